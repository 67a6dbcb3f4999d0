"""The sizes of the device mesh and the coordinates of a rank in it, computed from numbers alone, without torch.

From the outermost dimension to the innermost: pipeline stages, replicas of a sharded model, its shards, slices of a
sequence (context parallel), and tensor parallel ranks, which are neighbors on a node. Ranks that differ only in their
pipeline, context or tensor parallel coordinate have the same part of the data: one ``dp_rank``. Expert parallelism
divides the ranks of the shards and of context parallelism a second time, for the experts of a model only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from automodel_ckpt.base.units import counted
from automodel_ckpt.errors import RecipeError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Strategy = Literal["fsdp2", "ddp", "single"]
_WHERE = "distributed"


@dataclass(frozen=True)
class Sizes:
    """The sizes of the device mesh; their product is the number of ranks."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Ranks that store different experts, among those that shard the model; not a factor of the number of ranks."""

    @property
    def dp(self) -> int:
        """The number of parts of each global batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def token_parts(self) -> int:
        """The number of parts of a global batch's tokens: by samples, and along the sequence.

        Gradients are summed over the ranks that compute them.
        """
        return self.dp * self.cp

    @property
    def expert_parts(self) -> int:
        """The number of ranks that shard the model, with tensor parallel ranks left out."""
        return self.dp_shard * self.cp

    @property
    def world(self) -> int:
        return self.token_parts * self.tp * self.pp

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """(data, context, tensor, pipeline parallel) sizes."""
        return self.dp, self.cp, self.tp, self.pp

    def __str__(self) -> str:
        parts = []
        for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
            size = getattr(self, name)
            if size > 1:
                parts.append(f"{name} {size}")
        return " x ".join(parts) or "one rank"


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


def share_out(
    world_size: int,
    *,
    dp_size: int | None = None,
    dp_replicate_size: int = 1,
    tp_size: int = 1,
    pp_size: int = 1,
    cp_size: int = 1,
    ep_size: int = 1,
) -> Sizes:
    """Compute the sizes of the mesh of *world_size* ranks; a *dp_size* of None takes all remaining ranks.

    Raises :class:`RecipeError` if the product of the sizes without *ep_size* is not *world_size*, or if *ep_size* does
    not divide the ranks that shard the model.
    """
    ranks_per_part = tp_size * pp_size * cp_size
    dp = dp_size or world_size // ranks_per_part
    if dp * ranks_per_part != world_size:
        hint = f"start a multiple of {ranks_per_part} ranks"
        if dp_size is not None:
            hint = f"start {dp_size * ranks_per_part} ranks, or remove dp_size to derive it"
        raise RecipeError(
            "the product of the parallel sizes is not the number of ranks",
            where=_WHERE,
            value=f"dp_size {dp_size or 'null'} x tp_size {tp_size} x pp_size {pp_size} x cp_size {cp_size}, "
            f"{counted(world_size, 'rank')}",
            hint=hint,
        )
    dp_shard = dp // dp_replicate_size
    sizes = Sizes(dp_replicate_size, dp_shard, tp_size, pp_size, cp_size, ep_size)
    for key, divisor, num_ranks, what in (
        ("dp_replicate_size", dp_replicate_size, dp, "the data parallel ranks"),
        ("ep_size", ep_size, sizes.expert_parts, "the ranks that shard the model"),
    ):
        if num_ranks % divisor:
            raise RecipeError(
                f"{what} are not divisible by {key}",
                where=f"{_WHERE}.{key}",
                value=f"{divisor} of {num_ranks} ranks",
                hint=f"set it to a divisor of {num_ranks}",
            )
    return sizes


def choose_strategy(strategy: str, sizes: Sizes) -> Strategy:
    """Choose how data and context parallel ranks store the model; ``auto`` shards it (fsdp2) over more than one rank.

    Raises :class:`RecipeError` if the strategy does not support this mesh.
    """
    if strategy == "auto":
        # Ranks of tp and pp hold different parameters anyway: only the others would store the same
        # ones.
        return "single" if sizes.token_parts == 1 else "fsdp2"
    what = ""
    if strategy == "single" and sizes.token_parts > 1:
        what = "strategy single supports only one data parallel rank"
    elif strategy == "ddp" and max(sizes.dp_replicate, sizes.tp, sizes.pp) > 1:
        what = "ddp has replicas of the complete model on all ranks: no shards, tensor parallel layers or stages"
    if what:
        raise RecipeError(
            what,
            where=f"{_WHERE}.strategy",
            value=f"{strategy}, with {sizes}",
            hint="set it to auto or fsdp2, or remove dp_replicate_size, tp_size and pp_size; or start one process",
        )
    return strategy  # type: ignore[return-value]  # the schema knows no others


def require_replicas(strategy: Strategy, sizes: Sizes, where: str) -> None:
    """Raise :class:`RecipeError` if no two ranks store the same parameters.

    *where* is the origin of ``checkpoint.verify_replicas``, which compares them.
    """
    num_replicas = sizes.token_parts if strategy == "ddp" else sizes.dp_replicate
    if num_replicas == 1:
        raise RecipeError(
            "the model has no replicas to compare",
            where=where,
            value=f"mesh: {sizes}",
            hint="remove the key",
        )
