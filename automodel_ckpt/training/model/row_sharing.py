"""Rows that several samples share without padding: whether a model keeps their attention separate, and how."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.data.batches.packing import RowLayout
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.attention.by_document import attend_by_document, attend_by_mask
from automodel_ckpt.models.attention.documents import document_kernel
from automodel_ckpt.models.attention.packing_probe import Answer, keeps_samples_apart
from automodel_ckpt.models.inspect.forward import attention_of
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.ranks.agree import on_all_ranks
from automodel_ckpt.training.model.sections import ModelRequest

log = logging.getLogger("automodel_ckpt")

Rows = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
"""From a collated micro-batch to the rows that the model gets, with the same sum of losses over labels."""
_USUAL_HIDDEN_SIZE = 1024
"""For a model by ``_target_``, which need not have a configuration."""


def choose_row_layout(
    request: ModelRequest,
    model: nn.Module,
    probe_model: nn.Module,
    options: Mapping[str, Any],
    compute: Callable[[], AbstractContextManager[Any]],
    *,
    marks_tokens: bool,
) -> Rows | None:
    """How samples share rows, if the recipe wants it and *model* supports it; None: each is padded to the longest.

    A collective: *probe_model*, which takes token ids, runs on a few tokens with *options*, in the context *compute*.
    *marks_tokens*: the rows contain a mask of the tokens that are not padding. Raises :class:`RecipeError` if
    ``packed_sequence`` is not supported by the model.
    """
    config, layout, row_multiple = request.config, request.layout, request.row_multiple
    is_packed = config.packed_sequence is not None
    if not (config.dataloader.padding_free or is_packed):
        return None
    attention = attention_of(model)
    # Flash attention finds the samples by their position ids only in a batch of one row.
    one_row = "flash" in attention
    max_row_length = None
    if config.packed_sequence is not None and not one_row:
        # Each pack has a row, while samples that are not packed can share longer rows.
        max_row_length = config.packed_sequence.size
    apart = partial(
        keeps_samples_apart,
        probe_model,
        one_row,
        options,
        row_multiple,
        layout.device,
        max_row_length,
    )
    answer = probe_with_masks(probe_model, layout, apart)
    if not answer:
        if is_packed:
            raise RecipeError(
                "this model does not keep the samples of a pack apart",
                where="packed_sequence",
                value=f"{type(model).__name__}, {attention} attention{answer.reason}",
                hint="leave packed_sequence out, or use another model or attn_implementation",
            )
        log.info(
            "samples are padded to the longest: this model does not keep those apart that share a row%s",
            answer.reason,
        )
        return None
    kernel = choose_document_kernel(request, probe_model, options, compute)
    if kernel:
        log.info(
            "packing samples without padding; attention is limited to each sample (%s)", kernel
        )
    else:
        log.info(
            "packing samples without padding; %s attention separates them by their position ids",
            attention,
        )
    text = request.model_config and request.model_config.get_text_config()
    hidden_size = getattr(text, "hidden_size", _USUAL_HIDDEN_SIZE)
    return RowLayout(hidden_size, one_row or bool(kernel), row_multiple, marks_tokens)


def probe_with_masks(
    probe_model: nn.Module, layout: RankLayout, apart: Callable[[], Answer]
) -> Answer:
    """Whether *apart* holds on all ranks for the model as it is, or else with masks by positions, which it then keeps.

    A collective.
    """
    answer = apart()
    # Each pipeline stage probes its own layers, and all stages need the same rows.
    if on_all_ranks(layout.gloo_group, bool(answer)):
        return Answer(True)
    from automodel_ckpt.models.attention.row_masks import mask_by_positions

    handle = None if layout.in_stages else mask_by_positions(probe_model)
    if handle is None:
        return replace(answer, holds=False)
    # All ranks have the same model here.
    if on_all_ranks(layout.gloo_group, bool(apart())):
        return Answer(True)
    handle.remove()
    return replace(answer, holds=False)


def choose_document_kernel(
    request: ModelRequest,
    probe_model: nn.Module,
    options: Mapping[str, Any],
    compute: Callable[[], AbstractContextManager[Any]],
) -> str:
    """Let attention skip pairs of tokens of different samples, if the recipe names no implementation itself.

    A collective. Returns the label of the kernel, the same on all ranks; empty if attention uses the mask.
    """
    config, layout = request.config, request.layout
    section = config.model
    if not isinstance(section, ModelConfig) or section.attn_implementation is not None:
        return ""
    kernel = document_kernel(layout.device.type, is_compiled=config.compile.enabled)
    # A probe is a collective of the ranks that share the model.
    if not on_all_ranks(layout.gloo_group, kernel is not None):
        return ""
    assert kernel is not None
    able = attend_by_document(
        probe_model, options, request.row_multiple, layout.device, kernel=kernel, compute=compute
    )
    if on_all_ranks(layout.gloo_group, able):
        return kernel.label
    # Another rank could not: undo the change on this rank.
    attend_by_mask(probe_model)
    return ""
