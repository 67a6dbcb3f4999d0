"""Context parallelism: each rank computes one slice of every row along the sequence, and attention for some heads.

Before attention, queries, keys and values are exchanged so that a rank has the complete row for a part of the heads.
After attention, the result is exchanged back to slices with all heads. Each exchange is one all-to-all, which is its
own inverse and its own gradient (source: Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509). This works with any
attention kernel on any device.

Everything before the first layer is computed for complete rows on every rank. So the mask, with the borders between
samples and windows, is the one that the model creates anyway.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.mesh import context_group, exchange
from automodel_ckpt.parallel.mesh_sizes import RankLayout
from automodel_ckpt.parallel.model_layers import decoder_layers
from automodel_ckpt.parallel.tensor_parallel import base_and_prefix

Attention = Callable[..., tuple[Tensor, Tensor | None]]
"""A function of transformers' attention interface: (module, query, key, value, mask, ...) -> (output, weights)."""

_WHERE = "distributed.cp_size"
_MARK = "context_parallel"
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_exchanging: set[str] = set()
"""Names of the attention implementations that :func:`_make_exchanging` has replaced."""


def check_context_parallel(model: nn.Module) -> None:
    """Validate that the model's layers mix tokens only in attention, as far as its class and configuration show.

    Raises :class:`RecipeError` otherwise.
    """
    if reason := _unsupported_reason(model):
        raise context_parallel_error(model, reason)


def context_parallel_error(model: nn.Module, reason: str) -> RecipeError:
    """The error for a model that cannot shard rows along the sequence."""
    return RecipeError(
        "this model does not support context parallelism",
        where=_WHERE,
        value=f"{type(base_and_prefix(model)[0]).__name__.removeprefix('FSDP')}: {reason}",
        hint="remove the key",
    )


def _unsupported_reason(model: nn.Module) -> str:
    """Why context parallelism does not support the model; empty if it does."""
    base = base_and_prefix(model)[0]
    config = getattr(base, "config", None)
    if config is None or not hasattr(base, "get_decoder"):
        return "it is not a model of transformers"
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    mixing = set(layer_types) - _ATTENTION_LAYERS
    for layer in decoder_layers(base.get_decoder()):
        convolutions = [part for part in layer.modules() if isinstance(part, nn.Conv1d)]
        mixing.update(type(part).__name__ for part in convolutions)
    if getattr(base, "_is_stateful", False) or mixing:
        named = ", ".join(sorted(mixing)) or "a state along the sequence"
        return f"its layers mix tokens outside of attention ({named})"
    if "deepstack_visual_embeds" in inspect.signature(base.get_decoder().forward).parameters:
        return "image features are inserted between its layers"
    if not getattr(base, "_supports_attention_backend", False):
        return "its attention does not use transformers' attention interface"
    if attention_name(base) == "eager":
        return "eager attention is each model's own (sdpa is not, where the model has it)"
    return ""


def attention_name(model: Any) -> str:
    """The attention implementation of the model's decoder."""
    return model.get_decoder().config._attn_implementation  # type: ignore[no-any-return]


class ContextParallel:
    """Shards the rows of a model along the sequence. Until :meth:`start`, each rank computes complete rows."""

    def __init__(
        self, model: nn.Module, layout: RankLayout, others: Sequence[nn.Module] = ()
    ) -> None:
        """Prepare *model* in place. Collective: every rank calls it once.

        *others* are further decoders in the model. They get complete rows as well, of which only this rank's slice
        counts.
        """
        self.size, self.rank = layout.sizes.cp, layout.cp_rank
        self.active = False
        self._group = context_group(layout)
        base = base_and_prefix(model)[0]
        _make_exchanging(attention_name(base))
        for decoder in (base.get_decoder(), *others):
            for number, layer in enumerate(decoder_layers(decoder)):
                names = [*inspect.signature(layer.forward).parameters]
                # Later pipeline stages receive slices.
                hook = self._slicing_hook(names, is_first=number == 0 and layout.pp_rank == 0)
                layer.register_forward_pre_hook(hook, with_kwargs=True)
                for module in layer.modules():
                    # The attention interface passes only the attention module. State dicts ignore the mark: it is
                    # neither a tensor nor a module.
                    setattr(module, _MARK, self)

    def start(self) -> None:
        """Make the model compute this rank's slices: its outputs then have T / ranks positions."""
        self.active = True

    def slice_of(self, length: int) -> slice:
        """The positions of this rank's slice in a row of *length* tokens, which must be a multiple of the ranks."""
        num_positions = length // self.size
        return slice(self.rank * num_positions, (self.rank + 1) * num_positions)

    def _slicing_hook(self, names: list[str], *, is_first: bool) -> Callable[..., Any]:
        """A forward pre-hook of a layer with the parameters *names*, which slices its inputs along the sequence."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if not self.active:
                return None
            named = dict(zip(names, args, strict=False)) | dict(kwargs)
            # The other layers get slices from the layer before, but the model's positions for complete rows.
            if is_first:
                named["hidden_states"] = self._slice(named["hidden_states"])
            embeddings = named.get("position_embeddings")
            if isinstance(embeddings, Tensor):
                named["position_embeddings"] = self._slice(embeddings)
            elif embeddings is not None:
                named["position_embeddings"] = tuple(self._slice(each) for each in embeddings)
            return (), named

        return hook

    def _slice(self, tensor: Tensor) -> Tensor:
        """This rank's slice [..., T / ranks, N] of [..., T, N]."""
        positions = self.slice_of(tensor.shape[-2])
        return tensor[..., positions, :].contiguous()

    def attend(
        self,
        attention: Attention,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Compute *attention* for slices of rows, with a mask of complete rows.

        *query*, *key*, *value*: [B, heads, T / ranks, D]. Returns (output [B, T / ranks, heads, D], None).
        """
        repeats = self.size // math.gcd(key.shape[1], self.size)
        if repeats > 1:
            # repeat_interleave keeps each key next to its own queries (grouped heads); repeat would
            # pair them with the queries of other keys.
            key = key.repeat_interleave(repeats, dim=1)
            value = value.repeat_interleave(repeats, dim=1)
        query, key, value = self._exchange(query), self._exchange(key), self._exchange(value)
        has_mask = isinstance(attention_mask, Tensor) and attention_mask.dim() == 4
        if has_mask and attention_mask.shape[1] > 1:
            # A mask per head: this rank needs the masks of its heads.
            attention_mask = attention_mask.chunk(self.size, dim=1)[self.rank]
        with _key_value_groups(module, query.shape[1] // key.shape[1]):
            output, _ = attention(module, query, key, value, attention_mask, **options)
        return self._exchange(output), None

    def _exchange(self, tensor: Tensor) -> Tensor:
        """Exchange [B, n, t, D], sharded along t, for [B, n / ranks, t * ranks, D], sharded along n."""
        parts = tensor.reshape(len(tensor), self.size, -1, *tensor.shape[2:]).movedim(1, 0)
        # Collective in the forward pass, in recomputation and in the backward pass: the ranks of a
        # group must run their layers in the same order.
        return exchange(parts, self._group).movedim(0, 2).flatten(2, 3)


@contextmanager
def _key_value_groups(module: Any, heads_per_key: int) -> Iterator[None]:
    """Set the number of queries per key of an attention module; repeated keys are shared by fewer queries."""
    before = getattr(module, "num_key_value_groups", heads_per_key)
    if before == heads_per_key:
        yield
        return
    module.num_key_value_groups = heads_per_key
    try:
        yield
    finally:
        module.num_key_value_groups = before


def _make_exchanging(name: str) -> None:
    """Replace transformers' attention function *name*: it exchanges for modules with the mark, and only for them."""
    if name in _exchanging:
        return
    attention: Attention = ALL_ATTENTION_FUNCTIONS[name]

    def exchanging(module: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        parallel: ContextParallel | None = getattr(module, _MARK, None)
        if parallel is None or not parallel.active:
            return attention(module, *args, **options)
        return parallel.attend(attention, module, *args, **options)

    # Patch for transformers 5.17 to 5.24: models compare the configured name with "sdpa", so the exchange cannot have
    # a separate name.
    ALL_ATTENTION_FUNCTIONS.register(name, exchanging)
    _exchanging.add(name)
