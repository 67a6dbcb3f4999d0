"""A task for SkyPilot's managed jobs, which start a run again on another cluster after a preemption."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from automodel_ckpt.cli.cluster.documents import documents, filled, shell_words
from automodel_ckpt.cli.cluster.job import Job
from automodel_ckpt.cli.cluster.kubernetes import NUM_FAILURES_PER_NODE, PORT
from automodel_ckpt.cli.cluster.options import LauncherOptions
from automodel_ckpt.config.tree.references import SECRET_NAME
from automodel_ckpt.errors import EXIT_STOPPED

_GPUS = ("H100", "H200", "A100-80GB")
_URL = "CHECKPOINT_URL"
_RESOURCES = """
use_spot: true
job_recovery: {max_restarts_on_errors: $failures, recover_on_exit_codes: [$stopped]}
"""


def task(job: Job, options: LauncherOptions) -> str:
    """Return a task of SkyPilot. Its disks do not outlive a cluster, so it requires ``checkpoint.remote``."""
    environment: dict[str, str | None] = {
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"),
        "PYTHONUNBUFFERED": "1",
    }
    required = list(job.required)
    if job.remote_url is None:
        required.append(_URL)
    # SkyPilot refuses to launch a task while one of these has no value.
    environment |= dict.fromkeys(name for name in required if not SECRET_NAME.search(name))
    secrets = [name for name in required if SECRET_NAME.search(name)]
    failures = NUM_FAILURES_PER_NODE if job.max_restarts is None else job.max_restarts
    resources = filled(_RESOURCES, failures=failures, stopped=EXIT_STOPPED)
    if job.uses_gpus:
        resources = {"accelerators": dict.fromkeys(_GPUS, job.ranks_per_node), **resources}
    else:
        resources = {"cpus": f"{2 * job.ranks_per_node}+", **resources}
    if options.image is not None:
        resources["image_id"] = f"docker:{options.image}"
    document: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.num_nodes,
        "resources": resources,
        "workdir": ".",
        "file_mounts": {} if _is_inside(job.recipe) else {_remote_recipe(job): job.recipe},
        "envs": environment,
        "secrets": dict.fromkeys(secrets),
        "setup": _setup(job),
        "run": _run(job),
    }
    used = {name: value for name, value in document.items() if value not in ({}, [])}
    return documents(used, comments=_comments(job, options))


def _comments(job: Job, options: LauncherOptions) -> list[str]:
    required = [*job.required, *([_URL] if job.remote_url is None else [])]
    flags = "".join(
        f" --{'secret' if SECRET_NAME.search(name) else 'env'} {name}{'=s3://BUCKET/PATH' if name == _URL else ''}"
        for name in required
    )
    optional = [name for name in job.credentials if name == "HF_TOKEN" or name.startswith("WANDB")]
    secrets = " and ".join(f"--secret {name}" for name in optional)
    store = job.remote_url or f"${_URL}"
    storage = (
        f"the disks of a cluster are lost with it. Checkpoints are copied to {store}, and a new cluster resumes from "
        "there. Save often (step_scheduler.ckpt_every_minutes): a preempted cluster may end without a signal"
    )
    shared = (
        "shared storage: the nodes of a cluster share no disk. Set checkpoint.checkpoint_dir to the URL of an object "
        "store, or add a volume (volumes: {/mnt/run: NAME}) and set it to a directory on that."
    )
    codes = (
        f"{EXIT_STOPPED} (saved after a signal) starts the run again without limit, as a preemption does; others do so "
        "max_restarts_on_errors times"
    )
    return [
        f"{job.title}. Written by ckpt-train; review it, then:",
        f"  sky jobs launch{flags} {options.output or 'FILE'}",
        "",
        f"storage: {storage}.",
        *([shared] if job.num_nodes > 1 and not job.has_url_directory else []),
        "workdir: the current directory is copied to each cluster, with the recipe, its data and custom code.",
        f"secrets: this file has none. Add {secrets or 'flags --secret'} if the run needs them.",
        f"exit codes: {codes}.",
    ]


def _is_inside(path: str) -> bool:
    return Path(path).resolve().is_relative_to(Path.cwd().resolve())


def _remote_recipe(job: Job) -> str:
    if _is_inside(job.recipe):
        return os.path.relpath(Path(job.recipe).resolve(), Path.cwd().resolve())
    return f"~/ckpt-train/{Path(job.recipe).name}"


def _setup(job: Job) -> str:
    extras = f"[{','.join(job.extras)}]" if job.extras else ""
    packages = " ".join([f"'.{extras}'", *job.packages])
    return (
        "# From an image (--image), or from this program's repository, if it is the current directory.\n"
        f"command -v ckpt-train || pip install {packages}\n"
    )


def _run(job: Job) -> str:
    lines = []
    if job.num_nodes > 1:
        lines.append('host=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")')
    words = job.launch_words('"$SKYPILOT_NODE_RANK"', '"$host"', str(PORT), '"$SKYPILOT_TASK_ID"')
    given = [shell_words([_remote_recipe(job), *job.run_words])]
    if job.remote_url is None:
        given.append(f'--checkpoint.remote.url="${_URL}"')
    # exec: signals reach the launcher.
    lines.append(f"exec ckpt-train {' '.join(words)} \\\n  {' '.join(given)}")
    return "\n".join(lines) + "\n"
