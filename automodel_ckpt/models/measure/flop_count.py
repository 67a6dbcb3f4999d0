"""The floating-point operations (FLOPs) that training a model requires: its matrix products, forward and backward.

Counted is what the mathematics of a step needs, as in the model FLOPs utilization of PaLM (Chowdhery et al., 2022,
appendix B): a product of [n, k] and [k, m] is 2 n k m. Activations that are computed again in the backward pass do not
count. Attention is counted per document, over all pairs of its positions although half of them are masked. A query of
a layer with a sliding window has at most as many keys as the window. In a mixture, the experts that a token is routed
to count. Layers of multi-token prediction count once per depth, and the output layer once more per depth, for all
labels: that a depth has a few labels less is not considered. Of a model with images or audio, the language model
counts, with the tokens of their features, and the towers do not. Encoder-decoders are not counted.

The backward pass of a product has two further products: the gradient of the weight, where it is trained, and that of
the input, where anything before it is trained. With frozen weights and adapters, a weight therefore counts 4 instead of
6 operations per token. Within a layer the order of the modules is not considered: if a parameter of a layer is trained,
all products of this layer have both gradients of activations.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from automodel_ckpt.models.config_checks import config_of_layer, layer_configs
from automodel_ckpt.models.inspect.forward import model_without_adapters
from automodel_ckpt.models.inspect.vision import part_of
from automodel_ckpt.models.loss.mtp import mtp_of

Lengths = np.ndarray[Any, Any]
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k_experts")
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class FlopCount:
    """The operations of a forward and a backward pass, as rates.

    *per_token* and *per_label* have the operations of products, *per_pair* those of attention per pair of a query and a
    key, by the largest number of keys of a query (None: all of the document).
    """

    per_token: int
    per_label: int
    per_pair: Mapping[int | None, int]

    def of(self, micro_batch: Mapping[str, torch.Tensor], num_labels: int) -> float:
        """The operations for a micro-batch [B, T] on the CPU with *num_labels* labels."""
        lengths = document_lengths(micro_batch)
        total = self.per_label * num_labels + self.per_token * int(lengths.sum())
        for window, per_pair in self.per_pair.items():
            num_keys = lengths if window is None else np.minimum(lengths, window)
            total += per_pair * int(np.dot(lengths, num_keys))
        return float(total)


def document_lengths(micro_batch: Mapping[str, torch.Tensor]) -> Lengths:
    """The lengths of the documents of a micro-batch, without padding: rows, or the samples of packed rows."""
    labels, mask = micro_batch["labels"], micro_batch.get("attention_mask")
    positions = micro_batch.get("position_ids")
    if positions is not None and positions.dim() == 2:
        is_token = np.ones(labels.shape, dtype=np.bool_) if mask is None else mask.numpy() != 0
        starts = np.flatnonzero((positions.numpy() == 0)[is_token])
        ends = np.append(starts[1:], np.count_nonzero(is_token))
        lengths: Lengths = ends - starts
        return lengths
    if mask is None:
        return np.full(labels.shape[0], labels.shape[1], dtype=np.int64)
    of_rows: Lengths = np.count_nonzero(mask.numpy(), axis=1)
    return of_rows


def count_flops(model: nn.Module, layers: Sequence[nn.Module]) -> FlopCount | None:
    """Count the operations of an unsharded transformers *model* from its modules; no tensor is read.

    *layers* are its repeated blocks. Returns None for a model without a configuration of transformers, for one whose
    configuration does not have the number of heads or one number of active experts, and for an encoder-decoder.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or getattr(config, "is_encoder_decoder", False):
        return None
    walk = _Walk(model, layers)
    walk.count_modules()
    walk.count_attention()
    if walk.is_unknown:
        return None
    return FlopCount(walk.per_token, walk.per_label, walk.per_pair)


class _Walk:
    """Adds up the operations of the modules of a language model."""

    def __init__(self, model: Any, layers: Sequence[nn.Module]) -> None:
        self.per_token = self.per_label = 0
        self.per_pair: Counter[int | None] = Counter()
        self.is_unknown = False
        self._model, inner = model, model_without_adapters(model)
        self._text_config = model.config.get_text_config()
        self._layers = layers
        self._layer_of = {module: layer for layer in layers for module in layer.modules()}
        self._has_gradient: dict[nn.Module, bool] = {}
        """Whether the inputs of a layer, or of a module outside of the layers, have gradients."""
        self._num_experts = _first_number(self._text_config, _NUM_EXPERTS)
        self._top_k = _first_number(self._text_config, _TOP_K)
        for layer in layer_configs(self._text_config):
            experts = _first_number(layer, _NUM_EXPERTS), _first_number(layer, _TOP_K)
            self.is_unknown |= experts != (self._num_experts, self._top_k)
        get_head: Any = getattr(inner, "get_output_embeddings", None)
        output_layer = get_head() if get_head is not None else None
        self._head = set(output_layer.modules()) if output_layer is not None else set()
        self._mtp = mtp_of(inner)
        self._num_calls: dict[nn.Module, int] = {}
        """How often a forward pass calls a module, of those that are called several times."""
        if self._mtp is not None:
            # The output layer computes the logits of each depth, too.
            self._num_calls = dict.fromkeys(self._head, 1 + self._mtp.num_depths)
            num_calls = self._mtp.num_depths // len(self._mtp.depths)
            self._num_calls |= dict.fromkeys(self._mtp.depths.modules(), num_calls)

    def count_modules(self) -> None:
        """Add the operations of the modules, which are in the order of a forward pass."""
        text = []
        is_trained = False
        for name, module in self._model.named_modules():
            if part_of(name) in ("vision_tower", "projector", "audio_tower"):
                # Its features are the input of the first layer.
                is_trained = is_trained or _has_trained_weight(module)
            # peft keeps the frozen original next to the copy that it trains.
            elif ".original_module" not in f".{name}":
                text.append((name, module))
        for name, module in text:
            layer = self._layer_of.get(module)
            place = module if layer is None else layer
            if place not in self._has_gradient:
                trains = layer is not None and any(p.requires_grad for p in layer.parameters())
                self._has_gradient[place] = is_trained or trains
                is_trained = is_trained or trains or _has_trained_weight(module)
            size = self._size(name, module)
            passes = 1 + self._has_gradient[place] + (size > 0 and _has_trained_weight(module))
            operations = 2 * size * passes * self._num_calls.get(module, 1)
            if module in self._head:
                self.per_label += operations
            else:
                self.per_token += operations
        of_text = {module for _, module in text}
        self._layers = [layer for layer in self._layers if layer in of_text]

    def count_attention(self) -> None:
        """Add the attention of the layers: its two products of each head, and twice as many in a backward pass."""
        of_mtp: list[str] = []
        for depth in self._mtp.depths if self._mtp is not None else ():
            mtp_config: Any = depth.decoder.config  # type: ignore[union-attr]
            of_mtp += _layer_kinds(mtp_config, mtp_config.num_hidden_layers)
        num_own = len(self._layers) - len(of_mtp)
        kinds = [*_layer_kinds(self._text_config, num_own)[:num_own], *of_mtp]
        for number, (layer, kind) in enumerate(zip(self._layers, kinds, strict=False)):
            config = config_of_layer(self._text_config, number)
            per_pair = _operations_per_pair(config)
            if per_pair is None:
                self.is_unknown = True
            elif "attention" in kind and "linear" not in kind:
                calls = self._num_calls.get(layer, 1) * (3 if self._has_gradient[layer] else 1)
                self.per_pair[_window_of(config, kind)] += per_pair * calls

    def _size(self, name: str, module: nn.Module) -> int:
        """The number of multiplications that *module* itself makes per token, without its submodules."""
        if isinstance(module, nn.Linear):
            size = module.in_features * module.out_features
            return self._active(size) if _ONE_EXPERT.search(f"{name}.") else size
        if isinstance(module, (Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return module.weight.numel()
        own = list(module.parameters(recurse=False))
        if self._num_experts is None:
            return 0
        is_router = type(module).__name__.endswith(("Router", "Gate"))
        of_experts = [each for each in own if each.shape[:1] == (self._num_experts,)]
        size = sum(self._active(each.numel()) for each in of_experts if each.dim() == 3)
        return size + is_router * sum(each.numel() for each in of_experts if each.dim() == 2)

    def _active(self, size: int) -> int:
        """The share of *size* multiplications of all experts that belongs to the experts of a token."""
        if not self._top_k or not self._num_experts:
            self.is_unknown = True
            return 0
        return size * self._top_k // self._num_experts


def _has_trained_weight(module: nn.Module) -> bool:
    """Whether a parameter of *module* itself, without its submodules, is trained."""
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _operations_per_pair(layer: Any) -> int | None:
    """The operations of a query with a key, and of their weight with a value, in all heads of a layer.

    None if its configuration does not have one number of heads.
    """
    num_heads = getattr(layer, "num_attention_heads", None)
    if not isinstance(num_heads, int) or num_heads < 1:
        return None
    width = getattr(layer, "head_dim", None) or layer.hidden_size // num_heads
    of_keys = of_values = width
    if hasattr(layer, "qk_nope_head_dim"):
        # Multi-head latent attention has heads of two widths.
        of_keys = getattr(layer, "qk_head_dim", None) or width
        of_values = getattr(layer, "v_head_dim", None) or width
    operations: int = 2 * num_heads * (of_keys + of_values)
    return operations


def _layer_kinds(text: Any, num_layers: int) -> Sequence[str]:
    """The kind of each decoder layer, as the configuration names it."""
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(text, name, None)
        if kinds:
            return list(kinds)
    found = []
    for number in range(num_layers):
        layer = config_of_layer(text, number)
        window = getattr(layer, "sliding_window", None)
        is_windowed = window and getattr(layer, "use_sliding_window", True)
        found.append("sliding_attention" if is_windowed else "full_attention")
    return found


def _window_of(text: Any, kind: str) -> int | None:
    """The largest number of keys of a query in a layer of this *kind*; None: no limit."""
    name = "attention_chunk_size" if "chunked" in kind else "sliding_window"
    if "sliding" not in kind and "chunked" not in kind:
        return None
    size = getattr(text, name, None)
    return size if isinstance(size, int) else None


def _first_number(config: Any, names: Iterable[str]) -> int | None:
    """The first of the values *names* that is a positive number; of the first layer, where layers differ."""
    for name in names:
        value = getattr(config_of_layer(config, 0), name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
