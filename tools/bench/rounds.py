"""Common parts of the benchmarks: rounds in which every row runs once, the page cache, and memory of a process."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


def parse_size(text: str) -> int:
    """Bytes of ``64M``, ``1G``, ``1.5GB`` (powers of ten) or a plain number."""
    number = text.upper().removesuffix("B")
    factor = _SUFFIXES.get(number[-1:], 1.0)
    return int(float(number.rstrip("KMG")) * factor)


def as_json(groups: Iterable[Group], size: int) -> dict[str, Any]:
    """All that was measured."""
    return {
        "size": size,
        "machine": machine(),
        "groups": [group.plain() for group in groups],
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
