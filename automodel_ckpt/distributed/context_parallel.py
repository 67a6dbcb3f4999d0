"""Rows cut along the sequence (context parallel): a rank computes a slice of each row, and attention by heads.

Before attention, queries, keys and values are exchanged so that a rank has the whole row for a part of the heads; after
it, the result goes back to slices with all heads. Both ways are one all-to-all, which is its own reverse and its own
gradient (source: Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509). Any attention kernel does, on any device.

What comes before the first layer is computed for whole rows on every rank: so the mask, with the borders between
samples and windows, is the one that the model makes anyway.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from automodel_ckpt.distributed.mesh import RankLayout, context_group
from automodel_ckpt.distributed.parallelize import decoder_layers
from automodel_ckpt.errors import RecipeError

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""A function of transformers' attention interface: (module, query, key, value, mask, ...) -> (output, weights)."""

_WHERE = "distributed.cp_size"
_MARK = "context_parallel"
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_exchanging: set[str] = set()
"""Names of attention implementations that look for the mark."""


def check_context_heads(config: Any, cp_size: int, tp_size: int = 1) -> None:
    """:class:`RecipeError` where the attention heads of a transformers configuration cannot be shared out evenly.

    Those of keys and values are repeated where they are too few.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    if cp_size == 1 or not isinstance(heads, int) or heads % (cp_size * tp_size) == 0:
        return
    fitting = max(size for size in range(1, cp_size) if heads % (size * tp_size) == 0 or size == 1)
    raise RecipeError(
        "the number of attention heads is not divisible by cp_size",
        where=_WHERE,
        value=f"{cp_size}; the model has num_attention_heads {heads}"
        + (f", tp_size is {tp_size}" * (tp_size > 1)),
        hint=f"set it to {fitting}" if fitting > 1 else "remove cp_size",
    )


def check_context_parallel(model: nn.Module) -> None:
    """:class:`RecipeError` for a model whose tokens meet elsewhere than in attention, as far as its class tells."""
    if reason := _why_not(model):
        raise cannot_be_cut(model, reason)


def cannot_be_cut(model: nn.Module, reason: str) -> RecipeError:
    """What a model is refused with whose rows cannot be cut."""
    return RecipeError(
        "this model does not support context parallelism",
        where=_WHERE,
        value=f"{type(_base(model)).__name__.removeprefix('FSDP')}: {reason}",
        hint="remove cp_size; fsdp2, tp_size and activation_checkpointing save memory too",
    )


def _why_not(model: nn.Module) -> str:
    base = _base(model)
    config = getattr(base, "config", None)
    if config is None or not hasattr(base, "get_decoder"):
        return "it is not a model of transformers"
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _ATTENTION_LAYERS
    inside = {
        type(part).__name__
        for layer in _layers(base)
        for part in layer.modules()
        if isinstance(part, nn.Conv1d)
    }
    if getattr(base, "_is_stateful", False) or kinds or inside:
        named = ", ".join(sorted(kinds | inside)) or "a state along the sequence"
        return f"its layers mix tokens outside of attention ({named})"
    if "deepstack_visual_embeds" in inspect.signature(base.get_decoder().forward).parameters:
        return "image features are inserted between its layers"
    if not getattr(base, "_supports_attention_backend", False):
        return "its attention does not use transformers' attention interface"
    if attention_name(base) == "eager":
        if getattr(base, "_supports_sdpa", False):
            return "eager attention is each model's own (model.attn_implementation sdpa is not)"
        return "eager attention is each model's own, and this model has no sdpa attention"
    return ""


def attention_name(model: Any) -> str:
    """The attention implementation of the model's decoder."""
    name: str = model.get_decoder().config._attn_implementation
    return name


def _base(model: nn.Module) -> Any:
    """The transformers model: what adapters wrap, where they do."""
    wrapped: Any = getattr(model, "get_base_model", None)
    return wrapped() if wrapped is not None else model


def _layers(base: Any) -> list[nn.Module]:
    return decoder_layers(base.get_decoder())


class ContextParallel:
    """The cut through a model's rows. Until :meth:`start` the model computes whole rows on each rank, as before."""

    def __init__(self, model: nn.Module, layout: RankLayout) -> None:
        """Prepare *model* in place. A collective: every rank does it once."""
        self.size, self.rank = layout.sizes.cp, layout.cp_rank
        self.active = False
        self._group = context_group(layout)
        base = _base(model)
        _make_exchanging(attention_name(base))
        for number, layer in enumerate(_layers(base)):
            names = [*inspect.signature(layer.forward).parameters]
            layer.register_forward_pre_hook(
                self._cutter(names, first=number == 0), with_kwargs=True
            )
            for module in layer.modules():
                setattr(module, _MARK, self)

    def start(self) -> None:
        """From now on the model computes this rank's slices: its outputs have a part of the row's length."""
        self.active = True

    def slice_of(self, length: int) -> slice:
        """The places of this rank's slice in a row of *length* tokens, a multiple of the ranks."""
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def _cutter(self, names: list[str], *, first: bool) -> Callable[..., Any]:
        """A layer's pre-hook: of what goes along the sequence it gets its slice."""

        def cut(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if not self.active:
                return None
            named = dict(zip(names, args, strict=False)) | dict(kwargs)
            if first:
                named["hidden_states"] = self._cut(named["hidden_states"])
            embeddings = named.get("position_embeddings")
            if isinstance(embeddings, torch.Tensor):
                named["position_embeddings"] = self._cut(embeddings)
            elif embeddings is not None:
                named["position_embeddings"] = tuple(map(self._cut, embeddings))
            return (), named

        return cut

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice of [..., T, N]."""
        places = self.slice_of(tensor.shape[-2])
        return tensor[..., places, :].contiguous()

    def attend(
        self,
        attention: Attention,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """*attention* of slices [B, heads, T / ranks, D], by a mask of whole rows: slices [B, T / ranks, heads, D]."""
        repeats = self.size // math.gcd(key.shape[1], self.size)
        if repeats > 1:
            key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        query, key, value = map(self._exchange, (query, key, value))
        if (
            isinstance(attention_mask, torch.Tensor)
            and attention_mask.dim() == 4
            and attention_mask.shape[1] > 1
        ):
            attention_mask = attention_mask.chunk(self.size, dim=1)[self.rank]
        with _groups(module, query.shape[1] // key.shape[1]):
            output, _ = attention(module, query, key, value, attention_mask, **options)
        return self._exchange(output), None

    def _exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B, n, t, D], of which the ranks have parts along t, with parts along n: [B, n / ranks, t * ranks, D]."""
        parts = tensor.reshape(len(tensor), self.size, -1, *tensor.shape[2:]).movedim(1, 0)
        received: torch.Tensor = _AllToAll.apply(parts, self._group)  # type: ignore[no-untyped-call]
        return received.movedim(0, 2).flatten(2, 3)


@contextmanager
def _groups(module: Any, heads_per_key: int) -> Iterator[None]:
    """While keys are repeated, fewer queries share one than the module says."""
    before = getattr(module, "num_key_value_groups", heads_per_key)
    if before == heads_per_key:
        yield
        return
    module.num_key_value_groups = heads_per_key
    try:
        yield
    finally:
        module.num_key_value_groups = before


class _AllToAll(torch.autograd.Function):
    """Part i of each rank's tensor [ranks, ...] goes to rank i."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        sent: torch.Tensor = _AllToAll.apply(gradient, ctx.group)  # type: ignore[no-untyped-call]
        return sent, None


def _make_exchanging(name: str) -> None:
    """Have transformers' attention *name* exchange for modules with the mark; for all others it stays as it is."""
    if name in _exchanging:
        return
    attention: Attention = ALL_ATTENTION_FUNCTIONS[name]

    def exchanging(
        module: nn.Module, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cut: ContextParallel | None = getattr(module, _MARK, None)
        if cut is None or not cut.active:
            return attention(module, *args, **options)
        return cut.attend(attention, module, *args, **options)

    # Patch for transformers 5.17 to 5.23: models compare the configured name with "sdpa", so the exchange cannot have
    # a name of its own.
    ALL_ATTENTION_FUNCTIONS.register(name, exchanging)
    _exchanging.add(name)
