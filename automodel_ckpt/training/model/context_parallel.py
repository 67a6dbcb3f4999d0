"""Dividing rows along the sequence among context parallel ranks, if the model computes the same logits that way."""

from __future__ import annotations

import logging

import torch
from torch import nn

from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.models.inspect.interface import (
    logits_of,
    model_without_adapters,
    side_effect_free,
)
from automodel_ckpt.models.loss.mtp import mtp_decoders
from automodel_ckpt.parallel.context_parallel import ContextParallel, context_parallel_error
from automodel_ckpt.parallel.mesh_sizes import RankLayout
from automodel_ckpt.parallel.ranks.agree import gather_objects
from automodel_ckpt.training.model.pipeline import FromTokens

log = logging.getLogger("automodel_ckpt")

_TOKENS_PER_SLICE = 3


def divide_rows(
    model: nn.Module, probe_model: nn.Module, layout: RankLayout, options: Values
) -> ContextParallel:
    """Make the sharded *model* compute only this rank's slice of each row. A collective.

    Tokens must exchange information in attention only. A forward pass of a few tokens with *options*, of complete rows
    and of slices, shows whether they do. *probe_model* is *model*, or its pipeline stages as a model that takes tokens.
    Raises :class:`RecipeError` if not.
    """
    context = ContextParallel(model, layout, mtp_decoders(model_without_adapters(model)))
    if isinstance(probe_model, FromTokens):
        probe_model.context = context
    difference = _difference(probe_model, context, layout.device, options)
    for reason in gather_objects(layout.gloo_group, difference):
        if reason:
            raise context_parallel_error(model, reason)
    return context


def _difference(
    model: nn.Module, context: ContextParallel, device: torch.device, options: Values
) -> str:
    """How the logits of this rank's slice differ from the logits of complete rows. Empty if only by rounding."""
    length = context.size * _TOKENS_PER_SLICE
    # Small ids, which every vocabulary has.
    tokens = torch.arange(length, device=device).remainder(5).unsqueeze(0)
    last_tokens = tokens[:, -_TOKENS_PER_SLICE:]
    try:
        with side_effect_free(model):
            complete = logits_of(model(input_ids=tokens, **options)).float()
            without_context = logits_of(model(input_ids=last_tokens, **options)).float()
            context.start()
            sliced = logits_of(model(input_ids=tokens, **options)).float()
    # Returned, not raised: the other ranks wait in gather_objects().
    except Exception as error:
        log.debug("could not probe the model for divided rows", exc_info=True)
        return f"{type(error).__name__}: {error}"
    # The scale is the error of ignoring the other slices: rounding is far below it in every dtype.
    error_without_context = (complete[:, -_TOKENS_PER_SLICE:] - without_context).abs().max()
    tolerance = 0.1 * float(error_without_context)
    expected = complete[:, context.slice_of(length)]
    is_equal = sliced.shape == expected.shape
    # The comparison is false for NaN.
    if is_equal and float((sliced - expected).abs().max()) <= tolerance:
        return ""
    return "slices of rows have other logits than complete rows"
