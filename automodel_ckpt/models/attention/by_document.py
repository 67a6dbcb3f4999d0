"""Attention that is limited to each document of a row (packing), and probes whether a model separates samples.

transformers separates the documents of a row by a mask over all pairs of the row's tokens. For models that were enabled
with :func:`attend_by_document`, the borders of the documents take the place of the mask (:func:`documents_of`), and a
kernel of :mod:`~automodel_ckpt.models.attention.documents` computes attention. The mask is still used for any other
pattern than causal attention within documents, and for options that need all pairs.

This is an attention implementation of transformers with its own name, which is set in the model's configurations.

A model's class does not show whether it separates samples: some models take ``position_ids`` and still let attention
cross from one sample to the next (OPT), and a state space model carries its state over. A few tokens show it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby, pairwise
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.models.attention.documents import (
    Documents,
    Kernel,
    document_kernel,
)
from automodel_ckpt.models.inspect.interface import (
    attention_of,
    autocast_dtype,
    class_and_message,
    forward_parameters,
    logits_of,
    side_effect_free,
)

log = logging.getLogger(__name__)

# Small token ids, which every vocabulary has. _OTHER replaces _FIRST to show whether _SECOND sees
# it.
_FIRST, _OTHER, _SECOND = [1, 2, 3], [3, 1, 2], [2, 2, 1, 3]
_ROUNDING_FACTOR = 16
"""How much larger the rounding of one comparison can be than the rounding of another one."""


@dataclass(frozen=True)
class Answer:
    """The result of a probe; *reason* is the end of a message that states why it does not hold, or empty."""

    holds: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.holds

    @classmethod
    def of_error(cls, error: Exception) -> Answer:
        """The answer of a probe that *error* ended."""
        return cls(False, f" (a forward pass of a few tokens raised {class_and_message(error)})")


def keeps_samples_apart(
    model: nn.Module,
    one_row: bool,
    options: Values,
    multiple: int = 1,
    device: torch.device | None = None,
    max_row_length: int | None = None,
) -> Answer:
    """Whether samples in one row, separated by ``position_ids`` alone, have the outputs that they have in a row alone.

    Runs *model* with *options* on a few tokens, on *device* (default: the device of its parameters), without side
    effects on its mode and the random state. *multiple* divides the length of the rows; *one_row* runs one row at a
    time. The answer is also false if the forward pass fails, for models of transformers with ``use_cache``, which look
    for samples in a row only without a cache, and for models with a mask of a fixed length that rows of
    *max_row_length* tokens (None: unlimited) exceed.
    """
    if "position_ids" not in forward_parameters(model):
        return Answer(False)
    length = _mask_length(model)
    if length and (max_row_length is None or max_row_length > length):
        return Answer(False, f" (its mask has {length} positions, and rows can be longer)")
    padding = _padding(multiple)
    restarted = [*range(3), *range(4), *padding]
    swapped = [*range(4), *range(3), *padding]
    tokens_and_positions = [
        (_FIRST + _SECOND, restarted),
        (_OTHER + _SECOND, restarted),
        (_FIRST + _SECOND, [*range(7), *padding]),
        (_SECOND + _FIRST, swapped),
        (_SECOND + _OTHER, swapped),
    ]
    tokens = [row + padding for row, _ in tokens_and_positions]
    positions = [row for _, row in tokens_and_positions]
    try:
        with side_effect_free(model):
            device = device or next(model.parameters()).device
            rows = torch.tensor([tokens, positions], device=device)
            outputs = _logits(model, rows, one_row, options)
        after_first, after_other, crossed = outputs[0, 3:7], outputs[1, 3:7], outputs[2, 3:7]
        alone, alone_again = outputs[3, :4], outputs[4, :4]
        if not torch.cat([after_first, after_other, crossed, alone]).isfinite().all():
            return Answer(False, " (its outputs are not finite: look for NaN in its weights)")
        # The effect of crossing attention is the scale: rounding is far below it in every dtype.
        allowed = 0.1 * _distance(crossed, alone)
        largest = max(_distance(after_first, alone), _distance(after_other, alone))
        # Beside attention that does not cross, a recurrent layer can carry over little, in particular with random
        # weights. The same tokens in the same place get the same values bit by bit, whatever other sample is in the
        # row, except that layers of experts compute groups of other sizes, and FP8 has one scale for a tensor. What
        # comes later in a row has the same effect on rounding, and cannot have another one.
        rounding = _ROUNDING_FACTOR * _distance(alone, alone_again)
        magnitude = float(alone.abs().max())
        seen = _distance(after_first, after_other)
        has_experts = any("experts" in name for name, _ in model.named_modules())
        smallest_effect = 1e-2 if has_experts else 1e-6
        is_rounding = seen <= rounding + smallest_effect * magnitude
        return Answer(largest <= allowed and is_rounding)
    except Exception as error:
        log.debug("could not probe the model for packed samples", exc_info=True)
        return Answer.of_error(error)


def padding_changes_outputs(
    model: nn.Module, options: Values, device: torch.device | None = None
) -> bool:
    """Whether padding behind a sample changes the outputs of its tokens, although the attention mask excludes it.

    Runs *model* with *options* on a few tokens, without side effects. The default *device* is the model's.
    Returns False when the forward pass fails, or returns no logits for each token.
    """
    padding = [0] * len(_FIRST)
    rows = [_SECOND + padding, [_OTHER[0], *_SECOND[1:], *padding]]
    mask = [1] * len(_SECOND) + [0] * len(padding)
    try:
        with side_effect_free(model):
            device = device or next(model.parameters()).device
            tokens = torch.tensor(rows, device=device)
            masks = torch.tensor([mask, mask], device=device)
            length = len(_SECOND)
            padded = logits_of(model(input_ids=tokens, attention_mask=masks, **options))
            alone = logits_of(model(input_ids=tokens[:, :length], **options))
            alone, padded = alone.float(), padded[:, :length].float()
            # The effect of another first token is the scale: rounding is far below it in every dtype.
            return _distance(padded, alone) > 0.1 * _distance(alone[0], alone[1])
    except Exception:
        log.debug("could not probe the model for padding", exc_info=True)
        return False


def _mask_length(model: nn.Module) -> int | None:
    """The length of a causal mask [1, 1, T, T] that a layer keeps as a buffer, as in GPT-Neo; None without one."""
    for buffer in model.buffers():
        is_square = buffer.dim() == 4 and buffer.shape[-1] == buffer.shape[-2] > 1
        if is_square and buffer.dtype == torch.bool:
            return buffer.shape[-1]
    return None


def probe_rows(multiple: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A row of a few samples, to compare ways of computing attention.

    Returns (token ids, position ids that restart with each sample, position ids of a single sample), each [1, T] with T
    divisible by *multiple*.
    """
    padding = _padding(multiple)
    tokens = [*_FIRST, *_SECOND, *padding]
    restarted = [*range(3), *range(4), *padding]
    continued = [*range(7 + len(padding))]
    rows = torch.tensor([tokens, restarted, continued], device=device)
    first, second, third = torch.split(rows, 1)
    return first, second, third


def _padding(multiple: int) -> list[int]:
    """Samples of one token each that make the length of a row a multiple."""
    return [0] * (-len(_FIRST + _SECOND) % multiple)


def _logits(model: nn.Module, rows: Tensor, one_row: bool, options: Values) -> Tensor:
    """Logits [B, T, V] of *rows* [2, B, T], which are token ids and position ids."""
    size = 1 if one_row else rows.shape[1]
    outputs = []
    for tokens, positions in torch.split(rows, size, dim=1):
        output = model(input_ids=tokens, position_ids=positions, **options)
        outputs.append(logits_of(output))
    return torch.cat(outputs).float()


def _distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


_BASES = ("sdpa", "eager")
"""The implementations that an enabled model can have had before, which compute everything else than documents."""
_PREFIX = "automodel_ckpt_documents"
"""Names are this, the base and the label of the kernel, joined by dots."""
_PROBE = ".probe"
_COMPARES_NAME = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)[^\n]*[\"']sdpa[\"']")
_COMPARES_HARMLESSLY = ("gemma4", "gemma4_unified")
"""Models that compare the name only where ``logits_to_keep`` is above 1, to keep masks for the last tokens."""


class UnsupportedByKernel(Exception):
    """The kernel cannot compute what a layer asks for."""


def attend_by_document(
    model: nn.Module,
    options: Values,
    multiple: int = 1,
    device: torch.device | None = None,
    *,
    kernel: Kernel | None = None,
    compute: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> bool:
    """Enable attention per document for *model* if its outputs stay the same as with the mask. Returns whether it is
    enabled.

    Only for models with sdpa or eager attention. Runs *model* with *options*, in the context *compute*, on a few
    tokens, on *device* (default: the device of its parameters), without side effects. *multiple* divides the number of
    tokens. The default *kernel* is the device's.
    """
    device = device or next(model.parameters()).device
    kernel = kernel or document_kernel(device.type)
    base = attention_of(model)
    if kernel is None or base not in _BASES:
        return False
    if any(map(_source_compares_name, {type(part).__module__ for part in model.modules()})):
        return False
    tokens, restarted, continued = probe_rows(multiple, device)
    name = ".".join([_PREFIX, base, kernel.label])
    _register(name, kernel, base)
    try:
        with side_effect_free(model), compute():
            by_masks = _logits_of_row(model, tokens, restarted, options)
            crossed = _logits_of_row(model, tokens, continued, options)
            # A model that computes with the mask fails below or returns other logits, and keeps its masks.
            _set_name(model, base, name + _PROBE)
            by_document = _logits_of_row(model, tokens, restarted, options)
            _set_name(model, name + _PROBE, name)
        # The effect of crossing attention is the scale: rounding is far below it in every dtype.
        difference = (by_document - by_masks).abs().max()
        is_equal = bool(difference <= 0.1 * (crossed - by_masks).abs().max())
    except Exception as error:
        log.debug("no attention by %s: %s: %s", kernel.label, type(error).__name__, error)
        is_equal = False
    if not is_equal:
        # On every failure: a model that stays enabled would get documents in place of its mask.
        attend_by_mask(model)
    return is_equal


def attend_by_mask(model: nn.Module) -> None:
    """Undo :func:`attend_by_document`."""
    for config in _configs_of(model):
        name = config._attn_implementation or ""
        if name.startswith(_PREFIX):
            config._attn_implementation_internal = name.split(".")[1]


@functools.cache
def _source_compares_name(module: str) -> bool:
    """Whether the code of a model in a Python *module* computes something else for another name than sdpa.

    Models with an index of the keys that each token sees (DeepSeek V3.2, GLM MoE DSA, MiniMax M3) add it to the mask
    only for the names sdpa and eager. The probe's few tokens cannot show this, because the index then has all keys.
    """
    package, _, name = module.rpartition(".")
    is_harmless = package.rpartition(".")[2] in _COMPARES_HARMLESSLY
    if is_harmless or not name.startswith(("modeling_", "modular_")):
        return False
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        # Code without a source cannot be read: the mask is always right.
        return True
    return _COMPARES_NAME.search(source) is not None


def _logits_of_row(model: nn.Module, tokens: Tensor, positions: Tensor, options: Values) -> Tensor:
    output = model(input_ids=tokens, position_ids=positions, **options)
    return logits_of(output).float()


def _set_name(model: nn.Module, before: str, after: str) -> None:
    """Rename the attention implementation in the configurations of *model* that have the name *before*."""
    for config in _configs_of(model):
        if config._attn_implementation == before:
            # The property would also change inner configurations, such as a vision tower's with eager attention.
            config._attn_implementation_internal = after


def _configs_of(model: nn.Module) -> list[Any]:
    """The configurations that the parts of *model* pass to transformers' mask functions."""
    configs = [getattr(part, "config", None) for part in model.modules()]
    return [config for config in configs if isinstance(config, PreTrainedConfig)]


def _register(name: str, kernel: Kernel, base: str) -> None:
    """Register *kernel* with transformers under *name*, and for probes under another name."""
    if name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        # Registered for another model, and context parallelism may have replaced the function since.
        return
    mask = functools.partial(_mask, kernel, base)
    for each, is_probe in ((name, False), (name + _PROBE, True)):
        AttentionMaskInterface.register(each, mask)
        attention = functools.partial(_attention, kernel, base, is_probe=is_probe)
        AttentionInterface.register(each, attention)


def _mask(kernel: Kernel, base: str, *args: Any, **options: Any) -> Any:
    """A mask function of transformers: what *kernel* needs of a row with documents, else the mask of *base*."""
    # documents_of needs all arguments by name, as transformers 5.17 to 5.24 pass them.
    documents = None if args else documents_of(**options)
    if documents is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[base](*args, **options)
    return kernel.prepare(documents)


def _attention(
    kernel: Kernel,
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    is_probe: bool,
    **options: Any,
) -> Any:
    """An attention function of transformers: compute documents with *kernel*, everything else with *base*.

    *query*, *key*, *value*: [1, heads, T, D]. Returns (output [1, T, heads, D], None). With *is_probe*, it raises
    :class:`UnsupportedByKernel` where the kernel cannot compute documents; else they are computed with the mask.
    """
    if not isinstance(attention_mask, Documents):
        return _base_attention(base, module)(module, query, key, value, attention_mask, **options)
    rows = attention_mask
    heads = (query, key, value)
    # Autocast does not know the kernels.
    if dtype := autocast_dtype(query.device):
        heads = (query.to(dtype), key.to(dtype), value.to(dtype))
    reason = kernel.unsupported(heads[0], heads[2], options)
    if is_probe:
        _base_attention(base, module)
        if not reason and _drops(module):
            reason = kernel.unsupported(heads[0], heads[2], {**options, "dropout": 0.5})
        if reason:
            raise UnsupportedByKernel(reason)
    is_complete = len(query) == 1 and query.shape[2] == key.shape[2] == rows.num_tokens
    if is_complete and not reason:
        return kernel.attend(*heads, rows, options), None
    mask = rows.mask
    if base == "eager":
        # Eager attention adds the mask to the scores.
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, lowest)
    return _base_attention(base, module)(module, query, key, value, mask, **options)


def _base_attention(base: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function of the implementation *base* for the attention module *module*.

    Raises :class:`UnsupportedByKernel` if there is none.
    """
    if base != "eager":
        return ALL_ATTENTION_FUNCTIONS[base]  # type: ignore[no-any-return]
    # Each model of transformers has its own function for eager attention, with this name.
    for part in type(module).__mro__:
        function = getattr(sys.modules.get(part.__module__), "eager_attention_forward", None)
        if function is not None:
            return function  # type: ignore[no-any-return]
    raise UnsupportedByKernel(f"{type(module).__name__} has no separate eager attention")


def _drops(module: nn.Module) -> bool:
    """Whether an attention module has dropout, which it passes on only in training."""
    settings = [given for name, given in vars(module).items() if "dropout" in name]
    return any(isinstance(given, float) and given > 0 for given in settings)


# ---------------------------------------------------------------- the documents of a mask


def documents_of(
    *,
    batch_size: int,
    mask_function: Callable[..., Tensor],
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: Any = "cpu",
    **others: Any,
) -> Documents | None:
    """Find the documents of the mask that transformers requests with these arguments of ``sdpa_mask``.

    Returns None when the mask is not causal attention within documents of one row. The mask is read off *mask_function*
    at the positions where it must change. On a GPU, this waits for the device once, unless the host knows the positions
    (:mod:`~automodel_ckpt.models.attention.positions`).
    """
    is_one_row = batch_size == 1 and q_length == kv_length >= 2 and attention_mask is None
    has_offset = (q_offset, kv_offset) != (0, 0)
    # transformers allows the skip if there are no documents. It combines documents with the causal pattern by "and".
    has_documents = not others.get("allow_is_causal_skip", True)
    is_narrowed = getattr(mask_function, "__name__", "") == "and_mask"
    if not is_one_row or has_offset or not has_documents:
        return None
    if not is_narrowed or _widens(mask_function) or others.get("use_vmap", False):
        return None
    target = torch.device(device)
    if target.type != "cpu":
        from automodel_ckpt.models.attention.positions import on_host

        if (of_host := on_host(mask_function)) is not None:
            mask_function, device = of_host, "cpu"
    row = torch.zeros(1, dtype=torch.long, device=device)

    def sees(queries: Tensor, keys: Tensor) -> Tensor:
        return mask_function(row, row, queries, keys).expand(queries.shape)

    positions = torch.arange(q_length, device=device)
    is_first = torch.ones(q_length, dtype=torch.bool, device=device)
    is_first[1:] = ~sees(positions[1:], positions[:-1])
    starts = torch.where(is_first, positions, 0).cummax(0).values
    is_causal = _is_causal_within(sees, positions, starts, local_size)
    # One copy to the host for both results: each copy waits for the device.
    found = torch.cat([is_first, is_causal.reshape(1)]).cpu()
    if not found[-1]:
        return None
    borders = found[:-1].nonzero().flatten().tolist()
    lengths = [end - start for start, end in pairwise([*borders, q_length])]
    runs = tuple((length, len(list(same))) for length, same in groupby(lengths))
    return Documents(runs, local_size, target)


def _widens(mask_function: Callable[..., Any]) -> bool:
    """Whether a mask lets tokens see more than causal attention does, such as the other tokens of an image.

    transformers joins such patterns to the causal one by "or". Documents are joined by "and": before the other patterns
    up to transformers 5.23, after them since 5.24. Both joints keep the functions that they join in their closures.
    """
    return any(each.__name__ == "or_mask" for each in _joined(mask_function))


def _joined(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield *function*, and the functions in its closure and in theirs."""
    if not inspect.isfunction(function):
        return
    yield function
    for cell in function.__closure__ or ():
        for value in _values(cell):
            yield from _joined(value)


def _values(cell: CellType) -> tuple[Any, ...]:
    try:
        value = cell.cell_contents
    except ValueError:  # empty
        return ()
    return value if isinstance(value, tuple) else (value,)


def _is_causal_within(
    sees: Callable[[Tensor, Tensor], Tensor],
    positions: Tensor,
    starts: Tensor,
    window: int | None,
) -> Tensor:
    """Whether each position sees exactly the range from the start of its document (or window) to itself: bool, 0-dim.

    Tested at both ends of the range, in its middle, and one position outside of each end.
    """
    lowest = starts
    if window is not None:
        lowest = torch.maximum(starts, positions - window + 1)
    # Not all pairs: they would take the quadratic memory that this module avoids.
    inside = torch.cat([positions, lowest, (positions + lowest) // 2])
    seen = sees(positions.repeat(3), inside)
    # Selecting by a mask would wait for the device. The last position has no next one, and the first document no
    # token before it: these positions are clamped, and do not count.
    last = len(positions) - 1
    sees_next = sees(positions, (positions + 1).clamp(max=last)) & (positions < last)
    sees_previous = sees(positions, (lowest - 1).clamp(min=0)) & (lowest > 0)
    return seen.all() & ~sees_next.any() & ~sees_previous.any()
