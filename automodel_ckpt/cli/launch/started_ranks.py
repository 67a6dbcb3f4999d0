"""Whether torchrun, srun or MPI started this process as one of several ranks, by the environment.

For a task of srun, also which rank it is, and where the ranks of its step connect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

from automodel_ckpt.cli.launch.node_resources import visible_gpus
from automodel_ckpt.config.schema_keys import is_number
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.errors import RecipeError

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def started_by(environment: Mapping[str, str], flags: LaunchFlags) -> str | None:
    """Return the program that started this process as one of several ranks: "torchrun", "srun" or None.

    A batch script of Slurm also has SLURM_PROCID and SLURM_NTASKS, but no step. If flags request ranks, srun started
    one launcher per node. Raises :class:`RecipeError` for such flags under torchrun, and for variables that do not
    describe a rank.
    """
    requests_ranks = flags.nproc_per_node != "1" or flags.nnodes != "1" or bool(flags.max_restarts)
    if all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        _validate_ranks(environment)
        if requests_ranks:
            raise RecipeError(
                "this process is already a rank, started by torchrun or a similar program",
                where="--nproc-per-node, --nnodes, --max-restarts",
                value=f"RANK={environment['RANK']} WORLD_SIZE={environment['WORLD_SIZE']}",
                hint="set these flags for torchrun only, or run ckpt-train without torchrun: "
                "unset RANK if it is left over in the shell",
            )
        return "torchrun"
    in_step = "SLURM_STEP_ID" in environment or "SLURM_JOB_ID" not in environment
    is_task = "SLURM_PROCID" in environment and in_step
    if is_task and not requests_ranks and slurm_tasks(environment) > 1:
        return "srun"
    if not requests_ranks:
        _validate_not_mpi(environment)
    return None


def started_world_size(environment: Mapping[str, str], flags: LaunchFlags) -> int | None:
    """Return the number of ranks that another program started. Returns None when this program starts them.

    Raises :class:`RecipeError` under the conditions of :func:`started_by`.
    """
    program = started_by(environment, flags)
    if program is None:
        return None
    return int(environment["WORLD_SIZE"]) if program == "torchrun" else slurm_tasks(environment)


def remove_leftover_ranks(environment: MutableMapping[str, str]) -> list[str]:
    """Remove the variables of a rank that are left over in a shell; return those that a user should know about."""
    found = [name for name in RANK_VARIABLES if environment.pop(name, None) is not None]
    return [name for name in found if name in ("RANK", "WORLD_SIZE")]


def _validate_ranks(environment: Mapping[str, str]) -> None:
    """Raise :class:`RecipeError` if torchrun's variables are not numbers, or RANK is not less than WORLD_SIZE."""
    values = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        values[name] = environment.get(name, "")
    values["LOCAL_RANK"] = environment.get("LOCAL_RANK", "0")
    are_numbers = all(text.isdecimal() for text in values.values())
    if are_numbers and int(values["RANK"]) < int(values["WORLD_SIZE"]):
        return
    raise RecipeError(
        "these variables do not describe a rank",
        where="environment",
        value=" ".join(f"{name}={text}" for name, text in values.items()),
        hint="correct them if you start the ranks yourself; otherwise unset RANK, which is left over in the shell",
    )


def _validate_not_mpi(environment: Mapping[str, str]) -> None:
    """Raise :class:`RecipeError` if mpirun started several processes: each would train alone."""
    size = environment.get("OMPI_COMM_WORLD_SIZE") or environment.get("PMI_SIZE") or "1"
    if size != "1":
        raise RecipeError(
            "mpirun started this process and others, but its variables are not supported",
            where="OMPI_COMM_WORLD_SIZE, PMI_SIZE",
            value=size,
            hint="set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each, or start one process per "
            "node with --nproc-per-node, --nnodes and --rdzv-endpoint; to train with one process, run "
            "`unset OMPI_COMM_WORLD_SIZE PMI_SIZE` first",
        )


# ---------------------------------------------------------------- srun


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
    """Return the number in the first of these variables that is set, or *default*. Raises :class:`RecipeError`."""
    name = next((name for name in names if environment.get(name)), None)
    text = str(default) if name is None else environment[name].strip()
    if not is_number(text):
        raise RecipeError(
            "this variable of Slurm is not a number",
            where=name or "",
            value=text,
            hint="correct it, or unset SLURM_PROCID to run without srun's ranks",
        )
    return int(text)
