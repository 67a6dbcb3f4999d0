"""The order of the data as pure functions: one permutation per epoch. Its slices are the global batches.

Only :func:`rank_part` depends on the number of ranks. Any number of ranks therefore trains on the same global batches
in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from automodel_ckpt.data.collate import Ids
from automodel_ckpt.errors import RecipeError

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class BatchSizes:
    """How a global batch is divided into micro-batches, and the rank that reads its part.

    *with_preceding*: the collator also gets the sample before the samples of a micro-batch.
    """

    global_batch_size: int
    local_batch_size: int
    dp_rank: int
    dp_size: int
    drop_last: bool
    with_preceding: bool = False

    def rank_part(self, ids: Sequence[int]) -> list[Ids]:
        """Return the micro-batches of the rank: see :func:`rank_part`."""
        return rank_part(ids, self.dp_rank, self.dp_size, self.local_batch_size)


def derive_seed(*parts: int) -> int:
    """Derive a seed of 63 bits from several integers. It does not depend on the machine or on library versions."""
    # Pass Python integers: NumPy 2 writes np.int64(1), which would give another order.
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def permutation(num_samples: int, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """Return the order of an epoch: an int64 tensor of shape [num_samples] with each index once.

    Sample ``i`` gets as key the i-th output of the generator SplitMix64 seeded with ``derive_seed(seed, epoch)``, and
    the keys are sorted (stably). ``torch.randperm`` is not used because a resumed epoch has to continue in the same
    order after an upgrade of torch. Source of SplitMix64: Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", 2014.
    """
    if not shuffle:
        return torch.arange(num_samples, dtype=torch.int64)
    keys = _splitmix64(derive_seed(seed, epoch), num_samples)
    order = np.argsort(keys, kind="stable")
    return torch.from_numpy(order.astype(np.int64, copy=False))


def _splitmix64(seed: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    state = np.arange(1, count + 1, dtype=np.uint64)
    # Arithmetic modulo 2**64: arrays of uint64 wrap silently, NumPy scalars would warn.
    state *= np.uint64(_GOLDEN_GAMMA)
    state += np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    state ^= state >> np.uint64(31)
    return state


def rank_part(ids: Sequence[int], dp_rank: int, dp_size: int, local_batch_size: int) -> list[Ids]:
    """Return the micro-batches of one rank, as lists of the *ids* of a global batch.

    The ids are divided, in order, into micro-batches of *local_batch_size* (the last may be shorter). Each rank takes a
    contiguous run of them; if they do not divide evenly, the first ranks take one more. Every rank returns the same
    number of micro-batches: ranks with one fewer get an empty list as their last.
    """
    starts = range(0, len(ids), local_batch_size)
    micro_batches = [list(ids[start : start + local_batch_size]) for start in starts]
    num_each, num_extra = divmod(len(micro_batches), dp_size)
    first = dp_rank * num_each + min(dp_rank, num_extra)
    has_extra = dp_rank < num_extra
    end = first + num_each + int(has_extra)
    own = micro_batches[first:end]
    if num_extra > 0 and not has_extra:
        # Every rank must run the same number of forward passes: FSDP communicates in each.
        own.append([])
    return own


def accumulation_steps(global_batch_size: int, local_batch_size: int, dp_size: int) -> int:
    """Return the number of micro-batches of each rank in a full global batch.

    Raises :class:`RecipeError` if the sizes do not divide.
    """
    per_pass = local_batch_size * dp_size
    if global_batch_size % per_pass:
        raise RecipeError(
            "the global batch does not divide into equal micro-batches",
            where="step_scheduler.global_batch_size, step_scheduler.local_batch_size",
            value=f"global_batch_size {global_batch_size}, local_batch_size {local_batch_size}, {dp_size} "
            "data parallel ranks",
            hint=f"make global_batch_size a multiple of local_batch_size x ranks = {per_pass}",
        )
    return global_batch_size // per_pass
