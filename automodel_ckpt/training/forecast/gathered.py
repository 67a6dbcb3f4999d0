"""The memory that fsdp2 needs at one time beside the shards: gathered parameters, their gradients, and buffers.

A group of parameters is gathered into one buffer, and copied out of it. The buffer is freed when the next group of a
forward pass is copied out; in the backward pass, right after the copy. The gradients of a group are copied into a
buffer of the type that they are reduced in, which is freed when the next group has its gradients. On one rank there are
no buffers, except for gradients that are copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from automodel_ckpt.parallel.model_layers import layers_after_input, separate_ends
from automodel_ckpt.parallel.precision import compute_dtype
from automodel_ckpt.training.forecast.rank_parts import RankParts
from automodel_ckpt.training.model.sections import is_fully_sharded, num_micro_batches


@dataclass(frozen=True, slots=True)
class Gathered:
    """Bytes in each phase of a micro-batch."""

    start: int = 0
    """While the input embedding computes, before there are activations."""
    forward: int = 0
    """While layers compute the forward pass."""
    loss: int = 0
    output: int = 0
    """In the backward pass of the output layer, with its gradient."""
    reduced_output: int = 0
    """While that gradient is reduced."""
    first_backward: int = 0
    """In the backward pass of the last layer, while the gradients of the output layer are reduced."""
    backward: int = 0
    """In the backward passes of the other layers."""
    last: int = 0
    """At the end of the backward pass, with the gradient of the embedding."""
    kept: int = 0
    """Layers that stay gathered: from their forward to their backward pass, or, with deferred gradients, from their
    backward pass to the forward pass of the next micro-batch. They are freed one after another."""
    is_deferred: bool = False
    of_layer: int = 0
    """Bytes of the gradients of the shards of the largest layer."""
    heap: int = 0
    """On a CPU, whose heap keeps what was freed: all that existed in any phase."""


class _Group(NamedTuple):
    """Bytes of modules that are gathered together: parameters, gradients, and gradients while they are reduced."""

    parameters: int = 0
    gradients: int = 0
    reduced: int = 0


def gathered_bytes(recipe: Any, parameters: list[nn.Parameter], parts: RankParts) -> Gathered:
    """What fsdp2 needs for the *parameters* of a rank; nothing for other strategies."""
    if not is_fully_sharded(recipe.config, recipe.layout):
        return Gathered()
    group = _grouping(recipe, parameters, parts)
    layers = [group(layer.parameters()) for layer in layers_after_input(recipe.model)]
    embeddings, outputs = separate_ends(recipe.model)
    embedding = group(each for module in embeddings for each in module.parameters())
    output = group(each for module in outputs for each in module.parameters())
    everything = group(parameters)
    parts_of_root = zip(everything, *layers, embedding, output, strict=True)
    root = _Group(*(total - sum(elsewhere) for total, *elsewhere in parts_of_root))
    layer = max(layers, key=lambda each: each.parameters, default=_Group())
    is_lookup = all(type(module) is nn.Embedding for module in embeddings)
    section = recipe.config.distributed
    has_buffers = parts.num_shards > 1
    reduces = has_buffers or section.cpu_offload
    buffer = int(has_buffers)
    # Several groups of a forward pass: the copy of one, its buffer, and the buffer of the next one.
    prefetched = buffer * max(layer.parameters, output.parameters)
    of_layers = layer.parameters * (1 + buffer) + prefetched
    of_embedding = embedding.parameters * (1 + buffer) + buffer * layer.parameters
    # The gradient of a tied output layer exists until the end.
    tied = root.gradients
    of_output = root.parameters + tied + output.gradients + buffer * layer.parameters
    reduced_output = output.reduced * reduces
    reduced_layer = layer.reduced * reduces
    backward = root.parameters + tied + layer.parameters * (1 + buffer) + layer.gradients
    reduced_embedding = max(
        reduced_layer, embedding.reduced + embedding.reduced * buffer // parts.num_shards
    )
    last = root.parameters + embedding.gradients + reduced_embedding * reduces
    if not is_lookup:
        last += embedding.parameters
    # A tied embedding: its gradients as an output layer and as an embedding, which are added.
    last_of_root = root.parameters + tied + max(tied, root.reduced * reduces)
    kept = 0
    if defers(recipe):
        kept = sum(each.parameters for each in layers) + output.parameters
    elif not section.reshard_after_forward:
        kept = sum(each.parameters for each in layers) + embedding.parameters
    return Gathered(
        start=root.parameters + of_embedding,
        forward=root.parameters + of_layers,
        loss=root.parameters + output.parameters * (1 + buffer),
        output=of_output + output.parameters,
        reduced_output=of_output + reduced_output,
        first_backward=backward + reduced_output,
        backward=backward + reduced_layer,
        last=max(last, last_of_root),
        kept=kept,
        is_deferred=defers(recipe),
        of_layer=layer.reduced // parts.num_shards,
        heap=_in_heap(everything, layers, embedding, is_deferred=defers(recipe)),
    )


def _grouping(
    recipe: Any, parameters: list[nn.Parameter], parts: RankParts
) -> Callable[[Iterable[nn.Parameter]], _Group]:
    """A function that returns the bytes of modules with some of the *parameters* of a rank."""
    section = recipe.config.distributed
    dtype = compute_dtype(section)
    # As in parallelize: gradients are summed over the ranks in float32.
    reduce_dtype = torch.float32 if dtype else None
    gathered = {id(each) for each in parameters}
    if parts.num_shards == 1 and not section.cpu_offload and dtype is not None:
        # On one rank, fsdp2 only casts.
        gathered = {id(each) for each in parameters if each.dtype != dtype}

    def group(some: Iterable[nn.Parameter]) -> _Group:
        those = [each for each in some if id(each) in gathered]
        trained = [each for each in those if each.requires_grad]
        return _Group(
            parts.computed_bytes(those, dtype),
            parts.computed_bytes(trained, dtype),
            parts.computed_bytes(trained, reduce_dtype),
        )

    return group


def _in_heap(
    everything: _Group, layers: list[_Group], embedding: _Group, *, is_deferred: bool
) -> int:
    """Bytes on a CPU: parameters that are gathered at one time, their buffer, and their gradients."""
    rest = everything.parameters - sum(each.parameters for each in (*layers, embedding))
    # A layer and the prefetched next one, with the rest of the model.
    of_layers = 2 * max((each.parameters for each in layers), default=0)
    window = rest + max(of_layers, embedding.parameters)
    return (everything.parameters if is_deferred else window) + 2 * window


def defers(recipe: Any) -> bool:
    """Whether micro-batches before the last one of a step keep the gradients and the parameters of fsdp2 unsharded."""
    config, layout = recipe.config, recipe.layout
    accumulates = num_micro_batches(config, layout.sizes.dp) > 1
    is_sharded = is_fully_sharded(config, layout)
    return is_sharded and accumulates and config.distributed.defer_gradient_sync
