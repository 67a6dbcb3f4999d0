"""Measure the time from the command to the end of the first optimizer step, compared with the imports alone.

    python -m tools.bench.startup [--runs 5] [--ranks 2]

Each run trains the main example in a fresh directory, on data that a run before prepared, and is killed after its first
step, whose end is the timestamp of its line in training.jsonl. Runs of all rows alternate, so that a load on
the machine affects them equally; compare the ratios, not the seconds. ``--runs 0``: one round, not warmed up.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.bench.harness import options_of
from tools.support import ROOT, log_lines, train_words

RECIPE = ROOT / "examples/llm_finetune/tiny_llama_python_docs.yaml"
GOAL_SECONDS = 4.5


def first_step_seconds(num_ranks: int, recipe: Path = RECIPE) -> float:
    """Seconds from starting ``ckpt-train`` to the end of its first optimizer step; the run is killed then."""
    with tempfile.TemporaryDirectory(
        prefix="bench-startup-", ignore_cleanup_errors=True
    ) as directory:
        output, log = Path(directory) / "output", Path(directory) / "checkpoints/training.jsonl"
        started = time.time()
        with output.open("wb") as file:
            process = subprocess.Popen(
                train_words(f"--nproc-per-node={num_ranks}", recipe),
                cwd=directory,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=file,
                stderr=file,
            )
        try:
            while not (lines := log_lines(log)):
                if process.poll() is not None:
                    sys.exit(f"ckpt-train ended before its first step:\n{output.read_text()}")
                time.sleep(0.02)
            return float(lines[0]["timestamp"]) - started
        finally:
            process.kill()
            process.wait()


def import_seconds(statement: str) -> float:
    """Seconds that a fresh interpreter takes to run a statement and end."""
    started = time.time()
    subprocess.run([sys.executable, "-c", statement], cwd=ROOT, check=True, capture_output=True)
    return time.time() - started


def main() -> None:
    parser = options_of(__doc__, 5)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    imports = {
        "python": "pass",
        "import torch": "import torch",
        "import torch, transformers' Llama": "import torch, transformers.models.llama.modeling_llama",
        "import the recipe": "import automodel_ckpt.recipes.llm_finetune",
    }
    rounds = []
    for _ in range(given.runs + 1):  # the first one prepares data and file caches
        seconds = {name: import_seconds(statement) for name, statement in imports.items()}
        for ranks in (1, given.ranks):
            seconds[f"first step, {ranks} process(es)"] = first_step_seconds(ranks)
        rounds.append(seconds)
    for name in rounds[0]:
        values = [seconds[name] for seconds in rounds[1:] or rounds]
        print(f"{name:36}  median {statistics.median(values):5.2f} s  best {min(values):5.2f} s")
    print(f"goal: the last line below {GOAL_SECONDS} s")


if __name__ == "__main__":
    main()
