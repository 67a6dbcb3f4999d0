"""Attention computed separately for each document of a row (packing) on a CPU.

transformers separates the documents of a row by a mask over all pairs of the row's tokens, and sdpa then computes all
pairs. Here, the lengths of the documents (:class:`Documents`) take the place of the mask, and sdpa is called for each
document, causal and without a mask.

This happens under the name ``sdpa``, for models that were enabled with :func:`attend_by_document`. The mask is still
used for any other pattern than causal attention within documents, and for options that need pairs.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from automodel_ckpt.models.forward import attention_of, logits_of, side_effect_free
from automodel_ckpt.models.packing_probe import probe_rows

log = logging.getLogger(__name__)

_NAME = "sdpa"
_NEEDS_PAIRS = ("position_bias", "softcap", "cache", "output_attentions", "s_aux")
"""Options of attention that require the mask if they are not None."""
_enabled: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The configurations of the enabled models, by id, because configurations cannot be hashed."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Causal attention within the documents of one row, limited to the last *window* tokens if that is not None.

    *runs* are pairs (length, count): consecutive documents of equal length, in the row's order.
    """

    runs: tuple[tuple[int, int], ...]
    window: int | None
    device: torch.device

    @property
    def sizes(self) -> list[int]:
        """Number of tokens of each run."""
        return [length * count for length, count in self.runs]

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        """Attention mask of all pairs of a row: bool [1, 1, T, T], true where a query (row) sees a key (column)."""
        lengths = []
        for length, count in self.runs:
            lengths += [length] * count
        numbers = torch.repeat_interleave(torch.tensor(lengths, device=self.device))
        return (numbers[:, None] == numbers) & _causal(len(numbers), self.window, self.device)

    def mask_of(self, length: int) -> torch.Tensor | None:
        """The mask of one document of *length* tokens, bool [1, 1, T, T]; None if causal is the same."""
        if self.window is None or length <= self.window:
            return None
        return _causal(length, self.window, self.device)


def _causal(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """The causal mask of one document, limited to *window* tokens: bool [1, 1, T, T]."""
    positions = torch.arange(length, device=device)
    distances = positions[:, None] - positions
    seen = distances >= 0
    if window is not None:
        seen &= distances < window
    return seen[None, None]


def attend_by_document(
    model: nn.Module,
    options: Mapping[str, Any],
    multiple: int = 1,
    device: torch.device | None = None,
) -> bool:
    """Enable attention per document for *model* if its outputs stay those of the mask. Returns whether it is enabled.

    Only for sdpa attention on the CPU. Runs *model* with *options* on a few tokens, on *device* (default: that of its
    parameters), without side effects. *multiple* divides the number of tokens.
    """
    device = device or next(model.parameters()).device
    if attention_of(model) != _NAME or device.type != "cpu":
        return False
    tokens, restarted, continued = probe_rows(multiple, device)
    try:
        with side_effect_free(model):
            by_masks = _logits(model, tokens, restarted, options)
            crossed = _logits(model, tokens, continued, options)
            # A model that computes with the mask fails below or returns other logits, and keeps its
            # masks.
            _enable(model)
            by_document = _logits(model, tokens, restarted, options)
    except Exception as error:
        log.debug("attention cannot be limited to each sample: %s: %s", type(error).__name__, error)
        # Undone on every failure: a model that stays enabled would get documents in place of its
        # mask.
        attend_by_mask(model)
        return False
    # The effect of crossing attention is the scale: rounding is far below it in every dtype.
    difference = (by_document - by_masks).abs().max()
    is_equal = bool(difference <= 0.1 * (crossed - by_masks).abs().max())
    if not is_equal:
        attend_by_mask(model)
    return is_equal


def attend_by_mask(model: nn.Module) -> None:
    """Undo :func:`attend_by_document`."""
    for config in _configs_of(model):
        _enabled.pop(id(config), None)


def _logits(
    model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor, options: Mapping[str, Any]
) -> torch.Tensor:
    output = model(input_ids=tokens, position_ids=positions, **options)
    return logits_of(output).float()


def _enable(model: nn.Module) -> None:
    _register()
    for config in _configs_of(model):
        _enabled[id(config)] = config


def _configs_of(model: nn.Module) -> list[Any]:
    """The configurations that the parts of *model* pass to transformers' mask functions."""
    configs = []
    for part in model.modules():
        config = getattr(part, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs.append(config)
    return configs


@functools.cache
def _register() -> None:
    """Replace transformers' functions of the name ``sdpa`` by functions that call them for all other models."""
    # Patch for transformers 5.17 to 5.23: a dozen models compare the configured name with "sdpa", so a separate name
    # would send them down another path; and transformers offers sdpa a mask of all pairs instead of document lengths.
    mask, attention = ALL_MASK_ATTENTION_FUNCTIONS[_NAME], ALL_ATTENTION_FUNCTIONS[_NAME]
    AttentionMaskInterface.register(_NAME, functools.partial(_mask, mask))
    AttentionInterface.register(_NAME, functools.partial(_attention, attention))


def _mask(by_pairs: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Replace transformers' mask function *by_pairs*: returns documents if possible, else the mask of *by_pairs*."""
    config = options.get("config")
    # The configuration itself is compared, because another object may have the id of a freed one.
    # documents_of needs all arguments by name, as transformers 5.17 to 5.23 pass them.
    if args or config is None or _enabled.get(id(config)) is not config:
        return by_pairs(*args, **options)
    return documents_of(**options) or by_pairs(**options)


def documents_of(
    *,
    batch_size: int,
    mask_function: Callable[..., torch.Tensor],
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    device: Any = "cpu",
    **others: Any,
) -> Documents | None:
    """Find the documents of the mask that transformers requests with these arguments of ``sdpa_mask``.

    Returns None if the mask is not causal attention within documents of one row. The mask is read off *mask_function*
    at the positions where it must change.
    """
    is_one_row = batch_size == 1 and q_length == kv_length >= 2 and attention_mask is None
    has_offset = (q_offset, kv_offset) != (0, 0)
    # transformers allows the skip if there are no documents. It combines documents with the causal pattern by "and",
    # and other patterns, such as blocks of images that see each other, by "or".
    has_documents = not others.get("allow_is_causal_skip", True)
    is_narrowed = getattr(mask_function, "__name__", "") == "and_mask"
    if not is_one_row or has_offset or not has_documents:
        return None
    if not is_narrowed or others.get("use_vmap", False):
        return None
    row = torch.zeros(1, dtype=torch.long, device=device)

    def sees(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return mask_function(row, row, queries, keys).expand(queries.shape)

    positions = torch.arange(q_length, device=device)
    is_first = torch.ones(q_length, dtype=torch.bool, device=device)
    is_first[1:] = ~sees(positions[1:], positions[:-1])
    starts = torch.where(is_first, positions, 0).cummax(0).values
    if not _is_causal_within(sees, positions, starts, local_size):
        return None
    borders = [*torch.nonzero(is_first).flatten().tolist(), q_length]
    lengths = [end - start for start, end in pairwise(borders)]
    runs = tuple((length, len(list(same))) for length, same in groupby(lengths))
    return Documents(runs, local_size, torch.device(device))


def _is_causal_within(
    sees: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    positions: torch.Tensor,
    starts: torch.Tensor,
    window: int | None,
) -> bool:
    """Whether each position sees exactly the range from the start of its document (or window) to itself.

    Tested at both ends of the range, in its middle, and one position outside of each end.
    """
    lowest = starts
    if window is not None:
        lowest = torch.maximum(starts, positions - window + 1)
    # Not all pairs: they would take the quadratic memory that this module avoids.
    inside = torch.cat([positions, lowest, (positions + lowest) // 2])
    seen = sees(positions.repeat(3), inside)
    has_next = positions < len(positions) - 1
    has_previous = lowest > 0
    outside = torch.cat([positions[has_next] + 1, lowest[has_previous] - 1])
    hidden = sees(torch.cat([positions[has_next], positions[has_previous]]), outside)
    return bool(seen.all() & ~hidden.any())


def _attention(
    attention: Callable[..., Any],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> Any:
    """Replace transformers' sdpa function *attention*: call it for each run of documents.

    *query*, *key*, *value*: [1, heads, T, D]. Returns (output [1, T, heads, D], None).
    """
    if not isinstance(attention_mask, Documents):
        return attention(module, query, key, value, attention_mask, **options)
    tensors = (query, key, value)
    num_tokens = sum(attention_mask.sizes)
    is_complete = all(tensor.shape[2] == num_tokens for tensor in tensors)
    needs_pairs = any(options.get(name) is not None for name in _NEEDS_PAIRS)
    if len(query) > 1 or not is_complete or needs_pairs:
        return attention(module, query, key, value, attention_mask.mask, **options)
    # transformers' sdpa function uses it only for a call without a mask.
    options["is_causal"] = True
    outputs = []
    parts = [torch.split(tensor, attention_mask.sizes, dim=2) for tensor in tensors]
    for (length, count), run in zip(attention_mask.runs, zip(*parts, strict=True), strict=True):
        if count > 1:
            run = tuple(_one_row_each(part, length) for part in run)
        output, _ = attention(module, *run, attention_mask.mask_of(length), **options)
        outputs.append(output.reshape(1, length * count, *output.shape[2:]))
    return torch.cat(outputs, dim=1), None


def _one_row_each(part: torch.Tensor, length: int) -> torch.Tensor:
    """View *part* [1, heads, n * length, D] of n documents as [n, heads, length, D]."""
    return part.view(part.shape[1], -1, length, part.shape[3]).transpose(0, 1)
