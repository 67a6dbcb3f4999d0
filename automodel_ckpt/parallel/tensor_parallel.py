"""Tensor parallelism: validate a plan for a model, find the style of each module, and apply them.

A plan maps module names, in which ``*`` matches one component (a layer's number), to the name of a style, as in the
``base_model_tp_plan`` of transformers' configurations, or to one of torch's own ``ParallelStyle`` objects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from automodel_ckpt.errors import RecipeError

Plan = Mapping[str, "str | ParallelStyle"]
_WHERE = "distributed.tp_size"
_PEFT_PREFIX = "base_model.model."
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: Replicated(partial=True),
    "replicate": lambda: Replicated(),
}
OTHER_PLAN = (
    "remove tp_size (fsdp2 shards any model), or write a plan for distributed.tp_plan with names of "
    f"model.named_modules() and the styles {', '.join(_STYLES)}"
)
"""The hint of errors about plans."""
_MAX_NAMED = 5
_SPLIT = {"colwise": "out_features", "rowwise": "in_features"}


class Replicated(ParallelStyle):
    """The style of a module that applies replicated parameters to plain tensors.

    The parameters become DTensors like all others, because optimizers and norms do not accept a mixture, but the module
    computes with their local values. With *partial*, each rank applies them only to some heads or positions, so their
    gradients are summed over the ranks.
    """

    def __init__(self, *, partial: bool = False) -> None:
        self._partial = partial

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        owners = [module, *used_by_parent(module)]
        for owner, name, parameter in own_parameters(owners):
            if isinstance(parameter, DTensor):
                continue
            replicated = distribute_tensor(
                parameter, device_mesh, [Replicate()], src_data_rank=self.src_data_rank
            )
            new = nn.Parameter(replicated, requires_grad=parameter.requires_grad)
            owner.register_parameter(name, new)

        def sum_over_ranks(gradient: Tensor) -> Tensor:
            # A hook must not modify its argument (torch's documentation of register_hook).
            total = gradient.clone()
            dist.all_reduce(total, group=group)
            return total

        def use_local_tensors(module: nn.Module, _: Any) -> None:
            for owner, name, parameter in own_parameters(owners):
                if not isinstance(parameter, DTensor):
                    continue
                replaced.append((owner, name, parameter))
                local = parameter.to_local()
                if self._partial and local.requires_grad:
                    local.register_hook(sum_over_ranks)  # type: ignore[no-untyped-call]
                # nn.Module's setattr rejects a tensor that is not a Parameter, and a Parameter would be a new leaf
                # without a gradient path to the DTensor.
                owner._parameters[name] = local  # type: ignore[assignment]

        def restore_parameters(module: nn.Module, *_: Any) -> None:
            for owner, name, parameter in replaced:
                owner._parameters[name] = parameter
            replaced.clear()

        module.register_forward_pre_hook(use_local_tensors)
        # always_call: an error in the forward pass must not leave plain tensors behind.
        module.register_forward_hook(restore_parameters, always_call=True)
        return module


def used_by_parent(module: nn.Module) -> list[nn.Module]:
    """The children of *module* with parameters that its forward pass uses without calling the children.

    A ParameterDict is never called. Layers with a state (Mamba) pass the weight of their convolution to a kernel.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return []
    kinds = (nn.ParameterDict, nn.Conv1d)
    return [child for child in module.children() if isinstance(child, kinds)]


def own_parameters(owners: Iterable[nn.Module]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """(module, name in it, parameter) of each parameter that belongs to one of *owners* directly."""
    found = []
    for owner in owners:
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                found.append((owner, name, parameter))
    return found


def check_plan_support(error: Exception, tp_size: int) -> None:
    """Explain an *error* of a forward or backward pass that is due to the tensor parallel plan.

    Raises :class:`RecipeError` in that case; otherwise, returns and leaves *error* to the caller.
    """
    # torch has no exception class for this.
    if tp_size == 1 or "mixed torch.Tensor and DTensor" not in str(error):
        return
    raise RecipeError(
        "the code of this model does not support its tensor parallel plan: it uses parameters of layers without "
        "calling them",
        where=_WHERE,
        value=f"{tp_size}; {str(error).splitlines()[0][:160]}",
        hint=OTHER_PLAN,
    ) from error


def check_heads(config: Any, tp_size: int, cp_size: int = 1) -> None:
    """Validate that the numbers of heads in a configuration of transformers can be divided evenly among the ranks.

    Raises :class:`RecipeError` otherwise. Context parallelism repeats heads of keys and values if there are too few.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    uneven: list[str] = []
    for name, parts in (
        ("num_attention_heads", tp_size * cp_size),
        ("num_key_value_heads", tp_size),
    ):
        count = getattr(text, name, None)
        if isinstance(count, int) and count % parts:
            uneven.append(f"{name} {count}")
    if uneven:
        raise RecipeError(
            "the number of attention heads is not divisible by the ranks that divide them",
            where="distributed",
            value=f"tp_size {tp_size}, cp_size {cp_size}; the model has {', '.join(uneven)}",
            hint="set tp_size to a common divisor of the numbers of heads, and cp_size so that cp_size x tp_size "
            "divides num_attention_heads; or remove both (fsdp2 shards any model)",
        )


def plan_for(model: nn.Module, given: Plan | None, tp_size: int) -> dict[str, ParallelStyle]:
    """The style of each module by its name, from the *given* plan or else the plan of the model.

    Plans name the modules of the base. In a model with adapters, these names have a prefix, and the style of an adapted
    module is expanded to styles for its base layer and its adapter.

    Raises :class:`RecipeError` for a model without a plan, unknown styles, names that match nothing, experts, and
    layers that cannot be sharded into *tp_size* equal parts.
    """
    base, prefix = base_and_prefix(model)
    if given is not None:
        given = {name.removeprefix(prefix): style for name, style in given.items()}
    expanded: dict[str, ParallelStyle] = {}
    for name, style in _plan_for_base(base, given, tp_size).items():
        for part, part_style in with_adapters(base, name, style).items():
            expanded[prefix + part] = part_style
    return expanded


def base_and_prefix(model: nn.Module) -> tuple[Any, str]:
    """The model without adapters, and the prefix that its module names have in *model*."""
    get_base_model: Any = getattr(model, "get_base_model", None)
    if get_base_model is None:
        return model, ""
    return get_base_model(), _PEFT_PREFIX


def with_adapters(base: nn.Module, name: str, style: ParallelStyle) -> dict[str, ParallelStyle]:
    """The styles of the modules that peft puts into the module *name*; only its *style* if it has no adapter.

    One of an adapter's two matrices, lora_A [r, in] and lora_B [out, r], is sharded like the base layer: lora_B if the
    base is sharded by rows (colwise), lora_A if by columns (rowwise). The other matrix is replicated.
    """
    module = base.get_submodule(name)
    if hasattr(module, "original_module") and hasattr(module, "modules_to_save"):
        copies = [f"{name}.modules_to_save.{key}" for key in module.modules_to_save]  # type: ignore[union-attr]
        return dict.fromkeys([f"{name}.original_module", *copies], style)
    if not hasattr(module, "base_layer") or not hasattr(module, "lora_A"):
        return {name: style}
    styles: dict[str, ParallelStyle] = {f"{name}.base_layer": style}
    for key in module.lora_A:  # type: ignore[union-attr]
        first, second = f"{name}.lora_A.{key}", f"{name}.lora_B.{key}"
        if isinstance(style, ColwiseParallel):
            styles |= {first: Replicated(), second: style}
        elif isinstance(style, RowwiseParallel):
            # Along the sequence each rank applies lora_B to its own positions.
            along_the_sequence = any(isinstance(layout, Shard) for layout in style.output_layouts)
            styles |= {first: style, second: Replicated(partial=along_the_sequence)}
        else:
            styles |= {first: style, second: style}
    return styles


def _plan_for_base(model: nn.Module, given: Plan | None, tp_size: int) -> dict[str, ParallelStyle]:
    plan: Plan = given if given is not None else getattr(model, "tp_plan", None) or {}
    names = [name for name, _ in model.named_modules()]
    found = dict(_matches(plan, names))
    if not found:
        raise RecipeError(
            "this model has no tensor parallel plan",
            where=_WHERE,
            value=f"{tp_size}, with {type(model).__name__}",
            hint=OTHER_PLAN,
        )
    faults = [
        f"{pattern} (matches no module)"
        for pattern in given or {}
        if not any(map(_compiled(pattern).fullmatch, names))
    ]
    faults += _faults(model, plan, found, tp_size)
    if faults:
        more = f" and {len(faults) - _MAX_NAMED} more" if len(faults) > _MAX_NAMED else ""
        raise RecipeError(
            "the tensor parallel plan does not fit this model",
            where=_WHERE,
            value=f"{tp_size}; {', '.join(faults[:_MAX_NAMED])}{more}",
            hint=OTHER_PLAN,
        )
    styles = {}
    for name, style in found.items():
        styles[name] = _STYLES[style]() if isinstance(style, str) else style
    for name in _activations(model, found):
        # Without it, each rank would train the parameters with the gradients of its own columns.
        styles.setdefault(name, Replicated(partial=True))
    return styles


def _activations(model: nn.Module, found: Plan) -> Iterator[str]:
    """The names of activation functions with parameters (xIELU of Apertus) that see a rank's columns only.

    transformers' plans leave them out.
    """
    cut = {
        name.rpartition(".")[0]
        for name, style in found.items()
        if style == "colwise" or isinstance(style, ColwiseParallel)
    }
    for name, module in model.named_modules():
        parent, _, own_name = name.rpartition(".")
        is_activation = own_name in ("act_fn", "act", "activation_fn")
        if is_activation and parent in cut and own_parameters([module]):
            yield name


def _matches(plan: Plan, names: Iterable[str]) -> Iterator[tuple[str, str | ParallelStyle]]:
    """The pairs (name, style) of the names that a pattern of the plan matches."""
    patterns = {_compiled(pattern): style for pattern, style in plan.items()}
    for name in names:
        for pattern, style in patterns.items():
            if pattern.fullmatch(name):
                yield name, style


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def _faults(model: nn.Module, plan: Plan, found: Plan, tp_size: int) -> Iterator[str]:
    """Report styles of parameters instead of modules, unknown styles, experts, and layers that cannot be sharded."""
    parameters = dict(model.named_parameters())
    for name, _ in _matches(plan, parameters):
        yield f"{name} (a parameter)"
    # Several matrices in one parameter [experts, out, in].
    stacked = {name.rpartition(".")[0] for name, each in parameters.items() if each.dim() == 3}
    for name, style in found.items():
        if name in stacked:
            yield f"{name} (experts)"
        elif isinstance(style, str) and style not in _STYLES:
            yield f"{name} (unknown style {style!r})"
        elif isinstance(style, str) and style in _SPLIT:
            # The next layer treats a rank's part of the output as complete, so all parts must have one size.
            size = getattr(model.get_submodule(name), _SPLIT[style], 0)
            if size % tp_size:
                yield f"{name} ({_SPLIT[style]} {size} is not a multiple)"


_BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def apply_plan(
    model: nn.Module,
    plan: Mapping[str, ParallelStyle],
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool = False,
) -> None:
    """Shard the model's layers in place over the 1-D *mesh*, and restore ties between parameters.

    With *sequence_parallel*, activations between the matrices of a layer are sharded along the sequence: the number of
    tokens in a row must be a multiple of the ranks. Raises :class:`RecipeError` for a model with another structure than
    Llama's, and for tied parameters that the plan shards differently.
    """
    styles = dict(plan)
    if sequence_parallel:
        base, prefix = base_and_prefix(model)
        # Replicated layers of an adapter compute with plain tensors.
        for name, style in _along_the_sequence(base, local_inputs=base is not model).items():
            for part, part_style in with_adapters(base, name, style).items():
                styles[prefix + part] = part_style
    # Recorded now: parallelize_module creates one parameter per name and so breaks ties without a
    # message.
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = first.setdefault(id(parameter), name)
        if first_name != name:
            tied[name] = first_name
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    parallelize_module(model, mesh, styles)
    for name in frozen:
        # The styles of torch 2.10 create new parameters that require gradients.
        model.get_parameter(name).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.ParameterDict):
            continue
        own = own_parameters([module, *used_by_parent(module)])
        # Optimizers and norms do not accept a mixture of DTensors and plain tensors.
        if any(not isinstance(parameter, DTensor) for _, _, parameter in own):
            Replicated()._apply(module, mesh)
    for alias, name in tied.items():
        _tie(model, alias, name)


def _tie(model: nn.Module, alias: str, first_name: str) -> None:
    """Make *alias* the parameter *first_name* again, since torch's styles created one parameter for each name."""
    parameter = model.get_parameter(first_name)
    other = model.get_parameter(alias)
    if getattr(parameter, "placements", None) != getattr(other, "placements", None):
        raise RecipeError(
            "the tensor parallel plan shards tied parameters differently",
            where="distributed.tp_plan",
            value=f"{first_name} and {alias}",
            hint="shard both along the same dimension (embedding_rowwise with colwise_gather_output), or untie them",
        )
    parent, _, name = alias.rpartition(".")
    setattr(model.get_submodule(parent), name, parameter)


def _along_the_sequence(model: nn.Module, *, local_inputs: bool) -> dict[str, ParallelStyle]:
    """The styles that shard activations along the sequence between the matrices of each layer.

    With *local_inputs*, attention and MLP get plain tensors: gathering their inputs then takes an all-reduce in the
    backward pass instead of a reduce-scatter.
    """
    prefix, layers = _blocks(model)
    sharded, replicated = Shard(1), Replicate()
    styles: dict[str, ParallelStyle] = {}
    for name in layers:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            styles[f"{name}.{norm}"] = Replicated(partial=True)
        styles[f"{name}.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": sharded},
            desired_input_kwarg_layouts={"hidden_states": replicated},
            use_local_output=local_inputs,
        )
        styles[f"{name}.mlp"] = PrepareModuleInput(
            input_layouts=(sharded,),
            desired_input_layouts=(replicated,),
            use_local_output=local_inputs,
        )
        for row in ("self_attn.o_proj", "mlp.down_proj"):
            styles[f"{name}.{row}"] = RowwiseParallel(output_layouts=sharded)
    # The output of the embedding is sharded only here, so that the model creates masks and positions for the complete
    # sequence.
    styles[layers[0]] = PrepareModuleInput(
        input_layouts=(replicated,), desired_input_layouts=(sharded,), use_local_output=True
    )
    styles[f"{prefix}norm"] = _Gathered(partial=True)
    return styles


class _Gathered(Replicated):
    """The style of the last norm. Its output is gathered along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        gather = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        return gather._apply(module, device_mesh)


def _blocks(model: nn.Module) -> tuple[str, list[str]]:
    """(prefix of the inner model's names, names of its layers) of a model built like Llama.

    Raises :class:`RecipeError` for other models.
    """
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if base and hasattr(model, base) else ""
    inner = getattr(model, base) if prefix else model
    layers = getattr(inner, "layers", None) or []
    is_supported = len(layers) > 0 and hasattr(inner, "norm")
    # A decoder layer consists of the modules of Llama's.
    is_supported = is_supported and all(
        {name for name, _ in layer.named_children()} == _BLOCK
        and hasattr(layer.self_attn, "o_proj")
        and hasattr(layer.mlp, "down_proj")
        for layer in layers
    )
    if not is_supported:
        raise RecipeError(
            "sequence parallelism supports only models built like Llama and Qwen",
            where="distributed.sequence_parallel",
            value=type(model).__name__,
            hint="remove the key",
        )
    return prefix, [f"{prefix}layers.{number}" for number in range(len(layers))]
