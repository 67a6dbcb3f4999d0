"""The floating-point operations (FLOPs) that training a model requires: its matrix products, forward and backward.

Counted is what the mathematics of a step needs, as in the model FLOPs utilization of PaLM (Chowdhery et al., 2022,
appendix B): a product of [n, k] and [k, m] is 2 n k m. Activations that are computed again in the backward pass do not
count. Attention is counted per document, over all pairs of its positions although half of them are masked. A query of
a layer with a sliding window has at most as many keys as the window. In a mixture, the experts that a token is routed
to count. Layers of multi-token prediction count once per depth, and the output layer once more per depth, for all
labels: that a depth has a few labels less is not considered. Encoder-decoders are not counted.

The backward pass of a product has two further products: the gradient of the weight, where it is trained, and that of
the input, where anything before it is trained. With frozen weights and adapters, a weight therefore counts 4 instead of
6 operations per token. Within a layer the order of the modules is not considered: if a parameter of a layer is trained,
all products of this layer have both gradients of activations.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

TEXT, LABEL = "text", "label"
PATCH, IMAGE_TOKEN = "patch", "image_token"
"""What operations are counted per. A patch is one of an image, and an image token one that it takes in the text."""

Lengths = np.ndarray[Any, Any]
_UNIT_OF_PART = {"vision_tower": PATCH, "projector": IMAGE_TOKEN}
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k_experts")
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
_OF_AUDIO = re.compile("feature|audio")
"""The names of tensors of audio."""
_IN_BLOCK = re.compile(r"\.\d+\.")
_QUERIES = {"q_proj": 1, "query": 1, "q": 1, "wq": 1, "qkv": 3, "qkv_proj": 3}
"""Names of layers that compute queries, and how many parts of equal width they have."""


@dataclass(frozen=True, slots=True)
class FlopCount:
    """The operations of a forward and a backward pass, as rates.

    *per_unit* has the operations of products. *pairs* has those of attention, for queries of a unit: operations per
    pair of a query and a key, by the largest number of keys of a query (None: all of the document). *image_token_id* is
    the token that the features of an image replace; None: the model has no images. Operations of a tower for audio are
    not counted.
    """

    per_unit: Mapping[str, int]
    pairs: Mapping[str, Mapping[int | None, int]]
    image_token_id: int | None = None
    patch_size: int = 0
    has_audio_tower: bool = False

    def of(self, micro_batch: Mapping[str, torch.Tensor], num_labels: int) -> float:
        """The operations for a micro-batch [B, T] on the CPU with *num_labels* labels; 0 if they are unknown."""
        if self.has_audio_tower and any(map(_OF_AUDIO.search, micro_batch)):
            return 0.0
        found = self._lengths(micro_batch)
        if found is None:
            return 0.0
        total = self.per_unit.get(LABEL, 0) * num_labels
        for unit, lengths in found.items():
            total += self.per_unit.get(unit, 0) * int(lengths.sum())
            for window, per_pair in self.pairs.get(unit, {}).items():
                num_keys = lengths if window is None else np.minimum(lengths, window)
                total += per_pair * int(np.dot(lengths, num_keys))
        return float(total)

    def _lengths(self, micro_batch: Mapping[str, torch.Tensor]) -> dict[str, Lengths] | None:
        """The lengths of documents, or of images in patches, by unit; None if images have an unknown format."""
        lengths = {TEXT: document_lengths(micro_batch)}
        pixels = micro_batch.get("pixel_values")
        if self.image_token_id is not None and pixels is not None:
            patches = _patches_of_images(pixels, micro_batch, self.patch_size)
            if patches is None:
                return None
            is_image = micro_batch["input_ids"].numpy() == self.image_token_id
            lengths |= {PATCH: patches, IMAGE_TOKEN: np.array([np.count_nonzero(is_image)])}
        return lengths


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


def _patches_of_images(
    pixels: torch.Tensor, micro_batch: Mapping[str, torch.Tensor], patch_size: int
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
    num_patches = (pixels.shape[-2] // patch_size) * (pixels.shape[-1] // patch_size)
    return np.full(num_images, num_patches, dtype=np.int64)


def count_flops(model: nn.Module, layers: Sequence[nn.Module]) -> FlopCount | None:
    """Count the operations of an unsharded transformers *model* from its modules; no tensor is read.

    *layers* are its repeated blocks. Returns None for a model without a configuration of transformers, for one whose
    configuration does not have the number of heads, one number of active experts, or the size of patches, and for an
    encoder-decoder.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or getattr(config, "is_encoder_decoder", False):
        return None
    walk = _Walk(model, layers)
    walk.count(walk.modules_of_text())
    walk.count_text_attention()
    if walk.is_unknown:
        return None
    vision = getattr(config, "vision_config", None)
    if vision is None or not walk.per_unit[PATCH]:
        return FlopCount(walk.per_unit, walk.pairs, has_audio_tower=walk.has_audio_tower)
    patch_size = getattr(vision, "patch_size", None)
    token_id = _first_number(config, ("image_token_id", "image_token_index"))
    if not isinstance(patch_size, int) or token_id is None:
        return None
    return FlopCount(
        walk.per_unit,
        walk.pairs,
        image_token_id=token_id,
        patch_size=patch_size,
        has_audio_tower=walk.has_audio_tower,
    )


_Module = tuple[str, nn.Module, str]


class _Walk:
    """Adds up the operations of a model's modules, by the unit that they are computed for."""

    def __init__(self, model: Any, layers: Sequence[nn.Module]) -> None:
        self.per_unit: Counter[str] = Counter()
        self.pairs: dict[str, Counter[int | None]] = defaultdict(Counter)
        self.is_unknown = self.has_audio_tower = False
        self._model, inner = model, model_without_adapters(model)
        self._config = model.config
        self._text_config = self._config.get_text_config()
        self._layers = layers
        self._layer_of = {module: layer for layer in layers for module in layer.modules()}
        self._has_gradient: dict[nn.Module, bool] = {}
        """Whether the inputs of a layer, or of a module outside of the layers, have gradients."""
        self._num_tower_queries = 0
        self._num_experts = _first_number(self._text_config, _NUM_EXPERTS)
        self._top_k = _first_number(self._text_config, _TOP_K)
        for layer in layer_configs(self._text_config):
            experts = _first_number(layer, _NUM_EXPERTS), _first_number(layer, _TOP_K)
            self.is_unknown |= experts != (self._num_experts, self._top_k)
        get_head: Any = getattr(inner, "get_output_embeddings", None)
        output_layer = get_head() if get_head is not None else None
        self._head = set(output_layer.modules()) if output_layer is not None else set()
        self._mtp = mtp_of(inner)
        self._num_calls = self._calls_of_modules()

    def _calls_of_modules(self) -> dict[nn.Module, int]:
        """{module: how often a forward pass calls it} of those that are called several times, because of MTP."""
        if self._mtp is None:
            return {}
        # The output layer computes the logits of each depth, too.
        calls = dict.fromkeys(self._head, 1 + self._mtp.num_depths)
        num_stored = len(self._mtp.depths)
        for number, depth in enumerate(self._mtp.depths):
            for module in depth.modules():
                calls[module] = len(range(number, self._mtp.num_depths, num_stored))
        return calls

    def modules_of_text(self) -> list[_Module]:
        """The modules of a decoder: those of a vision tower first, then the projector, then the text."""
        found: dict[str, list[_Module]] = {PATCH: [], IMAGE_TOKEN: [], TEXT: []}
        for name, module in _named_modules(self._model):
            part = part_of(name) or ""
            if part == "audio_tower":
                self.has_audio_tower = True
                continue
            unit = _UNIT_OF_PART.get(part, TEXT)
            found[unit].append((name, module, LABEL if module in self._head else unit))
        return [entry for of_unit in found.values() for entry in of_unit]

    def count(self, modules: Iterable[_Module]) -> None:
        """Add the operations of *modules*, which are in the order of a forward pass."""
        is_trained = False
        for name, module, unit in modules:
            layer = self._layer_of.get(module)
            place = module if layer is None else layer
            if place not in self._has_gradient:
                trains = layer is not None and any(p.requires_grad for p in layer.parameters())
                self._has_gradient[place] = is_trained or trains
                is_trained = is_trained or trains or _has_trained_weight(module)
            has_gradient = self._has_gradient[place]
            if unit == PATCH and _IN_BLOCK.search(name) is None:
                if "patch" not in name:
                    # A pooling head, which a language model does not use.
                    continue
                # Pixels have no gradient.
                has_gradient = False
            size = self._size(name, module, unit)
            passes = 1 + has_gradient + (size > 0 and _has_trained_weight(module))
            self.per_unit[unit] += 2 * size * passes * self._num_calls.get(module, 1)
            if unit == PATCH and isinstance(module, nn.Linear) and ".lora_" not in name:
                self._count_tower_attention(name, module)

    def _count_tower_attention(self, name: str, module: nn.Linear) -> None:
        """Add the attention of a block of the vision tower if *module* computes its queries."""
        # The layer may be inside of a wrapper with this name: one with an adapter, or one that limits its values.
        parts = [_QUERIES[each] for each in name.split(".")[-2:] if each in _QUERIES]
        if not parts:
            return
        layer = self._layer_of.get(module, module)
        per_pair = 4 * module.out_features // parts[0] * (3 if self._has_gradient[layer] else 1)
        self.pairs[PATCH][self._tower_window()] += per_pair

    def _tower_window(self) -> int | None:
        """The number of patches that a query of the next block of the vision tower attends to; None: all."""
        vision = self._config.vision_config
        number = self._num_tower_queries
        self._num_tower_queries += 1
        full, window = (
            getattr(vision, key, None) for key in ("fullatt_block_indexes", "window_size")
        )
        if full is None or number in full or not isinstance(window, int):
            return None
        return int((window // vision.patch_size) ** 2)

    def count_text_attention(self) -> None:
        """Add the attention of the text layers: its two products of each head, and twice as many in a backward pass."""
        of_text = {module for _, module, unit in self.modules_of_text() if unit == TEXT}
        layers = [layer for layer in self._layers if layer in of_text]
        for number, (layer, (kind, num_calls)) in enumerate(
            zip(layers, self._kinds_of_layers(len(layers)), strict=False)
        ):
            config = config_of_layer(self._text_config, number)
            per_pair = _operations_per_pair(config)
            if per_pair is None:
                self.is_unknown = True
            elif "attention" in kind and "linear" not in kind:
                passes = 3 if self._has_gradient[layer] else 1
                self.pairs[TEXT][_window_of(config, kind)] += per_pair * passes * num_calls

    def _kinds_of_layers(self, num_layers: int) -> list[tuple[str, int]]:
        """The kind of each text layer, and how often a pass calls it; those of MTP are the last ones."""
        of_mtp: list[tuple[str, int]] = []
        for depth in self._mtp.depths if self._mtp is not None else ():
            config: Any = depth.decoder.config  # type: ignore[union-attr]
            kinds = _layer_kinds(config, config.num_hidden_layers)
            of_mtp += [(kind, self._num_calls[depth]) for kind in kinds]
        num_own = num_layers - len(of_mtp)
        of_model = [(kind, 1) for kind in _layer_kinds(self._text_config, num_own)]
        return [*of_model[:num_own], *of_mtp]

    def _size(self, name: str, module: nn.Module, unit: str) -> int:
        """The number of multiplications that *module* itself makes per unit, without its submodules."""
        if isinstance(module, nn.Linear):
            size = module.in_features * module.out_features
            return self._active(size) if _ONE_EXPERT.search(f"{name}.") else size
        if isinstance(module, (Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return module.weight.numel()
        own = list(module.parameters(recurse=False))
        if unit == IMAGE_TOKEN and not isinstance(module, nn.Embedding):
            return sum(parameter.numel() for parameter in own if parameter.dim() == 2)
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


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        # peft keeps the frozen original next to the copy that it trains.
        if ".original_module" not in f".{name}":
            yield name, module


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
