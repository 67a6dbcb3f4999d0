"""Check the launchers for Kubernetes and SkyPilot: python -m tools.launchers [--python PYTHON] [--crds DIR] [--keep]

1. Their schemas, in the environment of PYTHON (see tools/launchers/schemas.py).
2. The pods of a TrainJob and of an indexed Job as processes: one pod receives SIGTERM, all save and exit with 75, which
   the pod failure policy ignores, and new pods resume; a killed pod is counted, and with --max-restarts the other pod
   waits for its replacement; a wrong recipe fails the job.
3. The commands of a SkyPilot task on two nodes with a store: SIGTERM, loss of both disks, resume from the store.

Needs root for mount namespaces. `make slurm` checks the scripts for Slurm.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tools.launchers.pods import Manifest, Pods

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "llm_finetune" / "tiny_llama_python_docs.yaml"
STEPS = 60
OVERRIDES = (
    "--distributed.backend=gloo",
    f"--step_scheduler.max_steps={STEPS}",
    "--checkpoint.checkpoint_dir=runs/$(NAME)",
    "--validation_dataset=null",
)
RUN = "runs/$(NAME)"
"""Kubernetes must not expand this name."""
END_SECONDS = 300.0


def write(directory: Path, kind: str, name: str, *words: str) -> Path:
    """Write a launcher of *kind* for two nodes."""
    path = directory / name
    flags = [f"--write-launcher={kind}", f"--output={path}", "--nnodes=2"]
    command = Path(sys.executable).with_name("ckpt-train")
    subprocess.run([command, RECIPE, *flags, *OVERRIDES, *words], cwd=ROOT, check=True)
    return path


def steps(run: Path) -> list[int]:
    """The steps in training.jsonl, in the order of its lines."""
    path = run / "training.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [line["step"] for line in lines if "event" not in line]


def wait_for_step(run: Path, step: int, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until the run in *run* has completed *step*. Raises TimeoutError, and AssertionError if a process ends."""
    end = time.monotonic() + END_SECONDS
    while max(steps(run), default=0) < step:
        codes = [process.poll() for process in processes]
        assert codes == [None] * len(codes), f"exit codes {codes} before step {step} in {run}"
        if time.monotonic() > end:
            raise TimeoutError(f"no step {step} in {run}")
        time.sleep(0.1)


def check_pods(path: Path, directory: Path) -> None:
    """Run the pods of a manifest through SIGTERM, replacement, and a kill. Raises AssertionError."""
    manifest = Manifest.read(path)
    pods = Pods(manifest, directory)
    run = directory / "volume" / RUN
    try:
        pods.start()
        wait_for_step(run, 10, pods.processes)
        codes = pods.terminate(1)
        actions = [manifest.action(code) for code in codes]
        assert actions == ["Ignore", "Ignore"], codes
        stopped = steps(run)[-1]
        pods.start()
        wait_for_step(run, stopped + 5, pods.processes)
        pods.processes[1].kill()
        if manifest.restarts_ranks:
            pods.processes[1].wait()
            pods.replace(1)
            print("  a pod was killed: the other one waits for its replacement")
        else:
            codes = pods.wait(60)
            print(f"  a pod was killed: {codes}")
            assert manifest.action(codes[0]) == "Count", codes
            pods.start()
        assert pods.wait(END_SECONDS) == [0, 0]
        assert steps(run) == list(range(1, STEPS + 1)), steps(run)
        manifest.container["args"].append("--optimizer.lr=none")
        pods.start()
        codes = pods.wait(END_SECONDS)
        assert [manifest.action(code) for code in codes] == ["FailJob", "FailJob"], codes
    except (AssertionError, TimeoutError, subprocess.TimeoutExpired):
        print(pods.log(), file=sys.stderr)
        raise
    finally:
        pods.kill()
    print(f"{path.name}: stopped after step {stopped}, resumed twice, completed; each step once")


def check_task(path: Path, directory: Path) -> None:
    """Run the commands of a SkyPilot task on two nodes, which lose their disks. Raises AssertionError."""
    task = yaml.safe_load(path.read_text())
    recovered = task["resources"]["job_recovery"]["recover_on_exit_codes"]
    directory.mkdir()
    store = directory / "store"
    first = _started_nodes(task, directory / "cluster_1", store)
    try:
        wait_for_step(directory / "cluster_1" / RUN, 10, first)
        first[1].send_signal(signal.SIGTERM)
        codes = [process.wait(END_SECONDS) for process in first]
        assert all(code in recovered for code in codes), codes
        stopped = steps(directory / "cluster_1" / RUN)[-1]
        shutil.rmtree(directory / "cluster_1")
        second = _started_nodes(task, directory / "cluster_2", store)
        codes = [process.wait(END_SECONDS) for process in second]
    finally:
        for process in first:
            process.kill()
    log = (directory / "cluster_2" / "node_0.log").read_text()
    assert codes == [0, 0], log
    assert f"step_{stopped}" in log, log
    assert steps(directory / "cluster_2" / RUN) == list(range(1, STEPS + 1))
    print(
        f"{path.name}: stopped after step {stopped}, resumed from the store on new disks, completed"
    )


def _started_nodes(
    task: dict[str, Any], directory: Path, store: Path
) -> list[subprocess.Popen[bytes]]:
    """Start the task's commands as SkyPilot does on each of two nodes that share *directory*."""
    directory.mkdir()
    (directory / "examples").symlink_to(ROOT / "examples")
    processes = []
    for rank in range(task["num_nodes"]):
        environment = {
            **os.environ,
            **{name: value for name, value in task["envs"].items() if value is not None},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "CHECKPOINT_URL": f"file://{store}",
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_TASK_ID": "sky-1",
        }
        with (directory / f"node_{rank}.log").open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", task["run"]],
                cwd=directory,
                env=environment,
                stdout=log,
                stderr=log,
            )
        processes.append(process)
    return processes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", help="interpreter with the validators; without it, no schemas")
    parser.add_argument("--crds", type=Path, help="Kubeflow's manifests/base/crds")
    parser.add_argument("--keep", action="store_true", help="keep the directory with all logs")
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="launchers-"))
    try:
        manifests = [
            write(directory, kind, f"{kind}.k8s.yaml", *words)
            for kind, words in (("k8s", []), ("k8s-job", ["--image=registry:5000/image:1"]))
        ]
        write(directory, "k8s", "restarts.k8s.yaml", "--max-restarts=2")
        task = write(directory, "skypilot", "task.sky.yaml")
        write(directory, "skypilot", "image.sky.yaml", "--image=registry:5000/image:1")
        if given.python:
            schemas = str(Path(__file__).with_name("schemas.py"))
            crds = ["--crds", str(given.crds)] if given.crds else []
            subprocess.run([given.python, schemas, str(directory), *crds], check=True)
        for path in manifests:
            check_pods(path, directory / path.stem)
        check_task(task, directory / "sky")
    except (AssertionError, TimeoutError, subprocess.SubprocessError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    finally:
        if not given.keep:
            shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
