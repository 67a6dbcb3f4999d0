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
        held: dict[str, nn.Parameter] = {}
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter, device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))

        def summed(gradient: torch.Tensor) -> torch.Tensor:
            total = gradient.clone()
            dist.all_reduce(total, group=group)
            return total

        def lend(module: nn.Module, _: Any) -> None:
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):
                    held[name] = parameter
                    local = parameter.to_local()
                    if self._partial and local.requires_grad:
                        local.register_hook(summed)  # type: ignore[no-untyped-call]
                    module._parameters[name] = local  # type: ignore[assignment]

        def give_back(module: nn.Module, *_: Any) -> None:
            module._parameters.update(held)
            held.clear()

        module.register_forward_pre_hook(lend)
        module.register_forward_hook(give_back, always_call=True)
        return module


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
    heads = {name: getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    uneven = {name: count for name, count in heads.items() if isinstance(count, int) and count % tp_size}
    if uneven:
        fitting = [size for size in range(1, tp_size) if not any(count % size for count in heads.values() if count)]
        raise RecipeError(
            "the attention heads cannot be shared out evenly",
            where=_WHERE,
            value=f"{tp_size}; the model has " + ", ".join(f"{name} {count}" for name, count in uneven.items()),
            remedy=f"set it to {max(fitting)}" + (", and shard with fsdp2" if max(fitting) == 1 else ""),
        )


def plan_for(model: nn.Module, given: Plan | None, tp_size: int) -> dict[str, ParallelStyle]:
    """The style of each module by its name: of the *given* plan, else of the model's own.

    Raises :class:`RecipeError` for a model without a plan, styles that are none, names that match nothing, and layers
    that cannot be cut into *tp_size* equal parts.
    """
    plan: Plan = given if given is not None else getattr(model, "tp_plan", None) or {}
    found = dict(_matches(plan, (name for name, _ in model.named_modules())))
    if not found:
        raise RecipeError(
            "this model brings no plan for tensor parallelism",
            where=_WHERE,
            value=f"{tp_size}, with {type(model).__name__}",
            remedy="leave tp_size out (fsdp2 shards any model), or write a plan and name it in distributed.tp_plan",
        )
    bare = dict(_matches(plan, (name for name, _ in model.named_parameters())))
    problems = [*_unmatched(given or {}, model), *_unknown(found, bare), *_uneven(model, found, tp_size)]
    if problems:
        raise RecipeError.all_of(problems)
    return {name: _STYLES[style]() if isinstance(style, str) else style for name, style in found.items()}


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
            remedy = "name modules as model.named_modules() does, with * for a layer's number"
            yield Problem("no module of the model has a name in the plan", "distributed.tp_plan", pattern, remedy)


def _unknown(found: Plan, bare: Plan) -> Iterator[Problem]:
    """Styles that are not known, and any style for a parameter instead of a module."""
    unknown = {**{name: s for name, s in found.items() if isinstance(s, str) and s not in _STYLES}, **bare}
    for style in sorted({str(style) for style in unknown.values()}):
        names = [name for name, its in unknown.items() if str(its) == style]
        yield Problem(
            f"the tensor parallel plan asks for what is not supported, {style!r}",
            _WHERE,
            f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0],
            "leave tp_size out (fsdp2 shards any model), or write a plan for distributed.tp_plan that gives modules "
            f"the styles {', '.join(_STYLES)}",
        )


def _uneven(model: nn.Module, found: Plan, tp_size: int) -> Iterator[Problem]:
    """A rank's part of a layer's output goes on as if it were whole: all parts have to be of one size."""
    for name, style in found.items():
        size = getattr(model.get_submodule(name), _SPLIT[style], 0) if style in _SPLIT else 0
        if size % tp_size:
            yield Problem(
                "a layer cannot be cut evenly",
                _WHERE,
                f"{tp_size}; {name} has {_SPLIT[style]} {size}",  # type: ignore[index]
                f"set it to a divisor of {size}",
            )
            return


def apply_plan(
    model: nn.Module, plan: Mapping[str, ParallelStyle], mesh: DeviceMesh, *, sequence_parallel: bool = False
) -> None:
    """Cut the model's layers in place over the 1-D *mesh*, and tie again what was tied.

    With *sequence_parallel* what lies between the layers' matrices is cut along the sequence: the number of tokens of
    a row has to be a multiple of the ranks. Raises :class:`RecipeError` for a model of another structure than Llama's,
    and for tied parameters that the plan cuts differently.
    """
    styles = dict(plan)
    if sequence_parallel:
        styles |= _along_the_sequence(model, plan)
    tied = _tied_names(model)
    parallelize_module(model, mesh, styles)
    for module in model.modules():
        if any(not isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
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
            "the tensor parallel plan cuts tied parameters differently",
            where="distributed.tp_plan",
            value=f"{kept} and {alias}",
            remedy="give both the same dimension (embedding_rowwise goes with colwise_gather_output), or untie them",
        )
    parent, _, name = alias.rpartition(".")
    setattr(model.get_submodule(parent), name, one)


def _along_the_sequence(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    prefix, layers = _blocks(model)
    cut, whole = Shard(1), Replicate()
    styles: dict[str, ParallelStyle] = {}
    for name in layers:
        styles[f"{name}.input_layernorm"] = styles[f"{name}.post_attention_layernorm"] = Replicated(partial=True)
        styles[f"{name}.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": cut}, desired_input_kwarg_layouts={"hidden_states": whole}
        )
        styles[f"{name}.mlp"] = PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(whole,))
        for row in ("self_attn.o_proj", "mlp.down_proj"):
            styles[f"{name}.{row}"] = RowwiseParallel(output_layouts=cut)
    # The embedding stays whole, so that masks and positions are made for all of the sequence.
    styles[layers[0]] = PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(cut,), use_local_output=True)
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
    alike = bool(len(layers)) and all({name for name, _ in layer.named_children()} == _BLOCK for layer in layers)
    rows = alike and all(hasattr(layer.self_attn, "o_proj") and hasattr(layer.mlp, "down_proj") for layer in layers)
    if not rows or not hasattr(inner, "norm"):
        raise RecipeError(
            "sequence parallelism is for models built like Llama and Qwen",
            where="distributed.sequence_parallel",
            value=type(model).__name__,
            remedy="leave sequence_parallel out: tensor parallelism works without it",
        )
    return prefix, [f"{prefix}layers.{number}" for number in range(len(layers))]
