"""The floating-point operations of training an encoder-decoder, whose two parts have rows of different lengths.

They are counted as :mod:`automodel_ckpt.models.measure.flop_count` counts those of decoders. The layers of the
encoder, and the
keys and values of cross attention, are computed for each token of a source, the other layers of the decoder for each
token of a target. Attention has all pairs of a source, of a target, and of a target with its source.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from automodel_ckpt.models.inspect.forward import model_without_adapters
from automodel_ckpt.models.measure.flop_rates import (
    Lengths,
    Pairs,
    attention_operations,
    has_trained_weight,
    layer_kinds,
    product_operations,
    window_of,
)

_IGNORE_INDEX = -100
_CROSS = re.compile(r"(EncDecAttention|encoder_attn|cross_attn|cross_attention|crossattention)\.")
_KEYS_VALUES = re.compile(r"\.(k|v|k_proj|v_proj|key|value)(\.|$)")
_QUERIES = re.compile(r"\.(q|q_proj|query)(\.base_layer)?$")
_NOT_COUNTED = (
    # Mixtures of experts: Switch Transformers, NLLB.
    "num_experts",
    # Attention to a part of the source: LED, LongT5, BigBird-Pegasus, Pegasus-X.
    "attention_window",
    "encoder_attention_type",
    "attention_type",
    "block_size",
    # A decoder that predicts several tokens per position: ProphetNet.
    "ngram",
)
"""Values of configurations of models whose operations have another form."""


@dataclass(frozen=True, slots=True)
class EncoderDecoderFlops:
    """The operations of a forward and a backward pass of an encoder-decoder, as rates per token."""

    per_source_token: int
    """Operations of the encoder, and of the keys and values of cross attention, per token of a source."""
    per_target_token: int
    """Operations of the other layers of the decoder per token of a target."""
    per_label: int
    """Operations of the output layer per label: the loss needs no other logits."""
    source_pairs: Pairs
    """Attention of the encoder."""
    target_pairs: Pairs
    """Attention of the decoder to the targets."""
    per_cross_pair: int
    """Operations of cross attention per pair of a token of a target and a token of its source."""

    def of(self, micro_batch: Mapping[str, torch.Tensor], num_labels: int) -> float:
        """The operations for pairs on the CPU, sources [B, S] and targets [B, T], with *num_labels* labels."""
        sources = _num_tokens(micro_batch, "attention_mask", micro_batch["input_ids"])
        targets = _num_tokens(micro_batch, "decoder_attention_mask", micro_batch["labels"])
        total = self.per_source_token * int(sources.sum())
        total += self.per_target_token * int(targets.sum()) + self.per_label * num_labels
        total += attention_operations(sources, self.source_pairs)
        total += attention_operations(targets, self.target_pairs)
        return float(total + self.per_cross_pair * int(np.dot(sources, targets)))


def _num_tokens(
    micro_batch: Mapping[str, torch.Tensor], mask: str, tokens: torch.Tensor
) -> Lengths:
    """The number of tokens of each row of *tokens* according to the mask with this name, if there is one."""
    is_token = micro_batch.get(mask)
    if is_token is None:
        is_token = tokens != _IGNORE_INDEX
    found: Lengths = np.count_nonzero(is_token.numpy(), axis=1)
    return found


def count_encoder_decoder(
    model: nn.Module, layers: Sequence[nn.Module]
) -> EncoderDecoderFlops | None:
    """Count the operations of an unsharded transformers *model*, whose repeated blocks are *layers*.

    Returns None for a model whose parts have another form than those of T5 and BART.
    """
    inner = model_without_adapters(model)
    config, head = inner.config, inner.get_output_embeddings()
    if head is None or any(getattr(config, name, None) is not None for name in _NOT_COUNTED):
        return None
    of_head = _sizes(head)
    encoder = _Part(inner.get_encoder(), layers, getattr(config, "encoder", config))
    decoder = _Part(inner.get_decoder(), layers, getattr(config, "decoder", config))
    encoder.count(of_head, of_source=False)
    decoder.count(of_head, of_source=encoder.is_trained)
    is_complete = (
        _sizes(inner).keys() <= encoder.sizes.keys() | decoder.sizes.keys() | of_head.keys()
    )
    if not (is_complete and of_head and encoder.pairs and decoder.per_cross_pair):
        return None
    per_label = 0
    for module, size in of_head.items():
        per_label += product_operations(module, size, has_gradient=decoder.is_trained)
    return EncoderDecoderFlops(
        encoder.per_token + decoder.per_source_token,
        decoder.per_token,
        per_label,
        encoder.all_pairs(),
        decoder.all_pairs(),
        decoder.per_cross_pair,
    )


class _Part:
    """Adds up the products of an encoder or a decoder by the tokens that they are computed for."""

    def __init__(self, part: nn.Module, layers: Sequence[nn.Module], config: Any) -> None:
        self.sizes = _sizes(part)
        self.per_token = self.per_source_token = self.per_cross_pair = 0
        self.pairs: Counter[int | None] = Counter()
        self.is_trained = False
        of_part = set(part.modules())
        self._part, self._config = part, config
        self._layers = [layer for layer in layers if layer in of_part]

    def count(self, of_head: Container[nn.Module], *, of_source: bool) -> None:
        """Count all layers but those *of_head*. What a decoder reads of the encoder has a gradient if *of_source*."""
        of_layers = {module for layer in self._layers for module in layer.modules()}
        self.is_trained = of_source
        for module in self._part.modules():
            if isinstance(module, nn.Embedding) and module not in of_layers:
                self.is_trained = self.is_trained or has_trained_weight(module)
        kinds = layer_kinds(self._config, len(self._layers))
        for layer, kind in zip(self._layers, kinds, strict=False):
            self.is_trained = self.is_trained or any(p.requires_grad for p in layer.parameters())
            self._count_layer(layer, window_of(self._config, kind), of_source=of_source)
        for module, size in self.sizes.items():
            if module not in of_layers and module not in of_head:
                self._add(module, size)

    def _add(self, module: nn.Module, size: int) -> None:
        self.per_token += product_operations(module, size, has_gradient=self.is_trained)

    def _count_layer(self, layer: nn.Module, window: int | None, *, of_source: bool) -> None:
        passes = 3 if self.is_trained else 1
        for name, module in layer.named_modules():
            size = self.sizes.get(module, 0)
            is_cross = _CROSS.search(name) is not None
            if is_cross and _KEYS_VALUES.search(name):
                self.per_source_token += product_operations(module, size, has_gradient=of_source)
            else:
                self._add(module, size)
            if _QUERIES.search(name) and isinstance(module, nn.Linear):
                per_pair = 4 * module.out_features * passes
                if is_cross:
                    self.per_cross_pair += per_pair
                else:
                    self.pairs[window] += per_pair

    def all_pairs(self) -> Pairs:
        """Attention of the layers to the tokens of the same part."""
        return tuple((per_pair, window) for window, per_pair in self.pairs.items())


def _sizes(part: nn.Module) -> dict[nn.Module, int]:
    """{module: the multiplications that it makes per token} of the modules of *part* that make any."""
    found: dict[nn.Module, int] = {}
    for name, module in part.named_modules():
        # peft keeps the frozen original next to the copy that it trains. BERT's pooler sees one token, and no decoder
        # uses what it computes.
        if ".original_module" in f".{name}" or "pooler" in name:
            continue
        if isinstance(module, nn.Linear):
            found[module] = module.in_features * module.out_features
        elif isinstance(module, Conv1D):
            found[module] = module.weight.numel()
    return found
