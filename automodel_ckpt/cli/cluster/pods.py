"""Pods that run a recipe: environment, volumes, and what follows from each exit code."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable
from typing import Any

import yaml

from automodel_ckpt.cli.cluster.comments import comment_lines
from automodel_ckpt.cli.cluster.job import SCRATCH, Job
from automodel_ckpt.cli.cluster.options import LauncherOptions
from automodel_ckpt.errors import (
    EXIT_SAVE_FAILED,
    EXIT_STOPPED,
    EXIT_UNUSABLE,
    EXIT_USAGE,
)

CONTAINER = "node"
"""Name of the container and of the replicated job, which Kubeflow's plugin for torch requires."""
PORT = 29500
WORK = "/work"
_CACHE = f"{WORK}/.cache/automodel_ckpt"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a mount point in the container
RECIPES = "/etc/ckpt-train"
RECIPE = "recipe.yaml"
IMAGE = "automodel_ckpt:latest"
NUM_FAILURES_PER_NODE = 3
"""How often the pods of a node may fail otherwise than by a signal, if ``--max-restarts`` does not set it."""


def documents(*parts: dict[str, Any], comments: Iterable[str]) -> str:
    """Return YAML documents after paragraphs of comments."""
    lines = comment_lines(comments)
    texts = map(_yaml, parts)
    return "\n".join(lines) + "\n" + "---\n".join(texts)


def _yaml(part: dict[str, Any]) -> str:
    """Return a document in which all characters that are not printable are escaped.

    Readers of YAML differ in which of them end a line.
    """
    text = ""
    for allow_unicode in (True, False):
        text = yaml.dump(
            part, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=allow_unicode
        )
        if text.replace("\n", "").isprintable():
            break
    return text


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no references between parts of a document."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def review(job: Job, options: LauncherOptions) -> list[str]:
    """Return the paragraphs of the comment that list what to check before the first use."""
    access = "ReadWriteMany" if job.num_nodes > 1 else "ReadWriteOnce"
    directory = job.run_directory if job.run_directory != SCRATCH else f"{_CACHE}/runs"
    paths = f"data, local models, and the run directory {directory}"
    if job.text is None:
        paths += f", and the recipe {recipe_path(job)} with the files that it names"
    claim = f"the PersistentVolumeClaim {options.volume_claim} ({access}) is mounted at {WORK}"
    codes = (
        f"pods that saved after a signal ({EXIT_STOPPED}) or were evicted are replaced without limit; {EXIT_USAGE}, "
        f"{EXIT_UNUSABLE} and {EXIT_SAVE_FAILED} fail the job; others count towards backoffLimit"
    )
    return [
        f"{job.title}. Written by ckpt-train; review it, then:",
        f"  kubectl apply -f {options.output or 'FILE'}",
        "",
        f"image: {options.image or IMAGE} must contain ckpt-train, as the image of this program's Dockerfile does.",
        f"volume: {claim}, the working directory. The recipe's relative paths are below it: {paths}.",
        f"secrets: the Secret {job.name}-env may have the keys {', '.join(_secret_names(job))}.",
        f"terminationGracePeriodSeconds: {job.stop.seconds} s from SIGTERM to SIGKILL; {job.stop.reason}.",
        f"exit codes: {codes}. If one pod is evicted, the ranks of all pods save and exit.",
    ]


def config_maps(job: Job) -> list[dict[str, Any]]:
    """Return the ConfigMap with the recipe's file; none for a recipe of several files, which is on the volume."""
    if job.text is None:
        return []
    recipe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.name}-recipe"},
        "data": {RECIPE: job.text},
    }
    return [recipe]


def recipe_path(job: Job) -> str:
    """Return the path of the recipe in a container: of the mounted ConfigMap, or below the working directory."""
    if job.text is not None:
        return f"{RECIPES}/{RECIPE}"
    return posixpath.basename(job.recipe) if posixpath.isabs(job.recipe) else job.recipe


def job_policy(job: Job) -> dict[str, Any]:
    """Return the fields of a Job's spec that decide what follows from a pod's end."""
    failures = NUM_FAILURES_PER_NODE if job.max_restarts is None else job.max_restarts
    final = [EXIT_USAGE, EXIT_UNUSABLE, EXIT_SAVE_FAILED]
    # The first rule that matches applies.
    rules = [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": final},
        },
        {
            "action": "Ignore",
            "onExitCodes": {
                "containerName": CONTAINER,
                "operator": "In",
                "values": [EXIT_STOPPED],
            },
        },
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "completionMode": "Indexed",
        # When a rank crashes, the pods of all nodes fail.
        "backoffLimit": failures * job.num_nodes,
        "podFailurePolicy": {"rules": rules},
    }


def environment(job: Job) -> list[dict[str, Any]]:
    """Return the environment variables of a container. Secrets are references."""
    variables: list[dict[str, Any]] = [
        {"name": "HF_HOME", "value": f"{WORK}/.cache/huggingface"},
        {"name": "AUTOMODEL_CKPT_CACHE", "value": _CACHE},
        {"name": "HF_HUB_OFFLINE", "value": os.environ.get("HF_HUB_OFFLINE", "0")},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]
    for name in _secret_names(job):
        is_optional = not job.variables.get(name, False)
        reference = {"name": f"{job.name}-env", "key": name, "optional": is_optional}
        variables.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    return variables


def _secret_names(job: Job) -> list[str]:
    return [*job.variables, *job.credentials]


def resources(job: Job) -> dict[str, Any]:
    """Return the resources of a pod: a GPU per rank, or cores."""
    if job.uses_gpus:
        return {"limits": {"nvidia.com/gpu": job.ranks_per_node}}
    return {"requests": {"cpu": job.ranks_per_node}}


def pod_spec(job: Job, options: LauncherOptions, container: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of a pod with *container*, to which volumes and the working directory are added."""
    mounts: list[dict[str, Any]] = [
        {"name": "work", "mountPath": WORK},
        {"name": "shared-memory", "mountPath": SHARED_MEMORY},
    ]
    directory = job.run_directory.rstrip("/")
    is_outside = directory.startswith("/") and not f"{directory}/".startswith(f"{WORK}/")
    if is_outside and "${" not in directory:
        path = re.sub(r"[^\w.-]+", "-", directory.strip("/"))
        mounts.append({"name": "work", "mountPath": directory, "subPath": path})
    claim = {"claimName": options.volume_claim}
    volumes: list[dict[str, Any]] = []
    if job.text is not None:
        mounts.append({"name": "recipe", "mountPath": RECIPES, "readOnly": True})
        volumes.append({"name": "recipe", "configMap": {"name": f"{job.name}-recipe"}})
    shared_memory = {"medium": "Memory", "sizeLimit": "8Gi" if job.num_workers else "2Gi"}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.stop.seconds,
        "containers": [{**container, "workingDir": WORK, "volumeMounts": mounts}],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": claim},
            # Data loader workers and NCCL use /dev/shm, which has 64 MB by default.
            {"name": "shared-memory", "emptyDir": shared_memory},
            *volumes,
        ],
    }


def arguments(job: Job, rank: str, address: str) -> list[str]:
    """Return the arguments of ckpt-train on a node. *rank* and *address* (HOST:PORT) may be variables: ``$(NAME)``."""
    words = [f"--nproc-per-node={job.ranks_per_node}"]
    host, _, port = address.rpartition(":")
    if job.max_restarts:
        words.append(f"--max-restarts={job.max_restarts}")
    if job.num_nodes > 1:
        words.append(f"--nnodes={job.num_nodes}")
        if job.max_restarts:
            words += [f"--rdzv-endpoint={address}", f"--rdzv-id={job.name}"]
        else:
            words += [f"--node-rank={rank}", f"--master-addr={host}", f"--master-port={port}"]
    name = [f"--run-name={job.run_name}"] if job.run_name else []
    # Kubernetes expands $(NAME), and $$ to a dollar sign.
    given = [re.sub(r"\$(?=[$(])", "$$", word) for word in (*job.arguments, *name)]
    return [*words, recipe_path(job), *given]
