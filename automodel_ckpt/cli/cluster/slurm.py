"""A batch script for Slurm: its signal before the time limit, requeueing, and arrays."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from automodel_ckpt.cli.cluster.job import Job, comments, shell_words
from automodel_ckpt.cli.cluster.options import LauncherOptions
from automodel_ckpt.errors import EXIT_STOPPED, RecipeError

_CPUS_PER_GPU_RANK = 8
_CPUS_PER_RANK = 2
_COMMENTS = """\
{job.title}. Written by ckpt-train; review it, then:
  sbatch {file}
  sbatch --array=0-3 {file} --seed '${{{{oc.env:SLURM_ARRAY_TASK_ID}}}}'

signal: {job.stop_seconds} s before the time limit, Slurm sends SIG{job.stop_signal}. The run completes its step, \
saves, and exits with {stopped}; then the job is requeued, and resumes. Increase the time if twice a step \
and a save take longer. SIGTERM, which a preempted job receives, has the same effect, if the partition's GraceTime \
suffices.
storage: the run directory {job.run_directory}, the recipe and the data must be on storage that all nodes share.
array: each task has a run directory task_N in that directory.
"""
# Without --kill-on-bad-exit=0, the first rank that exits with 75 would have the others signaled.
_SCRIPT = """\
#!/bin/bash
{comments}
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.num_nodes}
#SBATCH --ntasks-per-node={tasks}
{gpus}#SBATCH --cpus-per-task={cpus}
#SBATCH --time={time_limit}
#SBATCH --signal={job.stop_signal}@{job.stop_seconds}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -u
: "${{VENV:={venv}}}"
# Models and data sets of the Hub: a directory that all nodes share.
export HF_HOME="${{HF_HOME:-{hf_home}}}"
{environment}
arguments=({given})
if [ -n "${{SLURM_ARRAY_TASK_ID:-}}" ]; then
  arguments+=("--run-name={task}$SLURM_ARRAY_TASK_ID")
fi

{start}
code=$?

# {stopped}: the run has saved, and resumes when it is started again. All other codes are final.
if [ "$code" -eq {stopped} ]; then
  echo "stopped by a signal after saving; requeueing the job"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
_RANKS = """\
# Each task is a rank.
# A rank that has saved exits with 75; the others must not be signaled for it.
srun --kill-on-bad-exit=0 "$VENV/bin/ckpt-train" "${arguments[@]}" "$@\""""
_LAUNCHERS = """\
# Each task is a launcher, which starts the ranks of its node again after a crash.
# A rank that has saved exits with 75; the others must not be signaled for it.
{host}srun --kill-on-bad-exit=0 "$VENV/bin/ckpt-train" {words} "${{arguments[@]}}" "$@\""""
_HOST = """\
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
"""


def script(job: Job, options: LauncherOptions) -> str:
    """Return the batch script of *job*. Raises :class:`RecipeError` if the time limit is too short for a save."""
    if options.time_limit_seconds < 2 * job.stop_seconds:
        raise RecipeError(
            "the time limit is too short: the run would stop again before it trains",
            where="--time-limit",
            value=f"{options.time_limit} ({job.stop_seconds} s are needed to save and stop)",
            hint="set a longer --time-limit",
        )
    cpus = max(_CPUS_PER_GPU_RANK if job.uses_gpus else _CPUS_PER_RANK, job.num_workers + 1)
    tasks, start = job.ranks_per_node, _RANKS
    if job.max_restarts:
        # srun starts one launcher per node, which can restart its ranks, instead of the ranks.
        cpus, tasks = cpus * tasks, 1
        # Another id after a requeue, so that launchers of the earlier start cannot join.
        run_id = '"$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"'
        words = job.launch_words("", '"$host', '$port"', run_id)
        start = _LAUNCHERS.format(host=_HOST if job.num_nodes > 1 else "", words=" ".join(words))
    return _SCRIPT.format(
        comments=comments(_COMMENTS, job=job, file=options.output or "FILE", stopped=EXIT_STOPPED),
        job=job,
        tasks=tasks,
        gpus=f"#SBATCH --gpus-per-node={job.ranks_per_node}\n" if job.uses_gpus else "",
        cpus=cpus,
        time_limit=options.time_limit,
        venv=_quoted_default(str(Path(sys.executable).parents[1])),
        hf_home=_quoted_default(os.environ.get("HF_HOME", "")) or "$HOME/.cache/huggingface",
        environment=_environment(job),
        given=shell_words([job.recipe, *job.run_words]),
        task=f"{job.run_name}_task_" if job.run_name else "task_",
        start=start,
        stopped=EXIT_STOPPED,
    )


def _environment(job: Job) -> str:
    line = "# export HF_HUB_OFFLINE=1  # nodes without a network: download models before"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "on", "yes"):
        line = "export HF_HUB_OFFLINE=1"
    lines = [line]
    for name in job.required:
        if not name.startswith("SLURM_"):
            lines.append(f': "${{{name}:?is not set: the recipe refers to it}}"')
    return "\n".join(lines) + "\n"


def _quoted_default(path: str) -> str:
    """Escape *path* for a default value between double quotes."""
    return "".join(f"\\{character}" if character in '\\"$`}' else character for character in path)
