"""Run examples/slurm/train.sbatch through what happens to jobs: python -m tools.slurm [--keep]

1. A job is signaled, as two minutes before its time limit: it saves, is requeued, resumes and completes.
2. The node fails: the job is requeued by Slurm and resumes from the newest checkpoint.
3. An array: each task has its own run, one is signaled.

Slurm's KillOnBadExit is set, so that srun sends SIGTERM to all ranks when the first one has exited with 75; srun's own
flag is tested in both positions. Exit code 0 if all is as described, 1 if not, 3 if Slurm is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tools.slurm.cluster import Cluster, missing_programs, wait_until

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
NOT_INSTALLED = 3


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class Job:
    """A submitted job, or one task of an array, and the directory of its run."""

    def __init__(self, cluster: Cluster, number: str, run: Path) -> None:
        self.cluster, self.number, self.run = cluster, number, run

    @property
    def log(self) -> str:
        """What the job has printed: each task of an array in a separate file."""
        identity = self.cluster.job(self.number)["JobId"]
        path = self.run.parent / f"ckpt-train-{identity}.log"
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
        fields, log = self.cluster.job(self.number), self.log
        state = {name: fields[name] for name in ("JobState", "ExitCode", "Restarts")}
        assert state == {"JobState": "COMPLETED", "ExitCode": "0:0", "Restarts": str(restarts)}, (
            f"{state}\n{log}"
        )
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


def signaled(cluster: Cluster, directory: Path) -> None:
    """Signal a job with each value of srun's --kill-on-bad-exit: it is requeued, resumes and completes."""
    for flag in (0, 1):
        place = directory / f"kill_on_bad_exit_{flag}"
        place.mkdir()
        script = place / "train.sbatch"
        script.write_text(
            SCRIPT.read_text().replace("--kill-on-bad-exit=0", f"--kill-on-bad-exit={flag}")
        )
        assert f"--kill-on-bad-exit={flag}" in script.read_text(), (
            f"{SCRIPT} does not set --kill-on-bad-exit"
        )
        job = Job(cluster, submit(cluster, place, script=script), place / "run")
        job.wait_for_step(30)
        say(f"job {job.number} is at step {max(job.steps())}: SIGUSR1 to its ranks")
        cluster.run("scancel", "--signal=USR1", job.number)
        texts = (
            "SIGUSR1: stopping after step",
            "stopped by SIGUSR1 after step",
            "requeueing the job",
            "Loading checkpoint from run/epoch_0_step_",
        )
        job.check(restarts=1, texts=texts)


def failed(cluster: Cluster, directory: Path) -> None:
    """The node of a job fails: Slurm requeues the job, which resumes when the node is back."""
    place = directory / "node_failure"
    place.mkdir()
    job = Job(cluster, submit(cluster, place), place / "run")
    job.wait_for_step(30)
    say(f"job {job.number} is at step {max(job.steps())}: its node fails")
    cluster.fail_node()
    wait_until(
        lambda: cluster.job(job.number)["JobState"] == "PENDING", "Slurm to requeue the job", 60
    )
    cluster.start_node()
    say("the node is back")
    job.check(restarts=1, texts=["Loading checkpoint from run/epoch_0_step_25"])


def array(cluster: Cluster, directory: Path) -> None:
    """An array of two tasks with a run each; the first is signaled and resumes, the other is not disturbed."""
    place = directory / "array"
    place.mkdir()
    number = submit(cluster, place, "--array=0-1", run="run_${oc.env:SLURM_ARRAY_TASK_ID}")
    tasks = [Job(cluster, f"{number}_{task}", place / f"run_{task}") for task in (0, 1)]
    tasks[0].wait_for_step(30)
    say(f"task {tasks[0].number} is at step {max(tasks[0].steps())}: SIGUSR1 to its ranks")
    cluster.run("scancel", "--signal=USR1", tasks[0].number)
    tasks[0].check(
        restarts=1,
        texts=["stopped by SIGUSR1 after step", "Loading checkpoint from run_0/epoch_0_step_"],
    )
    tasks[1].check(restarts=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="keep the directory with all logs")
    keep = parser.parse_args().keep
    if absent := missing_programs():
        print(
            f"Slurm is not installed: {', '.join(absent)} not found; apt-get install slurm-wlm munge",
            file=sys.stderr,
        )
        return NOT_INSTALLED
    if os.geteuid() != 0:
        print(
            "a Slurm cluster has to be started by root: slurmd starts jobs of any user",
            file=sys.stderr,
        )
        return NOT_INSTALLED
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    (directory / "cluster").mkdir()
    say(f"a Slurm cluster of one node in {directory}")
    try:
        with Cluster(directory / "cluster") as cluster:
            print(cluster.run("sinfo", "--long"), end="")
            for scene in (signaled, failed, array):
                scene(cluster, directory)
    except (AssertionError, TimeoutError, subprocess.CalledProcessError) as error:
        details = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        print(f"failed: {error}\n{details}", file=sys.stderr)
        return 1
    finally:
        if not keep:
            shutil.rmtree(directory)
    say("all jobs ended as they should")
    return 0


if __name__ == "__main__":
    sys.exit(main())
