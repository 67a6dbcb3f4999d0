"""This process's rank and device, the process groups, and the device mesh that models are sharded over."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.mesh_sizes import Sizes, share_out

CPU_BACKEND = "gloo"
CUDA_BACKEND = "cpu:gloo,cuda:nccl"


@dataclass(frozen=True)
class RankLayout:
    """This rank's coordinates in the device mesh of *sizes*. Control messages and saves use ``gloo_group``."""

    rank: int
    sizes: Sizes
    local_rank: int
    device: torch.device
    gloo_group: dist.ProcessGroup

    @property
    def world_size(self) -> int:
        return self.sizes.world

    @property
    def dp_size(self) -> int:
        return self.sizes.dp

    @property
    def dp_rank(self) -> int:
        """The part of each global batch that this rank computes; tensor and context parallel groups share one part."""
        # The divisions of these properties must match the order of dimensions in build_mesh and
        # context_group: tp is innermost, then cp.
        return self.rank // (self.sizes.tp * self.sizes.cp) % self.sizes.dp

    @property
    def cp_rank(self) -> int:
        """The slice of each row that this rank computes."""
        return self.rank // self.sizes.tp % self.sizes.cp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.sizes.tp

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.sizes.tp * self.sizes.token_parts)

    @property
    def in_stages(self) -> bool:
        """Whether ranks hold different layers of the model (pipeline parallelism)."""
        return self.sizes.pp > 1

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pp_rank == self.sizes.pp - 1

    def num_row_parts(self, *, sequence_parallel: bool) -> int:
        """The number of slices of a row of tokens: one per rank of the context parallel group, or, with
        *sequence_parallel*, one per rank of the tensor parallel group."""
        if self.sizes.cp > 1:
            return self.sizes.cp
        return self.sizes.tp if sequence_parallel else 1

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    @property
    def reports(self) -> bool:
        """Whether this rank reports for its part of the data, so that sums over ranks count each part once."""
        return self.reports_loss and self.cp_rank == 0

    @property
    def reports_loss(self) -> bool:
        """Whether sums over ranks include this rank's loss; ranks of a context parallel group have different tokens."""
        return self.tp_rank == 0 and self.is_last_stage

    @property
    def random_stream(self) -> int:
        """The number of this rank's random stream; ranks of a tensor parallel group draw the same numbers."""
        return (self.pp_rank * self.sizes.dp + self.dp_rank) * self.sizes.cp + self.cp_rank


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
    shape, names = (num_others, sizes.cp, sizes.tp), ("rest", "cp", "tp")
    mesh = init_device_mesh(layout.device.type, shape, mesh_dim_names=names)
    return mesh.get_group("cp")


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
        from automodel_ckpt.parallel.ranks.joining import store_of_ranks

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
    from automodel_ckpt.parallel.ranks.joining import await_ranks

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
