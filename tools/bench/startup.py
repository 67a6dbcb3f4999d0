"""Measure the time from the command to the end of the first optimizer step, compared with the imports alone.

    python -m tools.bench.startup [--runs 5]

Each run trains the main example in a fresh directory, on data that a run before prepared, and is killed after its first
step: its end is the timestamp of its line in training.jsonl. Runs of all rows alternate, so that a load on
the machine affects them equally; compare the ratios, not the seconds. The goal for two processes is 4.5 seconds.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from tools.bench.harness import options_of
from tools.support import ROOT, log_lines, train_words

RECIPE = ROOT / "examples/llm_finetune/tiny_llama_python_docs.yaml"


def first_step_seconds(num_ranks: int) -> float:
    """Seconds from starting ``ckpt-train`` to the end of its first optimizer step; the run is killed then."""
    with tempfile.TemporaryDirectory(prefix="bench-startup-", ignore_cleanup_errors=True) as place:
        output, log = Path(place) / "output", Path(place) / "checkpoints/training.jsonl"
        words = train_words(f"--nproc-per-node={num_ranks}", RECIPE)
        variables = os.environ | {"PYTHONPATH": str(ROOT)}
        started = time.time()
        with output.open("wb") as file:
            process = subprocess.Popen(words, cwd=place, env=variables, stdout=file, stderr=file)
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


LLAMA = "import torch, transformers.models.llama.modeling_llama"
ROWS = {
    "python": partial(import_seconds, "pass"),
    "import torch": partial(import_seconds, "import torch"),
    "import torch, transformers' Llama": partial(import_seconds, LLAMA),
    "import the recipe": partial(import_seconds, "import automodel_ckpt.recipes.llm_finetune"),
    "first step, 1 process": partial(first_step_seconds, 1),
    "first step, 2 processes": partial(first_step_seconds, 2),
}


def main() -> None:
    """Measure and print; the first round prepares data and file caches."""
    given = options_of(__doc__, 5).parse_args()
    rounds = [{name: row() for name, row in ROWS.items()} for _ in range(given.runs + 1)]
    for name in ROWS:
        values = [seconds[name] for seconds in rounds[1:]]
        print(f"{name:36}  median {statistics.median(values):5.2f} s  best {min(values):5.2f} s")


if __name__ == "__main__":
    main()
