"""Distribute a model over ranks: tensor parallel layers, and shards (fsdp2) or replicas (ddp)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.gradients import DEFERS, FixedBucketsDDP, may_vary
from automodel_ckpt.parallel.mesh import build_mesh, mesh_of, shards_of
from automodel_ckpt.parallel.mesh_sizes import RankLayout, choose_strategy
from automodel_ckpt.parallel.model_layers import separate_ends, untied_layers

if TYPE_CHECKING:
    from automodel_ckpt.parallel.tensor_parallel import Plan

log = logging.getLogger("automodel_ckpt")

# FSDP2 warns that an in-place operation on an output that is a view, such as gathered logits, would lose gradients.
# Nothing modifies them in place.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")

Materialise = Callable[[nn.Module, torch.device], None]
"""Called with a model on the meta device and a device; gives the model this rank's values there."""


@dataclass(frozen=True)
class Parallelism:
    """The settings of the recipe besides the sizes. A ``compute_dtype`` of None is the dtype of the parameters.

    With fsdp2, the parameters named in ``float32_names`` are computed in their own type, and the buffers named in
    ``constants`` are cast to ``compute_dtype``.
    """

    strategy: str = "auto"
    reshard_after_forward: bool = True
    compute_dtype: torch.dtype | None = None
    cpu_offload: bool = False
    defer_gradient_sync: bool = False
    sequence_parallel: bool = False
    tp_plan: Plan | None = None
    float32_names: frozenset[str] = frozenset()
    constants: frozenset[str] = frozenset()


def check_parallelism(how: Parallelism, layout: RankLayout) -> None:
    """Validate the settings for these ranks and this node before anything is loaded. Raises :class:`RecipeError`."""
    strategy = choose_strategy(how.strategy, layout.sizes)
    if how.cpu_offload and (strategy != "fsdp2" or layout.device.type != "cuda"):
        raise RecipeError(
            "CPU offload needs fsdp2, and the memory of a GPU to offload from",
            where="distributed.cpu_offload",
            value=f"strategy {strategy}, device {layout.device}",
            hint="remove the key",
        )


def parallelize(
    model: nn.Module,
    layout: RankLayout,
    how: Parallelism,
    materialise: Materialise | None = None,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Distribute *model*: shard it in place, or wrap it (ddp). Returns this rank's model on its device.

    Parameters may be on the meta device: *materialise* then fills this rank's shards of them. Parameters with values
    must be equal on every rank. fsdp2 creates a group for each decoder layer, for an embedding and an output layer that
    are larger than one, and a group for the rest, which contains tied parameters. It gathers them in the compute dtype;
    the other strategies require :func:`compute_context`. *mesh* is the result of :func:`build_mesh`, if the caller has
    one. Raises :class:`RecipeError` for what this model does not support.
    """
    strategy = choose_strategy(how.strategy, layout.sizes)
    if mesh is None and (strategy == "fsdp2" or layout.sizes.tp > 1):
        mesh = build_mesh(layout)
    # Tensor parallelism first: fsdp2 then shards the DTensors that it leaves. torch does not
    # support the other order.
    if mesh is not None and layout.sizes.tp > 1:
        from automodel_ckpt.parallel.tensor_parallel import plan_for

        plan = plan_for(model, how.tp_plan, layout.sizes.tp)
        from automodel_ckpt.parallel.tensor_parallel import apply_plan

        apply_plan(model, plan, mesh["tp"], sequence_parallel=how.sequence_parallel)
    if mesh is not None and strategy == "fsdp2":
        is_one_rank = layout.sizes.world == 1 and not how.cpu_offload
        # In bfloat16, each addition over the ranks would be rounded to 8 significant bits.
        reduce_dtype = torch.float32 if how.compute_dtype else None
        options: dict[str, Any] = {
            "mp_policy": MixedPrecisionPolicy(how.compute_dtype, reduce_dtype),
            "offload_policy": CPUOffloadPolicy() if how.cpu_offload else OffloadPolicy(),
            "ignored_params": _not_sharded(model, how, is_one_rank=is_one_rank),
        }
        if layout.sizes.ep > 1:
            _shard_experts(model, layout, options, how)
        _shard(model, shards_of(mesh), options, how)
    device = torch.device("cpu") if how.cpu_offload else layout.device
    if materialise is not None:
        materialise(model, device)
    model = model.to(device)
    if strategy == "fsdp2" and how.compute_dtype is not None:
        constants, dtype = how.constants, how.compute_dtype
        _convert_buffers(
            model, lambda name, buffer: buffer.to(dtype) if name in constants else buffer
        )
    if how.cpu_offload:
        # fsdp2 moves only parameters between the devices.
        _convert_buffers(model, lambda name, buffer: buffer.to(layout.device))
    # DDP only reduces gradients, and raises for a model without any (a frozen reference model).
    return _replicate(model, layout) if strategy == "ddp" and _is_trained(model) else model


def _replicate(model: nn.Module, layout: RankLayout) -> nn.Module:
    varies = may_vary(model)
    if varies:
        log.debug(
            "batches may use different parameters of this model: ddp looks for unused ones in each step"
        )
    return FixedBucketsDDP(
        model,
        device_ids=[layout.device] if layout.device.type == "cuda" else None,
        # Views save a copy of all gradients, but detach_() fails on them (torch's documentation of DDP).
        gradient_as_bucket_view=True,
        # DDP then looks for unused parameters in each step. Otherwise, it would wait for their gradients.
        find_unused_parameters=varies,
    )


def _convert_buffers(
    model: nn.Module, convert: Callable[[str, torch.Tensor], torch.Tensor]
) -> None:
    """Replace the buffers of *model* by what *convert* returns for their names and values."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            # Module.to would change the parameters as well.
            module._buffers[name] = convert(f"{prefix}.{name}" if prefix else name, buffer)


def _not_sharded(model: nn.Module, how: Parallelism, *, is_one_rank: bool) -> set[nn.Parameter]:
    """The parameters that each rank has as they are. Freezes those without elements: fsdp2 cannot reduce
    their gradients.

    fsdp2 cannot shard parameters without dimensions. Raises :class:`RecipeError` if one of these is trained. On one
    rank, it has nothing to gather and only casts: copies of parameters that are in the compute dtype, and of frozen
    ones that are not computed in it (a frozen base in bfloat16), would cost memory and time.
    """
    found: set[nn.Parameter] = set()
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            parameter.requires_grad_(False)
        if parameter.dim() == 0 and parameter.requires_grad:
            raise RecipeError(
                "fsdp2 cannot train a parameter without dimensions",
                where="distributed.strategy",
                value=f"fsdp2, {name}",
                hint="set distributed.strategy to ddp",
            )
        is_kept = name in how.float32_names and not parameter.requires_grad
        is_not_cast = is_kept or parameter.dtype == how.compute_dtype
        # Bytes of quantized weights are never cast.
        is_not_cast = is_not_cast or not parameter.is_floating_point()
        if parameter.dim() == 0 or (is_one_rank and is_not_cast):
            found.add(parameter)
    return found


def _shard_experts(
    model: nn.Module, layout: RankLayout, options: dict[str, Any], how: Parallelism
) -> None:
    """Divide each layer's experts among the ranks, and shard a rank's experts over the ranks that have the same."""
    from automodel_ckpt.parallel.expert_parallel import divide_experts

    sizes = layout.sizes
    mesh = mesh_of(layout, {"expert_shard": sizes.expert_parts // sizes.ep, "ep": sizes.ep})
    # They get the weights of the router in its type.
    of_layers = _layer_options(model, options)
    for module in divide_experts(model, mesh["ep"]):
        fully_shard(
            module,
            mesh=shards_of(mesh, "expert_shard"),
            reshard_after_forward=how.reshard_after_forward,
            **of_layers,
        )


def _shard(model: nn.Module, mesh: DeviceMesh, options: dict[str, Any], how: Parallelism) -> None:
    from automodel_ckpt.parallel.fsdp_groups import divide_groups_by_type, show_compute_types

    options = {**options, "mesh": mesh}
    is_trained = _is_trained(model)
    # Before anything is sharded, which changes classes.
    embeddings, heads = separate_ends(model)
    # Layers before the root: fully_shard gives the root's group all parameters that no inner group
    # has.
    of_layers = _layer_options(model, options)
    for layer in untied_layers(model):
        fully_shard(layer, reshard_after_forward=how.reshard_after_forward, **of_layers)
    kept = _ids_of(model, how.float32_names)
    for module in (*embeddings, *heads):
        is_lookup = type(module) is nn.Embedding
        of_module = dict(options)
        if all(id(parameter) in kept for parameter in module.parameters()):
            # The model computes its inputs in float32, too.
            of_module["mp_policy"] = MixedPrecisionPolicy()
        # The backward pass needs the head and the root first: gathering them twice would only cost. A frozen model has
        # no backward pass.
        reshards = how.reshard_after_forward if module in embeddings else not is_trained
        fully_shard(module, reshard_after_forward=reshards, **of_module)
        if is_lookup and module in embeddings:
            # The gradient of a lookup depends on the token ids only.
            module.set_unshard_in_backward(False)  # type: ignore[operator]
    fully_shard(model, reshard_after_forward=not is_trained, **options)
    # fully_shard has replaced the parameters.
    kept = _ids_of(model, how.float32_names)
    divide_groups_by_type(model, kept)
    show_compute_types(model, kept)
    setattr(model, DEFERS, how.defer_gradient_sync)
    if mesh.size() == 1:
        from automodel_ckpt.parallel.fsdp_groups import cast_without_copies

        # There is nothing to prefetch: a rank has all parameters.
        cast_without_copies(model)
    else:
        _prefetch(model, embeddings, heads)


def _ids_of(model: nn.Module, names: Collection[str]) -> set[int]:
    """The ids of the parameters *names*."""
    named = model.named_parameters(remove_duplicate=False)
    return {id(parameter) for name, parameter in named if name in names}


def _layer_options(model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """The *options* of a decoder layer: layers of transformers get their inputs in the types in which the model
    computes them.

    Some models give their layers positions or hidden states in float32 although their weights are in bfloat16.
    """
    if not hasattr(model, "_keep_in_fp32_modules_strict"):
        return options
    return {**options, "mp_policy": replace(options["mp_policy"], cast_forward_inputs=False)}


def _prefetch(model: nn.Module, embeddings: list[nn.Module], heads: list[nn.Module]) -> None:
    """Gather the parameters of the next layer of a list while a layer computes its forward pass.

    In the backward pass, fsdp2 prefetches in the reverse order of the forward pass without being asked. A module that
    does not run after all (an early exit) costs its gathering: fsdp2 drops it at the end of the backward pass.
    """
    for parent in model.modules():
        children = list(parent.children())
        for layers in children:
            if not isinstance(layers, nn.ModuleList):
                continue
            # A pipeline stage has stand-ins in place of layers of other stages.
            for layer, following in pairwise(layers):
                _prefetch_after(layer, following)
            if len(layers) and any(child in embeddings for child in children):
                for embedding in embeddings:
                    _prefetch_after(embedding, layers[0])
                # If a layer has a trained copy, only the copy runs, not the original.
                _prefetch_after(layers[-1], heads[-1] if heads else None)


def _prefetch_after(module: nn.Module, following: nn.Module | None) -> None:
    if following is None or not isinstance(module, FSDPModule):
        return
    # Experts are sharded separately inside of a layer.
    parts: list[FSDPModule] = [part for part in following.modules() if isinstance(part, FSDPModule)]
    module.set_modules_to_forward_prefetch(parts)


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def compute_context(
    strategy: str, device: torch.device, compute_dtype: torch.dtype | None
) -> Callable[[], AbstractContextManager[object]]:
    """The context of a forward pass in *compute_dtype*: autocast, or none if fsdp2 gathers in that dtype."""
    if compute_dtype is None or strategy == "fsdp2":
        return nullcontext
    return partial(torch.autocast, device.type, dtype=compute_dtype)


def gather_root(model: nn.Module) -> None:
    """Gather the parameters that fsdp2 gathers in the forward pass of the root module, until :func:`reshard`.

    Needed where the modules inside of the root are called without it: peft's ``generate`` calls the base model. A
    collective.
    """
    if isinstance(model, FSDPModule):
        model.unshard()


def reshard(model: nn.Module) -> None:
    """Free parameters that a forward pass without a backward pass left gathered (fsdp2), also one that failed."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        from automodel_ckpt.parallel.fsdp_groups import leave_forward_pass

        leave_forward_pass(module)
        _leave_forward(module)
        module.reshard()


def _leave_forward(module: FSDPModule) -> None:
    """End what a failed forward pass, such as a probe, began in *module*: torch would not reshard it."""
    # FSDPModule.reset_iter_state does this in newer versions of torch only.
    state = module._get_fsdp_state()
    state._training_state = TrainingState.IDLE
    state._state_ctx.iter_forward_root = None
    group = state._fsdp_param_group
    if group is None:
        return
    group._training_state = TrainingState.IDLE
    if group._all_gather_result is not None:
        # Prefetched and not used. The next forward pass would use it, after a checkpoint has changed the weights.
        module.unshard()
