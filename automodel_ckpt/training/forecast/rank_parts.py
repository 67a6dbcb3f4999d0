"""Which part of each parameter a rank stores, and which part of it fsdp2 gathers for a computation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from automodel_ckpt.config.callables.plugins import build
from automodel_ckpt.models.loss.loss_head import output_layer
from automodel_ckpt.models.quantize import type_beside_quantized
from automodel_ckpt.parallel.expert_parallel import experts_of
from automodel_ckpt.parallel.tensor_plan import plan_for
from automodel_ckpt.training.model.sections import is_fully_sharded


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the size of all *tensors* together, in bytes."""
    return sum(tensor.nbytes for tensor in tensors)


_BYTES_IN_4_BITS = 0.5 + 1 / 64
"""Of an element: its bits, and its share of a scale of 8 bits for 64 elements."""


@dataclass(frozen=True)
class RankParts:
    """The parts of the parameters of a model that is complete, on the meta device.

    *shapes* are those of the parameters, by id, that tensor parallelism divides. A rank computes with the parts, and
    fsdp2 divides them into *num_shards*. *experts* are the parameters, by id, of which a rank gathers one of *ep*
    parts.
    """

    num_shards: int
    shapes: Mapping[int, torch.Size] = field(default_factory=dict)
    experts: frozenset[int] = frozenset()
    ep: int = 1
    itemsizes: Mapping[int, float] = field(default_factory=dict)
    """Bytes of an element that is stored, by the ids of parameters whose dtype is another one in a run."""

    def shape(self, parameter: torch.Tensor) -> torch.Size:
        """The shape of *parameter* that a rank computes with."""
        return self.shapes.get(id(parameter), parameter.shape)

    def computed_bytes(
        self, parameters: Iterable[torch.Tensor], dtype: torch.dtype | None = None
    ) -> int:
        """Bytes of *parameters* that a rank computes with, in *dtype*; None: in their own dtypes."""
        total = 0
        for parameter in parameters:
            nbytes = self.shape(parameter).numel() * (dtype or parameter.dtype).itemsize
            total += nbytes // self.ep if id(parameter) in self.experts else nbytes
        return total

    def stored_bytes(self, parameters: Iterable[torch.Tensor]) -> int:
        """Bytes of *parameters* that a rank stores."""
        total = 0.0
        for parameter in parameters:
            itemsize = self.itemsizes.get(id(parameter), parameter.dtype.itemsize)
            total += self.shape(parameter).numel() * itemsize
        return int(total) // self.num_shards


def rank_parts(recipe: Any) -> RankParts:
    """The parts of the parameters of *recipe*'s model on a rank of its layout."""
    sizes = recipe.layout.sizes
    is_sharded = is_fully_sharded(recipe.config, recipe.layout)
    num_shards = sizes.dp_shard * sizes.cp if is_sharded else 1
    shapes = _tensor_parallel_shapes(recipe) if sizes.tp > 1 else {}
    experts: set[int] = set()
    if sizes.ep > 1:
        for module in experts_of(recipe.model).values():
            experts.update(id(parameter) for parameter in module.parameters())
    return RankParts(num_shards, shapes, frozenset(experts), sizes.ep, quantized_itemsizes(recipe))


def quantized_layers(recipe: Any) -> list[nn.Linear]:
    """The layers that ``peft.quantize_base`` quantizes when the base is read: all but the output layer."""
    section = recipe.config.peft
    if section is None or section.quantize_base is None:
        return []
    head = output_layer(recipe.model)
    outputs = set() if head is None else set(head.modules())
    found = []
    for module in recipe.model.modules():
        if not isinstance(module, nn.Linear) or module in outputs:
            continue
        if not module.weight.requires_grad:
            found.append(module)
    return found


def quantized_itemsizes(recipe: Any) -> dict[int, float]:
    """Bytes of an element of each frozen parameter of a quantized base, by id; empty for other models."""
    layers = quantized_layers(recipe)
    if not layers:
        return {}
    section = recipe.config.peft
    assert section is not None
    of_layers = 1.0 if section.quantize_base == "int8" else _BYTES_IN_4_BITS
    weights = {id(layer.weight) for layer in layers}
    found: dict[int, float] = {}
    for parameter in recipe.model.parameters():
        if id(parameter) in weights:
            found[id(parameter)] = of_layers
        elif not parameter.requires_grad:
            found[id(parameter)] = float(type_beside_quantized(parameter.dtype).itemsize)
    return found


def _tensor_parallel_shapes(recipe: Any) -> dict[int, torch.Size]:
    """The shapes of the parameters, by id, that the plan of tensor parallelism divides."""
    model, section, size = recipe.model, recipe.config.distributed, recipe.layout.sizes.tp
    given = build(section.tp_plan, model=model) if section.tp_plan is not None else None
    shapes: dict[int, torch.Size] = {}
    for name, style in plan_for(model, given, size).items():
        module = model.get_submodule(name)
        dim = _divided_dim(module, style)
        if dim is None:
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 1 and isinstance(style, RowwiseParallel):
                # A bias is added to the sum over the ranks.
                continue
            shape = list(parameter.shape)
            at = min(dim, parameter.dim() - 1)
            shape[at] = -(-shape[at] // size)
            shapes[id(parameter)] = torch.Size(shape)
    return shapes


def _divided_dim(module: nn.Module, style: Any) -> int | None:
    """The dimension of the weight of *module* that *style* divides; None: none."""
    is_lookup = isinstance(module, nn.Embedding)
    if isinstance(style, ColwiseParallel):
        return 1 if is_lookup else 0
    if isinstance(style, RowwiseParallel):
        return 0 if is_lookup else 1
    return None
