"""Cutting a recipe's rows along the sequence, once the model has shown that it computes the same then."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from automodel_ckpt.distributed.agree import gather_objects
from automodel_ckpt.distributed.context_parallel import ContextParallel, context_parallel_error
from automodel_ckpt.distributed.mesh import RankLayout
from automodel_ckpt.models.forward import logits_of, side_effect_free

log = logging.getLogger("automodel_ckpt")

_TOKENS_PER_SLICE = 3


def cut_rows(model: nn.Module, layout: RankLayout, options: Mapping[str, Any]) -> ContextParallel:
    """From here on *model*, which is shared out, computes this rank's slices of rows.

    A few tokens through it, whole and cut, with *options*, tell whether its tokens meet in attention only:
    :class:`RecipeError` if not. A collective.
    """
    cut = ContextParallel(model, layout)
    reasons = gather_objects(layout.gloo_group, _difference(model, cut, layout.device, options))
    if any(reasons):
        raise context_parallel_error(model, next(filter(None, reasons)))
    log.info(
        "rows are cut along the sequence among %d ranks, which share out the heads of attention",
        cut.size,
    )
    return cut


def _difference(
    model: nn.Module, cut: ContextParallel, device: torch.device, options: Mapping[str, Any]
) -> str:
    """What this rank's slice of the logits differs in from that of whole rows; empty where it is rounding."""
    length = cut.size * _TOKENS_PER_SLICE
    tokens = torch.arange(length, device=device).remainder(5).unsqueeze(0)
    try:
        with side_effect_free(model):
            whole = logits_of(model(input_ids=tokens, **options)).float()
            alone = logits_of(model(input_ids=tokens[:, -_TOKENS_PER_SLICE:], **options)).float()
            cut.start()
            mine = logits_of(model(input_ids=tokens, **options)).float()
    except Exception as error:
        log.debug("the model cannot be asked about cut rows", exc_info=True)
        return f"{type(error).__name__}: {error}"
    # What a slice without the others computes is the measure: rounding is far below it in every dtype.
    allowed = 0.1 * float((whole[:, -_TOKENS_PER_SLICE:] - alone).abs().max())
    wanted = whole[:, cut.slice_of(length)]
    if mine.shape == wanted.shape and float((mine - wanted).abs().max()) <= allowed:
        return ""
    return "cut rows have other logits than whole ones"
