"""What all benchmarks share: rounds in which every row runs once, the page cache, processes, and forked ranks."""

import argparse
import math
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tools.support import parser_of

LIMIT_SECONDS = 7200.0
"""Of forked ranks."""
_WIDTH = 2048
_SUFFIXES = {"K": 1e3, "M": 1e6, "G": 1e9}


def options_of(doc: str | None, runs: int) -> argparse.ArgumentParser:
    """The command line of a benchmark: ``--runs``, ``--docs``, and what the caller adds."""
    parser = parser_of(doc)
    parser.add_argument("--runs", type=int, default=runs, help=f"rounds of every row ({runs})")
    parser.add_argument("--docs", action="store_true", help="write docs/performance.md")
    parser.add_argument("--directory", help="where to write (default: a temporary directory)")
    return parser


Group = tuple[str, list[tuple[str, float, float]]]


@dataclass
class Row:
    """One thing that is timed. *slow*: known to take many times the base, so it runs twice. *nbytes*: what it moves,
    where that is not what its group does; its ratio then compares times per byte."""

    name: str
    run: Callable[[Path], object]
    slow: bool = False
    nbytes: int | None = None
    seconds: list[float] = field(default_factory=list)


def measure_group(
    title: str,
    nbytes: int,
    rows: Iterable[Row],
    num_rounds: int,
    directory: Path,
    prepare: Callable[[], object],
    timed: Callable[[Row, Path], float],
) -> Group:
    """Run every row once per round, each in an empty directory, after *prepare*, so that a drift of the machine meets
    all alike. Returns the title, and (name, ratio, seconds) of each row: medians over the rounds, relative to the first
    row."""
    every = list(rows)
    for turn in range(num_rounds):
        for row in every:
            if turn < 2 or not row.slow:
                prepare()
                row.seconds.append(timed(row, directory))
    plain = []
    for row in every:
        less = nbytes / (row.nbytes or nbytes)
        pairs = zip(row.seconds, every[0].seconds, strict=False)
        ratio = statistics.median(less * seconds / base for seconds, base in pairs)
        plain.append((row.name, ratio, statistics.median(row.seconds)))
    return title, plain


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


def fsync_all(directory: Path) -> None:
    """What a writer without fsync leaves undone."""
    for parent, _, names in os.walk(directory):
        for path in [*(os.path.join(parent, name) for name in names), parent]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def data_files(directory: Path) -> list[Path]:
    suffixes = (".safetensors", ".distcp")
    return sorted(path for path in directory.rglob("*") if path.suffix in suffixes)


def llama_shapes(
    nbytes: int, itemsize: int, at_least: int = 1
) -> tuple[dict[str, tuple[int, ...]], int]:
    """The matrices of a Llama layer, and how many layers take about *nbytes*: narrower ones where it would be few."""
    width = _WIDTH
    while width > 64 and 8 * _numel(_layer(width)) * itemsize > nbytes:
        width //= 2
    layer = _layer(width)
    return layer, max(at_least, round(nbytes / (_numel(layer) * itemsize)))


def _layer(width: int) -> dict[str, tuple[int, ...]]:
    narrow, square = (width // 4, width), (width, width)
    attention = {"q": square, "k": narrow, "v": narrow, "o": square}
    up = (3 * width, width)
    return {**attention, "gate": up, "up": up, "down": (width, 3 * width)}


def _numel(layer: dict[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, layer.values()))


def parse_size(text: str) -> int:
    """Bytes of ``64M``, ``1G``, ``1.5GB`` (powers of ten) or a plain number."""
    number = text.upper().removesuffix("B")
    return int(float(number.rstrip("KMG")) * _SUFFIXES.get(number[-1:], 1.0))


def status_bytes(field_name: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS is what is resident, VmHWM its peak."""
    found = re.search(rf"{field_name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def reset_peak() -> None:
    """Let VmHWM of /proc/self/status begin again with what is resident now. Source: proc(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def marked(name: str) -> str:
    """The name of a row in a table, in bold type for this project's rows."""
    return f"**{name}**" if name.startswith("ours") else name
