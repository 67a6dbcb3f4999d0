"""Compare the training loop with a bare loop, Hugging Face's Trainer and accelerate.

    python -m tools.bench.loop [--sizes tiny 5M 50M] [--runs N] [--docs]

The bare loop and one other program alternate every few steps in one process, on one thread (:mod:`.loop_ways`),
so that changes in the machine's speed affect both equally. (With all programs in one process, some were slowed down by
what others left in it.) Each step is compared with the bare loop's steps next to it; the result is the median over all
of them and all processes. ``--docs`` writes the figures to docs/performance.md.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.bench.harness import marked, options_of
from tools.bench.loop_ways import PLAN, SIZES, Plan, recipe_of
from tools.support import ROOT, environment, machine, table, train_words, write_block

LONGEST_SECONDS = 600
"""After which a process counts as failed."""
ONE, SHORT = "One process", "Short answers (docstrings of at most 512 tokens)"
GROUPS = {
    ONE: ("bare", ["bare, repeated", "accelerate", "Trainer", "ours"]),
    "Two ranks, FSDP2": ("bare, 2 ranks", ["ours, 2 ranks"]),
    SHORT: ("bare, padded docstrings", ["ours, packed docstrings", "ours, docstrings"]),
}
"""The name of the bare loop, and the ways that are compared with it, one by one."""
OTHER_ROUNDS = 3
"""Of the tables of several ranks and of short answers."""
PEERS, PEER_ROUNDS = ("accelerate", "Trainer"), 3
Steps = dict[str, list[Any]]
Pairs = list[tuple[Steps, Steps]]
"""For each process, the steps of the bare loop and of the other one."""


def measure(way: str, size: str) -> tuple[Steps, Steps]:
    """The steps of the bare loop and of *way*, taking turns in fresh processes."""
    with tempfile.TemporaryDirectory(prefix="bench-loop-") as name:
        directory = Path(name)
        plan = Plan(way, size, str(directory / "figures"))
        command = [sys.executable, "-m", "tools.bench.loop_ways"]
        if plan.way.run is None:
            recipe = directory / "recipe.yaml"
            recipe.write_text(json.dumps(recipe_of(plan)))
            place = f"--checkpoint.checkpoint_dir={directory / 'run'}"
            ranks = f"--nproc-per-node={plan.way.ranks}"
            command = train_words(ranks, "--trust=tools", place, recipe)
        variables = {PLAN: json.dumps(asdict(plan)), "TOKENIZERS_PARALLELISM": "false"}
        env = environment(**variables)
        subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=LONGEST_SECONDS)
        base, other = json.loads(Path(plan.output).read_text())
        return base, other


def row_of(name: str, pairs: Pairs, block: int) -> dict[str, Any]:
    """A way compared with the bare loop: medians over the turns; with samples of different lengths over the rounds."""

    def turns(clock: str) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []
        for base, way in pairs:
            both = (_by_turn(steps[clock], block) for steps in (base, way))
            found += zip(*both, strict=True)
        return found

    wall, processor = turns("seconds"), turns("processor")
    rates = [(_tokens_per_second(base), _tokens_per_second(way)) for base, way in pairs]
    return {
        "way": name,
        "ms": 1e3 * statistics.median(way for _, way in wall),
        "added_ms": 1e3 * statistics.median(way - base for base, way in wall),
        "added_cpu_ms": 1e3 * statistics.median(way - base for base, way in processor),
        "speed": statistics.median(base / way for base, way in wall),
        "tokens_per_s": statistics.median(way for _, way in rates),
        "useful": statistics.median(way / base for base, way in rates),
    }


def _by_turn(steps: list[float], block: int) -> list[float]:
    """The median step of each turn."""
    return [
        statistics.median(steps[start : start + block]) for start in range(0, len(steps), block)
    ]


def _tokens_per_second(steps: Steps) -> float:
    return float(sum(steps["tokens"]) / sum(steps["seconds"]))


def run_table(group: str, size_name: str, num_rounds: int | None) -> list[dict[str, Any]]:
    """The rows of one table, which are also printed after each round."""
    size, (base_name, ways) = SIZES[size_name], GROUPS[group]
    if group == ONE and not size.with_peers:
        ways = ["ours"]
    if importlib.util.find_spec("accelerate") is None:  # the extra bench is not installed
        ways = [way for way in ways if way not in PEERS]
    num_rounds = num_rounds or (size.rounds if group == ONE else OTHER_ROUNDS)
    found: dict[str, Pairs] = {way: [] for way in ways}
    for turn in range(num_rounds):
        started = time.time()
        for way in ways:
            if way not in PEERS or turn < PEER_ROUNDS:
                found[way].append(measure(way, size_name))
        bases = [(base, base) for pairs in found.values() for base, _ in pairs]
        rows = [row_of(name, pairs, size.block) for name, pairs in found.items()]
        rows.insert(0, row_of(base_name, bases, size.block))
        texts = [f"{row['way']} {row['ms']:.2f} ms ({row['useful']:.3f})" for row in rows]
        what = f"{group}, {size_name}, round {turn + 1} of {num_rounds}"
        seconds = f"{time.time() - started:.0f} s"
        print(f"{what}, {seconds}: {', '.join(texts)}", file=sys.stderr, flush=True)
    return rows


def tables_of(sizes: list[str], num_rounds: int | None) -> Iterator[str]:
    """The generated part of docs/performance.md."""
    yield (
        f"{machine()}; one thread per process. "
        "Added: milliseconds per step more than the first row, in wall time and in processor time. "
        "Speed: tokens per second without padding, relative to the first row."
    )
    middle = sizes[-2:][0]
    places = [(ONE, size) for size in sizes] + [(group, middle) for group in GROUPS if group != ONE]
    for group, size in places:
        lines = []
        for row in run_table(group, size, num_rounds):
            cells = [f"{row['tokens_per_s']:,.0f}", f"{row['useful']:.2f}"]
            if group != SHORT:
                added = [f"{row['added_ms']:+.2f}", f"{row['added_cpu_ms']:+.2f}"]
                cells = [f"{row['ms']:.2f}", *added, f"{row['speed']:.3f}"]
            lines.append((marked(row["way"]), *cells))
        header = ["", "ms per step", "added", "processor time", "speed"]
        if group == SHORT:
            header = ["", "tokens per second", "speed"]
        yield f"### {group}, {size}\n\n{table(header, lines, numbers=True)}"


def main() -> None:
    """Measure and print."""
    parser = options_of(__doc__, 0)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    given = parser.parse_args()
    measure("bare, repeated", given.sizes[0])  # warms file caches and prepares data
    block = "\n\n".join(tables_of(given.sizes, given.runs))
    print(block)
    if given.docs:
        write_block("bench-loop", block)


if __name__ == "__main__":
    main()
