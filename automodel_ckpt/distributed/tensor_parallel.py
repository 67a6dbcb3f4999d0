"""A model cut within its layers: a plan of names and styles, checked, and carried out by torch's parallelize_module.

A plan maps module names, in which ``*`` stands for one component (a layer's number), to the style's name, as in the
``base_model_tp_plan`` of transformers' configurations, or to one of torch's own ``ParallelStyle`` objects.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
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

from automodel_ckpt.errors import Problem, RecipeError

# The gathered logits are a view of the collective's result. Nothing is done to them in place.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")

Plan = Mapping[str, "str | ParallelStyle"]
_WHERE = "distributed.tp_size"

_PEFT_PREFIX = "base_model.model."
_BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


class Replicated(ParallelStyle):
    """For a module whose own parameters every rank holds whole and applies to plain tensors.

    They become DTensors like all others, since optimizers and norms take no mixture of kinds, but the module computes
    with their local values. *partial*: each rank applies them to a part only (some heads, some positions), so that
    their gradients are summed over the ranks.
    """

    def __init__(self, *, partial: bool = False) -> None:
        self._partial = partial

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        held: list[tuple[nn.Module, str, nn.Parameter]] = []
        # A ParameterDict is never called: its parameters are used by the module that has it.
        owners = [
            module,
            *(child for child in module.children() if isinstance(child, nn.ParameterDict)),
        ]
        for owner, name, parameter in _own_parameters(owners):
            whole = distribute_tensor(
                parameter, device_mesh, [Replicate()], src_data_rank=self.src_data_rank
            )
            owner.register_parameter(
                name, nn.Parameter(whole, requires_grad=parameter.requires_grad)
            )

        def summed(gradient: torch.Tensor) -> torch.Tensor:
            total = gradient.clone()
            dist.all_reduce(total, group=group)
            return total

        def lend(module: nn.Module, _: Any) -> None:
            for owner, name, parameter in _own_parameters(owners):
                if isinstance(parameter, DTensor):
                    held.append((owner, name, parameter))
                    local = parameter.to_local()
                    if self._partial and local.requires_grad:
                        local.register_hook(summed)  # type: ignore[no-untyped-call]
                    owner._parameters[name] = local  # type: ignore[assignment]

        def give_back(module: nn.Module, *_: Any) -> None:
            for owner, name, parameter in held:
                owner._parameters[name] = parameter
            held.clear()

        module.register_forward_pre_hook(lend)
        module.register_forward_hook(give_back, always_call=True)
        return module


def _own_parameters(owners: Iterable[nn.Module]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """(module, name in it, parameter) of each parameter that is a module's own."""
    return [
        (owner, name, p)
        for owner in owners
        for name, p in owner._parameters.items()
        if p is not None
    ]


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
    "replicate": Replicated,
}
_SPLIT = {"colwise": "out_features", "rowwise": "in_features"}


def check_heads(config: Any, tp_size: int) -> None:
    """:class:`RecipeError` where the heads that a transformers configuration names cannot be shared out evenly."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = {
        name: getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    }
    uneven = {
        name: count for name, count in heads.items() if isinstance(count, int) and count % tp_size
    }
    if uneven:
        fitting = [
            size
            for size in range(1, tp_size)
            if not any(count % size for count in heads.values() if count)
        ]
        raise RecipeError(
            "the number of attention heads is not divisible by tp_size",
            where=_WHERE,
            value=f"{tp_size}; the model has "
            + ", ".join(f"{name} {count}" for name, count in uneven.items()),
            hint=f"set it to {max(fitting)}"
            + (", and shard with fsdp2" if max(fitting) == 1 else ""),
        )


def plan_for(model: nn.Module, given: Plan | None, tp_size: int) -> dict[str, ParallelStyle]:
    """The style of each module by its name: of the *given* plan, else of the model's own.

    Plans name the modules of the base; in a model with adapters these have a prefix, and the style of an adapted module
    becomes styles for its base layer and its adapter.

    Raises :class:`RecipeError` for a model without a plan, styles that are none, names that match nothing, experts, and
    layers that cannot be cut into *tp_size* equal parts.
    """
    prefix = _PEFT_PREFIX if hasattr(model, "get_base_model") else ""
    base: Any = model.get_base_model() if prefix else model  # type: ignore[operator]
    if given is not None:
        given = {name.removeprefix(prefix): style for name, style in given.items()}
    styles = _plan_for_base(base, given, tp_size)
    expanded = {
        part: its
        for name, style in styles.items()
        for part, its in _with_adapters(base, name, style).items()
    }
    return {prefix + name: style for name, style in expanded.items()}


def _with_adapters(base: nn.Module, name: str, style: ParallelStyle) -> dict[str, ParallelStyle]:
    """The styles of what is inside the module *name* if adapters wrap it, else its *style*.

    Of the two matrices of an adapter, lora_A [r, in] and lora_B [out, r], one is cut as the base layer is: lora_B where
    ranks have rows of the base's weight, lora_A where they have columns. The other one is whole on every rank.
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
    found = dict(_matches(plan, (name for name, _ in model.named_modules())))
    if not found:
        raise RecipeError(
            "this model has no tensor parallel plan",
            where=_WHERE,
            value=f"{tp_size}, with {type(model).__name__}",
            hint="remove tp_size (fsdp2 shards any model), or write a plan and set distributed.tp_plan",
        )
    bare = dict(_matches(plan, (name for name, _ in model.named_parameters())))
    if experts := _experts(model, found, bare):
        raise RecipeError(
            "tensor parallelism cannot shard the experts of this model, although its plan requires it",
            where=_WHERE,
            value=f"{tp_size}; {experts[0]}"
            + (f" and {len(experts) - 1} more" if len(experts) > 1 else ""),
            hint="remove tp_size (fsdp2 shards experts too), or write a plan for distributed.tp_plan without them",
        )
    problems = [
        *_unmatched(given or {}, model),
        *_unknown(found, bare),
        *_uneven(model, found, tp_size),
    ]
    if problems:
        raise RecipeError.all_of(problems)
    return {
        name: _STYLES[style]() if isinstance(style, str) else style for name, style in found.items()
    }


def _matches(plan: Plan, names: Iterable[str]) -> Iterator[tuple[str, str | ParallelStyle]]:
    """Those of the names that the plan has a style for."""
    patterns = {_compiled(pattern): style for pattern, style in plan.items()}
    for name in names:
        for pattern, style in patterns.items():
            if pattern.fullmatch(name):
                yield name, style


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def _unmatched(given: Plan, model: nn.Module) -> Iterator[Problem]:
    names = [name for name, _ in model.named_modules()]
    for pattern in given:
        if not any(map(_compiled(pattern).fullmatch, names)):
            hint = "use the names of model.named_modules(), with * for a layer's number"
            yield Problem(
                "the plan matches no module of the model", "distributed.tp_plan", pattern, hint
            )


def _experts(model: nn.Module, found: Plan, bare: Plan) -> list[str]:
    """Modules and parameters with a style that are experts: several matrices in one parameter [experts, out, in]."""
    stacked = {name for name, parameter in model.named_parameters() if parameter.dim() == 3}
    modules = {name.rpartition(".")[0] for name in stacked}
    return [
        *(name for name in found if name in modules),
        *(name for name in bare if name in stacked),
    ]


def _unknown(found: Plan, bare: Plan) -> Iterator[Problem]:
    """Styles that are not known, and styles of parameters instead of modules."""
    for name in bare:
        hint = f"use the module, {name.rpartition('.')[0]}"
        yield Problem(
            "the tensor parallel plan names a parameter instead of a module", _WHERE, name, hint
        )
    unknown = {name: s for name, s in found.items() if isinstance(s, str) and s not in _STYLES}
    for style in sorted({str(style) for style in unknown.values()}):
        names = [name for name, its in unknown.items() if str(its) == style]
        yield Problem(
            f"the tensor parallel plan uses an unsupported style, {style!r}",
            _WHERE,
            f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0],
            "remove tp_size (fsdp2 shards any model), or write a plan for distributed.tp_plan that gives modules "
            f"the styles {', '.join(_STYLES)}",
        )


def _uneven(model: nn.Module, found: Plan, tp_size: int) -> Iterator[Problem]:
    """A rank's part of a layer's output goes on as if it were whole: all parts have to be of one size."""
    for name, style in found.items():
        size = getattr(model.get_submodule(name), _SPLIT[style], 0) if style in _SPLIT else 0
        if size % tp_size:
            yield Problem(
                "a layer cannot be sharded evenly",
                _WHERE,
                f"{tp_size}; {name} has {_SPLIT[style]} {size}",  # type: ignore[index]
                f"set it to a divisor of {size}",
            )
            return


def apply_plan(
    model: nn.Module,
    plan: Mapping[str, ParallelStyle],
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool = False,
) -> None:
    """Cut the model's layers in place over the 1-D *mesh*, and tie again what was tied.

    With *sequence_parallel* what lies between the layers' matrices is cut along the sequence: the number of tokens of
    a row has to be a multiple of the ranks. Raises :class:`RecipeError` for a model of another structure than Llama's,
    and for tied parameters that the plan cuts differently.
    """
    styles = dict(plan)
    if sequence_parallel:
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        prefix = _PEFT_PREFIX if base is not model else ""
        # Layers of an adapter that are whole on every rank compute with plain tensors.
        for name, style in _along_the_sequence(base, local_inputs=base is not model).items():
            styles |= {
                prefix + part: its for part, its in _with_adapters(base, name, style).items()
            }
    tied = _tied_names(model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    parallelize_module(model, mesh, styles)
    for name in frozen:
        model.get_parameter(name).requires_grad_(
            False
        )  # torch 2.10's styles make new parameters that are trained
    for module in model.modules():
        dicts = [child for child in module.children() if isinstance(child, nn.ParameterDict)]
        own = [] if isinstance(module, nn.ParameterDict) else _own_parameters([module, *dicts])
        if any(not isinstance(parameter, DTensor) for _, _, parameter in own):
            Replicated()._apply(module, mesh)
    for alias, kept in tied.items():
        _tie(model, alias, kept)


def _tied_names(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    return {name: first[id(p)] for name, p in named if first.setdefault(id(p), name) != name}


def _tie(model: nn.Module, alias: str, kept: str) -> None:
    one, other = model.get_parameter(kept), model.get_parameter(alias)
    if getattr(one, "placements", None) != getattr(other, "placements", None):
        raise RecipeError(
            "the tensor parallel plan shards tied parameters differently",
            where="distributed.tp_plan",
            value=f"{kept} and {alias}",
            hint="shard both along the same dimension (embedding_rowwise with colwise_gather_output), or untie them",
        )
    parent, _, name = alias.rpartition(".")
    setattr(model.get_submodule(parent), name, one)


def _along_the_sequence(model: nn.Module, *, local_inputs: bool) -> dict[str, ParallelStyle]:
    """The styles of what is cut along the sequence. With *local_inputs* attention and MLP get plain tensors: gathering
    their inputs then takes an all-reduce in the backward pass instead of a reduce-scatter."""
    prefix, layers = _blocks(model)
    cut, whole = Shard(1), Replicate()
    styles: dict[str, ParallelStyle] = {}
    for name in layers:
        styles[f"{name}.input_layernorm"] = styles[f"{name}.post_attention_layernorm"] = Replicated(
            partial=True
        )
        styles[f"{name}.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": cut},
            desired_input_kwarg_layouts={"hidden_states": whole},
            use_local_output=local_inputs,
        )
        styles[f"{name}.mlp"] = PrepareModuleInput(
            input_layouts=(cut,), desired_input_layouts=(whole,), use_local_output=local_inputs
        )
        for row in ("self_attn.o_proj", "mlp.down_proj"):
            styles[f"{name}.{row}"] = RowwiseParallel(output_layouts=cut)
    # The embedding stays whole, so that masks and positions are made for all of the sequence.
    styles[layers[0]] = PrepareModuleInput(
        input_layouts=(whole,), desired_input_layouts=(cut,), use_local_output=True
    )
    styles[f"{prefix}norm"] = _Gathered(partial=True)
    return styles


class _Gathered(Replicated):
    """The last norm: its output is put together again."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        gather = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        return gather._apply(module, device_mesh)


def _blocks(model: nn.Module) -> tuple[str, list[str]]:
    """(prefix of the inner model's names, names of its layers) of a model built like Llama."""
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if base and hasattr(model, base) else ""
    inner = getattr(model, base) if prefix else model
    layers = getattr(inner, "layers", None) or []
    alike = bool(len(layers)) and all(
        {name for name, _ in layer.named_children()} == _BLOCK for layer in layers
    )
    rows = alike and all(
        hasattr(layer.self_attn, "o_proj") and hasattr(layer.mlp, "down_proj") for layer in layers
    )
    if not rows or not hasattr(inner, "norm"):
        raise RecipeError(
            "sequence parallelism supports only models built like Llama and Qwen",
            where="distributed.sequence_parallel",
            value=type(model).__name__,
            hint="remove sequence_parallel: tensor parallelism works without it",
        )
    return prefix, [f"{prefix}layers.{number}" for number in range(len(layers))]
