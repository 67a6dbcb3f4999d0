"""Compare the training loop with a bare loop, Hugging Face's Trainer and accelerate.

    python -m tools.bench.loop [--sizes tiny 5M 50M] [--rounds N] [--docs]

The bare loop and one other program alternate every few steps in one process, on one thread (:mod:`.loop_ways`),
so that changes in the machine's speed affect both equally. (With all programs in one process, some were slowed down by
what others left in it.) Each step is compared with the bare loop's steps next to it; the result is the median over all
of them and all processes. ``--docs`` writes the figures to docs/performance.md. What was measured
is printed if Ctrl-C ends the benchmark early.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tools.bench.loop_ways import SIZES, WAYS, Size, train_here
from tools.bench.report import write_block
from tools.bench.rounds import ROOT, machine

LONGEST_SECONDS = 600
"""After which a process counts as failed."""
GROUPS: dict[str, list[str]] = {
    "One process": ["bare", "bare, repeated", "accelerate", "Trainer", "ours"],
    "Two ranks, FSDP2": ["bare, 2 ranks", "ours, 2 ranks"],
    "Short answers (docstrings of at most 512 tokens)": [
        "bare, padded docstrings",
        "ours, packed docstrings",
        "ours, docstrings",
    ],
}
"""The first of each is what the others are compared with, one by one."""
OTHER_ROUNDS = 3
"""Of the tables of several ranks and of short answers."""
PEERS, PEER_ROUNDS = ["accelerate", "Trainer"], 3
BESIDES = ["bare, repeated", *PEERS]
"""What the largest model is not worth. The bare loop beside itself shows what is not the loop's: the second one of a
process has the main thread and another part of the memory."""
Found = list[dict[str, Any]]
"""For each process, the steps of each way in it."""


def measure(ways: list[str], size: str, *options: str) -> dict[str, Any]:
    """The steps of all *ways*, taking turns in fresh processes; ``first_step`` in seconds from their start.

    Ways of several ranks are a bare loop and ours, in the ranks that ``ckpt-train`` starts.
    """
    with tempfile.TemporaryDirectory(prefix="bench-loop-") as directory:
        output = Path(directory) / "figures"
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "BENCH_LOOP_DIRECTORY": directory,
        }
        if WAYS[ways[0]][0] > 1:
            command, more = _launched(ways, size, Path(directory), output)
            environment |= more
        else:
            command = [
                "tools.bench.loop",
                "--sizes",
                size,
                *options,
                "--one",
                str(output),
                *ways,
            ]
        started = time.time()
        process = subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, env=environment)
        try:
            code = process.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"no end after {LONGEST_SECONDS} s") from error
        finally:
            process.kill()
        if code:
            raise RuntimeError(f"a process ended with {code}, see above")
        figures: dict[str, Any] = json.loads(output.read_text())
        return {
            name: {**way, "first_step": way["first_step"] - started}
            for name, way in figures.items()
        }


def _launched(
    ways: list[str], size: str, directory: Path, output: Path
) -> tuple[list[str], dict[str, str]]:
    """The words of ``ckpt-train`` that trains *ways* in turns, and variables of its environment."""
    from tools.bench.launched_ways import PLAN, Plan

    bare, ours = ways
    plan = Plan(ours, bare, size, WAYS[bare][0], str(output))
    recipe = directory / "recipe.yaml"
    recipe.write_text(json.dumps(plan.recipe()))
    words = [
        "automodel_ckpt.cli.train",
        f"--nproc-per-node={plan.num_ranks}",
        "--trust=tools",
        f"--checkpoint.checkpoint_dir={directory / 'run'}",
        str(recipe),
    ]
    return words, {PLAN: json.dumps(asdict(plan))}


def compared(found: Found) -> list[dict[str, Any]]:
    """Each way beside the first one: medians over the turns; with samples of different lengths over the rounds."""
    first, names = next(iter(found[0])), dict.fromkeys(name for run in found for name in run)
    return [_row(name, [(run[first], run[name]) for run in found if name in run]) for name in names]


def _row(name: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    def turns(clock: str) -> list[tuple[float, float]]:
        return [
            pair
            for base, way in pairs
            for pair in zip(_by_turn(base, clock), _by_turn(way, clock), strict=True)
        ]

    wall, processor = turns("seconds"), turns("processor")
    return {
        "way": name,
        "ms": 1e3 * statistics.median(way for _, way in wall),
        "added_ms": 1e3 * statistics.median(way - base for base, way in wall),
        "added_cpu_ms": 1e3 * statistics.median(way - base for base, way in processor),
        "speed": statistics.median(base / way for base, way in wall),
        "tokens_per_s": statistics.median(_tokens_per_second(way) for _, way in pairs),
        "useful": statistics.median(
            _tokens_per_second(way) / _tokens_per_second(base) for base, way in pairs
        ),
    }


def _by_turn(way: dict[str, Any], clock: str) -> list[float]:
    """The median step of each turn."""
    steps, block = way[clock], way["block"]
    return [
        statistics.median(steps[start : start + block]) for start in range(0, len(steps), block)
    ]


def _tokens_per_second(way: dict[str, Any]) -> float:
    return float(sum(way["tokens"]) / sum(way["seconds"]))


def as_markdown(results: Mapping[str, Any]) -> str:
    """The generated part of docs/performance.md."""
    where = results["machine"]
    head = (
        f"{where['cores']} cores ({where['processor']}), {where['kernel']}, {where['date']}; one thread per process. "
        "Added: milliseconds per step more than the first row, in wall time and in processor time. "
        "Speed: tokens per second without padding, relative to the first row."
    )
    parts = [head]
    for title, table in results["tables"].items():
        parts += [
            "",
            f"### {title}",
            "",
            *(_of_samples(table) if "answers" in title else _of_steps(table)),
        ]
    return "\n".join([*parts, "", *(f"* {name}: {text}" for name, text in results["also"].items())])


def _of_steps(table: list[dict[str, Any]]) -> list[str]:
    cells = [
        f"{row['ms']:.2f} | {row['added_ms']:+.2f} | {row['added_cpu_ms']:+.2f} | {row['speed']:.3f}"
        for row in table
    ]
    return [
        "| | ms per step | added | processor time | speed |",
        "|---|---:|---:|---:|---:|",
        *_lines(table, cells),
    ]


def _of_samples(table: list[dict[str, Any]]) -> list[str]:
    cells = [f"{row['tokens_per_s']:,.0f} | {row['useful']:.2f}" for row in table]
    return ["| | tokens per second | speed |", "|---|---:|---:|", *_lines(table, cells)]


def _lines(table: list[dict[str, Any]], cells: list[str]) -> list[str]:
    ways = [f"**{row['way']}**" if row["way"].startswith("ours") else row["way"] for row in table]
    return [f"| {way} | {cell} |" for way, cell in zip(ways, cells, strict=True)]


def plan(sizes: list[str], num_rounds: int | None) -> list[tuple[str, list[str], str, int]]:
    """(title, ways, size, rounds) of each table."""
    middle = sizes[-2:][0]
    tables = [("One process", size) for size in sizes] + [
        (title, middle) for title in GROUPS if title != "One process"
    ]
    return [
        (
            f"{title}, {size}",
            [way for way in GROUPS[title] if SIZES[size].with_peers or way not in BESIDES],
            size,
            num_rounds or (SIZES[size].rounds if title == "One process" else OTHER_ROUNDS),
        )
        for title, size in tables
    ]


def run_tables(tables: list[tuple[str, list[str], str, int]], results: dict[str, Any]) -> None:
    """Those of :func:`plan`."""
    also = results["also"]
    missing = [] if importlib.util.find_spec("accelerate") is not None else PEERS
    if missing:
        also["accelerate and Trainer"] = (
            "not measured, since accelerate is not installed (extra bench)"
        )
    for title, ways, size, rounds in tables:
        try:
            run_table(title, [way for way in ways if way not in missing], size, rounds, results)
        except RuntimeError as error:
            results["failed"].append(title)
            also[title] = f"not measured to the end: {error}"


def run_table(
    title: str, ways: list[str], size: str, num_rounds: int, results: dict[str, Any]
) -> None:
    """One table of the *results*, better after each round."""
    found: Found = []
    for turn in range(num_rounds):
        started = time.time()
        found += [
            measure([ways[0], way], size)
            for way in ways[1:]
            if way not in PEERS or turn < PEER_ROUNDS
        ]
        results["tables"][title] = compared(found)
        tell(
            f"{title}, round {turn + 1} of {num_rounds}, {time.time() - started:.0f} s",
            results["tables"][title],
        )


def tell(what: str, table: list[dict[str, Any]]) -> None:
    """What was found so far, in a line."""
    ways = [f"{row['way']} {row['ms']:.2f} ms ({row['useful']:.3f})" for row in table]
    print(f"{what}: {', '.join(ways)}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, help="processes for each table (default: by table, 2 to 11)"
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument(
        "--docs", action="store_true", help="write the figures to docs/performance.md"
    )
    parser.add_argument("--short", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        train_one(given.one[0], given.one[1:], SIZES[given.sizes[0]], short=given.short)
        return 0
    return run_and_tell(given.sizes, given.rounds, docs=given.docs)


def train_one(output: str, ways: list[str], size: Size, *, short: bool) -> None:
    """A process of :func:`measure`; rank 0 leaves the figures in a file."""
    figures = train_here(ways, replace(size, block=1, blocks=1) if short else size)
    if os.environ.get("RANK", "0") == "0":
        Path(output).write_text(json.dumps(figures))


def run_and_tell(sizes: list[str], num_rounds: int | None, *, docs: bool) -> int:
    """Measure and print; what is there is printed too when Ctrl-C ends it."""
    results: dict[str, Any] = {"machine": machine(), "tables": {}, "also": {}, "failed": []}
    try:
        measure(["bare"], sizes[0], "--short")  # warms file caches and prepares data
        run_tables(plan(sizes, num_rounds), results)
    except KeyboardInterrupt:
        print(as_markdown(results))
        return 130
    print(as_markdown(results))
    if docs:
        write_block("bench-loop", as_markdown(results))
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
