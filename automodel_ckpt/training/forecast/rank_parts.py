"""Which part of each parameter a rank stores, and which part of it fsdp2 gathers for a computation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from automodel_ckpt.config.callables.plugins import build
from automodel_ckpt.data.media.image_packing import PACK_IDS
from automodel_ckpt.models.layers.quantized_linear import num_bytes
from automodel_ckpt.models.loss.loss_head import output_layer
from automodel_ckpt.models.quantize import type_beside_quantized
from automodel_ckpt.parallel.expert_parallel import experts_of
from automodel_ckpt.parallel.mesh_sizes import choose_strategy
from automodel_ckpt.parallel.tensor_parallel import plan_for
from automodel_ckpt.training.model.sections import (
    compute_dtype,
    is_fully_sharded,
    num_micro_batches,
)

log = logging.getLogger("automodel_ckpt")

Parameters = Iterable[Tensor]


def nbytes(tensors: Parameters) -> int:
    """Return the size of all *tensors* together, in bytes."""
    return sum(tensor.nbytes for tensor in tensors)


class RankParts:
    """The parts of a dry run's *recipe* on a rank of its layout: the model is complete, on the meta device.

    A rank computes with the parts that tensor parallelism leaves, and fsdp2 divides these into *num_shards*.
    """

    def __init__(self, recipe: Any) -> None:
        self.recipe, self.sizes, section = recipe, recipe.layout.sizes, recipe.config.distributed
        sizes = self.sizes
        self.is_sharded = is_fully_sharded(recipe.config, recipe.layout)
        self.num_shards = sizes.dp_shard * sizes.cp if self.is_sharded else 1
        self.on_gpu = recipe.layout.device.type == "cuda"
        self.dtype = compute_dtype(section)
        self.accumulates = num_micro_batches(recipe.config, sizes.dp) > 1
        self.defers = self.is_sharded and self.accumulates and section.defer_gradient_sync
        """Whether micro-batches before the last one of a step keep gradients and parameters of fsdp2 unsharded."""
        self.has_buckets = choose_strategy(section.strategy, sizes) == "ddp"
        """Whether ranks sum up gradients in buckets, as DistributedDataParallel does."""
        self.shapes = _tensor_parallel_shapes(recipe) if sizes.tp > 1 else {}
        """The shapes of the parameters, by id, that tensor parallelism divides."""
        self.itemsizes = quantized_itemsizes(recipe)
        """Bytes of a stored element, by the ids of parameters that have another dtype in a run."""
        self._experts: set[int] = set()
        if sizes.ep > 1:
            for module in experts_of(recipe.model).values():
                self._experts.update(id(parameter) for parameter in module.parameters())

    def shape(self, parameter: Tensor) -> torch.Size:
        """The shape of *parameter* that a rank computes with."""
        return self.shapes.get(id(parameter), parameter.shape)

    def computed_bytes(self, parameters: Parameters, dtype: torch.dtype | None = None) -> int:
        """Bytes of *parameters* that a rank computes with, in *dtype*, by default in their own dtypes."""
        total = 0
        for parameter in parameters:
            nbytes = self.shape(parameter).numel() * (dtype or parameter.dtype).itemsize
            if id(parameter) in self.itemsizes:
                # It is gathered as it is stored.
                nbytes = int(parameter.numel() * self.itemsizes[id(parameter)])
            # A rank gathers one of ep parts of the experts.
            total += nbytes // self.sizes.ep if id(parameter) in self._experts else nbytes
        return total

    def stored_bytes(self, parameters: Parameters) -> int:
        """Bytes of *parameters* that a rank stores."""
        total = 0.0
        for parameter in parameters:
            itemsize = self.itemsizes.get(id(parameter), parameter.dtype.itemsize)
            total += self.shape(parameter).numel() * itemsize
        return int(total) // self.num_shards

    def dequantized_bytes(self, parameters: Parameters) -> int:
        """Bytes of the largest of *parameters* that a pass dequantizes from 4 bits: one at a time."""
        largest = 0
        for parameter in parameters:
            if self.itemsizes.get(id(parameter), 1.0) < 1:
                itemsize = (self.dtype or parameter.dtype).itemsize
                largest = max(largest, parameter.numel() * itemsize)
        return largest


def quantized_layers(recipe: Any) -> list[nn.Linear]:
    """The layers that ``peft.quantize_base`` quantizes when the base is read: all but the output layer."""
    section = recipe.config.peft
    if section is None or section.quantize_base is None:
        return []
    head = output_layer(recipe.model)
    outputs = set() if head is None else set(head.modules())
    found = []
    for module in recipe.model.modules():
        if type(module) is not nn.Linear or module in outputs:
            continue
        if not module.weight.requires_grad:
            found.append(module)
    return found


def quantized_itemsizes(recipe: Any) -> dict[int, float]:
    """Bytes of an element of the frozen parameters of a quantized base that have another type in a run, by id.

    Empty for other models. bitsandbytes (8 bits) has other types for what it does not quantize, too.
    """
    layers = quantized_layers(recipe)
    if not layers:
        return {}
    section = recipe.config.peft
    assert section is not None
    weights = {id(layer.weight): layer.weight.numel() for layer in layers}
    if section.quantize_base != "int8":
        return {key: num_bytes(size) / size for key, size in weights.items()}
    found: dict[int, float] = {}
    for parameter in recipe.model.parameters():
        if id(parameter) in weights:
            found[id(parameter)] = 1.0
        elif not parameter.requires_grad:
            found[id(parameter)] = float(type_beside_quantized(parameter.dtype).itemsize)
    return found


def _tensor_parallel_shapes(recipe: Any) -> dict[int, torch.Size]:
    """The shapes of the parameters, by id, that the plan of tensor parallelism divides."""
    model, section, size = recipe.model, recipe.config.distributed, recipe.layout.sizes.tp
    given = build(section.tp_plan, model=model) if section.tp_plan is not None else None
    shapes: dict[int, torch.Size] = {}
    for name, style in plan_for(model, given, size).items():
        is_rowwise = isinstance(style, RowwiseParallel)
        if not is_rowwise and not isinstance(style, ColwiseParallel):
            continue
        module = model.get_submodule(name)
        # The weight of an embedding has the rows and columns of a transposed layer.
        dim = int(is_rowwise != isinstance(module, nn.Embedding))
        for parameter in module.parameters(recurse=False):
            # A bias of a rowwise layer is added to the sum over the ranks.
            if parameter.dim() > 1 or not is_rowwise:
                shape = list(parameter.shape)
                at = min(dim, parameter.dim() - 1)
                shape[at] = -(-shape[at] // size)
                shapes[id(parameter)] = torch.Size(shape)
    return shapes


_OF_TEXT = {"input_ids", "labels", "attention_mask", "position_ids", "token_type_ids"}
_OF_TEXT |= {"mm_token_type_ids", PACK_IDS}


@dataclass(frozen=True)
class MicroBatchShape:
    """The rows of a micro-batch, the tokens of a row, and the inputs other than tokens, by name (images).

    Rows of an encoder-decoder have the tokens of a source, and *targets_per_row* tokens of a target.
    """

    rows: int
    tokens_per_row: int
    targets_per_row: int | None = None
    images: Mapping[str, Tensor] = field(default_factory=dict)


def micro_batch_shape(recipe: Any) -> MicroBatchShape | None:
    """The shape of a full micro-batch. Returns None when it is unknown.

    Its samples are as long as the recipe allows. Their number of rows is taken from the first micro-batch: a pair of
    answers has two. Their length is also taken from it if they have images, or if the recipe does not determine it.
    """
    packed, rows = recipe.config.packed_sequence, recipe.config.step_scheduler.local_batch_size
    arguments = recipe.config.dataset.kwargs
    longest = packed.size if packed is not None else arguments.get("seq_length")
    has_targets = getattr(recipe.model_config, "is_encoder_decoder", False)
    target_length = (arguments.get("target_length") or longest) if has_targets else None
    has_images = hasattr(recipe, "processor")
    is_known = longest is not None and packed is not None and not has_images
    batch = None if is_known else _first_micro_batch(recipe)
    if batch is None:
        return None if longest is None else MicroBatchShape(rows, int(longest), target_length)
    if longest is not None and not has_images:
        rows = max(rows, len(batch["input_ids"]))
        return MicroBatchShape(rows, int(longest), target_length)
    length = batch["input_ids"].shape[1]
    if longest is None or PACK_IDS not in batch:
        # A batch of packs has a row per sample; the model gets packs.
        rows, longest = len(batch["input_ids"]), length
    images = {name: value for name, value in batch.items() if name not in _OF_TEXT}
    targets = batch["labels"].shape[1] if has_targets else None
    return MicroBatchShape(rows, int(longest), targets, images)


def _first_micro_batch(recipe: Any) -> Mapping[str, Tensor] | None:
    """The first samples of the training data, collated.

    Returns None for streams, and for samples that cannot be collated here.
    """
    loader = recipe.dataloader
    try:
        size = recipe.config.step_scheduler.local_batch_size
        samples = [loader.dataset[number] for number in range(size)]
        batch: Mapping[str, Tensor] = loader.collate_fn(samples)
    except Exception as error:
        log.debug("the first samples make no micro-batch: %r", error)
        return None
    return batch
