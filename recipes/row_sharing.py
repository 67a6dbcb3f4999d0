"""Rows that several samples share without padding: whether a model keeps their attention separate, and how."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from automodel_ckpt.config.schema import ModelConfig, RecipeConfig
from automodel_ckpt.data.packing import RowLayout
from automodel_ckpt.distributed.agree import on_all_ranks
from automodel_ckpt.distributed.mesh import RankLayout
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.attention import attend_by_document, attend_by_mask
from automodel_ckpt.models.forward import attention_of
from automodel_ckpt.models.packing_probe import keeps_samples_apart

log = logging.getLogger("automodel_ckpt")

Rows = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
"""From a collated micro-batch to the rows that the model gets, with the same sum of losses over labels."""


def choose_row_layout(
    model: nn.Module,
    probe_model: nn.Module,
    config: RecipeConfig,
    layout: RankLayout,
    options: Mapping[str, Any],
    *,
    row_multiple: int,
    hidden_size: int,
    marks_tokens: bool,
) -> Rows | None:
    """How samples share rows, if the recipe wants it and *model* supports it; None: each is padded to the longest.

    A collective: *probe_model*, which takes token ids, runs on a few tokens with *options*. *marks_tokens*: the rows
    contain a mask of the tokens that are not padding. Raises :class:`RecipeError` if ``packed_sequence`` is not
    supported by the model.
    """
    is_packed = config.packed_sequence is not None
    if not (config.dataloader.padding_free or is_packed):
        return None
    attention = attention_of(model)
    # Flash attention finds the samples by their position ids only in a batch of one row.
    one_row = "flash" in attention
    apart = keeps_samples_apart(probe_model, one_row, options, row_multiple, layout.device)
    # Each pipeline stage probes its own layers, and all stages need the same rows.
    if not on_all_ranks(layout.gloo_group, bool(apart)):
        if is_packed:
            raise RecipeError(
                "this model does not keep the samples of a pack apart",
                where="packed_sequence",
                value=f"{type(model).__name__}, {attention} attention{apart.reason}",
                hint="leave packed_sequence out, or use another model or attn_implementation",
            )
        log.info(
            "samples are padded to the longest: this model does not keep those apart that share a row%s",
            apart.reason,
        )
        return None
    by_document = _attends_by_document(probe_model, config, layout, options, row_multiple)
    if by_document:
        log.info(
            "packing samples without padding; attention is limited to each sample (%s)", attention
        )
    else:
        log.info(
            "packing samples without padding; %s attention separates them by their position ids",
            attention,
        )
    return RowLayout(hidden_size, one_row or by_document, row_multiple, marks_tokens)


def _attends_by_document(
    probe_model: nn.Module,
    config: RecipeConfig,
    layout: RankLayout,
    options: Mapping[str, Any],
    row_multiple: int,
) -> bool:
    """Let attention skip pairs of tokens of different samples, if the recipe names no implementation itself."""
    section = config.model
    is_free = isinstance(section, ModelConfig) and section.attn_implementation is None
    # Compiled layers would be compiled again for each row; context parallel ranks use another attention.
    if not is_free or config.compile.enabled or layout.sizes.cp > 1:
        return False
    able = attend_by_document(probe_model, options, row_multiple, layout.device)
    if not on_all_ranks(layout.gloo_group, able):
        # Another rank could not: undo the change on this rank.
        attend_by_mask(probe_model)
        return False
    return True
