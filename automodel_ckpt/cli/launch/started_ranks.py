"""Whether torchrun, srun or MPI started this process as one of several ranks, by the environment."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from automodel_ckpt.cli.launch.slurm import slurm_tasks
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
    """Return the number of ranks that another program started; None if this program starts them.

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
