"""What a recipe would do, counted without doing it: the model stays on the meta device, nothing is allocated."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
from automodel_ckpt.distributed.mesh import RankLayout
from automodel_ckpt.distributed.mesh_sizes import Sizes, choose_strategy
from automodel_ckpt.distributed.parallelize import decoder_layers
from automodel_ckpt.models.loss_head import CHUNK_ELEMENTS
from automodel_ckpt.models.pipeline_stage import parameters_of_stages
from automodel_ckpt.recipes.exports import check_export
from automodel_ckpt.recipes.recipe import Recipe
from automodel_ckpt.recipes.trainable import parallelism
from automodel_ckpt.training.metrics import PeakMemory
from automodel_ckpt.training.rng import StatefulRNG
from automodel_ckpt.training.step_scheduler import planned_end

log = logging.getLogger("automodel_ckpt")

_HEAP = 1.5
_OF_TEXT = frozenset(
    {"input_ids", "labels", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids"}
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at the peak of a step, by what they hold; on a GPU ``process`` is host memory, not counted."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int | None
    process: int

    @property
    def total(self) -> int:
        return sum(
            (
                self.weights,
                self.gradients,
                self.optimizer,
                self.gathered,
                self.activations or 0,
                self.process,
            )
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A run before it is one. Steps are None where they cannot be known; *checkpoint_bytes* is of one checkpoint.

    *end* says what will end the run. *config_json* is the content of the model's config.json, None with adapters and
    for a model by ``_target_``.
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
    """Build *recipe* for a grid of ranks without weights. Raises :class:`RecipeError` for what could not train."""
    recipe.is_dry_run = True
    recipe.layout = RankLayout(0, sizes, 0, torch.device("cpu"), None)  # type: ignore[arg-type]
    recipe.build()
    parameters = list(recipe.model.parameters())
    memory = memory_of(recipe, sizes)
    is_saved = recipe.config.checkpoint.enabled
    assets = recipe.build_assets() if is_saved else {}
    return Plan(
        type(recipe.model).__name__,
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
        recipe.step_scheduler.planned_steps,
        _length(recipe.dataloader),
        memory,
        _checkpoint_bytes(recipe, sizes, assets) if is_saved else None,
        assets["model"].files[CONFIG] if assets and recipe.config.peft is None else None,
        planned_end(recipe.step_scheduler.cadence, _length(recipe.dataloader)),
    )


def _checkpoint_bytes(recipe: Recipe, sizes: Sizes, assets: Mapping[str, Assets]) -> int:
    """Expected bytes of one checkpoint of this run. Raises :class:`RecipeError` where it could not be read back."""
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
    """Into how many parts a stage's parameters are cut."""
    strategy = choose_strategy(recipe.config.distributed.strategy, sizes)
    return sizes.tp * (sizes.dp_shard * sizes.cp if strategy == "fsdp2" else 1)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def memory_of(recipe: Recipe, sizes: Sizes) -> Memory:
    """An estimate: exact for what is kept per parameter, traced for activations, a layer's worth for the rest.

    Of pipeline stages it is that of the largest, which holds as many micro-batches' activations as the schedule has
    under way on the first.
    """
    parameters = _largest_stage(recipe.model, sizes.pp)
    strategy, cut = (
        choose_strategy(recipe.config.distributed.strategy, sizes),
        _num_shards(recipe, sizes),
    )
    trained = [p for p in parameters if p.requires_grad]
    share = nbytes(trained) / max(
        nbytes(p for p in recipe.model.parameters() if p.requires_grad), 1
    )
    kept = [item for item in classify(discover(recipe)) if item.kind == "optimizer"]
    overhead = forecast_bytes([], world_size=1, save_optimizer=True)
    state = int((forecast_bytes(kept, world_size=1, save_optimizer=True) - overhead) * share)
    here = set(map(id, parameters))
    layers = [
        nbytes(p for p in layer.parameters() if id(p) in here)
        for layer in decoder_layers(recipe.model)
    ]
    # A layer and the one fetched ahead, and what is outside of the layers: the buffer that is filled, the parameters
    # that are copied out of it, and their gradients.
    gathered = (
        3 * (2 * max(layers, default=0) + nbytes(parameters) - sum(layers))
        if strategy == "fsdp2"
        else 0
    )
    # What this process has taken so far is about what a rank has before its model.
    process = PeakMemory(recipe.layout.device).nbytes
    rows, length, images = micro_batch_shape(recipe)
    num_parts = recipe.layout.num_row_parts(
        sequence_parallel=recipe.config.distributed.sequence_parallel
    )
    activations = (
        traced_activations(recipe, rows, -(-length // num_parts), images) if rows else None
    )
    if activations is not None:
        activations = activations * _under_way(recipe, sizes) // sizes.pp
    return Memory(
        nbytes(parameters) // cut,
        nbytes(trained) // cut,
        state // cut,
        gathered,
        activations,
        process,
    )


def _largest_stage(model: nn.Module, num_stages: int) -> list[nn.Parameter]:
    if num_stages == 1:
        return list(model.parameters())
    return max(parameters_of_stages(model, num_stages), key=nbytes)


def _under_way(recipe: Recipe, sizes: Sizes) -> int:
    """Micro-batches whose activations a stage holds at once, at most."""
    if sizes.pp == 1:
        return 1
    steps, one_by_one = (
        recipe.config.step_scheduler,
        recipe.config.distributed.pp_schedule == "1f1b",
    )
    num_micro_batches = steps.global_batch_size // (steps.local_batch_size * sizes.dp)
    return min(num_micro_batches, sizes.pp) if one_by_one else num_micro_batches


def nbytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def row_tokens(recipe: Recipe) -> tuple[int, int] | None:
    """(rows, tokens per row) of a full micro-batch; None where the recipe does not tell how long samples are."""
    packed, rows = recipe.config.packed_sequence, recipe.config.step_scheduler.local_batch_size
    length = packed.size if packed is not None else recipe.config.dataset.kwargs.get("seq_length")
    return None if length is None else (rows, int(length))


def micro_batch_shape(recipe: Recipe) -> tuple[int, int, Mapping[str, torch.Tensor]]:
    """(rows, tokens per row, what comes beside tokens) of a micro-batch: a full one, or that of the first samples where
    the recipe does not tell how long they are, or has images; 0 rows where neither can be known."""
    known = row_tokens(recipe)
    if known is not None and not hasattr(recipe, "processor"):
        return *known, {}
    loader = recipe.dataloader
    try:
        samples = [
            loader.dataset[number]
            for number in range(recipe.config.step_scheduler.local_batch_size)
        ]
        batch = loader.collate_fn(samples)
        rows, length = batch["input_ids"].shape
    except Exception as error:  # a stream, or samples of a form of their own
        log.debug("the first samples make no micro-batch: %r", error)
        return *(known or (0, 0)), {}
    return rows, length, {name: value for name, value in batch.items() if name not in _OF_TEXT}


def traced_activations(
    recipe: Recipe, rows: int, length: int, images: Mapping[str, torch.Tensor]
) -> int | None:
    """Bytes that a forward pass keeps for the backward one, from a pass over tensors without values, and the logits'.

    None for a model whose forward pass needs values.
    """
    backbone = getattr(recipe.model, "base_model", recipe.model)
    tokens = {"input_ids": torch.zeros(1, length, dtype=torch.long)}
    try:
        kept = _kept_bytes(backbone, tokens, recipe.trainable.forward_options)
        with _remembering(recipe.model):
            whole = _kept_bytes(backbone, tokens, recipe.trainable.forward_options)
        seen = _kept_bytes(_Seeing(backbone), images, {}) if images else 0
    except Exception as error:
        log.debug("the activations cannot be traced: %r", error)
        return None
    head = getattr(recipe.model, "get_output_embeddings", lambda: None)()
    logits = (
        min(rows * length * head.out_features, CHUNK_ELEMENTS) if isinstance(head, nn.Linear) else 0
    )
    layers = max(len(decoder_layers(recipe.model)), 1)
    computed = parallelism(recipe.config.distributed).compute_dtype
    narrower = (
        computed.itemsize / next(recipe.model.parameters()).element_size()
        if computed is not None
        else 1.0
    )
    # The backward pass of a layer holds about what its forward pass keeps once more; so do the logits.
    held = ((kept + whole / layers) * rows + seen) * narrower + 8 * logits
    # On a CPU, short-lived tensors leave holes in the heap between those that stay (measured: tools/bench_forecast.py).
    return int(held if torch.cuda.is_available() else _HEAP * held)


class _Seeing(nn.Module):
    """What a model does with images before its layers for text see them."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, **images: torch.Tensor) -> Any:
        return self.backbone.get_image_features(**images)  # type: ignore[operator]


@contextmanager
def _remembering(model: nn.Module) -> Iterator[None]:
    """Without activation checkpointing."""
    switched = [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", False)
    ]
    for module in switched:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True  # type: ignore[assignment]


def _kept_bytes(
    backbone: nn.Module, inputs: Mapping[str, torch.Tensor], options: Mapping[str, Any]
) -> int:
    with FakeTensorMode():
        here = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
            for name, tensor in [*backbone.named_parameters(), *backbone.named_buffers()]
        }
        kept = _Kept(here.values())
        empty = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in inputs.items()
        }
        with torch.autograd.graph.saved_tensors_hooks(kept.note, lambda tensor: tensor):
            torch.func.functional_call(backbone, here, kwargs={**empty, **options})
    return kept.nbytes


class _Kept:
    """Counts each storage that autograd keeps once, but not the model's *own*."""

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self._storages: list[Any] = [
            tensor.untyped_storage() for tensor in own
        ]  # alive: no address comes twice
        self._seen = {storage._cdata for storage in self._storages}
        self.nbytes = 0

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._storages.append(storage)
            self.nbytes += storage.nbytes()
        return tensor
