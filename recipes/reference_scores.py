"""Computes the log-probabilities of all pairs under the reference before training, or reads them from the cache.

They depend on the pairs, the values of the reference's weights, and the precision of the computation. Digests of these
are the key of the file, so a resumed run and later runs use the same values.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.parts.collective_errors import raise_on_all_ranks
from automodel_ckpt.checkpoint.state.fill_modules import local_part
from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.data.batches.sampler import rank_part
from automodel_ckpt.data.pairs.preference_rows import CHOSEN, REJECTED
from automodel_ckpt.data.pairs.reference_scores import (
    ScoredPairs,
    Scores,
    read_scores,
    scores_file,
    write_scores,
)
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.ranks.agree import broadcast_object, gather_objects
from automodel_ckpt.recipes.preference import PairObjective, PreferenceFinetune, Reference

log = logging.getLogger("automodel_ckpt")

_HINT = (
    "set the environment variable AUTOMODEL_CKPT_CACHE to a directory with enough free space, or "
    "dpo.precompute: false"
)
_CHUNK = 2**24
"""Elements of a parameter whose digest is computed at a time."""
_MODULUS = 2**64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Size of an element in bytes -> integers of this size."""


def score_all(recipe: PreferenceFinetune, datasets: Sequence[ScoredPairs]) -> None:
    """Give each of *datasets* its scores under the reference of *recipe*, from the cache if possible. A collective."""
    group = recipe.layout.gloo_group
    model = weights_digest(recipe.reference, group)
    for dataset in datasets:
        key: dict[str, Any] = {}
        found: Scores | None = None
        with _raising_on_all_ranks(recipe):
            if recipe.layout.is_rank0:
                key = _key(recipe, dataset, model)
                found = read_scores(scores_file(key), key, len(dataset))
        found = broadcast_object(group, found)
        if found is None:
            found = _computed(recipe, dataset)
            with _raising_on_all_ranks(recipe):
                if recipe.layout.is_rank0:
                    write_scores(scores_file(key), key, found)
        elif recipe.layout.is_rank0:
            shown = counted(len(dataset), "pair")
            log.info("the reference's log-probabilities of %s are read from the cache", shown)
        dataset.scores = found


def _raising_on_all_ranks(recipe: PreferenceFinetune) -> AbstractContextManager[None]:
    """Return a context manager that raises on all ranks what its block raises on one rank."""
    doing = "computing the reference's log-probabilities"
    return raise_on_all_ranks(recipe.layout.gloo_group, doing, "dpo.precompute", RecipeError, _HINT)


def _key(recipe: PreferenceFinetune, dataset: ScoredPairs, model: str) -> dict[str, Any]:
    return {
        "pairs": dataset.digest(),
        "num_pairs": len(dataset),
        "reference": model,
        "precision": recipe.trainable.precision,
    }


def _computed(recipe: PreferenceFinetune, dataset: ScoredPairs) -> Scores:
    """Compute the scores of all pairs; each data parallel rank computes those of its part. A collective."""
    layout, batch_size = recipe.layout, recipe.config.step_scheduler.local_batch_size
    started = time.monotonic()
    objective = recipe.build_objective()
    assert isinstance(objective, PairObjective)
    loader = GlobalBatchLoader(
        dataset.dataset,
        global_batch_size=batch_size * layout.dp_size,
        local_batch_size=batch_size,
        collate_fn=recipe.build_collate_fn(),
        dp_rank=layout.dp_rank,
        dp_size=layout.dp_size,
        shuffle=False,
    )
    # The largest value of all ranks: below any that a rank computes.
    scores = torch.full((len(dataset), 2), -torch.inf)
    batches = iter(loader)
    while True:
        # The forward passes below may be collective, so all ranks have to begin them, or none.
        with _raising_on_all_ranks(recipe):
            batch = next(batches, None)
        if batch is None:
            break
        parts = rank_part(batch.sample_ids, layout.dp_rank, layout.dp_size, batch_size)
        for micro_batch, numbers in zip(batch.micro_batches, parts, strict=True):
            log_probs = objective.reference_log_probs(objective.pair_rows(micro_batch))
            if numbers:
                # A rank without samples reads one, only to keep in step.
                scores[numbers] = log_probs.float().cpu().view(-1, 2)
    if layout.world_size > 1:
        dist.all_reduce(scores, dist.ReduceOp.MAX, group=layout.gloo_group)
    found: Scores = scores.numpy()
    _check_finite(found)
    log.info(
        "computed the reference's log-probabilities of %s in %.1f s",
        counted(len(dataset), "pair"),
        time.monotonic() - started,
    )
    return found


def _check_finite(scores: Scores) -> None:
    infinite = np.flatnonzero(~np.isfinite(scores).all(axis=1))
    if len(infinite):
        first = int(infinite[0])
        raise RecipeError(
            "a log-probability of the reference is not finite",
            where=f"pair {first} of the data set",
            value=dict(zip((CHOSEN, REJECTED), scores[first].tolist(), strict=True)),
            hint="use another reference, another distributed.mixed_precision, or remove the pair",
        )


@torch.no_grad()
def weights_digest(reference: Reference, group: dist.ProcessGroup | None) -> str:
    """A digest of the values of the reference's parameters, however ranks share them. A collective.

    It is made of sums over the bits of each parameter, which do not depend on the order of its values.
    """
    parts: dict[str, tuple[int, ...]] = {}
    for name, parameter in _frozen(reference):
        local, box = local_part(parameter)
        # Ranks with the same part compute the same, and it counts once.
        place = json.dumps([name, str(parameter.dtype), list(parameter.shape), box.offsets])
        parts[place] = _bit_sums(local)
    merged: dict[str, tuple[int, ...]] = {}
    for found in gather_objects(group, parts):
        merged.update(found)
    by_parameter: dict[str, list[int]] = {}
    for place, sums in merged.items():
        # Without the offsets.
        name = json.dumps(json.loads(place)[:3])
        total = by_parameter.setdefault(name, [0, 0])
        for number, value in enumerate(sums):
            total[number] = (total[number] + value) % _MODULUS
    text = json.dumps(sorted(by_parameter.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _frozen(reference: Reference) -> list[tuple[str, nn.Parameter]]:
    """The parameters that the reference computes with: without adapters, if it is their base."""
    parameters = list(unwrap(reference.trainable.model).named_parameters())
    if not reference.has_adapters:
        return parameters
    return [(name, each) for name, each in parameters if not each.requires_grad]


def _bit_sums(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sums of the bits of each element as integers, and of their squares, modulo 2^64."""
    integers = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
    total, squares = 0, 0
    for chunk in torch.split(integers, _CHUNK):
        wide = chunk.long()
        total += int(wide.sum())
        squares += int((wide * wide).sum())
    return total % _MODULUS, squares % _MODULUS
