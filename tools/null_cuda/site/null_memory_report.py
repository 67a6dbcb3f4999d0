"""Write which lines of Python hold how much memory: at out-of-memory to NULL_SNAP, at the peak to NULL_PEAK."""

import collections
import os
from pathlib import Path
from typing import Any, NoReturn

import torch

LIBRARY_FILES = (
    "nn/modules/module.py",
    "_tensor.py",
    "autograd/graph.py",
    "null_operators.py",
    "_contextlib.py",
    "generic.py",
    "utils/_pytree",
)


def report(device: int, asked: int, total: int, free: int) -> None:
    sizes: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for segment in torch.cuda.memory._snapshot()["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                lines = _lines(block.get("frames", []))
                sizes[lines] += block["size"]
                counts[lines] += 1
    title = f"asked {asked / 1e6:.1f} MB, allocated {sum(sizes.values()) / 1e6:.1f} MB"
    _write(Path(os.environ["NULL_SNAP"]), title, sizes, counts)


def _write(
    path: Path, title: str, sizes: collections.Counter[str], counts: collections.Counter[str]
) -> None:
    with path.open("w") as file:
        print(title, file=file)
        for lines, size in sizes.most_common(40):
            print(f"{size / 1e6:10.1f} MB {counts[lines]:5d}  {lines}", file=file)


def _events() -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][
        torch.cuda.current_device()
    ]
    return events


def reset_and_note(device: Any = None) -> None:
    """In place of ``torch.cuda.reset_peak_memory_stats``."""
    global num_at_reset
    reset(device)
    num_at_reset = len(_events())


def report_peak() -> None:
    """Write what existed when this process had most in tensors, after the latest reset of that number."""
    events = _events()
    current, peak, index_of_peak = 0, 0, 0
    for index, event in enumerate(events):
        if event["action"] == "alloc":
            current += event["size"]
        elif event["action"] == "free_completed":
            current -= event["size"]
        if current > peak and index >= num_at_reset:
            peak, index_of_peak = current, index
    existing: dict[int, Any] = {}
    for event in events[: index_of_peak + 1]:
        if event["action"] == "alloc":
            existing[event["addr"]] = event
        elif event["action"] == "free_completed":
            existing.pop(event["addr"], None)
    sizes: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for event in existing.values():
        lines = _lines(event.get("frames", []))
        sizes[lines] += event["size"]
        counts[lines] += 1
    last = _lines(events[index_of_peak].get("frames", [])) if events else ""
    title = f"peak {peak / 1e6:.1f} MB, reached in {last}"
    _write(Path(f"{os.environ['NULL_PEAK']}.{os.getpid()}"), title, sizes, counts)


def report_peak_and_exit(code: int) -> NoReturn:
    """In place of ``os._exit``, with which the trainer ends."""
    report_peak()
    exit_now(code)


def _lines(frames: list[dict[str, Any]]) -> str:
    own = [
        frame for frame in frames if not any(name in frame["filename"] for name in LIBRARY_FILES)
    ]
    return " < ".join(
        f"{Path(frame['filename']).name}:{frame['line']}:{frame['name']}" for frame in own
    )[:260]


exit_now = os._exit
reset = torch.cuda.reset_peak_memory_stats
num_at_reset = 0
initialize = torch.cuda._lazy_init
is_installed = False


def initialize_and_record() -> None:
    """Initialize CUDA, and record allocations from then on."""
    global is_installed
    initialize()
    if not is_installed:
        is_installed = True
        torch.cuda.memory._record_memory_history(max_entries=2_000_000, stacks="python")
        if os.environ.get("NULL_SNAP"):
            torch._C._cuda_attach_out_of_memory_observer(report)
        if os.environ.get("NULL_PEAK"):
            torch.cuda.reset_peak_memory_stats = reset_and_note
            os._exit = report_peak_and_exit


torch.cuda._lazy_init = initialize_and_record
