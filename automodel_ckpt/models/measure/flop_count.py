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
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from automodel_ckpt.models.config_reading import config_of_layer, layer_configs
from automodel_ckpt.models.inspect.interface import model_without_adapters, part_of
from automodel_ckpt.models.loss.mtp import mtp_of

Lengths = np.ndarray[Any, Any]
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k_experts")
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class FlopCount:
    """The operations of a forward and a backward pass, as rates.

    *per_token* and *per_label* have the operations of products, *per_pair* the operations of attention per pair of a
    query and a key, by the largest number of keys of a query (None: all of the document).
    """

    per_token: int
    per_label: int
    per_pair: Mapping[int | None, int]

    def of(self, micro_batch: Mapping[str, Tensor], num_labels: int) -> float:
        """The operations for a micro-batch [B, T] on the CPU with *num_labels* labels."""
        lengths = document_lengths(micro_batch)
        total = self.per_label * num_labels + self.per_token * int(lengths.sum())
        for window, per_pair in self.per_pair.items():
            num_keys = lengths if window is None else np.minimum(lengths, window)
            total += per_pair * int(np.dot(lengths, num_keys))
        return float(total)


def document_lengths(micro_batch: Mapping[str, Tensor]) -> Lengths:
    """The lengths of the documents of a micro-batch, without padding: rows, or the samples of packed rows."""
    labels, mask = micro_batch["labels"], micro_batch.get("attention_mask")
    positions = micro_batch.get("position_ids")
    if positions is not None and positions.dim() == 2:
        is_token = np.ones(labels.shape, dtype=np.bool_) if mask is None else mask.numpy() != 0
        starts = np.flatnonzero((positions.numpy() == 0)[is_token])
        ends = np.append(starts[1:], np.count_nonzero(is_token))
        return ends - starts
    if mask is None:
        return np.full(labels.shape[0], labels.shape[1], dtype=np.int64)
    return np.count_nonzero(mask.numpy(), axis=1)  # type: ignore[no-any-return]


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
    of_layers = {
        (_first_number(layer, _NUM_EXPERTS), _first_number(layer, _TOP_K))
        for layer in layer_configs(text)
    }
    if mtp_of(inner) is not None or len(of_layers) > 1:
        return None
    experts = of_layers.pop()
    get_head: Any = getattr(inner, "get_output_embeddings", lambda: None)
    output_layer = get_head()
    head = set() if output_layer is None else set(output_layer.modules())
    layer_of = {module: layer for layer in layers for module in layer.modules()}
    # Whether the inputs of a layer, or of a module outside of the layers, have gradients.
    has_gradient: dict[nn.Module, bool] = {}
    of_text, is_trained = _language_model(model)
    per_token = per_label = 0
    for name, module in of_text:
        layer = layer_of.get(module)
        place = module if layer is None else layer
        trains = _has_trained_weight(module)
        if place not in has_gradient:
            trains_layer = layer is not None and any(p.requires_grad for p in layer.parameters())
            has_gradient[place] = is_trained or trains_layer
            is_trained = has_gradient[place] or trains
        size = _size(name, module, *experts)
        if size is None:
            return None
        operations = 2 * size * (1 + has_gradient[place] + (size > 0 and trains))
        if module in head:
            per_label += operations
        else:
            per_token += operations
    found = [layer for layer in dict.fromkeys(layer_of.values()) if layer in has_gradient]
    per_pair: Counter[int | None] = Counter()
    for number, (layer, kind) in enumerate(
        zip(found, _layer_kinds(text, len(found)), strict=False)
    ):
        of_layer = config_of_layer(text, number)
        of_heads = _operations_per_pair(of_layer)
        if of_heads is None:
            return None
        if "attention" in kind and "linear" not in kind:
            # The backward pass has twice as many products.
            per_pair[_window_of(of_layer, kind)] += of_heads * (3 if has_gradient[layer] else 1)
    return FlopCount(per_token, per_label, per_pair)


def _language_model(model: nn.Module) -> tuple[list[tuple[str, nn.Module]], bool]:
    """The modules of the language model, in the order of a forward pass, and whether its towers are trained.

    The features of the towers are the input of the first layer.
    """
    of_text: list[tuple[str, nn.Module]] = []
    is_trained = False
    for name, module in model.named_modules():
        if part_of(name) in ("vision_tower", "projector", "audio_tower"):
            is_trained = is_trained or _has_trained_weight(module)
        # peft keeps the frozen original next to the copy that it trains.
        elif ".original_module" not in f".{name}":
            of_text.append((name, module))
    return of_text, is_trained


def _size(name: str, module: Any, num_experts: int | None, num_active: int | None) -> int | None:
    """The number of multiplications that *module* itself makes per token, without its submodules.

    Of experts, the active ones count. Returns None when their number is unknown.
    """
    size = of_experts = 0
    if isinstance(module, nn.Linear):
        size = module.in_features * module.out_features
        if _ONE_EXPERT.search(f"{name}."):
            size, of_experts = 0, size
    elif isinstance(module, (Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        size = module.weight.numel()
    elif num_experts is not None:
        is_router = type(module).__name__.endswith(("Router", "Gate"))
        for parameter in module.parameters(recurse=False):
            if parameter.shape[:1] == (num_experts,):
                of_experts += parameter.numel() if parameter.dim() == 3 else 0
                size += parameter.numel() if parameter.dim() == 2 and is_router else 0
    if not of_experts:
        return size
    if not num_experts or not num_active:
        return None
    return size + of_experts * num_active // num_experts


def _has_trained_weight(module: nn.Module) -> bool:
    """Whether a parameter of *module* itself, without its submodules, is trained."""
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _operations_per_pair(layer: Any) -> int | None:
    """The operations of a query with a key, and of their weight with a value, in all heads of a layer.

    None when its configuration does not have one number of heads.
    """
    num_heads = _first_number(layer, ["num_attention_heads"])
    if num_heads is None:
        return None
    width = getattr(layer, "head_dim", None) or layer.hidden_size // num_heads
    if not hasattr(layer, "qk_nope_head_dim"):
        return 4 * num_heads * width  # type: ignore[no-any-return]
    # Multi-head latent attention has heads of two widths.
    of_keys = getattr(layer, "qk_head_dim", None) or width
    of_values = getattr(layer, "v_head_dim", None) or width
    return 2 * num_heads * (of_keys + of_values)  # type: ignore[no-any-return]


def _layer_kinds(text: Any, num_layers: int) -> Sequence[str]:
    """The kind of each decoder layer, as the configuration names it."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
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
    if "chunked" in kind:
        return _first_number(text, ["attention_chunk_size"])
    return _first_number(text, ["sliding_window"]) if "sliding" in kind else None


def _first_number(config: Any, names: Iterable[str]) -> int | None:
    """The first of the values *names* of a configuration that is a positive number."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
