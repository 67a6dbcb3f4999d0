"""Run the pods of a written manifest as processes, as a kubelet would: arguments, environment, mounts, signals.

Each pod has a mount namespace, in which its volumes, the recipe's ConfigMap and /etc/hosts are bind mounts. Where a
volume hides the directory of this program or of its environment, they are mounted below it. Needs root.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RANK_FIELD = "metadata.labels['batch.kubernetes.io/job-completion-index']"
_ENTER = """\
set -euo pipefail
mount --make-rprivate /
while [ "$1" != -- ]; do
  if [ -d "$1" ]; then mkdir -p "$2"; fi
  mount --bind "$1" "$2"
  shift 2
done
shift
cd "$WORKING_DIR"
exec "$@"
"""


@dataclass(frozen=True)
class Manifest:
    """What the pods of a manifest have in common: the job's spec, the pod's spec, its container, and the recipe."""

    name: str
    job: dict[str, Any]
    pod: dict[str, Any]
    container: dict[str, Any]
    recipe: str
    address: str
    is_kubeflow: bool

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest. Kubeflow completes the container of a TrainJob from its fields."""
        documents = {
            document["kind"]: document for document in yaml.safe_load_all(path.read_text())
        }
        recipe = documents["ConfigMap"]["data"]["recipe.yaml"]
        if "Job" in documents:
            name = documents["Job"]["metadata"]["name"]
            job = documents["Job"]["spec"]
            pod = job["template"]["spec"]
            (container,) = pod["containers"]
            return cls(name, job, pod, container, recipe, f"{name}-0.{name}", is_kubeflow=False)
        spec = documents["TrainJob"]["spec"]
        name = documents["TrainJob"]["metadata"]["name"]
        (replicated,) = documents["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
        job = replicated["template"]["spec"] | {"completions": spec["trainer"]["numNodes"]}
        pod = job["template"]["spec"]
        container = {
            **pod["containers"][0],
            **{key: spec["trainer"][key] for key in ("command", "args", "env")},
        }
        address = f"{name}-node-0-0.{name}"
        return cls(name, job, pod, container, recipe, address, is_kubeflow=True)

    @property
    def restarts_ranks(self) -> bool:
        """Whether the launcher of a pod starts its ranks again after the loss of another pod."""
        return any(word.startswith("--max-restarts") for word in self.container["args"])

    def action(self, code: int) -> str:
        """What the pod failure policy does with a container's exit code; Count if no rule matches."""
        for rule in self.job["podFailurePolicy"]["rules"]:
            if code in rule.get("onExitCodes", {}).get("values", ()):
                return str(rule["action"])
        return "Count"

    def environment(self, index: int) -> dict[str, str]:
        """The variables of the container of pod *index*. Optional secrets are not set."""
        variables = {}
        for variable in self.container["env"]:
            source = variable.get("valueFrom", {})
            if "value" in variable:
                variables[variable["name"]] = variable["value"]
            elif "fieldRef" in source:
                assert source["fieldRef"]["fieldPath"] == RANK_FIELD
                variables[variable["name"]] = str(index)
            else:
                assert source["secretKeyRef"]["optional"]
        if self.is_kubeflow:
            # What Kubeflow's plugin for torch adds (pkg/runtime/framework/plugins/torch).
            variables |= {
                "PET_NNODES": str(self.job["completions"]),
                "PET_NODE_RANK": str(index),
                "PET_MASTER_ADDR": self.address,
                "PET_MASTER_PORT": "29500",
            }
        return variables


class Pods:
    """The pods of one job, with *directory* as the volume."""

    def __init__(self, manifest: Manifest, directory: Path) -> None:
        self.manifest, self.directory = manifest, directory
        self.processes: list[subprocess.Popen[bytes]] = []
        directory.mkdir(exist_ok=True)
        (directory / "recipe").mkdir(exist_ok=True)
        (directory / "recipe" / "recipe.yaml").write_text(manifest.recipe)
        names = f"localhost {socket.gethostname()} {manifest.address}"
        (directory / "hosts").write_text(f"127.0.0.1 {names}\n")
        (directory / "volume").mkdir(exist_ok=True)

    def start(self) -> None:
        """Start one process per pod."""
        indices = range(self.manifest.job["completions"])
        self.processes = [self._started(index) for index in indices]

    def replace(self, index: int) -> None:
        """Start a new process for a pod that has ended, as the Job's controller does."""
        self.processes[index] = self._started(index)

    def _started(self, index: int) -> subprocess.Popen[bytes]:
        container = self.manifest.container
        variables = self.manifest.environment(index)
        words = [*container["command"], *(expanded(word, variables) for word in container["args"])]
        assert words[0] == "ckpt-train"
        words[0] = str(Path(sys.executable).with_name("ckpt-train"))
        mounts = [str(self.directory / "hosts"), "/etc/hosts"]
        sources = {"work": "volume", "recipe": "recipe"}
        for mount in container["volumeMounts"]:
            if mount["name"] in sources:
                source = self.directory / sources[mount["name"]]
                mounts += _mounts(source, Path(mount["mountPath"]), self.directory / "programs")
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "WORKING_DIR": container["workingDir"],
            **variables,
        }
        with (self.directory / f"pod_{index}.log").open("ab") as log:
            return subprocess.Popen(
                ["unshare", "--mount", "bash", "-c", _ENTER, "pod", *mounts, "--", *words],
                env=environment,
                stdout=log,
                stderr=log,
            )

    def terminate(self, index: int) -> list[int]:
        """Send SIGTERM to one pod; the codes of all. Raises TimeoutExpired after the grace period."""
        start = time.monotonic()
        self.processes[index].send_signal(signal.SIGTERM)
        codes = self.wait(self.manifest.pod["terminationGracePeriodSeconds"])
        print(f"  all pods have ended {time.monotonic() - start:.1f} s after SIGTERM: {codes}")
        return codes

    def wait(self, seconds: float) -> list[int]:
        """Wait for the ends of all pods; their exit codes."""
        end = time.monotonic() + seconds
        return [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]

    def kill(self) -> None:
        """End all pods that still run."""
        for process in self.processes:
            process.kill()
            process.wait()

    def log(self) -> str:
        """What the pods have printed."""
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("pod_*.log")))


def _mounts(source: Path, target: Path, aside: Path) -> list[str]:
    """Sources and targets of the bind mounts that show *source* at *target*, and the programs that it would hide.

    The programs are mounted below *aside* first: *target* hides their directories.
    """
    needed = {ROOT.resolve(), Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    hidden = sorted(path for path in needed if path.is_relative_to(target))
    before, after = [], []
    for number, path in enumerate(hidden):
        kept = str(aside / str(number))
        before += [str(path), kept]
        after += [kept, str(path)]
    return [*before, str(source), str(target), *after]


def expanded(text: str, variables: dict[str, str]) -> str:
    """Expand ``$(NAME)`` and ``$$`` as Kubernetes does in arguments."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)
