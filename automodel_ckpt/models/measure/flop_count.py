"""The floating-point operations (FLOPs) that training a model requires: its matrix products, forward and backward.

Counted is what the mathematics of a step needs, as in the model FLOPs utilization of PaLM (Chowdhery et al., 2022,
appendix B): a product of [n, k] and [k, m] is 2 n k m. Activations that are computed again in the backward pass do not
count. Attention is counted per document, over all pairs of its positions although half of them are masked. A query of
a layer with a sliding window has at most as many keys as the window. In a mixture, the experts that a token is routed
to count. Of a model with images or audio, the language model counts, with the tokens of their features, and the towers
do not. Encoder-decoders and models with layers for multi-token prediction are not counted.

The backward pass of a product has two further products: the gradient of the weight, where it is trained, and the
gradient of the input, where anything before it is trained. With frozen weights and adapters, a weight therefore counts
4 instead of 6 operations per token. Within a layer the order of the modules is not considered: if a parameter of a
layer is trained, all products of this layer have both gradients of activations.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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

    *per_token* and *per_label* have the operations of products, *per_pair* the operations of attention per pair of a
    query and a key, by the largest number of keys of a query (None: all of the document).
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

    *layers* are its repeated blocks. Returns None for a model without a configuration of transformers, for a
    configuration that does not have the number of heads or one number of active experts, for an encoder-decoder, and
    for multi-token prediction.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or getattr(config, "is_encoder_decoder", False):
        return None
    inner, text = model_without_adapters(model), config.get_text_config()
    experts = {_Experts.of(layer) for layer in layer_configs(text)}
    if mtp_of(inner) is not None or len(experts) > 1:
        return None
    get_head: Any = getattr(inner, "get_output_embeddings", lambda: None)
    walk = _Walk(get_head(), layers, experts.pop())
    walk.add_modules(model)
    per_pair = _per_pair(text, walk)
    if per_pair is None or walk.is_unknown:
        return None
    return FlopCount(walk.per_token, walk.per_label, per_pair)


class _Experts(NamedTuple):
    """The number of experts of a layer, and of those that a token is routed to; None: unknown, or there are none."""

    num_all: int | None
    num_active: int | None

    @classmethod
    def of(cls, layer: Any) -> _Experts:
        """Those that the configuration of a layer states."""
        return cls(_first_number(layer, _NUM_EXPERTS), _first_number(layer, _TOP_K))


class _Walk:
    """Adds up the operations of the modules of a language model, in the order of a forward pass."""

    def __init__(
        self, output_layer: nn.Module | None, layers: Sequence[nn.Module], experts: _Experts
    ) -> None:
        self.per_token = self.per_label = 0
        self.is_unknown = False
        self.has_gradient: dict[nn.Module, bool] = {}
        """Whether the inputs of a layer, or of a module outside of the layers, have gradients."""
        self._head = set() if output_layer is None else set(output_layer.modules())
        self.layer_of = {module: layer for layer in layers for module in layer.modules()}
        self._experts = experts
        self._is_trained = False

    def add_modules(self, model: nn.Module) -> None:
        """Add the modules of the language model. The features of its towers are the input of the first layer."""
        of_text = []
        for name, module in model.named_modules():
            if part_of(name) in ("vision_tower", "projector", "audio_tower"):
                self._is_trained = self._is_trained or _has_trained_weight(module)
            # peft keeps the frozen original next to the copy that it trains.
            elif ".original_module" not in f".{name}":
                of_text.append((name, module))
        for name, module in of_text:
            self._add(name, module)

    def _add(self, name: str, module: nn.Module) -> None:
        layer = self.layer_of.get(module)
        place = module if layer is None else layer
        is_trained = _has_trained_weight(module)
        if place not in self.has_gradient:
            trains = layer is not None and any(p.requires_grad for p in layer.parameters())
            self.has_gradient[place] = self._is_trained or trains
            self._is_trained = self._is_trained or trains or is_trained
        size = self._size(name, module)
        operations = 2 * size * (1 + self.has_gradient[place] + (size > 0 and is_trained))
        if module in self._head:
            self.per_label += operations
        else:
            self.per_token += operations

    def _size(self, name: str, module: nn.Module) -> int:
        """The number of multiplications that *module* itself makes per token, without its submodules."""
        if isinstance(module, nn.Linear):
            size = module.in_features * module.out_features
            return self._active(size) if _ONE_EXPERT.search(f"{name}.") else size
        if isinstance(module, (Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return module.weight.numel()
        if self._experts.num_all is None:
            return 0
        is_router = type(module).__name__.endswith(("Router", "Gate"))
        size = 0
        for parameter in module.parameters(recurse=False):
            if parameter.shape[:1] == (self._experts.num_all,):
                if parameter.dim() == 3:
                    size += self._active(parameter.numel())
                elif parameter.dim() == 2 and is_router:
                    size += parameter.numel()
        return size

    def _active(self, size: int) -> int:
        """The share of *size* multiplications of all experts that belongs to the experts of a token."""
        num_all, num_active = self._experts
        if not num_all or not num_active:
            self.is_unknown = True
            return 0
        return size * num_active // num_all


def _per_pair(text: Any, walk: _Walk) -> Counter[int | None] | None:
    """The operations of attention for :class:`FlopCount`: two products of each head, and twice as many in a backward
    pass. Returns None when the configuration *text* does not have the number of heads."""
    per_pair: Counter[int | None] = Counter()
    layers = [
        layer for layer in dict.fromkeys(walk.layer_of.values()) if layer in walk.has_gradient
    ]
    kinds = _layer_kinds(text, len(layers))
    for number, (layer, kind) in enumerate(zip(layers, kinds, strict=False)):
        config = config_of_layer(text, number)
        operations = _operations_per_pair(config)
        if operations is None:
            return None
        if "attention" in kind and "linear" not in kind:
            per_pair[_window_of(config, kind)] += operations * (
                3 if walk.has_gradient[layer] else 1
            )
    return per_pair


def _has_trained_weight(module: nn.Module) -> bool:
    """Whether a parameter of *module* itself, without its submodules, is trained."""
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _operations_per_pair(layer: Any) -> int | None:
    """The operations of a query with a key, and of their weight with a value, in all heads of a layer.

    None when its configuration does not have one number of heads.
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
    """The first of the values *names* of a configuration that is a positive number."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
