"""The steps, the memory and the size of checkpoints that a recipe would need, without allocating its model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from automodel_ckpt.checkpoint import discover
from automodel_ckpt.checkpoint.discovery import classify
from automodel_ckpt.checkpoint.saving.forecast import (
    check_manifest_size,
    forecast_bytes,
    forecast_manifest_bytes,
)
from automodel_ckpt.checkpoint.saving.side_files import Assets
from automodel_ckpt.checkpoint.state.model_config import CONFIG
from automodel_ckpt.data.image_packing import PACK_IDS
from automodel_ckpt.distributed.mesh import RankLayout, device_type
from automodel_ckpt.distributed.mesh_sizes import Sizes, choose_strategy
from automodel_ckpt.distributed.parallelize import decoder_layers, untied_ends
from automodel_ckpt.models.activation_memory import (
    MIN_OFFLOADED_BYTES,
    HostActivations,
    noting_kept,
    without_checkpointing,
)
from automodel_ckpt.models.forward import model_without_adapters
from automodel_ckpt.models.fused_cross_entropy import CHUNK_ELEMENTS, peak_bytes
from automodel_ckpt.models.mtp import MultiTokenPrediction, mtp_of
from automodel_ckpt.models.pipeline_stage import parameters_of_ranks
from automodel_ckpt.recipes.exports import check_export
from automodel_ckpt.recipes.loop import steps_per_epoch
from automodel_ckpt.recipes.precision import resolve_precision
from automodel_ckpt.recipes.recipe import Recipe
from automodel_ckpt.recipes.trainable import activation_mode, compute_dtype, parallelism
from automodel_ckpt.training.metrics import PeakMemory
from automodel_ckpt.training.rng import StatefulRNG
from automodel_ckpt.training.step_scheduler import planned_end

log = logging.getLogger("automodel_ckpt")

# Measured by tools/bench_forecast.py: the heap keeps holes between long-lived tensors.
_HEAP = 1.5
_OF_TEXT = frozenset(
    {
        "input_ids",
        "labels",
        "attention_mask",
        "position_ids",
        "token_type_ids",
        "mm_token_type_ids",
        PACK_IDS,
    }
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at the peak of a step, by content.

    *process* is the memory of the process before the model exists. None: activations cannot be estimated.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int | None
    process: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        state = self.weights + self.gradients + self.optimizer
        return state + self.gathered + (self.activations or 0) + self.process


@dataclass(frozen=True, slots=True)
class Plan:
    """A forecast of a run. Steps are None if they are unknown; *checkpoint_bytes* is the size of one checkpoint.

    *end* describes what will end the run. *config_json* is the content of the model's config.json, None with adapters
    and for a model by ``_target_``.
    """

    model: str
    num_parameters: int
    num_trained: int
    steps: int | None
    steps_per_epoch: int | None
    memory: Memory
    checkpoint_bytes: int | None
    config_json: bytes | None = None
    end: str = ""


def plan(recipe: Recipe, sizes: Sizes) -> Plan:
    """Build *recipe* without weights for a mesh of *sizes*. Raises :class:`RecipeError` if it could not train."""
    recipe.is_dry_run = True
    # No process group: collectives return this rank's own values.
    # Nothing is allocated on the device, but it decides about data types.
    device = torch.device(device_type(recipe.config.distributed.backend))
    recipe.layout = RankLayout(0, sizes, 0, device, None)  # type: ignore[arg-type]
    recipe.config = resolve_precision(recipe.config, sizes, device.type)
    recipe.build()
    num_parameters, num_trained = 0, 0
    for parameter in recipe.model.parameters():
        num_parameters += parameter.numel()
        if parameter.requires_grad:
            num_trained += parameter.numel()
    memory = memory_of(recipe, sizes)
    is_saved = recipe.config.checkpoint.enabled
    assets = recipe.build_assets() if is_saved else {}
    return Plan(
        type(recipe.model).__name__,
        num_parameters,
        num_trained,
        recipe.step_scheduler.planned_steps,
        steps_per_epoch(recipe.dataloader),
        memory,
        _checkpoint_bytes(recipe, sizes, assets) if is_saved else None,
        assets["model"].files[CONFIG] if assets and recipe.config.peft is None else None,
        planned_end(recipe.step_scheduler.cadence, steps_per_epoch(recipe.dataloader)),
    )


def _checkpoint_bytes(recipe: Recipe, sizes: Sizes, assets: Mapping[str, Assets]) -> int:
    """Expected bytes of one checkpoint of this run. Raises :class:`RecipeError` where it could not be read back."""
    # setup() does this in a run. discover() below has to find it.
    recipe.rng = StatefulRNG(recipe.config.seed, recipe.layout.random_stream, sizes.grid)
    assets = recipe.build_assets()
    check_export(recipe.config.checkpoint, assets)
    items, num_shards = classify(discover(recipe)), _num_shards(recipe, sizes)
    save_optimizer = recipe.config.checkpoint.save_optimizer
    check_manifest_size(
        forecast_manifest_bytes(items, save_optimizer=save_optimizer, num_shards=num_shards)
    )
    return forecast_bytes(
        items,
        world_size=sizes.world,
        save_optimizer=save_optimizer,
        side_bytes=sum(each.nbytes for each in assets.values()),
        num_shards=num_shards,
    )


def _num_shards(recipe: Recipe, sizes: Sizes) -> int:
    """The number of shards of each parameter of a stage."""
    strategy = choose_strategy(recipe.config.distributed.strategy, sizes)
    return sizes.tp * (sizes.dp_shard * sizes.cp if strategy == "fsdp2" else 1)


def memory_of(recipe: Recipe, sizes: Sizes) -> Memory:
    """Estimate the memory of one rank: exact for parameters and optimizer, traced for activations.

    With pipeline stages, it is that of the largest stage, with the activations of as many micro-batches as the schedule
    has in progress on the first stage.
    """
    # What this process has allocated before the model is traced is about what a rank has before its model.
    process = PeakMemory(recipe.layout.device).nbytes
    parameters = _largest_stage(recipe.model, sizes.pp, recipe.config.distributed.stages_per_rank)
    num_shards = _num_shards(recipe, sizes)
    trained = [p for p in parameters if p.requires_grad]
    return Memory(
        nbytes(parameters) // num_shards,
        _gradient_bytes(recipe, trained, sizes),
        _optimizer_bytes(recipe, trained) // num_shards,
        _gathered_bytes(recipe, parameters, sizes),
        _activation_bytes(recipe, sizes),
        process,
    )


def _gradient_bytes(recipe: Recipe, trained: list[nn.Parameter], sizes: Sizes) -> int:
    """Bytes of the gradients of the *trained* parameters of a stage that a rank holds at one time.

    With ``defer_gradient_sync``, these are the gradients of complete parameters in the type that they are reduced in.
    Each is freed when its shard is made, in the last micro-batch of the step.
    """
    if not _defers(recipe, sizes):
        return nbytes(trained) // _num_shards(recipe, sizes)
    # Micro-batches are summed in the type that gradients are reduced in.
    reduced_in = torch.float32 if compute_dtype(recipe.config.distributed) else None
    return _bytes_in(reduced_in, trained) // sizes.tp


def _optimizer_bytes(recipe: Recipe, trained: list[nn.Parameter]) -> int:
    """Bytes of the optimizers' state of the *trained* parameters of a stage."""
    all_trained = [p for p in recipe.model.parameters() if p.requires_grad]
    share = nbytes(trained) / max(nbytes(all_trained), 1)
    optimizers = [item for item in classify(discover(recipe)) if item.kind == "optimizer"]
    without_state = forecast_bytes([], world_size=1, save_optimizer=True)
    with_state = forecast_bytes(optimizers, world_size=1, save_optimizer=True)
    return int((with_state - without_state) * share)


def _gathered_bytes(recipe: Recipe, parameters: list[nn.Parameter], sizes: Sizes) -> int:
    """Bytes of the parameters that fsdp2 gathers at one time, in the type that they are computed in; 0 for other
    strategies."""
    section = recipe.config.distributed
    if choose_strategy(section.strategy, sizes) != "fsdp2":
        return 0
    of_stage = set(map(id, _gathered(recipe, parameters, sizes)))
    dtype = compute_dtype(section)
    layers = []
    for layer in decoder_layers(recipe.model):
        layers.append(_bytes_in(dtype, (p for p in layer.parameters() if id(p) in of_stage)))
    complete = _bytes_in(dtype, (p for p in parameters if id(p) in of_stage))
    of_embeddings = 0
    for embedding in untied_ends(recipe.model)[0]:
        of_embeddings += _bytes_in(dtype, (p for p in embedding.parameters() if id(p) in of_stage))
    rest = complete - sum(layers) - of_embeddings
    # A layer and the prefetched next one, or the embedding, with the rest of the model.
    window = rest + max(2 * max(layers, default=0), of_embeddings)
    kept = complete if _defers(recipe, sizes) else window
    # Besides the parameters, the buffer of the collective that they are copied out of, and their gradients.
    return kept + 2 * window


def _gathered(recipe: Recipe, parameters: list[nn.Parameter], sizes: Sizes) -> list[nn.Parameter]:
    """Those of *parameters* that fsdp2 gathers or casts; on one rank, only those that are not in the compute type."""
    section = recipe.config.distributed
    dtype = compute_dtype(section)
    if sizes.world > 1 or section.cpu_offload or dtype is None:
        return parameters
    return [parameter for parameter in parameters if parameter.dtype != dtype]


def _bytes_in(dtype: torch.dtype | None, parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of *parameters* in *dtype*; None: in their types."""
    if dtype is None:
        return nbytes(parameters)
    return dtype.itemsize * sum(parameter.numel() for parameter in parameters)


def _defers(recipe: Recipe, sizes: Sizes) -> bool:
    """Whether micro-batches before the last one of a step keep the gradients and the parameters of fsdp2 unsharded."""
    section, steps = recipe.config.distributed, recipe.config.step_scheduler
    accumulates = steps.global_batch_size > steps.local_batch_size * sizes.dp
    is_sharded = choose_strategy(section.strategy, sizes) == "fsdp2"
    return is_sharded and accumulates and section.defer_gradient_sync


def _activation_bytes(recipe: Recipe, sizes: Sizes) -> int | None:
    """Bytes of the activations of all micro-batches in progress; None if they are unknown."""
    rows, length, images = micro_batch_shape(recipe)
    if not rows:
        return None
    is_sequence_parallel = recipe.config.distributed.sequence_parallel
    num_parts = recipe.layout.num_row_parts(sequence_parallel=is_sequence_parallel)
    tokens_per_row = -(-length // num_parts)
    activations = traced_activations(recipe, rows, tokens_per_row, images)
    if activations is None:
        return None
    return activations * _num_in_progress(recipe, sizes) // sizes.pp


def _largest_stage(model: nn.Module, num_ranks: int, stages_per_rank: int) -> list[nn.Parameter]:
    """The parameters of the rank of a pipeline that has most of them."""
    if num_ranks == 1:
        return list(model.parameters())
    return max(parameters_of_ranks(model, num_ranks, stages_per_rank), key=nbytes)


def _num_in_progress(recipe: Recipe, sizes: Sizes) -> int:
    """The largest number of micro-batches whose activations a stage has at one time."""
    if sizes.pp == 1:
        return 1
    steps = recipe.config.step_scheduler
    num_micro_batches = steps.global_batch_size // (steps.local_batch_size * sizes.dp)
    section = recipe.config.distributed
    if section.pp_schedule == "1f1b":
        return min(num_micro_batches, sizes.pp)
    if section.pp_schedule == "interleaved1f1b":
        # The first rank starts this many forward passes of a stage before its first backward pass ends.
        per_rank = section.stages_per_rank
        num_passes = (per_rank - 1) * sizes.pp + 2 * (sizes.pp - 1) + 1
        return min(num_micro_batches, -(-num_passes // per_rank))
    return num_micro_batches


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of all elements of *tensors*."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def row_tokens(recipe: Recipe) -> tuple[int, int] | None:
    """(rows, tokens per row) of a full micro-batch; None if the recipe does not determine the length of samples."""
    packed, rows = recipe.config.packed_sequence, recipe.config.step_scheduler.local_batch_size
    length = packed.size if packed is not None else recipe.config.dataset.kwargs.get("seq_length")
    return None if length is None else (rows, int(length))


def micro_batch_shape(recipe: Recipe) -> tuple[int, int, Mapping[str, torch.Tensor]]:
    """(rows, tokens per row, other inputs than tokens) of a micro-batch; 0 rows if they are unknown.

    It is a full micro-batch; if the recipe does not determine the length of samples, or has images, the first one.
    """
    known = row_tokens(recipe)
    if known is not None and not hasattr(recipe, "processor"):
        return *known, {}
    loader = recipe.dataloader
    try:
        size = recipe.config.step_scheduler.local_batch_size
        samples = [loader.dataset[number] for number in range(size)]
        batch = loader.collate_fn(samples)
        rows, length = batch["input_ids"].shape
        if known is not None and PACK_IDS in batch:
            # The batch has a row per sample; the model gets packs.
            rows, length = known
    except Exception as error:  # a stream, or samples that only a user's collate_fn understands
        log.debug("the first samples make no micro-batch: %r", error)
        return *(known or (0, 0)), {}
    return rows, length, {name: value for name, value in batch.items() if name not in _OF_TEXT}


def traced_activations(
    recipe: Recipe, rows: int, length: int, images: Mapping[str, torch.Tensor]
) -> int | None:
    """Bytes that a forward pass saves for the backward pass, and the logits, traced with tensors without values.

    None for a model whose forward pass needs values.
    """
    backbone = _traced_part(recipe.model)
    tokens = {"input_ids": torch.zeros(1, length, dtype=torch.long)}
    try:
        options = recipe.trainable.forward_options
        host = None
        if activation_mode(recipe.config.model) == "offload":
            host = HostActivations(torch.device("cpu"), MIN_OFFLOADED_BYTES // rows)
        saved = _saved_tensors(backbone, tokens, options, host)
        with without_checkpointing(recipe.model):
            unchecked = _saved_tensors(backbone, tokens, options)
        of_images = 0
        if images:
            of_images = _saved_tensors(_ImageFeatures(backbone), images, {}).nbytes
    except Exception as error:
        log.debug("the activations cannot be traced: %r", error)
        return None
    head = getattr(recipe.model, "get_output_embeddings", lambda: None)()
    of_loss = 0
    if isinstance(head, nn.Linear):
        layers = mtp_of(model_without_adapters(recipe.model))
        num_outputs = 1 if layers is None else 1 + layers.num_depths
        of_loss = _bytes_of_loss(recipe, head, rows * length * num_outputs)
    num_layers = max(len(decoder_layers(recipe.model)), 1)
    dtype_ratio = 1.0
    compute_dtype = parallelism(recipe.config.distributed).compute_dtype
    if compute_dtype is not None:
        dtype_ratio = compute_dtype.itemsize / next(recipe.model.parameters()).element_size()
    # The backward pass of a layer needs about as much again as its forward pass saved without checkpointing.
    one_layer = unchecked.nbytes / num_layers
    # Of offloaded activations, that of a layer and the one that is copied at the same time are on the device.
    in_copies = 2 * saved.offloaded_bytes / num_layers
    total = ((saved.nbytes + in_copies + one_layer) * rows + of_images) * dtype_ratio + of_loss
    if torch.cuda.is_available():
        return int(total)
    # On a CPU, short-lived tensors leave holes in the heap between long-lived ones (tools/bench_forecast.py).
    return int(_HEAP * total)


def _traced_part(model: Any) -> nn.Module:
    """The part of a model whose activations are traced: without the output layer, with the layers of further tokens."""
    backbone: nn.Module = getattr(model, "base_model", model)
    layers = mtp_of(model_without_adapters(model))
    if layers is None or layers in set(backbone.modules()):
        return backbone
    return _WithDepths(backbone, layers)


class _WithDepths(nn.Module):
    """A model without its output layer, and its layers that predict further tokens."""

    def __init__(self, backbone: nn.Module, layers: MultiTokenPrediction) -> None:
        super().__init__()
        self.backbone, self.layers = backbone, layers

    def forward(self, input_ids: torch.Tensor, **options: Any) -> list[torch.Tensor]:
        backbone: Any = self.backbone
        hidden = backbone(input_ids=input_ids, **options).last_hidden_state
        found: list[torch.Tensor] = self.layers(
            hidden, backbone.get_input_embeddings()(input_ids), {}
        )
        return found

    def get_image_features(self, **images: torch.Tensor) -> Any:
        return self.backbone.get_image_features(**images)  # type: ignore[operator]


def _bytes_of_loss(recipe: Recipe, head: nn.Linear, num_positions: int) -> int:
    """Bytes that the loss head needs beside its inputs and gradients."""
    if not torch.cuda.is_available():
        # A chunk of logits and its gradient in float32: 8 bytes for each.
        return 8 * min(num_positions * head.out_features, CHUNK_ELEMENTS["cpu"])
    dtype = parallelism(recipe.config.distributed).compute_dtype or head.weight.dtype
    return peak_bytes(
        num_positions,
        head.out_features,
        head.in_features,
        dtype,
        "cuda",
        trains_weight=head.weight.requires_grad,
    )


class _ImageFeatures(nn.Module):
    """The part of a multimodal model that computes the features of images for its text layers."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, **images: torch.Tensor) -> Any:
        return self.backbone.get_image_features(**images)  # type: ignore[operator]


def _saved_tensors(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    options: Mapping[str, Any],
    host: HostActivations | None = None,
) -> _SavedTensors:
    """What is saved for the backward pass in a forward pass of *model*, without its parameters and buffers.

    *host* decides what is offloaded; None: nothing.
    """
    with FakeTensorMode():
        own: dict[str, torch.Tensor] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            own[name] = torch.empty(
                tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad
            )
        fake_inputs: dict[str, torch.Tensor] = {}
        for name, tensor in inputs.items():
            fake_inputs[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        saved = _SavedTensors(own.values(), host)
        hooks = torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor)
        with hooks, noting_kept(saved.note):
            torch.func.functional_call(model, own, kwargs={**fake_inputs, **options})
    return saved


class _SavedTensors:
    """Counts the bytes of each storage that autograd saves, once, without the storages of *own* tensors.

    What *host* offloads is counted separately.
    """

    def __init__(self, own: Iterable[torch.Tensor], host: HostActivations | None = None) -> None:
        # References keep the storages alive: otherwise a new one could get the address of a freed one.
        self._storages: list[Any] = [tensor.untyped_storage() for tensor in own]
        self._seen = {storage._cdata for storage in self._storages}
        self._host = host
        self.nbytes = 0
        self.offloaded_bytes = 0

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count *tensor*, which autograd saves, and return it."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return tensor
        self._seen.add(storage._cdata)
        self._storages.append(storage)
        if self._host is not None and self._host.is_offloaded(tensor):
            self.offloaded_bytes += storage.nbytes()
        else:
            self.nbytes += storage.nbytes()
        return tensor
