"""How the samples of a micro-batch share rows, found by forward passes of a few tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.data.batches.packing import RowLayout
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.attention.by_document import attend_by_document, attend_by_mask
from automodel_ckpt.models.attention.documents import document_kernel
from automodel_ckpt.models.attention.packing_probe import (
    Answer,
    keeps_samples_apart,
)
from automodel_ckpt.models.inspect.forward import (
    attention_of,
)
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.ranks.agree import on_all_ranks
from automodel_ckpt.training.model.sections import ModelRequest

log = logging.getLogger("automodel_ckpt")

Rows = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
"""From a collated micro-batch to the rows that the model gets, with the same sum of losses over labels."""
_USUAL_HIDDEN_SIZE = 1024
"""For a model by ``_target_``, which need not have a configuration."""


@dataclass(frozen=True)
class ProbedModel:
    """A sharded *model*, and how forward passes of a few tokens are computed with it."""

    request: ModelRequest
    model: nn.Module
    """The object that was sharded in place: a DDP wrapper around it would reduce gradients."""
    from_tokens: nn.Module
    """The same, or the pipeline stages as a model that takes tokens."""
    options: Mapping[str, Any]
    """The arguments of each forward pass."""
    compute: Callable[[], AbstractContextManager[Any]]
    """The context of a forward pass."""
    marks_tokens: bool
    """Whether the rows contain a mask of the tokens that are not padding."""

    @property
    def row_multiple(self) -> int:
        """Rows are padded to a multiple of this many tokens."""
        return self.request.row_multiple

    @property
    def layout(self) -> RankLayout:
        """The ranks that share the model."""
        return self.request.layout


def choose_row_layout(probed: ProbedModel) -> Rows | None:
    """How samples share rows, if the recipe wants it and the model supports it. None: each is padded to the longest.

    A collective, which runs the model. Raises :class:`RecipeError` if ``packed_sequence`` is not supported.
    """
    request, config = probed.request, probed.request.config
    is_packed = config.packed_sequence is not None
    if not (config.dataloader.padding_free or is_packed):
        return None
    attention = attention_of(probed.model)
    # Flash attention finds the samples by their position ids only in a batch of one row.
    one_row = "flash" in attention
    max_row_length = None
    if config.packed_sequence is not None and not one_row:
        # Each pack has a row, while samples that are not packed can share longer rows.
        max_row_length = config.packed_sequence.size
    apart = partial(
        keeps_samples_apart,
        probed.from_tokens,
        one_row,
        probed.options,
        probed.row_multiple,
        probed.layout.device,
        max_row_length,
    )
    answer = probe_with_masks(probed.from_tokens, probed.layout, apart)
    if not answer and is_packed:
        raise RecipeError(
            "this model does not keep the samples of a pack apart",
            where="packed_sequence",
            value=f"{type(probed.model).__name__}, {attention} attention{answer.reason}",
            hint="leave packed_sequence out, or use another model or attn_implementation",
        )
    if not answer:
        log.info(
            "samples are padded to the longest: this model does not keep those apart that share a row%s",
            answer.reason,
        )
        return None
    kernel = choose_document_kernel(probed)
    how = f"{attention} attention separates them by their position ids"
    if kernel:
        how = f"attention is limited to each sample ({kernel})"
    log.debug("packing samples without padding; %s", how)
    text = request.model_config and request.model_config.get_text_config()
    hidden_size = getattr(text, "hidden_size", _USUAL_HIDDEN_SIZE)
    one_row = one_row or bool(kernel)
    return RowLayout(hidden_size, one_row, probed.row_multiple, probed.marks_tokens)


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


def choose_document_kernel(probed: ProbedModel) -> str:
    """Let attention skip pairs of tokens of different samples, if the recipe names no implementation itself.

    A collective. Returns the label of the kernel, the same on all ranks. Empty if attention uses the mask.
    """
    config, layout = probed.request.config, probed.layout
    section = config.model
    if not isinstance(section, ModelConfig) or section.attn_implementation is not None:
        return ""
    kernel = document_kernel(layout.device.type, is_compiled=config.compile.enabled)
    # A probe is a collective of the ranks that share the model.
    if not on_all_ranks(layout.gloo_group, kernel is not None):
        return ""
    assert kernel is not None
    able = attend_by_document(
        probed.from_tokens,
        probed.options,
        probed.row_multiple,
        layout.device,
        kernel=kernel,
        compute=probed.compute,
    )
    if on_all_ranks(layout.gloo_group, able):
        return kernel.label
    # Another rank could not: undo the change on this rank.
    attend_by_mask(probed.from_tokens)
    return ""
