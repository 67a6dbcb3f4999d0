"""Common parts of the benchmarks: rounds in which every row runs once, the page cache, and memory of a process."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from automodel_ckpt.checkpoint.export import copy_engine as export_output
from automodel_ckpt.checkpoint.files import durable_file
from automodel_ckpt.checkpoint.jobs import shared_file

ROOT = Path(__file__).parents[2]
_WIDTH = 2048
_SUFFIXES = {"K": 1e3, "M": 1e6, "G": 1e9}


@dataclass
class Row:
    """One thing that is timed. *ours*: this project's. *slow*: known to take many times the base, so it runs twice.
    *nbytes*: what it moves, where that is not what its group does; its ratio then is that of the times per byte."""

    name: str
    run: Callable[[Path], object]
    ours: bool = False
    slow: bool = False
    nbytes: int | None = None
    seconds: list[float] = field(default_factory=list)


@dataclass
class Group:
    """Rows that move the same *nbytes*; the first one is the base of the others' ratios."""

    title: str
    nbytes: int
    rows: list[Row]

    def ratio(self, row: Row) -> float:
        """The median over the rounds of the row's time relative to the base in the same round."""
        less = self.nbytes / (row.nbytes or self.nbytes)
        return statistics.median(
            less * m / base for m, base in zip(row.seconds, self.rows[0].seconds, strict=False)
        )

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        rows = [
            {"name": r.name, "ours": r.ours, "seconds": r.seconds, "ratio": self.ratio(r)}
            for r in self.rows
        ]
        return {"title": self.title, "nbytes": self.nbytes, "rows": rows}


def rounds(
    group: Group,
    num_rounds: int,
    directory: Path,
    prepare: Callable[[], object],
    timed: Callable[[Row, Path], float],
) -> None:
    """Run every row once per round, each in an empty directory, after *prepare*; so a drift of the machine meets all
    alike."""
    for turn in range(num_rounds):
        for row in group.rows:
            if row.slow and turn >= 2:
                continue
            prepare()
            row.seconds.append(timed(row, directory))


def in_this_process(row: Row, directory: Path) -> float:
    """Seconds that the row takes; its output is removed."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    started = time.perf_counter()
    row.run(directory)
    seconds = time.perf_counter() - started
    shutil.rmtree(directory)
    return seconds


def unflushed(run: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return *run* without O_DIRECT and fsync, for a comparison with writes to the page cache. No command does this."""

    def run_so(directory: Path) -> None:
        with contextlib.ExitStack() as stack:
            for module in (durable_file, shared_file, export_output):
                stack.enter_context(mock.patch.object(module, "DIRECT_FROM_BYTES", sys.maxsize))
            stack.enter_context(mock.patch.object(os, "fsync", return_value=None))
            run(directory)

    return run_so


def warm(paths: Iterable[Path]) -> None:
    """Bring the files into the page cache, and have earlier writes done with."""
    os.sync()
    for path in paths:
        with open(path, "rb") as file:
            while file.read(4 << 20):
                pass


def cold(paths: Iterable[Path]) -> None:
    """Drop the files from the page cache; needs no privileges, since they are on disk already."""
    os.sync()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def llama_shapes(
    nbytes: int, itemsize: int, at_least: int = 1
) -> tuple[dict[str, tuple[int, ...]], int]:
    """The matrices of a Llama layer, and how many layers take about *nbytes*: narrower ones where it would be few."""
    width = _WIDTH
    while width > 64 and 8 * _layer_numel(width) * itemsize > nbytes:
        width //= 2
    return _layer(width), max(at_least, round(nbytes / (_layer_numel(width) * itemsize)))


def _layer(width: int) -> dict[str, tuple[int, ...]]:
    attention = {
        "q": (width, width),
        "k": (width // 4, width),
        "v": (width // 4, width),
        "o": (width, width),
    }
    return {
        **attention,
        "gate": (3 * width, width),
        "up": (3 * width, width),
        "down": (width, 3 * width),
    }


def _layer_numel(width: int) -> int:
    return sum(math.prod(shape) for shape in _layer(width).values())


def fsync_all(directory: Path) -> None:
    """What a writer without fsync leaves undone."""
    for parent, _, names in os.walk(directory):
        for path in [*(os.path.join(parent, name) for name in names), parent]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def data_files(directory: Path) -> list[Path]:
    """The files of weights under a directory."""
    return sorted(
        path for path in directory.rglob("*") if path.suffix in (".safetensors", ".distcp")
    )


_WATCH = """
import json, re, sys, threading
def anonymous():
    with open("/proc/self/status") as file:
        return int(re.search(r"RssAnon:\\s+(\\d+)", file.read())[1])
{setup}
start, peak, done = anonymous(), [0], threading.Event()
def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous())
thread = threading.Thread(target=watch)
thread.start()
{code}
done.set(); thread.join()
print(json.dumps(max(0, peak[0] - start)))
"""


def anonymous_megabytes(setup: str, code: str, *arguments: object) -> float:
    """How much anonymous memory (RssAnon) a fresh interpreter takes for *code* beyond what it held after *setup*."""
    script = _WATCH.format(setup=setup, code=code)
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return float(json.loads(done.stdout.splitlines()[-1])) / 1024


def parse_size(text: str) -> int:
    """Bytes of ``64M``, ``1G``, ``1.5GB`` (powers of ten) or a plain number."""
    number = text.upper().removesuffix("B")
    factor = _SUFFIXES.get(number[-1:], 1.0)
    return int(float(number.rstrip("KMG")) * factor)


@dataclass
class Memory:
    """Anonymous memory that something takes over its interpreter, in megabytes."""

    name: str
    megabytes: float


def as_json(groups: Iterable[Group], memory: Iterable[Memory], size: int) -> dict[str, Any]:
    """All that was measured."""
    return {
        "size": size,
        "machine": machine(),
        "groups": [group.plain() for group in groups],
        "memory": [asdict(entry) for entry in memory],
    }


def machine() -> dict[str, str]:
    """Where it was measured."""
    model = "unknown processor"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
            model,
        )
    system = os.uname()
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "processor": model,
        "kernel": f"{system.sysname} {system.release}",
        "date": time.strftime("%Y-%m-%d"),
    }


def machine_text() -> str:
    """Where and when it was measured, and how busy the machine was before, as the head of a table."""
    here = machine()
    load = os.getloadavg()[0]
    return f"{here['cores']} cores ({here['processor']}) under load {load:.1f}, {here['kernel']}, {here['date']}"
