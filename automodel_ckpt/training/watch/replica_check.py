"""Detection of silent data corruption: replicas of the model must have the same bits on all their ranks.

Ranks of DDP, and the replicas of HSDP, compute the same update from the same summed gradients. A difference is an error
of the hardware or of a kernel, which would otherwise spread with the next gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import nn

from automodel_ckpt.checkpoint.parts.collective_errors import gather_or_raise
from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.errors import AutomodelError
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.ranks import agree

KEY = "checkpoint.verify_replicas"
_MAX_NAMED = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck:
    """Compares the parameters of *model* between the ranks that hold replicas of them.

    *is_replicated* states whether the strategy replicates the model over all data-parallel ranks (DDP).
    """

    def __init__(self, model: nn.Module, layout: RankLayout, *, is_replicated: bool) -> None:
        self._model = unwrap(model)
        self._group = layout.gloo_group
        self._rank = layout.rank
        if is_replicated:
            self._shard: tuple[int, ...] = (layout.pp_rank, layout.tp_rank)
        else:
            shard_rank = layout.dp_rank % layout.sizes.dp_shard
            self._shard = (layout.pp_rank, shard_rank, layout.cp_rank, layout.tp_rank)

    def check(self, step: int) -> None:
        """Raise :class:`AutomodelError` on all ranks if replicas differ after *step*. Collective.

        The message names the first parameter that differs and the ranks that differ from most others.
        """
        sums: dict[str, int] = {}

        def digest_here() -> tuple[tuple[int, ...], str]:
            named = {name: checksum(each) for name, each in self._model.named_parameters()}
            # One copy to the host for all parameters.
            totals = torch.stack(list(named.values())).tolist()
            sums.update(zip(named, totals, strict=True))
            return self._shard, xxhash.xxh3_64_hexdigest(repr(sums).encode())

        # A short exchange first: in a correct run, it is the only one.
        digests = gather_or_raise(
            self._group, digest_here, f"comparing replicas after step {step}", KEY, AutomodelError
        )
        shards = [shard for shard, _ in digests]
        if len(set(digests)) == len(set(shards)):
            return
        raise _difference(step, shards, agree.gather_objects(self._group, sums))


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements of a tensor, or of its local part, read as integers: int64, 0-dim.

    A change of a single bit always changes it. It is computed on the tensor's device without a copy.
    """
    local: Any = tensor.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()
    integers = _INTEGERS.get(local.element_size(), torch.int8)
    total: torch.Tensor = local.contiguous().view(integers).sum(dtype=torch.int64)
    return total


def _difference(
    step: int, shards: Sequence[tuple[int, ...]], sums: Sequence[Mapping[str, int]]
) -> AutomodelError:
    """Return the error for replicas that differ: *shards* and *sums* have an entry for each rank, in order."""
    differing: dict[int, str] = {}
    by_shard: dict[tuple[int, ...], list[int]] = {}
    for rank, shard in enumerate(shards):
        by_shard.setdefault(shard, []).append(rank)
    for ranks in by_shard.values():
        for name in sums[ranks[0]]:
            for rank in outliers({rank: sums[rank][name] for rank in ranks}):
                differing.setdefault(rank, name)
    ranks = sorted(differing)
    listed = ", ".join(str(rank) for rank in ranks[:_MAX_NAMED])
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return AutomodelError(
        f"replicas of the model differ after step {step}: rank {listed}{more} has other values",
        where=f"{KEY}: {differing[ranks[0]]}",
        value="silent data corruption",
        hint="check the memory and the GPU of each of these ranks; the same command continues from the last checkpoint",
    )


def outliers(values: Mapping[int, int]) -> set[int]:
    """Return the ranks that differ from the most frequent value, or all ranks if no value is the most frequent.

    *values* has the value of each rank.
    """
    counts = Counter(values.values()).most_common(2)
    if len(counts) == 1:
        return set()
    (most, num_most), (_, num_next) = counts
    if num_most == num_next:
        return set(values)
    return {rank for rank, value in values.items() if value != most}
