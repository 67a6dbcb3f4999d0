"""Who starts the ranks of a run, how many, and where they meet: pure functions of flags and environment."""

from __future__ import annotations

import contextlib
import math
import os
import re
import uuid
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.config.bind import is_number
from automodel_ckpt.config.flags import LaunchFlags
from automodel_ckpt.errors import RecipeError

DEFAULT_PORT = 29500
ELASTIC_RESTARTS = 3
RDZV_PORT = 29400
LOCAL = "local"
STATIC = "static"
C10D = "c10d"
LEFT_OVER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def started_by(environment: Mapping[str, str], flags: LaunchFlags) -> str:
    """Who started this process as one rank of several: "torchrun", "srun" or "nobody".

    A batch script of Slurm's carries SLURM_PROCID and SLURM_NTASKS too, but no step; flags that ask for ranks mean that
    srun started one launcher per machine. Raises :class:`RecipeError` for such flags under torchrun, and for variables
    that make no rank.
    """
    asked = flags.nproc_per_node != "1" or flags.nnodes != "1" or bool(flags.max_restarts)
    if all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        _check_parsed(environment)
        if asked:
            raise RecipeError(
                "this process is already a rank, started by torchrun or alike",
                where="--nproc-per-node, --nnodes, --max-restarts",
                value=f"RANK={environment['RANK']} WORLD_SIZE={environment['WORLD_SIZE']}",
                hint="give these flags to torchrun only, or run ckpt-train by itself: "
                "unset RANK where a shell has it left over",
            )
        return "torchrun"
    in_step = "SLURM_STEP_ID" in environment or "SLURM_JOB_ID" not in environment
    if "SLURM_PROCID" in environment and in_step and not asked and _slurm_tasks(environment) > 1:
        return "srun"
    _check_not_mpi(environment, asked=asked)
    return "nobody"


def num_joined(environment: Mapping[str, str], flags: LaunchFlags) -> int | None:
    """How many ranks there are where somebody else started them; None where nobody did. Raises as
    :func:`started_by`."""
    started = started_by(environment, flags)
    if started == "nobody":
        return None
    return int(environment["WORLD_SIZE"]) if started == "torchrun" else _slurm_tasks(environment)


def forget_ranks(environment: MutableMapping[str, str]) -> list[str]:
    """Take out what a shell has left over from other programs' ranks, where nobody started this process as one; the
    names of those that made it look like one."""
    found = [name for name in LEFT_OVER if environment.pop(name, None) is not None]
    return [name for name in found if name in ("RANK", "WORLD_SIZE")]


def _check_parsed(environment: Mapping[str, str]) -> None:
    numbers = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    local = environment.get("LOCAL_RANK", "0")
    if all(text.isdecimal() for text in (*numbers.values(), local)) and int(numbers["RANK"]) < int(
        numbers["WORLD_SIZE"]
    ):
        return
    raise RecipeError(
        "these variables make no rank",
        where="environment",
        value=" ".join(
            f"{name}={text}" for name, text in (numbers | {"LOCAL_RANK": local}).items()
        ),
        hint="correct them where ranks are started by hand; else unset RANK, which a shell has left over",
    )


def _check_not_mpi(environment: Mapping[str, str], *, asked: bool) -> None:
    """Each process would train alone. With flags that ask for ranks it is a launcher, one per machine."""
    size = environment.get("OMPI_COMM_WORLD_SIZE") or environment.get("PMI_SIZE") or "1"
    if size != "1" and not asked:
        raise RecipeError(
            "this process is one of several that mpirun started, whose variables are not read",
            where="OMPI_COMM_WORLD_SIZE, PMI_SIZE",
            value=size,
            hint="set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each, or start one process per "
            "machine with --nproc-per-node, --nnodes and --rdzv-endpoint",
        )


def slurm_ranks(environment: Mapping[str, str], flags: LaunchFlags) -> dict[str, str]:
    """The variables that torchrun would have set, from srun's; a given address, port and number of threads stay.

    MASTER_ADDR is the step's first node (this machine where there is one node); the port follows from job and step.
    A task that was given the only GPU that it sees has that one, whatever its number.
    Raises :class:`RecipeError` where nothing tells it.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    single = slurm_number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1) == 1
    if not (single or nodes or flags.master_addr or "MASTER_ADDR" in environment):
        raise RecipeError(
            "srun does not tell which machines the step has",
            where="SLURM_STEP_NODELIST, SLURM_JOB_NODELIST",
            value="",
            hint="give --master-addr HOST, the machine of task 0",
        )
    job = slurm_number(environment, "SLURM_JOB_ID", default=0)
    step = slurm_number(environment, "SLURM_STEP_ID", default=0)
    port = 20000 + (job * 31 + step) % 10000
    gpus_per_task = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[
        2
    ]  # "1", or with a type: "a100:1"
    has_its_own = gpus_per_task == "1" and visible_gpus(environment) == 1
    local_rank = (
        0 if has_its_own else slurm_number(environment, "SLURM_LOCALID", "SLURM_PROCID", default=0)
    )
    ranks = {
        "RANK": str(slurm_number(environment, "SLURM_PROCID", default=0)),
        "WORLD_SIZE": str(_slurm_tasks(environment)),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": flags.master_addr
        or ("127.0.0.1" if single or not nodes else first_host(nodes)),
        "MASTER_PORT": str(flags.master_port or port),
    }
    if cores := environment.get("SLURM_CPUS_PER_TASK"):
        ranks["OMP_NUM_THREADS"] = cores
    kept = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    return ranks | {name: environment[name] for name in kept if name in environment}


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
    """Where and how the machines of a run meet; fields are named as in torch's LaunchConfig.

    The backend is LOCAL (one machine), STATIC (at a master) or C10D (at a rendezvous).
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

    def restarts(self, asked: int | None) -> int:
        """How often the ranks are started again: where machines may go, also without a flag that says so."""
        return asked if asked is not None else ELASTIC_RESTARTS if self.is_elastic else 0


def rendezvous(flags: LaunchFlags, environment: Mapping[str, str]) -> Rendezvous:
    """Map the launch flags as torch.distributed.run does; a single node uses a free port.

    Raises :class:`RecipeError` for flags that contradict each other or leave open where to meet.
    """
    least, _, most = flags.nnodes.partition(":")
    nodes = (int(least), int(most or least))
    if flags.rdzv_endpoint:
        _check_static_flags(flags)
        return Rendezvous(C10D, _endpoint(flags.rdzv_endpoint), flags.rdzv_id or "none", *nodes)
    if nodes == (1, 1):
        _node_rank(flags, nodes, environment)
        host = flags.master_addr or "127.0.0.1"
        return Rendezvous(
            LOCAL, f"{host}:{flags.master_port or 0}", flags.rdzv_id or str(uuid.uuid4()), 1, 1
        )
    node_rank = _node_rank(flags, nodes, environment)
    endpoint = f"{flags.master_addr}:{flags.master_port or DEFAULT_PORT}"
    return Rendezvous(STATIC, endpoint, flags.rdzv_id or "none", *nodes, node_rank=node_rank)


def _endpoint(text: str) -> str:
    """HOST:PORT, with torchrun's port where none is given. IPv6 addresses stand in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(RDZV_PORT)
    bare = host.strip("[]")
    if (
        not bare
        or (":" in bare) != host.startswith("[")
        or not (is_number(port) and 0 < int(port) < 65536)
    ):
        raise RecipeError(
            "this is not a place to meet",
            where="--rdzv-endpoint",
            value=text,
            hint="give HOST:PORT, such as node0:29400 or [fd00::1]:29400",
        )
    return f"{host}:{port}"


def _check_static_flags(flags: LaunchFlags) -> None:
    for name in ("node_rank", "master_addr", "master_port"):
        value = getattr(flags, name)
        if value is not None:
            raise RecipeError(
                "two ways to meet the other machines",
                where=f"--{name.replace('_', '-')} beside --rdzv-endpoint",
                value=value,
                hint="give --rdzv-endpoint (ranks are assigned there), or --master-addr with --node-rank",
            )


def _node_rank(flags: LaunchFlags, nodes: tuple[int, int], environment: Mapping[str, str]) -> int:
    least, most = nodes
    if least != most:
        raise RecipeError(
            "an elastic number of machines needs a place to meet",
            where="--nnodes",
            value=flags.nnodes,
            hint="add --rdzv-endpoint HOST:PORT and --rdzv-id NAME, the same on all machines",
        )
    if most > 1 and flags.master_addr is None:
        raise RecipeError(
            "several machines need a place to meet",
            where="--nnodes",
            value=flags.nnodes,
            hint="add --rdzv-endpoint HOST:PORT, or --master-addr HOST and --node-rank N",
        )
    if most > 1 and flags.max_restarts:
        raise RecipeError(
            "restarts on several machines need a rendezvous that can be repeated",
            where="--max-restarts",
            value=flags.max_restarts,
            hint="give --rdzv-endpoint HOST:PORT instead of --master-addr and --node-rank",
        )
    rank = flags.node_rank
    if rank is None and most == 1:
        rank = 0
    if rank is None and "SLURM_NODEID" in environment:
        rank = slurm_number(environment, "SLURM_NODEID", default=0)
    if rank is None or rank >= most:
        raise RecipeError(
            "this machine's number is missing or too large",
            where="--node-rank",
            value=rank,
            hint=f"give each machine its own number from 0 to {most - 1}",
        )
    return rank


def cores() -> int:
    """The processor cores that this process may use: by its affinity, and by the quota of its container."""
    quota = quota_of_cores(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return max(1, int(min(len(os.sched_getaffinity(0)), quota)))


def quota_of_cores(membership: Path, tree: Path) -> float:
    """How many cores' time the control groups of a process and those above them grant; infinity without a limit.

    *membership* has lines ``number:controllers:/path`` (source: cgroups(7)). A container may see the whole path, or
    have its own group at the root of *tree*.
    """
    quota = math.inf
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            group = tree / controllers / path.lstrip("/")
            for place in (group, *group.parents):
                if place.is_relative_to(tree):
                    quota = min(quota, _quota_at(place))
    return quota


def _quota_at(group: Path) -> float:
    """``cpu.max`` of version 2 is "QUOTA PERIOD" or "max PERIOD"; version 1 has a file for each, -1 for no limit."""
    with contextlib.suppress(OSError, ValueError):
        if (group / "cpu.max").exists():
            given, period = (group / "cpu.max").read_text().split()
        else:
            given, period = (
                (group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        if int(given) > 0:
            return int(given) / int(period)
    return math.inf


def visible_gpus(environment: Mapping[str, str]) -> int:
    """GPUs as the driver's files and CUDA_VISIBLE_DEVICES tell, without torch; a first estimate."""
    devices = environment.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        return len([device for device in devices.split(",") if device.strip() not in ("", "-1")])
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0


def set_threads(environment: MutableMapping[str, str], num_ranks: int) -> None:
    """Share the cores among the ranks, unless the user said otherwise; torch reads this once, at its import."""
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // max(1, num_ranks))))


def count_ranks(asked: str, num_gpus: int, *, on_gpu: bool) -> int:
    """Ranks on this machine for ``--nproc-per-node``, which has ``num_gpus`` GPUs; ``on_gpu``: the ranks will use them.

    Raises :class:`RecipeError` where there are fewer GPUs than asked for.
    """
    if asked == "cpu" or (asked == "auto" and num_gpus == 0):
        return cores()
    wanted = num_gpus if asked == "auto" else 1 if asked == "gpu" and num_gpus == 0 else num_gpus
    if asked not in ("auto", "gpu"):
        wanted = int(asked)
    missing = num_gpus == 0 if asked == "gpu" else on_gpu and 0 < num_gpus < wanted
    if missing:
        raise RecipeError(
            "more ranks on this machine than it has GPUs"
            if num_gpus
            else "this machine has no GPU",
            where="--nproc-per-node",
            value=f"{asked} ({num_gpus} GPUs are visible)",
            hint="lower --nproc-per-node, or train on the CPU with --distributed.backend gloo"
            if num_gpus
            else "use --nproc-per-node cpu, auto or a number",
        )
    return wanted
