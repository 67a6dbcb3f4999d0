"""Compare the cost of ``ckpt average`` with ``cp`` of its sources.

    python -m tools.bench_average [--size 1G] [--runs 3] [--directory DIR]

Averages are durable, and compare every byte that they read with its digest; ``cp`` does neither. Prints a table for
docs/performance.md.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from automodel_ckpt.convert.merging.average import prepare, run_average
from automodel_ckpt.convert.merging.average_options import AverageOptions
from tools.bench_rounds import (
    Group,
    Row,
    anonymous_megabytes,
    data_files,
    in_this_process,
    parse_size,
    rounds,
    warm,
)
from tools.bench_sources import write_source

_SETUP = """
import sys
from pathlib import Path
from automodel_ckpt.convert.merging.average import prepare, run_average
from automodel_ckpt.convert.merging.average_options import AverageOptions
"""
_CODE = (
    "run_average(prepare([Path(p) for p in sys.argv[1:3]], Path(sys.argv[3]), AverageOptions()))"
)


def copied(sources: list[Path]) -> Callable[[Path], None]:
    """``cp`` of the shards of all sources."""

    def run(directory: Path) -> None:
        for number, source in enumerate(sources):
            target = directory / str(number)
            target.mkdir()
            files = [str(path) for path in data_files(source)]
            subprocess.run(["cp", "--reflink=never", *files, str(target)], check=True)

    return run


def averaged(sources: list[Path]) -> Callable[[Path], None]:
    """The mean of *sources*."""

    def run(directory: Path) -> None:
        run_average(prepare(sources, directory / "out", AverageOptions()))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=parse_size("1G"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        sources = [
            write_source(scratch / "run" / f"epoch_0_step_{step}", arguments.size)
            for step in (1, 2)
        ]
        rows = [
            Row("`cp` of two checkpoints", copied(sources)),
            Row("`ckpt average`", averaged(sources), ours=True),
        ]
        group = Group("average", 2 * arguments.size, rows)
        files = [path for source in sources for path in data_files(source)]
        rounds(group, arguments.runs, scratch / "out", lambda: warm(files), in_this_process)
        print("| | ratio | seconds |\n|---|---|---|")
        for row in rows:
            seconds = sorted(row.seconds)[len(row.seconds) // 2]
            print(f"| {row.name} | {group.ratio(row):.2f} | {seconds:.2f} |")
        memory = anonymous_megabytes(_SETUP, _CODE, *sources, scratch / "memory")
        print(f"\nMemory of the average: {memory:.0f} MB.")
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
