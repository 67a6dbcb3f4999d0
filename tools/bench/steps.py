"""Time and memory of one step with a large output layer, each measurement in a separate process."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from tools.bench.memory import reset_peak, status_megabytes
from tools.bench.rounds import ROOT

Figures = dict[str, float]
"""``seconds`` of a step, and the ``megabytes`` of its peak above the memory before it."""


def figures_of(
    step: Callable[[int], None], num_tokens: int, *, reset: Callable[[], None]
) -> Figures:
    """Measure ``step(num_tokens)`` after a small step to warm up; *reset* frees the gradients of that one."""
    step(4)
    reset()
    reset_peak()
    before = status_megabytes("VmRSS")
    started = time.perf_counter()
    step(num_tokens)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "megabytes": status_megabytes("VmHWM") - before}


def arguments(description: str | None, defaults: Mapping[str, int]) -> argparse.Namespace:
    """Parse the command line: a number for each of *defaults*, and ``--docs``.

    ``one`` is the list of values that :func:`in_a_process` passed to this process; None in the first process.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--docs", action="store_true", help="write the figures to docs/performance.md"
    )
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_a_process(module: str, *one: object) -> Figures:
    """Run *module* with the arguments of this process and ``--one``; return the JSON that it prints."""
    values = [str(value) for value in one]
    command = [sys.executable, "-m", module, *sys.argv[1:], "--one", *values]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT)
    found: Figures = json.loads(done.stdout)
    return found
