"""Measure how long a training is interrupted when one of its ranks is killed, with checkpoints in memory.

    python -m tools.bench_restart [--kills 10] [--docs]

Two ranks train a model of 5 million parameters with ``--max-restarts`` and ``checkpoint.memory.every_steps: 1``, and
one of them gets SIGKILL again and again, at random instants. A kill is measured from the signal to the end of the next
step that had not been completed before. The seconds of a step are in the table, too: the last step is part of them.
``--docs`` writes the table to docs/performance.md. Only figures of an otherwise idle machine can be compared with the
goal of 3 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tools.bench_report import write_block
from tools.bench_rounds import ROOT, machine_text
from tools.crash.trainer import forked_ranks

RECIPE = ROOT / "examples/llm_finetune/tiny_llama_python_docs.yaml"
KEYS = {
    "checkpoint.memory.every_steps": 1,
    "checkpoint.save_consolidated": "false",
    "model.from_config.hidden_size": 256,
    "model.from_config.intermediate_size": 1024,
    "model.from_config.num_hidden_layers": 5,
    "step_scheduler.ckpt_every_steps": 100_000,
    "step_scheduler.val_every_steps": 100_000,
    "step_scheduler.max_steps": 100_000,
    "step_scheduler.num_epochs": 100_000,
}
"""The main example with a model of 5 million parameters, without checkpoints on disk."""
NUM_RANKS = 2
GOAL_SECONDS = 3.0
LONGEST_SECONDS = 120.0
STEPS_BETWEEN = 10
"""Completed steps between two kills."""


class Line(NamedTuple):
    """A completed step, and when it was completed, in seconds since the epoch."""

    step: int
    seconds: float


class Interruption(NamedTuple):
    """What a kill cost: seconds until the state is loaded, and until the next new step; completed steps repeated."""

    load_seconds: float
    seconds: float
    lost_steps: int


class Training:
    """A training in *directory*, which is killed on exit."""

    def __init__(self, directory: Path, restarts: int) -> None:
        self._directory = directory
        (directory / "tmp").mkdir()
        flags = [f"--{key}={value}" for key, value in KEYS.items()]
        words = ["-m", "automodel_ckpt.cli.train", f"--nproc-per-node={NUM_RANKS}"]
        words += [f"--max-restarts={restarts}", str(RECIPE), *flags]
        environment = {"PYTHONPATH": str(ROOT), "TMPDIR": str(directory / "tmp")}
        with open(directory / "output", "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                cwd=directory,
                env=os.environ | environment,
                stdout=output,
                stderr=output,
            )

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *error: object) -> None:
        # Twice: the second signal ends it without a checkpoint on disk.
        for _ in range(2):
            self._process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        self._process.wait(LONGEST_SECONDS)

    def lines(self, event: str | None = None) -> list[Line]:
        """The completed steps in the log, or the events of one kind."""
        log = self._directory / "checkpoints/training.jsonl"
        if not log.exists():
            return []
        complete = [line for line in log.read_text().splitlines(keepends=True) if line[-1] == "\n"]
        entries = [json.loads(line) for line in complete]
        found = [entry for entry in entries if entry.get("event") == event]
        return [Line(entry["step"], entry["timestamp"]) for entry in found]

    def wait_for(self, step: int, since: float) -> list[Line]:
        """Wait until *step* was completed after *since*; returns the steps completed since then."""
        end = time.monotonic() + LONGEST_SECONDS
        while True:
            found = [line for line in self.lines() if line.seconds > since]
            if found and found[-1].step >= step:
                return found
            if self._process.poll() is not None or time.monotonic() > end:
                sys.exit((self._directory / "output").read_text())
            time.sleep(0.02)

    def kill(self, rank: int) -> Interruption:
        """Kill a rank, and wait for the next new step."""
        last_step = self.lines()[-1].step
        os.kill(forked_ranks(self._process.pid)[rank], signal.SIGKILL)
        killed = time.time()
        found = self.wait_for(last_step + 1, killed)
        first_new = next(line for line in found if line.step > last_step)
        loaded = self.lines("resume")[-1]
        num_repeated = last_step + 1 - found[0].step
        return Interruption(loaded.seconds - killed, first_new.seconds - killed, num_repeated)

    def step_seconds(self) -> float:
        """The median time of a step so far."""
        times = [line.seconds for line in self.lines()]
        return median(after - before for before, after in pairwise(times))


def measure(num_kills: int, seed: int) -> tuple[list[Interruption], float]:
    """Interruptions by kills, and the seconds of a step."""
    chance = random.Random(seed)
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-restart-") as directory,
        Training(Path(directory), num_kills) as training,
    ):
        for _ in range(num_kills):
            done = [Line(0, 0.0), *training.lines()][-1].step
            training.wait_for(done + STEPS_BETWEEN, 0.0)
            time.sleep(chance.uniform(0, 0.2))
            found.append(training.kill(chance.randrange(NUM_RANKS)))
            last = found[-1]
            print(
                f"loaded after {last.load_seconds:.2f} s, {last.seconds:.2f} s, {last.lost_steps} lost",
                flush=True,
            )
        return found, training.step_seconds()


def table(found: list[Interruption], step_seconds: float) -> str:
    """The table in Markdown."""
    loads = [interruption.load_seconds for interruption in found]
    seconds = [interruption.seconds for interruption in found]
    lost = [interruption.lost_steps for interruption in found]
    lines = [
        f"{machine_text()}; {len(found)} kills; a step takes {step_seconds:.2f} s.",
        "",
        "| | goal | median | most |",
        "|---|---:|---:|---:|",
        f"| from SIGKILL until the state is loaded (s) | | {median(loads):.1f} | {max(loads):.1f} |",
        f"| from SIGKILL to the next new step (s) | {GOAL_SECONDS:.0f} | {median(seconds):.1f} | {max(seconds):.1f} |",
        f"| completed steps that were repeated | 1 | {median(lost):.0f} | {max(lost)} |",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--docs", action="store_true", help="write to docs/performance.md")
    arguments = parser.parse_args()
    text = table(*measure(arguments.kills, arguments.seed))
    print(text)
    if arguments.docs:
        write_block("restart", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
