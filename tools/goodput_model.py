"""Which share of its time a large run can use in spite of failures: an estimate on paper, for docs/performance.md.

    python -m tools.goodput_model [--docs] [--mtbf 3600] [--nodes 1000] [--parameters 405e9] [--step 10] ...

Failures come at random, on average every M seconds. Between two saves, training works for T seconds; then it waits
D seconds for the save (D is small for an asynchronous one), which can be used W seconds after it began. A failure costs
R seconds until training continues, and the work since the last usable save began. The estimate is that of Daly (2006)
for the expected time of a run, in which an asynchronous save adds W - D to R, since so much more work is lost:

    time / work = M / T * exp((R + W - D) / M) * (exp((T + D) / M) - 1)

The interval is Daly's higher-order optimum, which begins with Young's sqrt(2 D M) (1974), in whole steps, and at least
W - D, because only one save is written at a time.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from tools.bench_report import write_block

BYTES_PER_PARAMETER = 14
"""Weights in bfloat16, and masters and AdamW's two moments in float32."""


@dataclass(frozen=True)
class Saving:
    """A way of saving: all in seconds. *wait*: D. *usable*: W. *load*: the part of R in which the state is read."""

    name: str
    wait: float
    usable: float
    load: float
    every_step: bool = False


def optimum(wait: float, mtbf: float) -> float:
    """Daly's estimate of the best time between two saves that each take *wait* seconds."""
    if wait >= 2 * mtbf:
        return mtbf
    ratio = wait / (2 * mtbf)
    return math.sqrt(2 * wait * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - wait


def goodput(interval: float, saving: Saving, restart: float, mtbf: float) -> float:
    """The expected share of the time that is spent on steps that count, with *interval* seconds between saves.

    *restart* is the time from a failure to the begin of the load.
    """
    lost = restart + saving.load + saving.usable - saving.wait
    cycle = math.expm1((interval + saving.wait) / mtbf)
    return interval / (mtbf * math.exp(lost / mtbf) * cycle)


def interval_of(saving: Saving, mtbf: float, step: float) -> float:
    """The seconds between saves, as whole steps of *step* seconds."""
    best = 0 if saving.every_step else round(optimum(saving.wait, mtbf) / step)
    fewest = math.ceil((saving.usable - saving.wait) / step)
    return max(1, best, fewest) * step


def ways(given: argparse.Namespace) -> list[Saving]:
    """The ways of saving that are compared."""
    total = given.parameters * BYTES_PER_PARAMETER
    node = total / given.nodes
    copy = node / given.copy
    memory = node / given.memory + node / given.network
    disk, store = node / given.disk, total / given.store
    from_memory = node / given.network
    return [
        Saving("memory, every step", copy, copy + memory, from_memory, every_step=True),
        Saving("memory, best interval", copy, copy + memory, from_memory),
        Saving("local disk, asynchronous", copy, copy + disk, disk),
        Saving("object store, asynchronous", copy, copy + store, store),
        Saving("object store, synchronous", store, store, store),
    ]


def table(given: argparse.Namespace) -> str:
    """The assumptions, and a row for each way of saving, in Markdown."""
    restarts = " | ".join(f"goodput, restart {seconds:g} s" for seconds in given.restart)
    lines = [
        _assumptions(given),
        "",
        f"| saved to | wait, s | usable after, s | load, s | interval, s | lost work per failure, s | {restarts} |",
        "|---" + "|---:" * (5 + len(given.restart)) + "|",
    ]
    for saving in ways(given):
        interval = interval_of(saving, given.mtbf, given.step)
        lost = interval / 2 + saving.usable - saving.wait
        shares = [goodput(interval, saving, seconds, given.mtbf) for seconds in given.restart]
        cells = [
            f"{saving.wait:.2f}",
            f"{saving.usable:.1f}",
            f"{saving.load:.1f}",
            f"{interval:.0f}",
            f"{lost:.0f}",
            *(f"{100 * share:.1f}%" for share in shares),
        ]
        lines.append(f"| {saving.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _assumptions(given: argparse.Namespace) -> str:
    total = given.parameters * BYTES_PER_PARAMETER
    rates = {
        "copy to memory": given.copy,
        "writers to tmpfs": given.memory,
        "network": given.network,
        "disk": given.disk,
    }
    listed = ", ".join(f"{name} {rate / 1e9:g}" for name, rate in rates.items())
    return (
        f"{given.nodes:,} nodes, a failure every {given.mtbf:g} s on average, steps of {given.step:g} s, "
        f"{total / 1e12:.1f} TB of state ({total / given.nodes / 1e9:.1f} GB per node). Assumed GB/s per node: "
        f"{listed}; object store, for all nodes: {given.store / 1e9:g}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mtbf", type=float, default=3600)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--parameters", type=float, default=405e9)
    parser.add_argument("--step", type=float, default=10, help="seconds of a step")
    rate = "bytes per second, per node"
    parser.add_argument(
        "--copy", type=float, default=100e9, help=f"from all GPUs to memory: {rate}"
    )
    parser.add_argument("--memory", type=float, default=4e9, help=f"writers to a tmpfs: {rate}")
    parser.add_argument("--network", type=float, default=5e9, help=f"to another node: {rate}")
    parser.add_argument("--disk", type=float, default=2e9, help=rate)
    parser.add_argument("--store", type=float, default=50e9, help="bytes per second of all nodes")
    parser.add_argument(
        "--restart", type=float, nargs="+", default=[5, 60, 300], help="seconds without the load"
    )
    parser.add_argument("--docs", action="store_true", help="write docs/performance.md")
    given = parser.parse_args()
    block = table(given)
    print(block)
    if given.docs:
        write_block("goodput-model", block)


if __name__ == "__main__":
    main()
