"""A manifest for Kubernetes: a TrainJob of Kubeflow Trainer. Its pods run a recipe."""

from __future__ import annotations

import os
import posixpath
import re
from typing import Any

from automodel_ckpt.cli.cluster.job import SCRATCH, Job, comments, documents, filled
from automodel_ckpt.cli.cluster.options import LauncherOptions
from automodel_ckpt.errors import (
    EXIT_SAVE_FAILED,
    EXIT_STOPPED,
    EXIT_UNUSABLE,
    EXIT_USAGE,
)

PORT = 29500
NUM_FAILURES_PER_NODE = 3
"""How often the pods of a node may fail otherwise than by a signal, if ``--max-restarts`` does not set it."""
_WORK = "/work"
_CACHE = f"{_WORK}/.cache/automodel_ckpt"
_RECIPES = "/etc/ckpt-train"
_RECIPE = "recipe.yaml"
_IMAGE = "automodel_ckpt:latest"
# The name of the container and of the replicated job is required by Kubeflow's plugin for torch. The first rule that
# matches the end of a pod applies. When a rank crashes, the pods of all nodes fail. Data loader workers and NCCL use
# /dev/shm, which has 64 MB by default.
_RUNTIME = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata: {name: $name, labels: {trainer.kubeflow.org/framework: torch}}
spec:
  mlPolicy: {numNodes: $nodes, torch: {}}
  template:
    spec:
      replicatedJobs:
      - name: node
        template:
          metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}
          spec:
            completionMode: Indexed
            backoffLimit: $failures
            podFailurePolicy:
              rules:
              - {action: FailJob, onExitCodes: {containerName: node, operator: In, values: $final}}
              - {action: Ignore, onExitCodes: {containerName: node, operator: In, values: [$stopped]}}
              - {action: Ignore, onPodConditions: [{type: DisruptionTarget, status: "True"}]}
            template:
              spec:
                restartPolicy: Never
                terminationGracePeriodSeconds: $seconds
                containers: [{name: node, image: $image, workingDir: $work, volumeMounts: $mounts}]
                volumes: $volumes
"""
_TRAIN_JOB = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: $name}
spec:
  runtimeRef: {apiGroup: trainer.kubeflow.org, kind: TrainingRuntime, name: $name}
  trainer:
    numNodes: $nodes
    numProcPerNode: $ranks
    image: $image
    command: [ckpt-train]
    args: $words
    env: $env
    resourcesPerNode: $resources
"""
_COMMENTS = """\
{job.title}. Written by ckpt-train; review it, then:
  kubectl apply -f {file}

image: {image} must contain ckpt-train, as the image of this program's Dockerfile does.
volume: the PersistentVolumeClaim {claim} ({access}) is mounted at {work}, the working directory. \
The recipe's relative paths are below it: data, local models, and {files}.
secrets: the Secret {job.name}-env may have the keys {secrets}.
terminationGracePeriodSeconds: {job.stop_seconds} s from SIGTERM to SIGKILL; increase it \
if twice a step and a save take longer.
exit codes: pods that saved after a signal ({stopped}) or were evicted are replaced without limit; \
{usage}, {unusable} and {failed} fail the job; others count towards backoffLimit. If one pod is evicted, the ranks of \
all pods save and exit.
cluster: needs Kubeflow Trainer 2.0 or later.
"""
_CONFIG_MAP = """
apiVersion: v1
kind: ConfigMap
metadata: {name: $name}
data: {recipe.yaml: $text}
"""


def train_job(job: Job, options: LauncherOptions) -> str:
    """Return a TrainJob (trainer.kubeflow.org/v1alpha1) and its TrainingRuntime with Kubeflow's policy for torch.

    The cluster's runtime ``torch-distributed`` is not used: a TrainJob cannot change its pod failure policy, and
    without one, a pod that was stopped by a signal counts as a failure.
    """
    image = options.image or _IMAGE
    failures = NUM_FAILURES_PER_NODE if job.max_restarts is None else job.max_restarts
    mounts, volumes = _storage(job, options)
    runtime = filled(
        _RUNTIME,
        name=job.name,
        nodes=job.num_nodes,
        failures=failures * job.num_nodes,
        final=[EXIT_USAGE, EXIT_UNUSABLE, EXIT_SAVE_FAILED],
        stopped=EXIT_STOPPED,
        seconds=job.stop_seconds,
        image=image,
        work=_WORK,
        mounts=mounts,
        volumes=volumes,
    )
    # A GPU per rank, or cores.
    resources: dict[str, Any] = {"requests": {"cpu": job.ranks_per_node}}
    if job.uses_gpus:
        resources = {"limits": {"nvidia.com/gpu": job.ranks_per_node}}
    trained = filled(
        _TRAIN_JOB,
        name=job.name,
        nodes=job.num_nodes,
        ranks=job.ranks_per_node,
        image=image,
        words=_arguments(job),
        env=_environment(job),
        resources=resources,
    )
    # A recipe of several files is on the volume.
    maps = []
    if job.text is not None:
        maps.append(filled(_CONFIG_MAP, name=f"{job.name}-recipe", text=job.text))
    return documents(_review(job, options), *maps, runtime, trained)


def _review(job: Job, options: LauncherOptions) -> str:
    """Return the comment that lists what to check before the first use."""
    files = f"the run directory {job.run_directory}"
    if job.run_directory == SCRATCH:
        files = f"the run directory {_CACHE}/runs"
    if job.text is None:
        files += f", and the recipe {_recipe_path(job)} with the files that it names"
    return comments(
        _COMMENTS,
        job=job,
        file=options.output or "FILE",
        image=options.image or _IMAGE,
        claim=options.volume_claim,
        access="ReadWriteMany" if job.num_nodes > 1 else "ReadWriteOnce",
        work=_WORK,
        files=files,
        secrets=", ".join(_secret_names(job)),
        stopped=EXIT_STOPPED,
        usage=EXIT_USAGE,
        unusable=EXIT_UNUSABLE,
        failed=EXIT_SAVE_FAILED,
    )


def _recipe_path(job: Job) -> str:
    """Return the path of the recipe in a container: of the mounted ConfigMap, or below the working directory."""
    if job.text is not None:
        return f"{_RECIPES}/{_RECIPE}"
    return posixpath.basename(job.recipe) if posixpath.isabs(job.recipe) else job.recipe


def _environment(job: Job) -> list[dict[str, Any]]:
    """Return the environment variables of a container. Secrets are references."""
    values = {
        "HF_HOME": f"{_WORK}/.cache/huggingface",
        "AUTOMODEL_CKPT_CACHE": _CACHE,
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"),
        "PYTHONUNBUFFERED": "1",
    }
    variables: list[dict[str, Any]] = [{"name": name, "value": values[name]} for name in values]
    for name in _secret_names(job):
        is_optional = not job.variables.get(name, False)
        reference = {"name": f"{job.name}-env", "key": name, "optional": is_optional}
        variables.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    return variables


def _secret_names(job: Job) -> list[str]:
    return [*job.variables, *job.credentials]


def _storage(
    job: Job, options: LauncherOptions
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the mounts of a container, and the volumes of its pod."""
    shared_memory = "/dev/shm"  # noqa: S108 - a mount point in the container
    mounts: list[dict[str, Any]] = [
        {"name": "work", "mountPath": _WORK},
        {"name": "shared-memory", "mountPath": shared_memory},
    ]
    size = "8Gi" if job.num_workers else "2Gi"
    volumes: list[dict[str, Any]] = [
        {"name": "work", "persistentVolumeClaim": {"claimName": options.volume_claim}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}},
    ]
    directory = job.run_directory.rstrip("/")
    is_outside = directory.startswith("/") and not f"{directory}/".startswith(f"{_WORK}/")
    if is_outside and "${" not in directory:
        path = re.sub(r"[^\w.-]+", "-", directory.strip("/"))
        mounts.append({"name": "work", "mountPath": directory, "subPath": path})
    if job.text is not None:
        mounts.append({"name": "recipe", "mountPath": _RECIPES, "readOnly": True})
        volumes.append({"name": "recipe", "configMap": {"name": f"{job.name}-recipe"}})
    return mounts, volumes


def _arguments(job: Job) -> list[str]:
    """Return the arguments of ckpt-train on a node."""
    # Variables that Kubeflow sets in the container (PET_ is torchrun's prefix).
    address = ("$(PET_NODE_RANK)", "$(PET_MASTER_ADDR)", "$(PET_MASTER_PORT)")
    words = job.launch_words(*address, run_id=job.name)
    # Kubernetes expands $(NAME), and $$ to a dollar sign.
    given = [re.sub(r"\$(?=[$(])", "$$", word) for word in job.run_words]
    return [*words, _recipe_path(job), *given]
