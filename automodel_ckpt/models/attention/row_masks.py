"""Attention masks of rows with several samples, for models that do not make such masks from position ids.

Some models (GPT-OSS, AFMoE) build their masks without position ids, so that attention crosses from one sample of a row
to the next. Their forward passes accept prepared masks, which ``generate`` uses (:func:`mask_by_positions`).

Gemma 3, Gemma 4 and PaliGemma let the tokens of an image attend to each other. Measured with transformers 5.23: its
masks of Gemma 3's sliding layers look up the image tokens of a packed row at the positions within each sample, so a
sample gets the pattern of the first sample's images. Here, the model's own function makes the masks of each sample
alone, and they are put on the diagonal of the row's mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.models.inspect.interface import (
    attention_of,
    autocast_dtype,
    model_without_adapters,
)

_TYPES = ("token_type_ids", "mm_token_type_ids")
_NAME = "create_masks_for_generate"
_SINGLE = ""
"""The name of the only mask of a model that has no types of layers."""
_ACCEPTED = {"input_ids", "inputs_embeds", "attention_mask", "position_ids"}


def mask_by_positions(model: nn.Module) -> RemovableHandle | None:
    """Pass masks by the position ids to the decoder of *model*; returns what undoes it, or None without a decoder.

    Whether the decoder uses the masks has to be probed. Passes with a cache or a mask are not changed.
    """
    outer: Any = model_without_adapters(model)
    if not isinstance(outer, PreTrainedModel):
        return None
    decoder: Any = outer.get_decoder()  # type: ignore[no-untyped-call]
    if not isinstance(decoder, PreTrainedModel):
        return None
    parameters = inspect.signature(decoder.forward).parameters
    if not parameters.keys() >= _ACCEPTED:
        return None
    return decoder.register_forward_pre_hook(_add_masks, with_kwargs=True)


def _add_masks(
    decoder: Any, args: tuple[Any, ...], inputs: ValueDict
) -> tuple[tuple[Any, ...], ValueDict] | None:
    """A hook that adds the masks to the *inputs* of a forward pass of *decoder*."""
    positions = inputs.get("position_ids")
    has_other = _has(inputs, "attention_mask") or _has(inputs, "past_key_values")
    if args or positions is None or positions.dim() != 2 or has_other:
        return None
    given = inputs["inputs_embeds"] if _has(inputs, "inputs_embeds") else inputs["input_ids"]
    # Only its shape, dtype and device are read.
    # Masks that are added to scores have the type that the decoder computes in.
    dtype = given.dtype if given.is_floating_point() else next(decoder.parameters()).dtype
    dtype = autocast_dtype(given.device) or dtype
    like = torch.empty((*given.shape[:2], 0), dtype=dtype, device=given.device)
    masks = _create_without_cache(
        create_masks_for_generate,
        config=decoder.config,
        inputs_embeds=like,
        attention_mask=None,
        position_ids=positions,
    )
    return args, {**inputs, "attention_mask": masks}


def _create_without_cache(create: Callable[..., Any], **arguments: Any) -> Any:
    """Call *create*, which makes the masks of a model, for a forward pass without a cache of keys and values.

    The argument for the cache is ``cache`` since transformers 5.24, which warns of ``past_key_values``.
    """
    names = inspect.signature(create).parameters
    return create(**{"cache" if "cache" in names else "past_key_values": None}, **arguments)


def _has(inputs: Values, name: str) -> bool:
    return inputs.get(name) is not None


def install_row_masks(model: nn.Module) -> RemovableHandle | None:
    """Let *model* compute the attention masks of packed rows from the masks of their samples. None when it cannot.

    A forward call with ``position_ids`` [B, T] and without ``attention_mask`` then gets masks [B, 1, T, T]. It concerns
    models of transformers with a separate function for masks (``create_masks_for_generate``), and the attention
    implementations sdpa and eager, which take masks of all pairs.
    """
    base = model_without_adapters(model)
    # The function of transformers itself makes causal masks, which need no help.
    has_function = any(_NAME in vars(each) for each in type(base).__mro__[:-1])
    if not has_function or attention_of(base) not in ("sdpa", "eager"):
        return None
    masks = _RowMasks(base)

    def add_masks(
        module: nn.Module, args: tuple[Any, ...], kwargs: ValueDict
    ) -> tuple[tuple[Any, ...], ValueDict] | None:
        positions = kwargs.get("position_ids")
        if kwargs.get("attention_mask") is not None or positions is None or positions.ndim != 2:
            return None
        return args, {**kwargs, "attention_mask": masks.of_rows(kwargs)}

    # On the outer module: peft calls the forward method of the base, which skips its hooks.
    return model.register_forward_pre_hook(add_masks, with_kwargs=True)


class _RowMasks:
    """Makes the masks of rows with the function of a model of transformers."""

    def __init__(self, base: Any) -> None:
        self.create = getattr(base, _NAME)
        self.config = base.config
        self.dtype = base.dtype
        self.is_eager = attention_of(base) == "eager"

    def of_rows(self, inputs: Values) -> Any:
        """The masks of the rows in *inputs*: one, or a mapping from the type of a layer to its mask.

        A mask is bool [B, 1, T, T], true where a query (row) sees a key (column); for eager attention it is what is
        added to the scores.
        """
        positions = inputs["position_ids"]
        num_rows, length = positions.shape
        shape = (num_rows, 1, length, length)
        found: dict[str, Tensor] = {}
        for row in range(num_rows):
            starts = torch.nonzero(positions[row] == 0).flatten().tolist()
            for start, end in pairwise([*starts, length]):
                masks = self._of_sample(inputs, row, start, end)
                if not isinstance(masks, dict):
                    masks = {_SINGLE: masks}
                for name, mask in masks.items():
                    if name not in found:
                        found[name] = torch.zeros(shape, dtype=torch.bool, device=positions.device)
                    found[name][row, 0, start:end, start:end] = self._seen(mask, end - start)
        if self.is_eager:
            lowest = torch.finfo(self.dtype).min
            for name, mask in found.items():
                added = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
                found[name] = added.masked_fill(~mask, lowest)
        return found.get(_SINGLE, found)

    def _of_sample(self, inputs: Values, row: int, start: int, end: int) -> Any:
        types = {
            name: inputs[name][row : row + 1, start:end]
            for name in _TYPES
            if inputs.get(name) is not None
        }
        device = inputs["position_ids"].device
        # Only the shape, type and device of the embeddings are used.
        embeddings = torch.empty((1, end - start, 0), dtype=self.dtype, device=device)
        return _create_without_cache(
            self.create,
            config=self.config,
            inputs_embeds=embeddings,
            attention_mask=None,
            position_ids=None,
            is_first_iteration=True,
            **types,
        )

    def _seen(self, mask: Tensor | None, length: int) -> Tensor:
        """Return the mask of one sample as bool [T, T]. None is causal attention without a mask."""
        if mask is None:
            return torch.ones(length, length, dtype=torch.bool).tril()
        square = mask[0, 0]
        if square.dtype == torch.bool:
            return square
        # The mask of eager attention is added to the scores.
        return square == 0
