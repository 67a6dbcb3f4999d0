"""The steps, the memory and the size of checkpoints that a recipe would need, without allocating its model."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.data.image_packing import PACK_IDS
from automodel_ckpt.distributed.mesh import RankLayout, device_type
from automodel_ckpt.distributed.mesh_sizes import Sizes, choose_strategy
from automodel_ckpt.distributed.parallelize import decoder_layers, untied_ends
from automodel_ckpt.models.activation_memory import HostActivations
from automodel_ckpt.models.forward import model_without_adapters
from automodel_ckpt.models.fused_cross_entropy import CHUNK_ELEMENTS, peak_bytes
from automodel_ckpt.models.mtp import MultiTokenPrediction, mtp_of
from automodel_ckpt.models.pipeline_stage import parameters_of_ranks
from automodel_ckpt.recipes.base_commit import pin_base
from automodel_ckpt.recipes.exports import check_export, check_uploads
from automodel_ckpt.recipes.loop import steps_per_epoch
from automodel_ckpt.recipes.memory_advice import (
    Candidate,
    first_that_fits,
    fits,
    larger_batches,
    smaller,
)
from automodel_ckpt.recipes.precision import resolve_precision
from automodel_ckpt.recipes.recipe import Recipe
from automodel_ckpt.recipes.step_trace import HeadMemory, StepTrace, checkpointing, traced_step
from automodel_ckpt.recipes.trainable import activation_mode, compute_dtype
from automodel_ckpt.recipes.weight_average import average_bytes
from automodel_ckpt.training.metrics import PeakMemory
from automodel_ckpt.training.rng import StatefulRNG
from automodel_ckpt.training.step_scheduler import planned_end

log = logging.getLogger("automodel_ckpt")

# Measured by tools/bench_forecast.py: the heap keeps holes between long-lived tensors.
_HEAP = 2.2
_RUNTIME_BYTES = 30 * 10**6
"""What a process on a CPU allocates for threads, kernels and data after its start."""
_CONTEXT_BYTES = 600 * 2**20
"""A process's share of a GPU before the first tensor: the CUDA context, and the workspace of matrix products."""
_COMMUNICATION_BYTES = 2**30
"""The buffers of NCCL on a rank that communicates with others."""
_BLOCKS = 1.03
"""CUDA's caching allocator rounds sizes up, and keeps parts of blocks that no tensor fits in."""
_NUM_TRACED = 2
_SMALL_LOGITS = 8
"""On a CPU, up to an eighth of a chunk of logits is computed without chunks."""
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

    *average* is that of the section ``ema``, *others* are the weights of models that are not trained. *process* is the
    memory of the process before the model exists. None: activations cannot be estimated.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int | None
    process: int
    average: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        state = self.weights + self.gradients + self.optimizer + self.average + self.others
        return state + self.gathered + (self.activations or 0) + self.process


@dataclass(frozen=True, slots=True)
class ForecastDevice:
    """The device that a forecast is for: its *type*, ``cuda`` or ``cpu``, and its memory; None: not limited."""

    type: str
    nbytes: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """Whether a run fits into the memory of its device, and other settings to paste after the command.

    *overrides* are the first settings that fit if the run does not, empty if none was found; or the largest local batch
    size that fits if the run does, empty if it is the recipe's. *memory* is the forecast with them.
    """

    fits: bool
    overrides: tuple[str, ...] = ()
    memory: Memory | None = None


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
    device: ForecastDevice | None = None
    advice: Advice | None = None
    """Whether the memory of the device suffices, and other settings; None if this is unknown."""


def device_here(recipe: Recipe) -> ForecastDevice:
    """The device that *recipe* would train on here: the GPU of this machine, or its CPU."""
    if device_type(recipe.config.distributed.backend) == "cpu":
        return ForecastDevice("cpu")
    properties = torch.cuda.get_device_properties(0)
    return ForecastDevice("cuda", properties.total_memory, properties.name)


def plan(recipe: Recipe, sizes: Sizes, device: ForecastDevice | None = None) -> Plan:
    """Build *recipe* without weights for a mesh of *sizes*, and forecast what it needs on *device*, by default that of
    this machine. Raises :class:`RecipeError` if it could not train."""
    device = device or device_here(recipe)
    recipe.is_dry_run = True
    # No process group: collectives return this rank's own values.
    # Nothing is allocated on the device, but it decides about data types.
    recipe.layout = RankLayout(0, sizes, 0, torch.device(device.type), None)  # type: ignore[arg-type]
    given = recipe.config
    recipe.config = resolve_precision(given, sizes, device.type)
    recipe.check_metric_keys()
    recipe.check_benchmarks()
    check_uploads(recipe.config)
    recipe.config = pin_base(recipe.config)
    recipe.build()
    recipe.build_weight_average()
    num_parameters, num_trained = 0, 0
    for parameter in recipe.model.parameters():
        num_parameters += parameter.numel()
        if parameter.requires_grad:
            num_trained += parameter.numel()
    memory = memory_of(recipe, sizes, device.type)
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
        device,
        advice_for(recipe, given, sizes, device, memory),
    )


def _checkpoint_bytes(recipe: Recipe, sizes: Sizes, assets: Mapping[str, Assets]) -> int:
    """Expected bytes of one checkpoint of this run. Raises :class:`RecipeError` where it could not be read back."""
    # setup() does this in a run. discover() below has to find it.
    recipe.rng = StatefulRNG(recipe.config.seed, recipe.layout.random_stream, sizes.grid)
    assets = recipe.build_assets()
    check_export(recipe.config, assets)
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


def memory_of(recipe: Recipe, sizes: Sizes, device_type: str) -> Memory:
    """Estimate the memory of one rank: exact for parameters and optimizer, traced for activations.

    The peak is in the backward pass or in the optimizer's step. With pipeline stages, it is that of the largest stage,
    with the activations of as many micro-batches as the schedule has in progress on the first stage.
    """
    # First: what this process has allocated before the model is traced is about what a rank has before its model.
    process = _process_bytes(sizes, device_type)
    parameters = _largest_stage(recipe.model, sizes.pp, recipe.config.distributed.stages_per_rank)
    num_shards = _num_shards(recipe, sizes)
    trained = [p for p in parameters if p.requires_grad]
    memory = Memory(
        nbytes(parameters) // num_shards,
        _gradient_bytes(recipe, trained, sizes),
        _optimizer_bytes(recipe, trained) // num_shards,
        _gathered_bytes(recipe, parameters, sizes),
        _activation_bytes(recipe, sizes, device_type),
        process,
        average_bytes(parameters) // num_shards if recipe.weight_average is not None else 0,
        sum(nbytes(model.parameters()) for model in recipe.other_models()) // num_shards,
    )
    temporary = _bytes_of_optimizer_step(recipe, trained, device_type) // num_shards
    if memory.activations is not None and memory.activations + memory.gathered < temporary:
        memory = replace(memory, activations=temporary - memory.gathered)
    if recipe.config.distributed.cpu_offload:
        memory = replace(memory, weights=0, gradients=0, optimizer=0, average=0, others=0)
    return memory


def _process_bytes(sizes: Sizes, device_type: str) -> int:
    """What a rank has allocated before its model."""
    if device_type == "cuda":
        return _CONTEXT_BYTES + (_COMMUNICATION_BYTES if sizes.world > 1 else 0)
    return PeakMemory(torch.device("cpu")).nbytes + _RUNTIME_BYTES


def _bytes_of_optimizer_step(recipe: Recipe, trained: list[nn.Parameter], device_type: str) -> int:
    """Bytes of the tensors that exist during the optimizer's step only.

    On a GPU, torch's optimizers process all parameters in one operation, with a temporary tensor for each, unless they
    are fused.
    """
    if device_type != "cuda" or type(recipe.optimizer).__module__.startswith("automodel_ckpt"):
        return 0
    options = recipe.optimizer.defaults
    is_fused = bool(options.get("fused"))
    is_multi_tensor = "foreach" in options and options["foreach"] is not False
    return nbytes(trained) if is_multi_tensor and not is_fused else 0


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


def _activation_bytes(recipe: Recipe, sizes: Sizes, device_type: str) -> int | None:
    """Bytes of the activations of all micro-batches in progress, and of temporary tensors; None if they are unknown.

    Gradients do not count. Without accumulation, they take the place of activations in the course of a backward pass.
    """
    rows, length, images = micro_batch_shape(recipe)
    if not rows:
        return None
    is_sequence_parallel = recipe.config.distributed.sequence_parallel
    num_parts = recipe.layout.num_row_parts(sequence_parallel=is_sequence_parallel)
    tokens_per_row = -(-length // num_parts)
    trace = _trace(recipe, rows, tokens_per_row)
    if trace is None:
        return None
    of_images = _image_bytes(recipe, images) if images else 0
    if of_images is None:
        return None
    head = _head_memory(recipe, rows * tokens_per_row, device_type)
    if sizes.tp * sizes.pp > 1 or _is_sharded(recipe):
        # Ranks keep their shards of gradients, which count elsewhere.
        activations = trace.later_peak(head)
    else:
        steps = recipe.config.step_scheduler
        activations = trace.peak(head) - trace.gradients - head.gradient_bytes
        if steps.global_batch_size > steps.local_batch_size * sizes.dp:
            activations = max(activations, trace.later_peak(head))
    activations = (activations + of_images) * _num_in_progress(recipe, sizes) // sizes.pp
    # On a CPU, short-lived tensors leave holes in the heap between long-lived ones (tools/bench_forecast.py).
    return int(activations * (_BLOCKS if device_type == "cuda" else _HEAP))


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


_traces: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], StepTrace | None]] = (
    weakref.WeakKeyDictionary()
)


def _trace(recipe: Recipe, rows: int, length: int) -> StepTrace | None:
    """The trace of a step with *rows* of *length* tokens; None for a model whose forward pass needs values.

    Two numbers of rows are traced for a length, and others computed from these.
    """
    known = _traces.setdefault(recipe.model, {})
    kind = (length, activation_mode(recipe.config.model), _is_sharded(recipe))
    if (rows, *kind) in known:
        return known[rows, *kind]
    others = {key[0]: trace for key, trace in known.items() if key[1:] == kind}
    if len(others) < _NUM_TRACED:
        known[rows, *kind] = found = _traced(recipe, rows, length)
        return found
    first, second = others
    start, end = others[first], others[second]
    if start is None or end is None:
        return None
    return start.between(end, (rows - first) / (second - first))


def _traced(recipe: Recipe, rows: int, length: int) -> StepTrace | None:
    backbone = _traced_part(recipe.model)
    tokens = {"input_ids": torch.zeros(rows, length, dtype=torch.long)}
    dtype = compute_dtype(recipe.config.distributed)
    is_autocast = dtype is not None and not _is_sharded(recipe)
    host = None
    if activation_mode(recipe.config.model) == "offload":
        host = HostActivations(torch.device("cpu"))
    try:
        return traced_step(
            backbone,
            tokens,
            recipe.trainable.forward_options,
            dtype=dtype,
            is_autocast=is_autocast,
            host=host,
        )
    except Exception as error:
        log.debug("the activations cannot be traced: %r", error)
        return None


def _image_bytes(recipe: Recipe, images: Mapping[str, torch.Tensor]) -> int | None:
    """Bytes that are saved for the backward pass of the features of *images*; None if they are unknown."""
    model = model_without_adapters(recipe.model)
    try:
        return _saved_bytes(_ImageFeatures(getattr(model, "base_model", model)), images, {})
    except Exception as error:
        log.debug("the features of images cannot be traced: %r", error)
        return None


def _is_sharded(recipe: Recipe) -> bool:
    return choose_strategy(recipe.config.distributed.strategy, recipe.layout.sizes) == "fsdp2"


def _head_memory(recipe: Recipe, num_positions: int, device_type: str) -> HeadMemory:
    """The memory of the output layer and the loss for *num_positions* tokens with labels."""
    head = getattr(recipe.model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear):
        return HeadMemory(0)
    dtype = compute_dtype(recipe.config.distributed) or head.weight.dtype
    is_trained = head.weight.requires_grad
    gradient = 0
    if is_trained and not _is_sharded(recipe):
        # With shards, it is among the gathered tensors.
        gradient = nbytes([head.weight])
    layers = mtp_of(model_without_adapters(recipe.model))
    if layers is not None:
        num_positions *= 1 + layers.num_depths
    num_logits = num_positions * head.out_features
    if device_type == "cpu" and _SMALL_LOGITS * num_logits <= CHUNK_ELEMENTS["cpu"]:
        # The logarithms of probabilities, their gradient, and that of the logits, in float32.
        return HeadMemory(3 * 4 * num_logits + gradient, gradient)
    chunks = peak_bytes(
        num_positions,
        head.out_features,
        head.in_features,
        dtype,
        device_type,
        trains_weight=is_trained,
    )
    return HeadMemory(chunks + gradient, gradient)


def _traced_part(model: Any) -> nn.Module:
    """The part of a model whose activations are traced: without the output layer, with the layers of further tokens."""
    model = model_without_adapters(model)
    backbone: nn.Module = getattr(model, "base_model", model)
    layers = mtp_of(model)
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


class _ImageFeatures(nn.Module):
    """The part of a multimodal model that computes the features of images for its text layers."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, **images: torch.Tensor) -> Any:
        return self.backbone.get_image_features(**images)  # type: ignore[operator]


def _saved_bytes(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], options: Mapping[str, Any]
) -> int:
    """Bytes that autograd saves in a forward pass of *model*, without those of its parameters and buffers."""
    with FakeTensorMode():
        own: dict[str, torch.Tensor] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            own[name] = torch.empty(
                tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad
            )
        fake_inputs: dict[str, torch.Tensor] = {}
        for name, tensor in inputs.items():
            fake_inputs[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        saved = _SavedTensors(own.values())
        with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
            torch.func.functional_call(model, own, kwargs={**fake_inputs, **options})
    return saved.nbytes


class _SavedTensors:
    """Counts the bytes of each storage that autograd saves, once, without the storages of *own* tensors."""

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        # References keep the storages alive: otherwise a new one could get the address of a freed one.
        self._storages: list[Any] = [tensor.untyped_storage() for tensor in own]
        self._seen = {storage._cdata for storage in self._storages}
        self.nbytes = 0

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count *tensor*, which autograd saves, and return it."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._storages.append(storage)
            self.nbytes += storage.nbytes()
        return tensor


def advice_for(
    recipe: Recipe, config: RecipeConfig, sizes: Sizes, device: ForecastDevice, memory: Memory
) -> Advice | None:
    """Find other settings of a dry run's *recipe* for the memory of *device*.

    *config* is the recipe as it was given, before its data types were resolved. Returns None if the memory of the
    device or that of the run is unknown.
    """
    if device.nbytes is None or memory.activations is None:
        return None
    forecasts: dict[tuple[str, ...], Memory] = {}

    def total_of(candidate: Candidate) -> int | None:
        changed = candidate.applied_to(recipe, device.type)
        with checkpointing(recipe.model, candidate.recomputes):
            forecast = memory_of(changed, candidate.sizes, device.type)
        forecasts[candidate.overrides] = forecast
        return None if forecast.activations is None else forecast.total

    if not fits(memory.total, device.nbytes):
        found = first_that_fits(smaller(config, recipe.model, sizes), total_of, device.nbytes)
        if found is None:
            return Advice(fits=False)
        return Advice(False, found.overrides, forecasts[found.overrides])
    largest: Candidate | None = None
    for candidate in larger_batches(config, sizes):
        total = total_of(candidate)
        if total is None or not fits(total, device.nbytes):
            break
        largest = candidate
    if largest is None:
        return Advice(fits=True)
    return Advice(True, largest.overrides, forecasts[largest.overrides])
