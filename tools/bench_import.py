"""Time and memory of ``ckpt import``, beside a durable copy of the same files.

    python -m tools.bench_import [KIND ...] [--gigabytes 4] [--rounds 2] [--directory DIR] [--docs]

For each kind of checkpoint, writes one of the given size with random values, and then alternates `cp` with an fsync of
each file, and `ckpt import`, whose result is as durable. Reports the ratio of the medians within this run, and the
largest anonymous memory of the import (RssAnon of its processes: what the page cache does not count). DIR needs three
times the size; four times for GGUF, whose decoded values are there, too. All kinds take about ten minutes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from automodel_ckpt.base.durable_io import fsync_directory, fsync_file
from tools.bench_import_kinds import KINDS, Kind, write_config
from tools.bench_report import write_block
from tools.bench_rounds import machine_text

_POLL_SECONDS = 0.02


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=[], metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument(
        "--docs", action="store_true", help="write the table into docs/performance.md"
    )
    arguments = parser.parse_args()
    lines = [
        f"{arguments.gigabytes:g} GB, {machine_text()}; {arguments.rounds} rounds.",
        "",
        "| kind | `cp`, s | import, s | speed relative to `cp` | memory, MB |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for kind in arguments.kinds or KINDS:
        with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="bench-import-") as work:
            lines.append(_measured(kind, Path(work), arguments.gigabytes, arguments.rounds))
        print(lines[-1], flush=True)
    if arguments.docs:
        write_block("bench-import", "\n".join(lines))
    return 0


def _measured(name: str, work: Path, gigabytes: float, rounds: int) -> str:
    """Return the row of a kind."""
    kind = KINDS[name]
    source = work / "source"
    source.mkdir()
    write_config(work / "config")
    # In another process: its memory must not stay in this one, from which the measured ones are started.
    make = (
        f"from tools.bench_import_kinds import make; make({name!r}, {str(source)!r}, {gigabytes})"
    )
    subprocess.run([sys.executable, "-c", make], check=True)
    copies: list[float] = []
    imports: list[float] = []
    memory = 0
    for number in range(rounds):
        # What was written before must not be written during a measurement.
        os.sync()
        copies.append(_copy_seconds(source, work / "copy"))
        shutil.rmtree(work / "copy")
        os.sync()
        seconds, anonymous = _import(kind, work, work / f"run{number}")
        shutil.rmtree(work / f"run{number}")
        imports.append(seconds)
        memory = max(memory, anonymous)
    copied, imported = statistics.median(copies), statistics.median(imports)
    title = f"{name} (computed)" if kind.converts else name
    return (
        f"| {title} | {copied:.1f} | {imported:.1f} | {copied / imported:.2f} "
        f"| {memory / 1e6:.0f} |"
    )


def _copy_seconds(source: Path, target: Path) -> float:
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    for parent, _, names in os.walk(target):
        for name in names:
            fsync_file(Path(parent, name))
        fsync_directory(Path(parent))
    return time.perf_counter() - begin


def _import(kind: Kind, work: Path, run: Path) -> tuple[float, int]:
    """Import the checkpoint in *work*.

    Return the seconds that the command took, and its largest anonymous memory in bytes.
    """
    source = work / "source"
    if kind.file is not None:
        source /= kind.file
    options = [option.replace("{config}", str(work / "config")) for option in kind.options]
    program = [sys.executable, "-m", "automodel_ckpt.cli.ckpt"]
    command = [*program, "import", str(source), str(run), *options]
    # Decoded values, on the same disk.
    environment = os.environ | {"TMPDIR": str(work)}
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    largest = 0
    while process.poll() is None:
        largest = max(largest, _anonymous_bytes(process.pid))
        time.sleep(_POLL_SECONDS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - begin, largest


def _anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process and its children in bytes; 0 if it has ended."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                total = int(line.split()[1]) * 1024
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return total
    return total + sum(_anonymous_bytes(int(child)) for child in children)


if __name__ == "__main__":
    raise SystemExit(main())
