"""At out-of-memory, write which lines of Python hold how much memory, to the file NULL_SNAP."""

import collections
import os
from pathlib import Path
from typing import Any

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
    with Path(os.environ["NULL_SNAP"]).open("w") as file:
        print(
            f"asked {asked / 1e6:.1f} MB, allocated {sum(sizes.values()) / 1e6:.1f} MB", file=file
        )
        for lines, size in sizes.most_common(40):
            print(f"{size / 1e6:10.1f} MB {counts[lines]:5d}  {lines}", file=file)


def _lines(frames: list[dict[str, Any]]) -> str:
    own = [
        frame for frame in frames if not any(name in frame["filename"] for name in LIBRARY_FILES)
    ]
    return " < ".join(
        f"{Path(frame['filename']).name}:{frame['line']}:{frame['name']}" for frame in own
    )[:260]


initialize = torch.cuda._lazy_init
is_installed = False


def initialize_and_record() -> None:
    """Initialize CUDA, and record allocations from then on."""
    global is_installed
    initialize()
    if not is_installed:
        is_installed = True
        torch.cuda.memory._record_memory_history(max_entries=2_000_000, stacks="python")
        torch._C._cuda_attach_out_of_memory_observer(report)


torch.cuda._lazy_init = initialize_and_record
