"""Attention of each document by itself, where several share a row.

transformers keeps the documents of a row apart by a mask over all pairs of the row's tokens, and sdpa then works on
all of them. Here what stands in the mask's place are the documents' lengths, and sdpa is called for each of them,
causal and without a mask, as for a document that has the row for itself.

It is done under the name ``sdpa``, for models that were asked to (:func:`attend_by_document`): models look at that
name, and no configuration has to know another. Wherever something other is wanted than causal attention within
documents, or pairs have to be looked at, it is the mask.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from automodel_ckpt.models.probe import attention_of, logits_of, rows_to_ask, undisturbed

log = logging.getLogger(__name__)

_NAME = "sdpa"
_NEEDS_PAIRS = ("position_bias", "softcap", "cache", "output_attentions", "s_aux")
"""Options of attention that need the mask where they are given."""
_asked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The configurations of the models that attend so, by id: they cannot be hashed."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Causal attention within the documents of one row, over the last *window* tokens if there is one.

    *runs*: (length, how many) of documents of equal length that follow each other, in the row's order.
    """

    runs: tuple[tuple[int, int], ...]
    window: int | None
    device: torch.device

    @property
    def sizes(self) -> list[int]:
        """Tokens of each run."""
        return [length * count for length, count in self.runs]

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        """Attention mask of all pairs of a row: bool [1, 1, T, T], true where a query (row) sees a key (column)."""
        lengths = list(chain.from_iterable([length] * count for length, count in self.runs))
        numbers = torch.repeat_interleave(torch.tensor(lengths, device=self.device))
        return (numbers[:, None] == numbers) & _causal(len(numbers), self.window, self.device)

    def mask_of(self, length: int) -> torch.Tensor | None:
        """The mask of a document of *length* tokens alone, where causal does not say all of it."""
        return (
            None
            if self.window is None or length <= self.window
            else _causal(length, self.window, self.device)
        )


def _causal(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [1, 1, T, T]."""
    places = torch.arange(length, device=device)
    distances = places[:, None] - places
    seen = distances >= 0
    return (seen if window is None else seen & (distances < window))[None, None]


def attend_by_document(
    model: nn.Module,
    options: Mapping[str, Any],
    multiple: int = 1,
    device: torch.device | None = None,
) -> bool:
    """Have *model* attend to each document by itself, if it then computes what it computes by masks; whether it does.

    For models with sdpa attention on the CPU. Runs *model*, on *device* (its parameters') and with *options*, on a few
    tokens, a number of them divisible by *multiple*, without a trace.
    """
    device = device or next(model.parameters()).device
    if attention_of(model) != _NAME or device.type != "cpu":
        return False
    tokens, restarted, continued = rows_to_ask(multiple, device)
    try:
        with undisturbed(model):
            by_masks, crossed = (
                _logits(model, tokens, each, options) for each in (restarted, continued)
            )
            _ask(model)
            by_document = _logits(model, tokens, restarted, options)
    except Exception as error:
        log.debug("attention cannot be limited to each sample: %s: %s", type(error).__name__, error)
        attend_by_mask(model)
        return False
    # What crossing attention does is the measure: rounding is far below it in every dtype.
    agrees = bool((by_document - by_masks).abs().max() <= 0.1 * (crossed - by_masks).abs().max())
    if not agrees:
        attend_by_mask(model)
    return agrees


def attend_by_mask(model: nn.Module) -> None:
    """Undo :func:`attend_by_document`."""
    for config in _configs_of(model):
        _asked.pop(id(config), None)


def _logits(model: nn.Module, *row_and_options: Any) -> torch.Tensor:
    tokens, positions, options = row_and_options
    return logits_of(model(input_ids=tokens, position_ids=positions, **options)).float()


def _ask(model: nn.Module) -> None:
    _register()
    for config in _configs_of(model):
        _asked[id(config)] = config


def _configs_of(model: Any) -> list[Any]:
    """The configurations by which the parts of *model* make their masks."""
    configs = (getattr(part, "config", None) for part in model.modules())
    return [config for config in configs if isinstance(config, PreTrainedConfig)]


@functools.cache
def _register() -> None:
    """Replace transformers' functions of the name ``sdpa`` by functions that call them for all other models."""
    # Patch for transformers 5.17 to 5.23: a dozen models compare the configured name with "sdpa", so a separate name
    # would send them down another path; and transformers offers sdpa a mask of all pairs instead of document lengths.
    mask, attention = ALL_MASK_ATTENTION_FUNCTIONS[_NAME], ALL_ATTENTION_FUNCTIONS[_NAME]
    AttentionMaskInterface.register(_NAME, functools.partial(_mask, mask))
    AttentionInterface.register(_NAME, functools.partial(_attention, attention))


def _mask(by_pairs: Callable[..., Any], *args: Any, **wanted: Any) -> Any:
    """What transformers calls to make a mask: *by_pairs*, or the documents where they say the same."""
    config = wanted.get("config")
    if args or config is None or _asked.get(id(config)) is not config:
        return by_pairs(*args, **wanted)
    return documents_of(**wanted) or by_pairs(**wanted)


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
    """The documents of the mask that transformers asks for with these arguments; None where it is another one.

    What the mask is, is asked of *mask_function* at the places where it has to change.
    """
    one_row = batch_size == 1 and q_length == kv_length >= 2 and attention_mask is None
    # Asked for without documents, or with another pattern over it: blocks that see each other join it by "or".
    narrowed = getattr(mask_function, "__name__", "") == "and_mask" and not others.get(
        "use_vmap", False
    )
    other_kind = others.get("allow_is_causal_skip", True) or not narrowed
    if not one_row or other_kind or (q_offset, kv_offset) != (0, 0):
        return None
    row = torch.zeros(1, dtype=torch.long, device=device)

    def sees(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return mask_function(row, row, queries, keys).expand(queries.shape)

    places = torch.arange(q_length, device=device)
    first = torch.ones(q_length, dtype=torch.bool, device=device)
    first[1:] = ~sees(places[1:], places[:-1])
    starts = torch.where(first, places, 0).cummax(0).values
    if not _is_causal_within(sees, places, starts, local_size):
        return None
    begins = [*torch.nonzero(first).flatten().tolist(), q_length]
    lengths = [end - start for start, end in pairwise(begins)]
    runs = tuple((length, len(list(same))) for length, same in groupby(lengths))
    return Documents(runs, local_size, torch.device(device))


def _is_causal_within(
    sees: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    places: torch.Tensor,
    starts: torch.Tensor,
    window: int | None,
) -> bool:
    """Whether each place sees what is from its start (or the window's) to itself, at both ends and between them."""
    lowest = starts if window is None else torch.maximum(starts, places - window + 1)
    later, earlier = places < len(places) - 1, lowest > 0
    seen = sees(places.repeat(3), torch.cat([places, lowest, (places + lowest) // 2]))
    hidden = sees(
        torch.cat([places[later], places[earlier]]),
        torch.cat([places[later] + 1, lowest[earlier] - 1]),
    )
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
    """What models call for attention, of [1, heads, T, D]: *attention*, of each document where they are known."""
    if not isinstance(attention_mask, Documents):
        return attention(module, query, key, value, attention_mask, **options)
    whole = [each.shape[2] for each in (query, key, value)] == [sum(attention_mask.sizes)] * 3
    if len(query) > 1 or not whole or any(options.get(name) is not None for name in _NEEDS_PAIRS):
        return attention(module, query, key, value, attention_mask.mask, **options)
    options["is_causal"] = True
    outputs = []
    parts = zip(
        *(torch.split(each, attention_mask.sizes, dim=2) for each in (query, key, value)),
        strict=True,
    )
    for (length, count), run in zip(attention_mask.runs, parts, strict=True):
        alone = (_a_row_each(part, length) if count > 1 else part for part in run)
        output, _ = attention(module, *alone, attention_mask.mask_of(length), **options)
        outputs.append(output.reshape(1, length * count, *output.shape[2:]))
    return torch.cat(outputs, dim=1), None


def _a_row_each(part: torch.Tensor, length: int) -> torch.Tensor:
    """[1, heads, n * length, D] as [n, heads, length, D]."""
    return part.view(part.shape[1], -1, length, part.shape[3]).transpose(0, 1)
