"""Computes the log-probabilities of all pairs under the reference at the start of a run, before training."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.parts.collective_errors import raise_on_all_ranks
from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.data.batches.sampler import rank_part
from automodel_ckpt.data.preference import (
    CHOSEN,
    REJECTED,
    ScoredPairs,
    Scores,
)
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.mesh import RankLayout

log = logging.getLogger("automodel_ckpt")

_HINT = "set dpo.precompute: false"


def score_all(recipe: Any, datasets: Sequence[ScoredPairs]) -> None:
    """Give each of *datasets* its scores under the reference of *recipe*. A collective.

    Each data parallel rank computes the scores of its part.
    """
    layout, batch_size = recipe.layout, recipe.config.step_scheduler.local_batch_size
    objective = recipe.build_objective()
    for dataset in datasets:
        started = time.monotonic()
        loader = GlobalBatchLoader(
            dataset.dataset,
            global_batch_size=batch_size * layout.dp_size,
            local_batch_size=batch_size,
            collate_fn=recipe.build_collate_fn(),
            dp_rank=layout.dp_rank,
            dp_size=layout.dp_size,
            shuffle=False,
        )
        dataset.scores = _computed(layout, loader, objective, batch_size, len(dataset))
        log.info(
            "computed the reference's log-probabilities of %s in %.1f s",
            counted(len(dataset), "pair"),
            time.monotonic() - started,
        )


def _computed(
    layout: RankLayout, loader: GlobalBatchLoader, objective: Any, batch_size: int, num_pairs: int
) -> Scores:
    # The largest value of all ranks: below any that a rank computes.
    scores = torch.full((num_pairs, 2), -torch.inf)
    batches = iter(loader)
    doing = "computing the reference's log-probabilities"
    while True:
        # The forward passes below may be collective, so all ranks have to begin them, or none.
        with raise_on_all_ranks(layout.gloo_group, doing, "dpo.precompute", RecipeError, _HINT):
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
    infinite = np.flatnonzero(~np.isfinite(found).all(axis=1))
    if len(infinite):
        first = int(infinite[0])
        raise RecipeError(
            "a log-probability of the reference is not finite",
            where=f"pair {first} of the data set",
            value=dict(zip((CHOSEN, REJECTED), found[first].tolist(), strict=True)),
            hint="use another reference, another distributed.mixed_precision, or remove the pair",
        )
    return found
