"""Run examples/slurm/train.sbatch and scripts of --write-launcher on Slurm: python -m tools.slurm [--keep] [SCENE ...]

1. A job is signaled, as two minutes before its time limit: it saves, is requeued, resumes and completes.
2. The node fails: the job is requeued by Slurm and resumes from the newest checkpoint.
3. An array: each task has its own run, one is signaled.
4. The script of `ckpt-train --write-launcher slurm`: an array of it; one with --max-restarts, of which a rank is
   killed; and one that Slurm signals before its time limit.

Slurm's KillOnBadExit is set, so that srun sends SIGTERM to all ranks when the first one has exited with 75; srun's own
flag is tested in both positions. Exit code 0 if all is as described, 1 if not, 3 if Slurm is not installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.slurm.cluster import Cluster, missing_programs, wait_until
from tools.slurm.jobs import SCRIPT, Job, say, submit
from tools.slurm.written import at_time_limit, written_array, written_with_restarts

NOT_INSTALLED = 3


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


SCENES = (signaled, failed, array, written_array, written_with_restarts, at_time_limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="keep the directory with all logs")
    names = [scene.__name__ for scene in SCENES]
    parser.add_argument("scenes", nargs="*", help=f"of {', '.join(names)}; all by default")
    given = parser.parse_args()
    keep = given.keep
    scenes = [scene for scene in SCENES if not given.scenes or scene.__name__ in given.scenes]
    if unknown := set(given.scenes) - set(names):
        parser.error(f"unknown scenes: {', '.join(sorted(unknown))}")
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
            for scene in scenes:
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
