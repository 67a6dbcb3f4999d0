"""A batch script for Slurm: its signal before the time limit, requeueing, and arrays."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from automodel_ckpt.cli.cluster.documents import comment_lines, shell_words
from automodel_ckpt.cli.cluster.job import Job
from automodel_ckpt.cli.cluster.options import LauncherOptions
from automodel_ckpt.errors import EXIT_STOPPED, RecipeError

_CPUS_PER_GPU_RANK = 8
_CPUS_PER_RANK = 2


def script(job: Job, options: LauncherOptions) -> str:
    """Return the batch script of *job*. Raises :class:`RecipeError` if the time limit is too short for a save."""
    if options.time_limit_seconds < 2 * job.stop.seconds:
        raise RecipeError(
            "the time limit is too short: the run would stop again before it trains",
            where="--time-limit",
            value=f"{options.time_limit} ({job.stop.seconds} s are needed to save and stop)",
            hint="set a longer --time-limit",
        )
    lines = ["#!/bin/bash", *_comments(job, options), "", *_directives(job, options), "", "set -u"]
    lines += _environment(job)
    lines += _arguments(job)
    lines += ["", *_start(job), "code=$?", ""]
    lines += [
        f"# {EXIT_STOPPED}: the run has saved, and resumes when it is started again. All other codes are final.",
        f'if [ "$code" -eq {EXIT_STOPPED} ]; then',
        '  echo "stopped by a signal after saving; requeueing the job"',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _comments(job: Job, options: LauncherOptions) -> list[str]:
    file = options.output or "FILE"
    signal_text = (
        f"signal: {job.stop.seconds} s before the time limit, Slurm sends SIG{job.stop_signal}. The run completes its "
        f"step, saves, and exits with {EXIT_STOPPED}; then the job is requeued, and resumes. The time is "
        f"{job.stop.reason}. SIGTERM, which a preempted job receives, has the same effect, if the partition's "
        "GraceTime suffices."
    )
    storage = f"the run directory {job.run_directory}, the recipe and the data must be on storage"
    return comment_lines(
        [
            f"{job.title}. Written by ckpt-train; review it, then:",
            f"  sbatch {file}",
            f"  sbatch --array=0-3 {file} --seed '${{oc.env:SLURM_ARRAY_TASK_ID}}'",
            "",
            signal_text,
            f"storage: {storage} that all nodes share.",
            "array: each task has a run directory task_N in that directory.",
        ]
    )


def _directives(job: Job, options: LauncherOptions) -> list[str]:
    cpus = _CPUS_PER_GPU_RANK if job.uses_gpus else _CPUS_PER_RANK
    cpus = max(cpus, job.num_workers + 1)
    tasks = job.ranks_per_node
    if _has_launchers(job):
        cpus, tasks = cpus * tasks, 1
    fields = {"job-name": job.name, "nodes": job.num_nodes, "ntasks-per-node": tasks}
    if job.uses_gpus:
        fields["gpus-per-node"] = job.ranks_per_node
    fields |= {
        "cpus-per-task": cpus,
        "time": options.time_limit,
        "signal": f"{job.stop_signal}@{job.stop.seconds}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in fields.items()]
    return [*lines, "#SBATCH --requeue", "#SBATCH --open-mode=append", "#SBATCH --output=%x-%j.log"]


def _has_launchers(job: Job) -> bool:
    """Whether srun starts one launcher per node, which can restart its ranks, instead of the ranks."""
    return bool(job.max_restarts)


def _environment(job: Job) -> list[str]:
    lines = [
        f': "${{VENV:={_quoted_default(str(Path(sys.executable).parents[1]))}}}"',
        "# Models and data sets of the Hub: a directory that all nodes share.",
        f'export HF_HOME="${{HF_HOME:-{_hf_home()}}}"',
    ]
    if os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "TRUE", "on", "ON", "yes", "YES"):
        lines.append("export HF_HUB_OFFLINE=1")
    else:
        lines.append("# export HF_HUB_OFFLINE=1  # nodes without a network: download models before")
    for name in job.required:
        if not name.startswith("SLURM_"):
            lines.append(f': "${{{name}:?is not set: the recipe refers to it}}"')
    return lines


def _hf_home() -> str:
    home = os.environ.get("HF_HOME")
    return _quoted_default(home) if home else "$HOME/.cache/huggingface"


def _quoted_default(path: str) -> str:
    """Escape *path* for a default value between double quotes."""
    return "".join(f"\\{character}" if character in '\\"$`}' else character for character in path)


def _arguments(job: Job) -> list[str]:
    given = shell_words([job.recipe, *job.run_words])
    task = f"{job.run_name}_task_" if job.run_name else "task_"
    return [
        "",
        f"arguments=({given})",
        'if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then',
        f'  arguments+=("--run-name={task}$SLURM_ARRAY_TASK_ID")',
        "fi",
    ]


def _start(job: Job) -> list[str]:
    # Without this flag, the first rank that exits with 75 would have the others signaled.
    comment = "# A rank that has saved exits with 75; the others must not be signaled for it."
    if not _has_launchers(job):
        return [
            "# Each task is a rank.",
            comment,
            'srun --kill-on-bad-exit=0 "$VENV/bin/ckpt-train" "${arguments[@]}" "$@"',
        ]
    words = ["--kill-on-bad-exit=0", '"$VENV/bin/ckpt-train"']
    words += [f"--nproc-per-node={job.ranks_per_node}", f"--max-restarts={job.max_restarts}"]
    lines = [
        "# Each task is a launcher, which starts the ranks of its node again after a crash.",
        comment,
    ]
    if job.num_nodes > 1:
        lines += [
            'host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "port=$((20000 + SLURM_JOB_ID % 10000))",
        ]
        words += [f"--nnodes={job.num_nodes}", '--rdzv-endpoint="$host:$port"']
        # Another id after a requeue, so that launchers of the earlier start cannot join.
        words.append('--rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"')
    command = " ".join(words)
    return [*lines, f'srun {command} "${{arguments[@]}}" "$@"']
