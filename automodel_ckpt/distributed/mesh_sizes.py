"""How many ranks share what, from the numbers alone: refused here is what no machine could do. Loads no torch.

Ranks form a grid: pipeline stages, then replicas of a sharded model, its shards, the slices of a sequence (context
parallel), and innermost, so that they are neighbours on a machine, the ranks of a tensor parallel group. All ranks of
one place in pipeline, context and tensor parallel groups share a part of the data: they have one ``dp_rank``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automodel_ckpt.errors import Problem, RecipeError

Strategy = Literal["fsdp2", "ddp", "single"]
_WHERE = "distributed"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The extents of the grid of ranks; their product is the number of ranks."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1

    @property
    def dp(self) -> int:
        """Parts that each global batch is cut into."""
        return self.dp_replicate * self.dp_shard

    @property
    def token_parts(self) -> int:
        """Parts of its tokens, cut by samples and along the sequence; gradients are sums over their ranks."""
        return self.dp * self.cp

    @property
    def world(self) -> int:
        return self.token_parts * self.tp * self.pp

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """How the ranks share the work: data, context, tensor and pipeline parallel."""
        return self.dp, self.cp, self.tp, self.pp

    def __str__(self) -> str:
        names = {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
        }
        names["tp"] = self.tp
        return (
            " x ".join(f"{name} {size}" for name, size in names.items() if size > 1) or "one rank"
        )


def share_out(
    world_size: int,
    *,
    dp_size: int | None = None,
    dp_replicate_size: int = 1,
    tp_size: int = 1,
    pp_size: int = 1,
    cp_size: int = 1,
) -> Sizes:
    """The grid of *world_size* ranks; *dp_size* None takes all that is left. Raises :class:`RecipeError`."""
    given = {"dp_size": dp_size, "tp_size": tp_size, "pp_size": pp_size} | (
        {"cp_size": cp_size} if cp_size > 1 else {}
    )
    named = " x ".join(f"{name} {size}" for name, size in given.items() if size is not None)
    sharing = tp_size * pp_size * cp_size
    dp = dp_size or world_size // sharing
    if dp * sharing != world_size:
        raise RecipeError(
            "the product of the parallel sizes is not the number of ranks",
            where=_WHERE,
            value=f"{named}, {world_size} rank{'' if world_size == 1 else 's'}",
            hint=_product_hint(dp_size, sharing, world_size),
        )
    if dp % dp_replicate_size:
        raise RecipeError(
            "the data parallel ranks are not divisible by dp_replicate_size",
            where=f"{_WHERE}.dp_replicate_size",
            value=f"{dp_replicate_size} of {dp} data parallel ranks",
            hint=f"set it to a divisor of {dp}",
        )
    return Sizes(dp_replicate_size, dp // dp_replicate_size, tp_size, pp_size, cp_size)


def _product_hint(dp_size: int | None, sharing: int, world_size: int) -> str:
    if dp_size is not None:
        return f"remove dp_size to derive it, or start {dp_size * sharing} ranks"
    return (
        f"start a multiple of {sharing} ranks (tp_size x pp_size x cp_size); there are {world_size}"
    )


def choose_strategy(strategy: str, sizes: Sizes) -> Strategy:
    """What is done with the data and context parallel ranks; ``auto`` shards the model (fsdp2) over more than one.

    Raises :class:`RecipeError` with all that the strategy cannot do on this grid.
    """
    if strategy == "auto":
        return "single" if sizes.token_parts == 1 else "fsdp2"
    if problems := _problems(strategy, sizes):
        raise RecipeError.all_of(problems)
    return strategy  # type: ignore[return-value]  # the schema knows no others


def _problems(strategy: str, sizes: Sizes) -> list[Problem]:
    where = f"{_WHERE}.strategy"
    problems = []
    if strategy == "single" and sizes.token_parts > 1:
        hint, found = (
            "set it to auto, fsdp2 or ddp, or start one process",
            f"single, with {sizes.token_parts} ranks",
        )
        problems.append(
            Problem("strategy single supports only one data parallel rank", where, found, hint)
        )
    if strategy == "ddp" and sizes.dp_replicate > 1:
        hint = "use fsdp2, or remove dp_replicate_size: ddp replicates over all ranks"
        problems.append(
            Problem(
                "dp_replicate_size requires fsdp2: ddp does not shard",
                where,
                f"ddp, with {sizes}",
                hint,
            )
        )
    if strategy == "ddp" and sizes.tp > 1:
        hint = "use fsdp2 (dp_replicate_size = dp_size makes it replicate), or tp_size: 1"
        problems.append(
            Problem("ddp cannot wrap a tensor parallel model", where, f"ddp, with {sizes}", hint)
        )
    if strategy == "ddp" and sizes.pp > 1:
        hint = "use fsdp2 (dp_replicate_size = dp_size makes it replicate), or pp_size: 1"
        what = "ddp supports one forward pass per backward pass, but a pipeline runs several"
        problems.append(Problem(what, where, f"ddp, with {sizes}", hint))
    return problems
