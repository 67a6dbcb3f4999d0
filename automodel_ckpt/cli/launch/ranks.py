"""The ranks of a run, by its flags and the environment: how many, who starts them, and where their nodes rendezvous.

torchrun, srun or MPI may have started this process as one of several ranks. Imports no torch.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import MutableMapping
from dataclasses import dataclass

from automodel_ckpt.checkpoint.files.type_aliases import TextDict, Texts
from automodel_ckpt.cli.launch.node_resources import visible_gpus
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.schema_keys import is_number
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.mesh_sizes import (
    Sizes,
    choose_strategy,
    require_replicas,
    share_out,
)

SET_MASTER_ADDR = "set --master-addr to a host name or address of task 0 that all nodes can resolve"
_LEFT_OVER = "if torchrun did not start ckpt-train, unset RANK, which is left over in the shell"
_RENDEZVOUS = (
    "give all nodes the same --rdzv-endpoint HOST:PORT and --rdzv-id NAME; a fixed number of nodes without restarts "
    "can have --master-addr HOST and --node-rank N instead"
)
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MASTER_PORT = 29500
"""The port of --master-addr if --master-port is not given, as in torchrun."""
RDZV_PORT = 29400
"""The port of --rdzv-endpoint if it has none, as in torchrun."""
ELASTIC_RESTARTS = 3
"""How often ranks are restarted by default if nodes may leave the run."""
LOCAL = "local"
STATIC = "static"
C10D = "c10d"
"""The backends: one node, --master-addr with --node-rank, --rdzv-endpoint."""


def started_by(environment: Texts, flags: LaunchFlags) -> str | None:
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
                "this process is already a rank, and torchrun determines these flags",
                "--nproc-per-node, --nnodes, --max-restarts",
                f"RANK={environment['RANK']} WORLD_SIZE={environment['WORLD_SIZE']}",
                _LEFT_OVER,
            )
        return "torchrun"
    in_step = "SLURM_STEP_ID" in environment or "SLURM_JOB_ID" not in environment
    is_task = "SLURM_PROCID" in environment and in_step
    if is_task and not requests_ranks and slurm_tasks(environment) > 1:
        return "srun"
    if not requests_ranks:
        _validate_not_mpi(environment)
    return None


def started_world_size(environment: Texts, flags: LaunchFlags) -> int | None:
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


def _validate_ranks(environment: Texts) -> None:
    """Raise :class:`RecipeError` if torchrun's variables are not numbers, or RANK is not less than WORLD_SIZE."""
    values = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    values["LOCAL_RANK"] = environment.get("LOCAL_RANK", "0")
    are_numbers = all(text.isdecimal() for text in values.values())
    if are_numbers and int(values["RANK"]) < int(values["WORLD_SIZE"]):
        return
    raise RecipeError(
        "these variables do not describe a rank",
        "environment",
        " ".join(f"{name}={text}" for name, text in values.items()),
        _LEFT_OVER,
    )


def _validate_not_mpi(environment: Texts) -> None:
    """Raise :class:`RecipeError` if mpirun started several processes: each would train alone."""
    size = environment.get("OMPI_COMM_WORLD_SIZE") or environment.get("PMI_SIZE") or "1"
    if size != "1":
        raise RecipeError(
            "mpirun started this process and others, but its variables are not supported",
            "OMPI_COMM_WORLD_SIZE, PMI_SIZE",
            size,
            "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each, or start one process per "
            "node with --nproc-per-node, --nnodes and --rdzv-endpoint; to train with one process, run "
            "`unset OMPI_COMM_WORLD_SIZE PMI_SIZE` first",
        )


# ---------------------------------------------------------------- srun


def slurm_environment(environment: Texts, flags: LaunchFlags) -> TextDict:
    """Return the variables that torchrun would set, from srun's. Address, port and threads that are set are kept.

    MASTER_ADDR is the step's first node, or this node if there is only one. The port is computed from job and step.
    The local rank of a task that sees only one GPU, its own, is 0. Raises :class:`RecipeError` if the first node is
    unknown.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    is_single = slurm_number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1) == 1
    if not (is_single or nodes or flags.master_addr or "MASTER_ADDR" in environment):
        what, where = "srun does not provide the nodes of the step", "SLURM_JOB_NODELIST"
        raise RecipeError(what, where, "", SET_MASTER_ADDR)
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
    given = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    return variables | {name: environment[name] for name in given if name in environment}


def _slurm_local_rank(environment: Texts) -> int:
    # It is "1", or with a type "a100:1".
    gpus_per_task = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
    if gpus_per_task == "1" and visible_gpus(environment) == 1:
        # Slurm shows the task only its own GPU, as number 0.
        return 0
    return slurm_number(environment, "SLURM_LOCALID", "SLURM_PROCID", default=0)


def slurm_tasks(environment: Texts) -> int:
    """Return the number of tasks of the step. Each may be a rank."""
    return slurm_number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's compressed list: ``gpu[007-009,12],login`` begins with ``gpu007``."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).partition(",")[0]


def slurm_number(environment: Texts, *names: str, default: int) -> int:
    """Return the number in the first of these variables that is set, or *default*. Raises :class:`RecipeError`."""
    name = next((name for name in names if environment.get(name)), None)
    text = str(default) if name is None else environment[name].strip()
    if not is_number(text):
        raise RecipeError(
            "this variable of Slurm is not a number",
            name,
            text,
            "correct it, or unset SLURM_PROCID to run without srun's ranks",
        )
    return int(text)


# ---------------------------------------------------------------- number


def known_ranks(flags: LaunchFlags) -> int | None:
    """Return the number of ranks, if the command line or the environment determines it; otherwise None."""
    world_size = started_world_size(os.environ, flags)
    if world_size:
        return world_size
    if flags.nproc_per_node.isdecimal() and flags.nnodes.isdecimal():
        return int(flags.nproc_per_node) * int(flags.nnodes)
    return None


def check_ranks(loaded: LoadedRecipe, ranks: int | None) -> None:
    """Raise :class:`RecipeError` if the recipe does not fit the number of *ranks*; None: the number is not known yet.

    Checked are the parallel sizes, the global batch size, and ``checkpoint.verify_replicas``.
    """
    if ranks is None:
        return
    sizes = mesh_sizes(loaded, ranks)
    if loaded.config.checkpoint.verify_replicas:
        strategy = choose_strategy(loaded.config.distributed.strategy, sizes)
        require_replicas(strategy, sizes, loaded.origins["checkpoint.verify_replicas"])
    steps = loaded.config.step_scheduler
    dp_size = sizes.dp
    if steps.global_batch_size % (steps.local_batch_size * dp_size) == 0:
        return
    global_batch = loaded.tree.at("step_scheduler.global_batch_size")
    local_batch = loaded.tree.at("step_scheduler.local_batch_size")
    raise RecipeError(
        "step_scheduler.global_batch_size must be a multiple of local_batch_size x ranks",
        loaded.origins["step_scheduler.global_batch_size"],
        f"global_batch_size: {global_batch}, local_batch_size: {local_batch}, ranks: {dp_size}",
    )


def mesh_sizes(loaded: LoadedRecipe, ranks: int) -> Sizes:
    """Return the sizes of the device mesh of *ranks* ranks. Raises :class:`RecipeError` if they do not fit together."""
    section = loaded.config.distributed
    sizes = share_out(ranks, **section.mesh_sizes)
    choose_strategy(section.strategy, sizes)
    return sizes


# ---------------------------------------------------------------- rendezvous


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of a run's nodes. Fields have the names of torch's LaunchConfig.

    The backend is LOCAL, STATIC or C10D.
    """

    rdzv_backend: str
    rdzv_endpoint: str
    run_id: str
    min_nodes: int
    max_nodes: int
    node_rank: int = 0

    @property
    def host(self) -> str:
        """The host of the endpoint; an IPv6 address without brackets."""
        return self.rdzv_endpoint.rpartition(":")[0].strip("[]")

    def max_restarts(self, requested: int | None) -> int:
        """Return how often the ranks may be restarted. The default is not 0 if nodes may leave the run."""
        if requested is not None:
            return requested
        return ELASTIC_RESTARTS if self.min_nodes < self.max_nodes else 0


def choose_rendezvous(flags: LaunchFlags, environment: Texts) -> Rendezvous:
    """Return the rendezvous that the launch flags describe, as torch.distributed.run does.

    A single node uses a free port. Raises :class:`RecipeError` for flags that contradict each other or give no address.
    """
    least, _, most = flags.nnodes.partition(":")
    min_nodes, max_nodes = int(least), int(most or least)
    if flags.rdzv_endpoint:
        _validate_no_static_flags(flags)
        endpoint = _endpoint(flags.rdzv_endpoint)
        if max_nodes > 1:
            return Rendezvous(C10D, endpoint, flags.rdzv_id or "none", min_nodes, max_nodes)
    _validate_static_nodes(flags, min_nodes, max_nodes)
    node_rank = _node_rank(flags, max_nodes, environment)
    if max_nodes == 1:
        # At any other address, other nodes could connect. Port 0: the system selects a free one, so that several runs
        # can share a node.
        endpoint = f"127.0.0.1:{flags.master_port or 0}"
        return Rendezvous(LOCAL, endpoint, flags.rdzv_id or str(uuid.uuid4()), 1, 1)
    endpoint = f"{flags.master_addr}:{flags.master_port or MASTER_PORT}"
    run_id = flags.rdzv_id or "none"
    return Rendezvous(STATIC, endpoint, run_id, min_nodes, max_nodes, node_rank=node_rank)


def _endpoint(text: str) -> str:
    """Return HOST:PORT, with torchrun's port by default. IPv6 addresses are in brackets.

    Raises :class:`RecipeError` for other text.
    """
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(RDZV_PORT)
    bare = host.strip("[]")
    is_ipv6 = ":" in bare
    is_port = is_number(port) and 0 < int(port) < 65536
    if not bare or is_ipv6 != host.startswith("[") or not is_port:
        raise RecipeError(
            "the rendezvous endpoint is not HOST:PORT, such as node0:29400 or [fd00::1]:29400",
            "--rdzv-endpoint",
            text,
        )
    return f"{host}:{port}"


def _validate_no_static_flags(flags: LaunchFlags) -> None:
    """Raise :class:`RecipeError` if flags of a static rendezvous are combined with --rdzv-endpoint."""
    for name in ("node_rank", "master_addr", "master_port"):
        value = getattr(flags, name)
        if value is not None:
            raise RecipeError(
                "two kinds of rendezvous are configured",
                f"--{name.replace('_', '-')} with --rdzv-endpoint",
                value,
                _RENDEZVOUS,
            )


def _validate_static_nodes(flags: LaunchFlags, min_nodes: int, max_nodes: int) -> None:
    """Raise :class:`RecipeError` for flags that need --rdzv-endpoint."""
    is_elastic = min_nodes != max_nodes
    if is_elastic or (max_nodes > 1 and (flags.master_addr is None or flags.max_restarts)):
        raise RecipeError(
            "a rendezvous endpoint is required",
            "--nnodes, --master-addr, --max-restarts",
            f"{flags.nnodes}, {flags.master_addr}, {flags.max_restarts}",
            _RENDEZVOUS,
        )


def _node_rank(flags: LaunchFlags, num_nodes: int, environment: Texts) -> int:
    """Return this node's rank, from the flag or Slurm. Raises :class:`RecipeError` if it is missing or too large."""
    rank = flags.node_rank
    if rank is None and num_nodes == 1:
        rank = 0
    if rank is None and "SLURM_NODEID" in environment:
        rank = slurm_number(environment, "SLURM_NODEID", default=0)
    if rank is None or rank >= num_nodes:
        raise RecipeError(
            f"each node needs a different rank from 0 to {num_nodes - 1}", "--node-rank", rank
        )
    return rank
