"""Jobs of the examples' batch script and of written scripts, and what their runs must contain in the end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

from tools.slurm.cluster import Cluster, wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
RECIPE = ROOT / "examples" / "llm_finetune" / "tiny_llama_python_docs.yaml"
STEPS = 150
OVERRIDES = (
    f"--step_scheduler.max_steps={STEPS}",
    "--step_scheduler.num_epochs=100",
    "--step_scheduler.ckpt_every_steps=25",
    "--validation_dataset=null",
)
RESOURCES = (
    "--nodes=1",
    "--ntasks-per-node=2",
    "--gpus-per-node=0",
    "--cpus-per-task=1",
    "--time=20",
)
JOB_SECONDS = 300.0


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class Job:
    """A submitted job, or one task of an array, and the directory of its run."""

    def __init__(
        self, cluster: Cluster, number: str, run: Path, log_directory: Path | None = None
    ) -> None:
        self.cluster, self.number, self.run = cluster, number, run
        self.log_directory = log_directory or run.parent

    @property
    def log(self) -> str:
        """What the job has printed: each task of an array in a separate file."""
        identity = self.cluster.job(self.number)["JobId"]
        path = self.log_directory / f"ckpt-train-{identity}.log"
        return path.read_text() if path.exists() else ""

    def steps(self) -> list[int]:
        """The steps in training.jsonl, in the order of its lines."""
        path = self.run / "training.jsonl"
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [line["step"] for line in lines if "event" not in line]

    def wait_for_step(self, step: int) -> None:
        wait_until(
            lambda: max(self.steps(), default=0) >= step,
            f"step {step} of job {self.number}",
            JOB_SECONDS,
        )

    def wait_for_end(self) -> None:
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_until(
            lambda: self.cluster.job(self.number)["JobState"] in ended,
            f"the end of job {self.number}",
            JOB_SECONDS,
        )

    def check(self, *, restarts: int, texts: Iterable[str] = ()) -> None:
        """Wait for the end. Raises AssertionError unless the job completed, with each step once."""
        self.wait_for_end()
        fields = self.cluster.job(self.number)
        log = self.log
        expected = {"JobState": "COMPLETED", "ExitCode": "0:0", "Restarts": str(restarts)}
        state = {name: fields[name] for name in expected}
        assert state == expected, f"{state}\n{log}"
        assert self.steps() == list(range(1, STEPS + 1)), f"{self.steps()}\n{log}"
        for text in texts:
            assert log.count(text) == 1, f"{text!r} is printed {log.count(text)} times\n{log}"
        assert (self.run / "LATEST" / "model" / "consolidated" / "config.json").is_file(), log
        say(f"job {self.number}: completed, {STEPS} steps, each once; restarted {restarts} times")


def submit(
    cluster: Cluster, directory: Path, *flags: str, run: str = "run", script: Path = SCRIPT
) -> str:
    """Submit the batch script for a recipe; returns the job's number."""
    words = [
        "sbatch",
        "--parsable",
        f"--chdir={directory}",
        *RESOURCES,
        *flags,
        str(script),
        str(RECIPE),
        *OVERRIDES,
    ]
    number = cluster.run(*words, f"--checkpoint.checkpoint_dir={run}").strip()
    say(f"job {number} is submitted")
    return number
