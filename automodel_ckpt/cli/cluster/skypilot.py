"""A task for SkyPilot's managed jobs, which start a run again on another cluster after a preemption."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from automodel_ckpt.cli.cluster.job import Job, comments, documents, filled, shell_words
from automodel_ckpt.cli.cluster.kubernetes import NUM_FAILURES_PER_NODE, PORT
from automodel_ckpt.cli.cluster.options import LauncherOptions
from automodel_ckpt.config.tree.references import SECRET_NAME
from automodel_ckpt.errors import EXIT_STOPPED

_URL = "CHECKPOINT_URL"
_TASK = """
name: $name
num_nodes: $nodes
resources: $resources
workdir: .
file_mounts: $mounts
envs: $envs
secrets: $secrets
setup: $setup
run: $run
"""
_COMMENTS = """\
{job.title}. Written by ckpt-train; review it, then:
  sky jobs launch{flags} {file}

storage: the disks of a cluster are lost with it. Checkpoints are copied to {store}, and a new cluster resumes from \
there. Save often (step_scheduler.ckpt_every_minutes): a preempted cluster may end without a signal.
"""
_SHARED = """\
shared storage: the nodes of a cluster share no disk. Set checkpoint.checkpoint_dir to the URL of an object store, or \
add a volume (volumes: {{/mnt/run: NAME}}) and set it to a directory on that.
"""
_MORE = """\
workdir: the current directory is copied to each cluster, with the recipe, its data and custom code.
secrets: this file has none. Add {secrets} if the run needs them.
exit codes: {stopped} (saved after a signal) starts the run again without limit, as a preemption does; others do so \
max_restarts_on_errors times.
"""
_SETUP = """\
# From an image (--image), or from this program's repository, if it is the current directory.
command -v ckpt-train || pip install {packages}
"""


def task(job: Job, options: LauncherOptions) -> str:
    """Return a task of SkyPilot. Its disks do not outlive a cluster, so it requires ``checkpoint.remote``."""
    # SkyPilot refuses to launch a task while one of these has no value.
    required = [*job.required, *([_URL] if job.remote_url is None else [])]
    secrets = [name for name in required if SECRET_NAME.search(name)]
    environment: dict[str, str | None] = {
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"),
        "PYTHONUNBUFFERED": "1",
        **dict.fromkeys(name for name in required if name not in secrets),
    }
    resources: dict[str, Any] = {"cpus": f"{2 * job.ranks_per_node}+"}
    if job.uses_gpus:
        gpus = dict.fromkeys(("H100", "H200", "A100-80GB"), job.ranks_per_node)
        resources = {"accelerators": gpus}
    failures = NUM_FAILURES_PER_NODE if job.max_restarts is None else job.max_restarts
    resources["use_spot"] = True
    resources["job_recovery"] = {
        "max_restarts_on_errors": failures,
        "recover_on_exit_codes": [EXIT_STOPPED],
    }
    if options.image is not None:
        resources["image_id"] = f"docker:{options.image}"
    recipe, is_copied = _recipe_of(job)
    extras = f"[{','.join(job.extras)}]" if job.extras else ""
    document = filled(
        _TASK,
        name=job.name,
        nodes=job.num_nodes,
        resources=resources,
        mounts={} if is_copied else {recipe: job.recipe},
        envs=environment,
        secrets=dict.fromkeys(secrets),
        setup=_SETUP.format(packages=" ".join([f"'.{extras}'", *job.packages])),
        run=_run(job, recipe),
    )
    used = {name: value for name, value in document.items() if value != {}}
    return documents(_review(job, options, required), used)


def _review(job: Job, options: LauncherOptions, required: list[str]) -> str:
    flags = ""
    for name in required:
        kind = "secret" if SECRET_NAME.search(name) else "env"
        flags += f" --{kind} {name}{'=s3://BUCKET/PATH' if name == _URL else ''}"
    optional = [name for name in job.credentials if name == "HF_TOKEN" or name.startswith("WANDB")]
    has_local_disks = job.num_nodes > 1 and not job.has_url_directory
    return comments(
        _COMMENTS + (_SHARED if has_local_disks else "") + _MORE,
        job=job,
        flags=flags,
        file=options.output or "FILE",
        store=job.remote_url or f"${_URL}",
        secrets=" and ".join(f"--secret {name}" for name in optional) or "flags --secret",
        stopped=EXIT_STOPPED,
    )


def _recipe_of(job: Job) -> tuple[str, bool]:
    """Return the path of the recipe on a cluster, and whether it is copied with the current directory."""
    here, recipe = Path.cwd().resolve(), Path(job.recipe).resolve()
    if recipe.is_relative_to(here):
        return str(recipe.relative_to(here)), True
    return f"~/ckpt-train/{recipe.name}", False


def _run(job: Job, recipe: str) -> str:
    lines = []
    if job.num_nodes > 1:
        lines.append('host=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")')
    words = job.launch_words('"$SKYPILOT_NODE_RANK"', '"$host"', str(PORT), '"$SKYPILOT_TASK_ID"')
    given = [shell_words([recipe, *job.run_words])]
    if job.remote_url is None:
        given.append(f'--checkpoint.remote.url="${_URL}"')
    # exec: signals reach the launcher.
    lines.append(f"exec ckpt-train {' '.join(words)} \\\n  {' '.join(given)}")
    return "\n".join(lines) + "\n"
