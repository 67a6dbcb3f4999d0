"""Compare the training loop with a bare loop, Hugging Face's Trainer and accelerate.

    python -m tools.bench.loop [--sizes tiny 5M 50M] [--runs N] [--docs]

The bare loop and one other program alternate every few steps in one process, on one thread (:mod:`.loop_ways`),
so that changes in the machine's speed affect both equally. (With all programs in one process, some were slowed down by
what others left in it.) Each step is compared with the bare loop's steps next to it; the result is the median over all
of them and all processes. ``--docs`` writes the figures to docs/performance.md. What was measured
is printed if Ctrl-C ends the benchmark early.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.bench.harness import marked, options_of
from tools.bench.loop_ways import PLAN, SIZES, Plan
from tools.support import ROOT, environment, machine, table, train_words, write_block

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


def measure(ways: list[str], size: str, *, short: bool = False) -> dict[str, Any]:
    """The steps of all *ways*, taking turns in fresh processes: those of ``ckpt-train``, if one is the recipe."""
    with tempfile.TemporaryDirectory(prefix="bench-loop-") as name:
        directory = Path(name)
        plan = Plan(ways, size, str(directory / "figures"), short)
        command = [sys.executable, "-m", "tools.bench.loop_ways"]
        if plan.last.run is None:
            from tools.bench.launched_ways import recipe_of

            recipe = directory / "recipe.yaml"
            recipe.write_text(json.dumps(recipe_of(plan)))
            place = f"--checkpoint.checkpoint_dir={directory / 'run'}"
            command = train_words(f"--nproc-per-node={plan.ranks}", "--trust=tools", place, recipe)
        variables = {PLAN: json.dumps(asdict(plan)), "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment(**variables))
        try:
            code = process.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"no end after {LONGEST_SECONDS} s") from error
        finally:
            process.kill()
        if code:
            raise RuntimeError(f"a process ended with {code}, see above")
        figures: dict[str, Any] = json.loads(Path(plan.output).read_text())
        return figures


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
    head = (
        f"{machine()}; one thread per process. "
        "Added: milliseconds per step more than the first row, in wall time and in processor time. "
        "Speed: tokens per second without padding, relative to the first row."
    )
    parts = [head]
    for title, rows in results["tables"].items():
        is_of_samples = "answers" in title
        header = ["", "ms per step", "added", "processor time", "speed"]
        if is_of_samples:
            header = ["", "tokens per second", "speed"]
        lines = []
        for row in rows:
            cells = [f"{row['tokens_per_s']:,.0f}", f"{row['useful']:.2f}"]
            if not is_of_samples:
                added = [f"{row['added_ms']:+.2f}", f"{row['added_cpu_ms']:+.2f}"]
                cells = [f"{row['ms']:.2f}", *added, f"{row['speed']:.3f}"]
            lines.append((marked(row["way"], row["way"].startswith("ours")), *cells))
        parts += [f"### {title}", table(header, lines, numbers=True)]
    notes = [f"* {name}: {text}" for name, text in results["also"].items()]
    return "\n\n".join([*parts, *notes])


def tables_of(
    sizes: list[str], num_rounds: int | None
) -> Iterator[tuple[str, list[str], str, int]]:
    """(title, ways, size, rounds) of each table."""
    one, *others = GROUPS
    middle = sizes[-2:][0]
    for title, size in [(one, size) for size in sizes] + [(title, middle) for title in others]:
        ways = [way for way in GROUPS[title] if SIZES[size].with_peers or way not in BESIDES]
        rounds = num_rounds or (SIZES[size].rounds if title == one else OTHER_ROUNDS)
        yield f"{title}, {size}", ways, size, rounds


def run_table(
    title: str, ways: list[str], size: str, num_rounds: int, results: dict[str, Any]
) -> None:
    """One table of the *results*, better after each round."""
    found: Found = []
    for turn in range(num_rounds):
        started = time.time()
        for way in ways[1:]:
            if way not in PEERS or turn < PEER_ROUNDS:
                found.append(measure([ways[0], way], size))
        rows = results["tables"][title] = compared(found)
        texts = [f"{row['way']} {row['ms']:.2f} ms ({row['useful']:.3f})" for row in rows]
        what = f"{title}, round {turn + 1} of {num_rounds}, {time.time() - started:.0f} s"
        print(f"{what}: {', '.join(texts)}", file=sys.stderr, flush=True)


def main() -> int:
    parser = options_of(__doc__, 0)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    given = parser.parse_args()
    results: dict[str, Any] = {"tables": {}, "also": {}}
    failed, missing = False, []
    if importlib.util.find_spec("accelerate") is None:
        missing = PEERS
        text = "not measured, since accelerate is not installed (extra bench)"
        results["also"]["accelerate and Trainer"] = text
    try:
        measure(["bare"], given.sizes[0], short=True)  # warms file caches and prepares data
        for title, ways, size, rounds in tables_of(given.sizes, given.runs):
            try:
                run_table(title, [w for w in ways if w not in missing], size, rounds, results)
            except RuntimeError as error:
                failed = True
                results["also"][title] = f"not measured to the end: {error}"
    except KeyboardInterrupt:
        print(as_markdown(results))
        return 130
    print(as_markdown(results))
    if given.docs:
        write_block("bench-loop", as_markdown(results))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
