"""Manifests for Kubernetes: a TrainJob of Kubeflow Trainer, or an indexed Job."""

from __future__ import annotations

from typing import Any

from automodel_ckpt.cli.cluster.job import Job
from automodel_ckpt.cli.cluster.options import LauncherOptions
from automodel_ckpt.cli.cluster.pods import (
    CONTAINER,
    IMAGE,
    PORT,
    arguments,
    config_maps,
    documents,
    environment,
    job_policy,
    pod_spec,
    resources,
    review,
)

GROUP = "trainer.kubeflow.org"


def train_job(job: Job, options: LauncherOptions) -> str:
    """Return a TrainJob (trainer.kubeflow.org/v1alpha1) and its TrainingRuntime with Kubeflow's policy for torch.

    The cluster's runtime ``torch-distributed`` is not used: a TrainJob cannot change its pod failure policy, and
    without one, a pod that was stopped by a signal counts as a failure.
    """
    image = options.image or IMAGE
    pod = pod_spec(job, options, {"name": CONTAINER, "image": image})
    runtime = {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name, "labels": {f"{GROUP}/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.num_nodes, "torch": {}},
            "template": {"spec": {"replicatedJobs": [_replicated_job(job, pod)]}},
        },
    }
    # Variables that Kubeflow sets in the container (PET_ is torchrun's prefix).
    words = arguments(job, "$(PET_NODE_RANK)", "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)")
    train_job = {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"apiGroup": GROUP, "kind": "TrainingRuntime", "name": job.name},
            "trainer": {
                "numNodes": job.num_nodes,
                "numProcPerNode": job.ranks_per_node,
                "image": image,
                "command": ["ckpt-train"],
                "args": words,
                "env": environment(job),
                "resourcesPerNode": resources(job),
            },
        },
    }
    comments = [*review(job, options), "cluster: needs Kubeflow Trainer 2.0 or later."]
    return documents(*config_maps(job), runtime, train_job, comments=comments)


def _replicated_job(job: Job, pod: dict[str, Any]) -> dict[str, Any]:
    template = {
        "metadata": {"labels": {f"{GROUP}/trainjob-ancestor-step": "trainer"}},
        "spec": {**job_policy(job), "template": {"spec": pod}},
    }
    return {"name": CONTAINER, "template": template}


def indexed_job(job: Job, options: LauncherOptions) -> str:
    """Return an indexed Job (batch/v1) with one pod per node, and the headless Service by which its pods find pod 0."""
    labels = {"app.kubernetes.io/name": "ckpt-train", "app.kubernetes.io/instance": job.name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        # Pods must find pod 0 before it is ready.
        "spec": {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True},
    }
    index = {"fieldPath": "metadata.labels['batch.kubernetes.io/job-completion-index']"}
    container = {
        "name": CONTAINER,
        "image": options.image or IMAGE,
        "command": ["ckpt-train"],
        "args": arguments(job, "$(NODE_RANK)", f"{job.name}-0.{job.name}:{PORT}"),
        "env": [{"name": "NODE_RANK", "valueFrom": {"fieldRef": index}}, *environment(job)],
        "resources": resources(job),
    }
    pod = {"subdomain": job.name, **pod_spec(job, options, container)}
    spec = {
        "completions": job.num_nodes,
        "parallelism": job.num_nodes,
        **job_policy(job),
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    batch_job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name, "labels": labels},
        "spec": spec,
    }
    comments = [*review(job, options), "cluster: needs Kubernetes 1.31 or later."]
    return documents(*config_maps(job), service, batch_job, comments=comments)
