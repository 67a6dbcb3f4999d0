"""The floating-point operations (FLOPs) that training a model requires: its matrix products, forward and backward.

Counted is what the mathematics of a step needs, as in the model FLOPs utilization of PaLM (Chowdhery et al., 2022,
appendix B): a product of [n, k] and [k, m] is 2 n k m. Activations that are computed again in the backward pass do not
count. Attention is counted per document, over all pairs of its positions although half of them are masked. A query of
a layer with a sliding window has at most as many keys as the window. In a mixture, the experts that a token is routed
to count. Layers of multi-token prediction count once per depth, and the output layer once more per depth, for all
labels: that a depth has a few labels less is not considered.

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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from automodel_ckpt.models.config_values import config_of_layer, layer_configs
from automodel_ckpt.models.inspect.forward import model_without_adapters
from automodel_ckpt.models.inspect.vision import part_of
from automodel_ckpt.models.loss.mtp import mtp_of
from automodel_ckpt.models.measure.flop_rates import (
    Lengths,
    Pairs,
    attention_operations,
    has_trained_weight,
    is_attention,
    layer_kinds,
    product_operations,
    window_of,
)

if TYPE_CHECKING:
    from automodel_ckpt.models.measure.encoder_decoder_flops import EncoderDecoderFlops

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k_experts")
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
_OF_AUDIO = re.compile("feature|audio")
"""The names of tensors of audio."""
_IN_BLOCK = re.compile(r"\.\d+\.")
_QUERIES = ("q_proj", "query", "q", "wq")
_FUSED_QUERIES = ("qkv", "qkv_proj")


@dataclass(frozen=True, slots=True)
class ImageFlops:
    """The operations of a vision tower and its projector, forward and backward."""

    per_patch: int
    """Operations of the layers of the tower per patch of an image."""
    per_token: int
    """Operations of the projector per token that an image takes in the text."""
    pairs: Pairs
    """Attention of the tower."""
    patch_size: int
    token_id: int
    """The token in the text that the features of an image replace."""

    def of(self, micro_batch: Mapping[str, torch.Tensor]) -> float | None:
        """The operations for the images of *micro_batch*; None if its images have an unknown format."""
        pixels = micro_batch.get("pixel_values")
        if pixels is None:
            return 0.0
        lengths = self._patches_of_images(pixels, micro_batch)
        if lengths is None:
            return None
        num_tokens = int(np.count_nonzero(micro_batch["input_ids"].numpy() == self.token_id))
        products = self.per_patch * int(lengths.sum()) + self.per_token * num_tokens
        return products + attention_operations(lengths, self.pairs)

    def _patches_of_images(
        self, pixels: torch.Tensor, micro_batch: Mapping[str, torch.Tensor]
    ) -> Lengths | None:
        """The number of patches of each image, or of each frame of a video."""
        if "image_grid_thw" in micro_batch:
            frames, heights, widths = micro_batch["image_grid_thw"].numpy().T
            patches: Lengths = np.repeat(heights * widths, frames)
            return patches
        if "image_position_ids" in micro_batch:
            # [images, patches, 2], negative where there is no patch.
            has_patch = micro_batch["image_position_ids"].numpy()[..., 0] >= 0
            of_images: Lengths = np.count_nonzero(has_patch, axis=-1)
            return of_images.reshape(-1)
        if pixels.dim() < 4:
            return None
        num_images = int(np.prod(pixels.shape[:-3]))
        num_patches = (pixels.shape[-2] // self.patch_size) * (pixels.shape[-1] // self.patch_size)
        return np.full(num_images, num_patches, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class FlopCount:
    """The operations of a forward and a backward pass of a language model, as rates per token."""

    per_token: int
    """Operations of the layers per token."""
    per_label: int
    """Operations of the output layer per token with a label: the loss needs no other logits."""
    pairs: Pairs
    """Attention of all layers."""
    images: ImageFlops | None = None
    """The part for images; None: the model has none."""
    has_audio_tower: bool = False
    """Whether the model has a tower for audio. Its operations are not counted."""

    def of(self, micro_batch: Mapping[str, torch.Tensor], num_labels: int) -> float:
        """The operations for a micro-batch [B, T] on the CPU with *num_labels* labels; 0 if they are unknown."""
        if self.has_audio_tower and any(map(_OF_AUDIO.search, micro_batch)):
            return 0.0
        lengths = document_lengths(micro_batch)
        total = self.per_token * int(lengths.sum()) + self.per_label * num_labels
        total += attention_operations(lengths, self.pairs)
        if self.images is None:
            return float(total)
        of_images = self.images.of(micro_batch)
        return 0.0 if of_images is None else total + of_images


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


def count_flops(
    model: nn.Module, layers: Sequence[nn.Module]
) -> FlopCount | EncoderDecoderFlops | None:
    """Count the operations of an unsharded transformers *model* from its modules; no tensor is read.

    *layers* are its repeated blocks. Returns None for a model without a configuration of transformers, and for one
    whose configuration does not have the number of heads, one number of active experts, or the size of patches.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return None
    if getattr(config, "is_encoder_decoder", False):
        from automodel_ckpt.models.measure.encoder_decoder_flops import count_encoder_decoder

        return count_encoder_decoder(model, layers)
    walk = _Walk(model, layers, config.get_text_config())
    text_pairs = walk.text_pairs()
    if walk.is_unknown or text_pairs is None:
        return None
    vision = getattr(config, "vision_config", None)
    images = None
    if vision is not None and walk.per_patch:
        patch_size = getattr(vision, "patch_size", None)
        token_id = _first_number(config, ("image_token_id", "image_token_index"))
        if not isinstance(patch_size, int) or token_id is None:
            return None
        images = ImageFlops(
            walk.per_patch,
            walk.per_image_token,
            walk.image_pairs(vision, patch_size),
            patch_size,
            token_id,
        )
    return FlopCount(walk.per_token, walk.per_label, text_pairs, images, walk.has_audio_tower)


class _Walk:
    """Adds up the products of a model's modules, by what they are computed for."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], text_config: Any) -> None:
        self.per_token = self.per_label = 0
        self.per_patch = self.per_image_token = 0
        self.is_unknown = False
        self._layers, self._text_config = layers, text_config
        # Whether attention of each decoder layer has a backward pass, in order.
        self._text_gradients: list[bool] = []
        # The width of the queries of each block of a vision tower.
        self._tower_widths: list[int] = []
        self._tower_has_gradient = False
        self._num_experts = _first_number(text_config, _NUM_EXPERTS)
        self._top_k = _first_number(text_config, _TOP_K)
        for layer in layer_configs(text_config):
            experts = _first_number(layer, _NUM_EXPERTS), _first_number(layer, _TOP_K)
            if experts != (self._num_experts, self._top_k):
                self.is_unknown = True
        head: Any = getattr(model_without_adapters(model), "get_output_embeddings", None)
        output_layer = head() if head is not None else None
        self._head = set(map(id, output_layer.modules())) if output_layer is not None else set()
        self._mtp = mtp_of(model_without_adapters(model))
        self._num_calls = self._calls_of_modules()
        # A vision tower comes before the projector, and both before the layers of the text.
        parts: dict[str, list[tuple[str, nn.Module]]] = {
            "vision_tower": [],
            "projector": [],
            "audio_tower": [],
        }
        rest: list[tuple[str, nn.Module]] = []
        for name, module in model.named_modules():
            # peft keeps the frozen original next to the copy that it trains.
            if ".original_module" in name:
                continue
            parts.get(part_of(name) or "", rest).append((name, module))
        self.has_audio_tower = bool(parts["audio_tower"])
        is_trained = self._count_tower(parts["vision_tower"])
        is_trained = self._count_projector(parts["projector"], is_trained)
        self._count_text(rest, is_trained)

    def text_pairs(self) -> Pairs | None:
        """Attention of the text layers: its two products of each head, and twice as many in a backward pass.

        None if the configuration does not have the number of heads of each layer.
        """
        found: Counter[int | None] = Counter()
        kinds = zip(self._kinds_of_layers(), self._text_gradients, strict=False)
        for number, ((kind, num_calls), has_gradient) in enumerate(kinds):
            layer = config_of_layer(self._text_config, number)
            per_pair = _operations_per_pair(layer)
            if per_pair is None:
                return None
            if is_attention(kind):
                passes = 3 if has_gradient else 1
                found[window_of(layer, kind)] += per_pair * passes * num_calls
        return tuple((per_pair, window) for window, per_pair in found.items())

    def _kinds_of_layers(self) -> list[tuple[str, int]]:
        """The kind of each decoder layer, and how often a pass calls it; those of MTP are the last ones."""
        of_mtp: list[tuple[str, int]] = []
        if self._mtp is not None:
            for depth in self._mtp.depths:
                config: Any = depth.decoder.config  # type: ignore[union-attr]
                kinds = layer_kinds(config, config.num_hidden_layers)
                of_mtp += [(kind, self._num_calls[id(depth)]) for kind in kinds]
        num_layers = len(self._text_gradients) - len(of_mtp)
        of_model = [(kind, 1) for kind in layer_kinds(self._text_config, num_layers)]
        return [*of_model[:num_layers], *of_mtp]

    def _calls_of_modules(self) -> dict[int, int]:
        """{id of a module: how often a forward pass calls it} of those that are called several times, because of MTP.

        The output layer computes the logits of each depth, too.
        """
        if self._mtp is None:
            return {}
        calls = dict.fromkeys(self._head, 1 + self._mtp.num_depths)
        num_stored = len(self._mtp.depths)
        for number, depth in enumerate(self._mtp.depths):
            for module in depth.modules():
                calls[id(module)] = len(range(number, self._mtp.num_depths, num_stored))
        return calls

    def image_pairs(self, vision: Any, patch_size: int) -> Pairs:
        """Attention of the blocks of the vision tower."""
        passes = 3 if self._tower_has_gradient else 1
        full = getattr(vision, "fullatt_block_indexes", None)
        window = None
        if full is not None and isinstance(getattr(vision, "window_size", None), int):
            window = (vision.window_size // patch_size) ** 2
        found: Counter[int | None] = Counter()
        for number, width in enumerate(self._tower_widths):
            is_full = full is None or number in full
            found[None if is_full else window] += 4 * width * passes
        return tuple((per_pair, limit) for limit, per_pair in found.items())

    def _count_tower(self, modules: Iterable[tuple[str, nn.Module]]) -> bool:
        """Count a vision tower; returns whether any parameter of it is trained."""
        is_trained = False
        for name, module in modules:
            is_trained = is_trained or has_trained_weight(module)
            is_in_block = _IN_BLOCK.search(name) is not None
            if not is_in_block and "patch" not in name:
                # A pooling head, which a language model does not use.
                continue
            size = self._size(name, module)
            # The first layer of a tower: pixels have no gradient.
            self.per_patch += product_operations(
                module, size, has_gradient=is_trained and is_in_block
            )
            if is_in_block and isinstance(module, nn.Linear) and ".lora_" not in name:
                self._note_queries(name, module)
        self._tower_has_gradient = is_trained
        return is_trained

    def _note_queries(self, name: str, layer: nn.Linear) -> None:
        """Keep the width of the queries if *layer* of a tower's block computes them."""
        # The layer may be inside of a wrapper with this name: one with an adapter, or one that limits its values.
        last_names = name.split(".")[-2:]
        if any(each in _QUERIES for each in last_names):
            self._tower_widths.append(layer.out_features)
        elif any(each in _FUSED_QUERIES for each in last_names):
            self._tower_widths.append(layer.out_features // 3)

    def _count_projector(self, modules: Iterable[tuple[str, nn.Module]], is_trained: bool) -> bool:
        """Count a projector after a tower with trained parameters if *is_trained*; returns whether now any is."""
        for name, module in modules:
            size = self._size(name, module)
            if not size and not isinstance(module, nn.Embedding):
                size = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() == 2)
            self.per_image_token += product_operations(module, size, has_gradient=is_trained)
            is_trained = is_trained or has_trained_weight(module)
        return is_trained

    def _count_text(self, modules: Sequence[tuple[str, nn.Module]], is_trained: bool) -> None:
        """Count the language model, whose input has a gradient if *is_trained* or if its embedding is trained."""
        layer_of: dict[int, int] = {}
        text_layers = self._text_layers(modules)
        for number, layer in enumerate(text_layers):
            for module in layer.modules():
                layer_of[id(module)] = number
        for _, module in modules:
            if isinstance(module, nn.Embedding) and id(module) not in layer_of:
                is_trained = is_trained or has_trained_weight(module)
        for layer in text_layers:
            is_trained = is_trained or any(p.requires_grad for p in layer.parameters())
            self._text_gradients.append(is_trained)
        for name, module in modules:
            size = self._size(name, module)
            position = layer_of.get(id(module))
            has_gradient = is_trained if position is None else self._text_gradients[position]
            operations = product_operations(module, size, has_gradient=has_gradient)
            operations *= self._num_calls.get(id(module), 1)
            if id(module) in self._head:
                self.per_label += operations
            else:
                self.per_token += operations

    def _text_layers(self, modules: Sequence[tuple[str, nn.Module]]) -> list[nn.Module]:
        of_text = {id(module) for _, module in modules}
        return [layer for layer in self._layers if id(layer) in of_text]

    def _size(self, name: str, module: nn.Module) -> int:
        """The number of multiplications that *module* itself makes per token, without its submodules."""
        if isinstance(module, nn.Linear):
            size = module.in_features * module.out_features
            if _ONE_EXPERT.search(f"{name}."):
                size = self._active(size)
            return size
        if isinstance(module, (Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return module.weight.numel()
        if self._num_experts is None:
            return 0
        size = 0
        for parameter in module.parameters(recurse=False):
            if parameter.shape[:1] != (self._num_experts,):
                continue
            if parameter.dim() == 3:
                size += self._active(parameter.numel())
            elif parameter.dim() == 2 and type(module).__name__.endswith(("Router", "Gate")):
                size += parameter.numel()
        return size

    def _active(self, size: int) -> int:
        """The share of *size* multiplications of all experts that belongs to the experts of a token."""
        if not self._top_k or not self._num_experts:
            self.is_unknown = True
            return 0
        return size * self._top_k // self._num_experts


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


def _first_number(config: Any, names: Iterable[str]) -> int | None:
    """The first of the values *names* that is a positive number; of the first layer, where layers differ."""
    for name in names:
        value = getattr(config_of_layer(config, 0), name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
