"""Scripts that `ckpt-train --write-launcher slurm` writes, submitted unchanged."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tools.slurm.cluster import Cluster, wait_until
from tools.slurm.jobs import JOB_SECONDS, OVERRIDES, RECIPE, Job, say


def write(directory: Path, *words: str) -> Path:
    """Write a script for two ranks on the CPU, whose run directory is ``run`` below *directory*."""
    script = directory / "train.sbatch"
    command = [
        str(Path(sys.executable).with_name("ckpt-train")),
        str(RECIPE),
        "--write-launcher=slurm",
        f"--output={script}",
        "--nproc-per-node=2",
        "--distributed.backend=gloo",
        "--checkpoint.checkpoint_dir=run",
        *OVERRIDES,
        *words,
    ]
    subprocess.run(command, cwd=directory, check=True)
    return script


def submit_written(cluster: Cluster, script: Path, *flags: str) -> str:
    """Submit a written script; returns the job's number. Its output is where those of other jobs are."""
    words = ["sbatch", "--parsable", f"--chdir={script.parent}", "--output=ckpt-train-%j.log"]
    number = cluster.run(*words, *flags, str(script)).strip()
    say(f"job {number} is submitted")
    return number


def written_array(cluster: Cluster, directory: Path) -> None:
    """An array of a written script: each task has its own run; the first is signaled, requeued and resumes."""
    place = directory / "written_array"
    place.mkdir()
    script = write(place, "--time-limit=00:20:00")
    number = submit_written(cluster, script, "--array=0-1")
    tasks = [
        Job(cluster, f"{number}_{task}", place / "run" / f"task_{task}", place) for task in (0, 1)
    ]
    tasks[0].wait_for_step(30)
    say(f"task {tasks[0].number} is at step {max(tasks[0].steps())}: SIGUSR1 to its ranks")
    cluster.run("scancel", "--signal=USR1", tasks[0].number)
    texts = ["stopped by SIGUSR1 after step", "requeueing the job"]
    tasks[0].check(restarts=1, texts=texts)
    tasks[1].check(restarts=0)


def written_with_restarts(cluster: Cluster, directory: Path) -> None:
    """A written script with launchers: a rank is killed, and its launcher restarts the ranks in the same job."""
    place = directory / "written_with_restarts"
    place.mkdir()
    script = write(place, "--time-limit=00:20:00", "--max-restarts=1")
    job = Job(cluster, submit_written(cluster, script), place / "run")
    job.wait_for_step(30)
    rank = _ranks_below(str(place))[-1]
    say(f"job {job.number} is at step {max(job.steps())}: SIGKILL to rank {rank}")
    os.kill(rank, signal.SIGKILL)
    job.check(restarts=0, texts=["Loading checkpoint from run/epoch_0_step_25"])


def at_time_limit(cluster: Cluster, directory: Path) -> None:
    """Slurm's own signal before the time limit: the job saves, is requeued, and continues."""
    place = directory / "at_time_limit"
    place.mkdir()
    script = write(place, "--time-limit=00:04:00", "--step_scheduler.max_steps=1000000")
    assert re.search(r"^#SBATCH --signal=USR1@120$", script.read_text(), re.MULTILINE)
    job = Job(cluster, submit_written(cluster, script), place / "run")
    wait_until(lambda: "requeueing the job" in job.log, "Slurm's signal", 240 + JOB_SECONDS)
    stopped = re.findall(r"stopped by SIGUSR1 after step (\d+)", job.log)
    assert len(stopped) == 1, job.log
    say(f"job {job.number} stopped after step {stopped[0]}")
    job.wait_for_step(int(stopped[0]) + 10)
    assert re.search(rf"Loading checkpoint from run/epoch_\d+_step_{stopped[0]}\n", job.log), (
        job.log
    )
    assert cluster.job(job.number)["Restarts"] == "1"
    cluster.run("scancel", job.number)
    say(f"job {job.number}: continued after step {stopped[0]}; canceled")


def _ranks_below(directory: str) -> list[int]:
    """Process numbers of the ranks whose working directory is *directory*: forks of a launcher, in their order."""
    children: list[tuple[int, int]] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if os.readlink(entry / "cwd") != directory or not any(
                word.endswith(b"ckpt-train") for word in words
            ):
                continue
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
        children.append((int(entry.name), parent))
    launchers = {number for number, _ in children}
    return sorted(number for number, parent in children if parent in launchers)
