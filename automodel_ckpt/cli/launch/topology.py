"""Determine who starts the ranks of a run, how many, and where nodes rendezvous: functions of flags and environment."""

from __future__ import annotations

import contextlib
import math
import os
import re
import uuid
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.config.flags import LaunchFlags
from automodel_ckpt.config.schema_keys import is_number
from automodel_ckpt.errors import RecipeError

DEFAULT_PORT = 29500
ELASTIC_RESTARTS = 3
RDZV_PORT = 29400
LOCAL = "local"
STATIC = "static"
C10D = "c10d"
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
    if is_task and not requests_ranks and _slurm_tasks(environment) > 1:
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
    return int(environment["WORLD_SIZE"]) if program == "torchrun" else _slurm_tasks(environment)


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
    """Raise :class:`RecipeError` if mpirun started several processes, each of which would train alone."""
    size = environment.get("OMPI_COMM_WORLD_SIZE") or environment.get("PMI_SIZE") or "1"
    if size != "1":
        raise RecipeError(
            "mpirun started this process and others, but its variables are not supported",
            where="OMPI_COMM_WORLD_SIZE, PMI_SIZE",
            value=size,
            hint="set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each, or start one process per "
            "node with --nproc-per-node, --nnodes and --rdzv-endpoint",
        )


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
        "WORLD_SIZE": str(_slurm_tasks(environment)),
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
    # "1", or with a type: "a100:1"
    gpus_per_task = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
    if gpus_per_task == "1" and visible_gpus(environment) == 1:
        return 0  # Slurm shows the task only its own GPU, as number 0
    return slurm_number(environment, "SLURM_LOCALID", "SLURM_PROCID", default=0)


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


def _slurm_tasks(environment: Mapping[str, str]) -> int:
    return slurm_number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of a run's nodes. Fields have the names of torch's LaunchConfig.

    The backend is LOCAL (one node), STATIC (--master-addr and --node-rank) or C10D (--rdzv-endpoint).
    """

    rdzv_backend: str
    rdzv_endpoint: str
    run_id: str
    min_nodes: int
    max_nodes: int
    node_rank: int = 0

    @property
    def is_elastic(self) -> bool:
        return self.min_nodes < self.max_nodes

    def max_restarts(self, requested: int | None) -> int:
        """Return how often the ranks may be restarted. The default is not 0 if nodes may leave the run."""
        if requested is not None:
            return requested
        return ELASTIC_RESTARTS if self.is_elastic else 0


def choose_rendezvous(flags: LaunchFlags, environment: Mapping[str, str]) -> Rendezvous:
    """Return the rendezvous that the launch flags describe, as torch.distributed.run does.

    A single node uses a free port. Raises :class:`RecipeError` for flags that contradict each other or give no address.
    """
    least, _, most = flags.nnodes.partition(":")
    min_nodes, max_nodes = int(least), int(most or least)
    if flags.rdzv_endpoint:
        _validate_no_static_flags(flags)
        endpoint = _endpoint(flags.rdzv_endpoint)
        return Rendezvous(C10D, endpoint, flags.rdzv_id or "none", min_nodes, max_nodes)
    _validate_static_nodes(flags, min_nodes, max_nodes)
    node_rank = _node_rank(flags, max_nodes, environment)
    if max_nodes == 1:
        # Port 0: the system selects a free one, so that several runs can share a node.
        endpoint = f"{flags.master_addr or '127.0.0.1'}:{flags.master_port or 0}"
        return Rendezvous(LOCAL, endpoint, flags.rdzv_id or str(uuid.uuid4()), 1, 1)
    endpoint = f"{flags.master_addr}:{flags.master_port or DEFAULT_PORT}"
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
            "invalid rendezvous endpoint",
            where="--rdzv-endpoint",
            value=text,
            hint="use HOST:PORT, such as node0:29400 or [fd00::1]:29400",
        )
    return f"{host}:{port}"


def _validate_no_static_flags(flags: LaunchFlags) -> None:
    """Raise :class:`RecipeError` if flags of a static rendezvous are combined with --rdzv-endpoint."""
    for name in ("node_rank", "master_addr", "master_port"):
        value = getattr(flags, name)
        if value is not None:
            raise RecipeError(
                "two kinds of rendezvous are configured",
                where=f"--{name.replace('_', '-')} with --rdzv-endpoint",
                value=value,
                hint="use --rdzv-endpoint (which assigns the node ranks), or --master-addr with --node-rank",
            )


def _validate_static_nodes(flags: LaunchFlags, min_nodes: int, max_nodes: int) -> None:
    """Raise :class:`RecipeError` for flags that need --rdzv-endpoint."""
    if min_nodes != max_nodes:
        raise RecipeError(
            "an elastic number of nodes requires a rendezvous endpoint",
            where="--nnodes",
            value=flags.nnodes,
            hint="add --rdzv-endpoint HOST:PORT and --rdzv-id NAME, the same on all nodes",
        )
    if max_nodes > 1 and flags.master_addr is None:
        raise RecipeError(
            "several nodes require a rendezvous endpoint",
            where="--nnodes",
            value=flags.nnodes,
            hint="add --rdzv-endpoint HOST:PORT, or --master-addr HOST and --node-rank N",
        )
    if max_nodes > 1 and flags.max_restarts:
        raise RecipeError(
            "restarts on several nodes require a rendezvous endpoint",
            where="--max-restarts",
            value=flags.max_restarts,
            hint="use --rdzv-endpoint HOST:PORT instead of --master-addr and --node-rank",
        )


def _node_rank(flags: LaunchFlags, num_nodes: int, environment: Mapping[str, str]) -> int:
    """Return this node's rank, from the flag or Slurm. Raises :class:`RecipeError` if it is missing or too large."""
    rank = flags.node_rank
    if rank is None and num_nodes == 1:
        rank = 0
    if rank is None and "SLURM_NODEID" in environment:
        rank = slurm_number(environment, "SLURM_NODEID", default=0)
    if rank is None or rank >= num_nodes:
        raise RecipeError(
            "the rank of this node is missing or too large",
            where="--node-rank",
            value=rank,
            hint=f"give each node a different rank from 0 to {num_nodes - 1}",
        )
    return rank


def cores() -> int:
    """Return the number of processor cores that this process may use: its affinity and the quota of its container."""
    quota = cpu_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    affinity = len(os.sched_getaffinity(0))
    return max(1, int(min(affinity, quota)))


def cpu_quota(membership: Path, tree: Path) -> float:
    """Return how many cores the control groups of a process and their parents allow; infinity without a limit.

    *membership* contains lines ``number:controllers:/path`` (source: cgroups(7)). A container may see the whole path,
    or its own group at the root of *tree*.
    """
    quota = math.inf
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            group = tree / controllers / path.lstrip("/")
            for directory in (group, *group.parents):
                if directory.is_relative_to(tree):
                    quota = min(quota, _cpu_quota_at(directory))
    return quota


def _cpu_quota_at(group: Path) -> float:
    """Return the number of cores that one control group allows.

    In version 2, ``cpu.max`` contains "QUOTA PERIOD" or "max PERIOD". Version 1 has one file for each, with -1 for no
    limit.
    """
    with contextlib.suppress(OSError, ValueError):
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        if int(quota) > 0:
            return int(quota) / int(period)
    return math.inf


def visible_gpus(environment: Mapping[str, str]) -> int:
    """Estimate the number of GPUs without torch, from CUDA_VISIBLE_DEVICES or the driver's files."""
    devices = environment.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        names = [device.strip() for device in devices.split(",")]
        return len([name for name in names if name not in ("", "-1")])
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0


def set_threads(environment: MutableMapping[str, str], num_ranks: int) -> None:
    """Divide the cores among the ranks, unless the user has set OMP_NUM_THREADS. torch reads it once, at its import."""
    num_threads = max(1, cores() // max(1, num_ranks))
    # Without this, each rank would start a thread for every core of the node.
    environment.setdefault("OMP_NUM_THREADS", str(num_threads))


def set_allocator(environment: MutableMapping[str, str]) -> None:
    """Let the segments of torch's allocator for GPUs grow, unless the user has set options of it.

    Otherwise, rows of many lengths leave gaps between segments, and a GPU runs out of memory although enough is free.
    torch reads the variable when CUDA is initialized.
    """
    # The later ones are names of earlier versions.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if not any(name in environment for name in names):
        environment[names[0]] = "expandable_segments:True"


def count_ranks(requested: str, num_gpus: int, *, on_gpu: bool) -> int:
    """Return the number of ranks on this node for ``--nproc-per-node``.

    *num_gpus* is the number of GPUs of this node; *on_gpu* states whether the ranks use them. Raises
    :class:`RecipeError` if there are fewer GPUs than requested.
    """
    hint = "lower --nproc-per-node, or train on the CPU with --distributed.backend gloo"
    if requested == "cpu" or (requested == "auto" and num_gpus == 0):
        return cores()
    if requested == "gpu" and num_gpus == 0:
        what = "this node has no GPU"
        hint = "use --nproc-per-node cpu, auto or a number"
    elif requested in ("auto", "gpu"):
        return num_gpus
    elif on_gpu and 0 < num_gpus < int(requested):
        what = "more ranks on this node than it has GPUs"
    else:
        return int(requested)
    raise RecipeError(
        what,
        where="--nproc-per-node",
        value=f"{requested} ({num_gpus} GPUs are visible)",
        hint=hint,
    )
