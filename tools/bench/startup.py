"""Measure the time from the command to the end of the first optimizer step, compared with the imports alone.

    python -m tools.bench.startup [--runs 5] [--ranks 2] [--json]

Each run trains the main example in a fresh directory, on data that a run before prepared, and is killed after its first
step, whose end is the timestamp of its line in training.jsonl. Runs of all rows alternate, so that a load on
the machine affects them equally; compare the ratios, not the seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples/llm_finetune/tiny_llama_python_docs.yaml"
GOAL_SECONDS = 4.5


def first_step_seconds(num_ranks: int, recipe: Path = RECIPE) -> float:
    """Seconds from starting ``ckpt-train`` to the end of its first optimizer step; the run is killed then."""
    with tempfile.TemporaryDirectory(
        prefix="bench-startup-", ignore_cleanup_errors=True
    ) as directory:
        words = ["-m", "automodel_ckpt.cli.train", f"--nproc-per-node={num_ranks}", str(recipe)]
        output = Path(directory) / "output"
        started = time.time()
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=directory,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=file,
                stderr=file,
            )
        try:
            return (
                _first_timestamp(process, Path(directory) / "checkpoints/training.jsonl", output)
                - started
            )
        finally:
            process.kill()
            process.wait()


def _first_timestamp(process: subprocess.Popen[bytes], log: Path, output: Path) -> float:
    while True:
        ended = process.poll() is not None
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        if lines and lines[0].endswith("\n"):
            return float(json.loads(lines[0])["timestamp"])
        if ended:
            sys.exit(
                f"ckpt-train ended with {process.returncode} before its first step:\n{output.read_text()}"
            )
        time.sleep(0.02)


def import_seconds(statement: str) -> float:
    """Seconds that a fresh interpreter takes to run a statement and end."""
    started = time.time()
    subprocess.run([sys.executable, "-c", statement], cwd=ROOT, check=True, capture_output=True)
    return time.time() - started


def rows(num_ranks: int) -> dict[str, Callable[[], float]]:
    """What is measured, by its name in the table."""
    return {
        "python": lambda: import_seconds("pass"),
        "import torch": lambda: import_seconds("import torch"),
        "import torch, transformers' Llama": lambda: import_seconds(
            "import torch, transformers.models.llama.modeling_llama"
        ),
        "import the recipe": lambda: import_seconds("import automodel_ckpt.recipes.llm_finetune"),
        "first step, 1 process": lambda: first_step_seconds(1),
        f"first step, {num_ranks} processes": lambda: first_step_seconds(num_ranks),
    }


def measure(num_runs: int, num_ranks: int) -> dict[str, list[float]]:
    """Seconds of each run of each row, after a round that prepares data and file caches; 0 runs: of that round."""
    measured = rows(num_ranks)
    rounds = [{name: run() for name, run in measured.items()} for _ in range(num_runs + 1)]
    return {name: [seconds[name] for seconds in rounds[1:] or rounds] for name in measured}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="0: one round, not warmed up")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    measured = measure(arguments.runs, arguments.ranks)
    if arguments.json:
        print(json.dumps(measured))
    else:
        for name, seconds in measured.items():
            print(
                f"{name:36}  median {statistics.median(seconds):5.2f} s  best {min(seconds):5.2f} s"
            )
        print(f"goal: the last line below {GOAL_SECONDS} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
