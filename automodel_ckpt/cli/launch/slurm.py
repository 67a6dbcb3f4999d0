"""The variables of Slurm: which rank a task of srun is, and where the ranks of its step connect."""

from __future__ import annotations

import re
from collections.abc import Mapping

from automodel_ckpt.cli.launch.node_resources import visible_gpus
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.errors import RecipeError


def slurm_environment(environment: Mapping[str, str], flags: LaunchFlags) -> dict[str, str]:
    """Return the variables that torchrun would set, from srun's. Address, port and threads that are set are kept.

    MASTER_ADDR is the step's first node, or this node if there is only one. The port is computed from job and step.
    The local rank of a task that sees only one GPU, its own, is 0. Raises :class:`RecipeError` if the first node is
    unknown.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    is_single = slurm_number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1) == 1
    if not (is_single or nodes or flags.master_addr or "MASTER_ADDR" in environment):
        raise RecipeError(
            "srun does not provide the nodes of the step",
            where="SLURM_STEP_NODELIST, SLURM_JOB_NODELIST",
            value="",
            hint="set --master-addr to the host of task 0",
        )
    master_addr = flags.master_addr
    if not master_addr:
        master_addr = "127.0.0.1" if is_single or not nodes else first_host(nodes)
    # All tasks compute the same port, and concurrent jobs or steps on a node most likely different ones.
    job = slurm_number(environment, "SLURM_JOB_ID", default=0)
    step = slurm_number(environment, "SLURM_STEP_ID", default=0)
    # Below 32768, where the ports that Linux gives to outgoing connections begin.
    port = 20000 + (job * 31 + step) % 10000
    variables = {
        "RANK": str(slurm_number(environment, "SLURM_PROCID", default=0)),
        "WORLD_SIZE": str(slurm_tasks(environment)),
        "LOCAL_RANK": str(_slurm_local_rank(environment)),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(flags.master_port or port),
    }
    if environment.get("SLURM_CPUS_PER_TASK"):
        variables["OMP_NUM_THREADS"] = environment["SLURM_CPUS_PER_TASK"]
    for name in ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"):
        if name in environment:
            variables[name] = environment[name]
    return variables


def _slurm_local_rank(environment: Mapping[str, str]) -> int:
    # It is "1", or with a type "a100:1".
    gpus_per_task = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
    if gpus_per_task == "1" and visible_gpus(environment) == 1:
        # Slurm shows the task only its own GPU, as number 0.
        return 0
    return slurm_number(environment, "SLURM_LOCALID", "SLURM_PROCID", default=0)


def slurm_tasks(environment: Mapping[str, str]) -> int:
    """Return the number of tasks of the step. Each may be a rank."""
    return slurm_number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's compressed list: ``gpu[007-009,12],login`` begins with ``gpu007``."""
    first_of_each_bracket = re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes)
    return first_of_each_bracket.partition(",")[0]


def slurm_number(environment: Mapping[str, str], *names: str, default: int) -> int:
    """Return the number in the first of these variables that is set, or *default*.

    Slurm writes a number per node as a list with repetitions: ``2(x3),1`` is 2 on each of three nodes and 1 on another,
    7 together. Raises :class:`RecipeError` for other text.
    """
    name = next((name for name in names if environment.get(name)), None)
    if name is None:
        return default
    text = environment[name].strip()
    total = 0
    for entry in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", entry)
        if match is None:
            raise RecipeError(
                "this variable of Slurm is not a number",
                where=name,
                value=text,
                hint="correct it, or unset SLURM_PROCID to run without srun's ranks",
            )
        total += int(match[1]) * int(match[2] or 1)
    return total
