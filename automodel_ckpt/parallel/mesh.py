"""This process's rank and device, the process groups, and the device mesh that models are sharded over.

Ranks wait for each other here until all have joined. torch waits in C++, where no signal handler runs, for up to half
an hour and without a message. :func:`gather_parts` collects equal parts of a tensor, with gradients to their ranks.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from automodel_ckpt.errors import AutomodelError, RecipeError
from automodel_ckpt.parallel.mesh_sizes import RankLayout, share_out
from automodel_ckpt.parallel.ranks.network import can_be_reached, is_this_node_only

log = logging.getLogger("automodel_ckpt")

CPU_BACKEND = "gloo"
CUDA_BACKEND = "cpu:gloo,cuda:nccl"


def init_distributed(
    *, backend: str | None = None, timeout_minutes: float = 30.0, **sizes_given: Any
) -> RankLayout:
    """Join the default process group by RANK, WORLD_SIZE, LOCAL_RANK and MASTER_*, or create a group of one rank.

    *sizes_given* are arguments of :func:`share_out`. The device is CUDA device LOCAL_RANK if there are GPUs and
    *backend* is not ``gloo``. Raises :class:`RecipeError` if the node has fewer GPUs than ranks, torch does not have
    the backend, or the product of the sizes is not the number of ranks.
    """
    rank = _environment_int("RANK", 0)
    world_size = _environment_int("WORLD_SIZE", 1)
    sizes = share_out(world_size, **sizes_given)
    local_rank = _environment_int("LOCAL_RANK", rank)
    device = _device(backend, local_rank)
    backend = backend or (CUDA_BACKEND if device.type == "cuda" else CPU_BACKEND)
    timeout = timedelta(minutes=timeout_minutes)
    _check_backend(backend)
    _init_process_group(backend, rank, world_size, timeout)
    # A dedicated group: a collective of a save must never be matched with one of the training step.
    group = dist.new_group(backend=CPU_BACKEND, timeout=timeout)
    return RankLayout(rank, sizes, local_rank, device, group)


def build_mesh(layout: RankLayout) -> DeviceMesh:
    """Create torch's mesh with the dimensions ``pp``, ``dp_replicate``, ``dp_shard``, ``tp``, if larger than 1.

    ``dp_shard`` is always present. It includes the ranks of a context parallel group, which shard the model like ranks
    with different samples. Collective: every rank calls it once.
    """
    sizes = layout.sizes
    dimensions = {"dp_shard": sizes.dp_shard * sizes.cp}
    if sizes.tp > 1:
        dimensions["tp"] = sizes.tp
    return mesh_of(layout, dimensions)


def mesh_of(layout: RankLayout, dimensions: Mapping[str, int]) -> DeviceMesh:
    """Create a mesh of all ranks with *dimensions* inside of ``pp`` and ``dp_replicate``, if these are larger than 1.

    Collective: every rank calls it once.
    """
    outer = {"pp": layout.sizes.pp, "dp_replicate": layout.sizes.dp_replicate}
    sizes = {name: size for name, size in outer.items() if size > 1} | dict(dimensions)
    return init_device_mesh(layout.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def shards_of(mesh: DeviceMesh, dimension: str = "dp_shard") -> DeviceMesh:
    """The dimensions of :func:`mesh_of` that fsdp2 uses: shards along *dimension*, or replicas of shards."""
    present = mesh.mesh_dim_names or ()
    return mesh[tuple(name for name in ("dp_replicate", dimension) if name in present)]


def context_group(layout: RankLayout) -> dist.ProcessGroup:
    """Create the group of the ranks that compute slices of the same rows, ordered by ``cp_rank``.

    Collective: every rank calls it once.
    """
    sizes = layout.sizes
    # A separate mesh: in build_mesh's mesh, dp_shard also contains the ranks of this group.
    num_others = sizes.world // (sizes.cp * sizes.tp)
    return _middle_group(layout, (num_others, sizes.cp, sizes.tp), "cp")


def close_distributed() -> None:
    """Leave all process groups, if there are any."""
    if dist.is_available() and dist.is_initialized():
        # torch 2.13 sometimes aborts the interpreter at exit while process groups exist.
        dist.destroy_process_group()


def _check_backend(backend: str) -> None:
    for part in backend.split(","):
        name = part.rpartition(":")[2]
        lacks_device = name == dist.Backend.NCCL and not torch.cuda.is_available()
        is_known = name in dist.Backend.backend_list
        if lacks_device or not is_known or not dist.is_backend_available(name):
            raise RecipeError(
                "unknown torch.distributed backend, or one that this node has no device for",
                where="distributed.backend",
                value=backend,
                hint="remove distributed.backend, or set it to gloo, nccl or cpu:gloo,cuda:nccl",
            )


_stores: dict[tuple[str, int, bool], Store] = {}
"""The stores that this process has used, by address, and whether it was rank 0. Rank 0 may serve one: it must not end
before the others have left their groups, or when they have already joined the next one."""


def _store_of_ranks(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT; the same object each time."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise RecipeError(
                f"{name} is not set, where the ranks connect",
                where="environment",
                value=f"WORLD_SIZE={world_size}",
                hint="start the ranks with torchrun or srun, or unset WORLD_SIZE to train with one process",
            )
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    key = (host, port, rank == 0)
    store = _stores.get(key)
    if store is None:
        store = _stores[key] = store_of_ranks(host, port, rank, world_size, timeout)
    store.set_timeout(timeout)
    return store


def _init_process_group(backend: str, rank: int, world_size: int, timeout: timedelta) -> None:
    if world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    store = _store_of_ranks(rank, world_size, timeout)
    if _environment_int("LOCAL_WORLD_SIZE", world_size) == world_size:
        # torchrun's store outlives a restart, and so do the addresses of the previous ranks and their request to stop.
        # On several nodes, the nodes count restarts separately, so the number cannot be a prefix; there, the launcher
        # creates a new store.
        attempt = _environment_int("TORCHELASTIC_RESTART_COUNT", 0)
        store = PrefixStore(f"attempt_{attempt}", store)
    # A process can join again after it has left. The store still has the addresses of the first time. A rank that read
    # the addresses of a group that another rank has left would wait for that rank.
    number = store.add(f"joined_by_{rank}", 1)
    store = PrefixStore(f"group_{number}", store)

    await_ranks(PrefixStore("joining", store), rank, world_size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def device_type(backend: str | None) -> str:
    """The type of the device that ranks of this node train on: ``cuda`` or ``cpu``. *backend* None is the default."""
    if backend == CPU_BACKEND or not torch.cuda.is_available():
        return "cpu"
    return "cuda"


def _device(backend: str | None, local_rank: int) -> torch.device:
    if device_type(backend) == "cpu":
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise RecipeError(
            "this node has fewer GPUs than ranks",
            where=f"local rank {local_rank}",
            value=f"GPUs of this node: {torch.cuda.device_count()}",
            hint="lower --nproc-per-node, or set distributed.backend to gloo to train on the CPU",
        )
    device = torch.device("cuda", local_rank)
    # Otherwise the current device of every rank is GPU 0.
    torch.cuda.set_device(device)
    return device


def _environment_int(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


REPORT_SECONDS = 10.0
"""How long a rank waits for others before it reports which ranks are missing."""
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.002, 0.5
_MAX_NAMED = 16
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def serve_store(host: str, port: int) -> TCPStore:
    """Serve the store of the ranks.

    Args:
        host: The address at which the ranks connect. With a loopback address, other nodes cannot connect.
        port: The port. With 0, the system chooses one.

    Returns:
        The store, which serves others while it exists.

    Raises:
        OSError: The port is in use.
        RuntimeError: torch could not create the store.
    """
    if not is_this_node_only(host):
        return TCPStore(host, port, is_master=True, wait_for_workers=False)
    # Without a socket, torch listens on all interfaces. It closes this one with the store.
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def store_of_ranks(
    host: str, port: int, rank: int, world_size: int, timeout: timedelta
) -> TCPStore:
    """Connect to the store at *host* and *port*. Rank 0 serves it, unless a launcher does.

    Raises :class:`AutomodelError` if no process serves it within *timeout*.
    """
    if rank == 0 and os.environ.get(_AGENT_STORE) != "True":
        return serve_store(host, port)

    by_rank_0 = rank != 0 and "TORCHELASTIC_RUN_ID" not in os.environ
    server = _names([0], world_size) if by_rank_0 else f"the launcher's store at {host}:{port}"
    _wait_for(lambda: can_be_reached(host, port), lambda: server, timeout)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def await_ranks(store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Wait until all ranks have called this function with *store*.

    The ranks that are missing are reported after REPORT_SECONDS, by one rank. Raises :class:`AutomodelError` if they
    are still missing after *timeout*.
    """
    store.set(f"joined_{rank}", "")
    if store.add("num_joined", 1) == world_size:
        store.set("all_joined", "")

    def missing() -> str:
        ranks = [other for other in range(world_size) if not store.check([f"joined_{other}"])]
        return _names(ranks, world_size) if ranks else ""

    _wait_for(
        lambda: store.check(["all_joined"]),
        missing,
        timeout,
        reports=lambda: store.add("reports", 1) == 1,
    )


def _wait_for(
    condition: Callable[[], bool],
    missing: Callable[[], str],
    timeout: timedelta,
    reports: Callable[[], bool] = lambda: True,
) -> None:
    """Wait for *condition* in Python. After REPORT_SECONDS, report what is *missing* if *reports* returns True."""
    start = time.monotonic()
    poll, has_reported = _FIRST_POLL_SECONDS, False
    while not condition():
        waited = time.monotonic() - start
        if waited > timeout.total_seconds():
            raise AutomodelError(
                "not all ranks of the run have started within distributed.timeout_minutes "
                f"({timeout.total_seconds() / 60:g})",
                where=f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}",
                value=f"missing: {missing()}",
                hint=_hint(os.environ),
            )
        if waited > REPORT_SECONDS and not has_reported:
            has_reported = True
            if reports() and (names := missing()):
                log.warning("waiting for %s, not started yet: %s", names, _hint(os.environ))
        time.sleep(poll)
        poll = min(1.5 * poll, _LONGEST_POLL_SECONDS)


def _names(ranks: Sequence[int], world_size: int) -> str:
    """``ranks 1, 2, 3 of 4``, with the first ranks of many."""
    named = ", ".join(map(str, ranks[:_MAX_NAMED]))
    more = f" and {len(ranks) - _MAX_NAMED} others" if len(ranks) > _MAX_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more} of {world_size}"


def _hint(environment: Mapping[str, str]) -> str:
    """What to do about missing ranks, which depends on the program that started this one."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return "see the output of these ranks and of their launcher"
    # Under srun, this program sets RANK itself.
    if "SLURM_PROCID" in environment and environment.get(_AGENT_STORE) == "True":
        start, variable = "start one task per rank with srun", "SLURM_PROCID"
    else:
        start, variable = "start them with the same MASTER_ADDR and MASTER_PORT", "RANK"
    return f"{start}, or run `unset {variable}` first to train with one process"


def data_group(layout: RankLayout) -> dist.ProcessGroup | None:
    """Create the group of the ranks with other parts of each global batch, ordered by ``dp_rank``; None for one rank.

    Ranks that differ in their tensor parallel coordinate are in different groups, which have the same samples. A
    collective: every rank calls it once.
    """
    sizes = layout.sizes
    if sizes.dp == 1:
        return None
    # The order of dimensions must match build_mesh: tp is innermost.
    return _middle_group(layout, (sizes.pp, sizes.dp, sizes.cp * sizes.tp), "dp")


def _middle_group(layout: RankLayout, shape: tuple[int, int, int], name: str) -> dist.ProcessGroup:
    """Create the group of the ranks along the second dimension, *name*, of a mesh [outer, ranks, inner]."""
    names = ("outer", name, "inner")
    return init_device_mesh(layout.device.type, shape, mesh_dim_names=names).get_group(name)


def gather_parts(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Stack the *part* of each rank, which has the same shape on all of them: [ranks, ...]. A collective.

    The gradient of a part is the sum of its gradients on all ranks, so that the sum of the losses of all ranks has the
    gradient that one process with all parts would compute. The backward pass is a collective too. Without a *group*,
    there is one part.
    """
    if group is None:
        return part.unsqueeze(0)
    return _Gather.apply(part, group)  # type: ignore[no-any-return, no-untyped-call]


class _Gather(torch.autograd.Function):
    """A stack over the ranks. Its backward pass adds the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def exchange(
    tensor: Tensor,
    group: dist.ProcessGroup,
    sent: list[int] | None = None,
    received: list[int] | None = None,
) -> Tensor:
    """Send consecutive rows of *tensor* to the ranks of *group*, and return the rows that they send to this one.

    *sent* and *received* are the numbers of rows for each rank, by default equal ones. Collective in the forward pass,
    in recomputation and in the backward pass, in which the gradient takes the opposite way.
    """
    return _Exchange.apply(tensor, group, sent, received)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        group: dist.ProcessGroup,
        sent: list[int] | None,
        received: list[int] | None,
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        num_rows = len(tensor) if received is None else sum(received)
        result = tensor.new_empty(num_rows, *tensor.shape[1:])
        dist.all_to_all_single(result, tensor.contiguous(), received, sent, group=group)
        # A view: torch 2.11 compiles this function without its gradient if the result was changed in place.
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(gradient, ctx.group, ctx.received, ctx.sent), None, None, None
