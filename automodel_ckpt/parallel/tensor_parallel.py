"""Tensor parallelism: apply a plan of module names and styles with torch's parallelize_module."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.tensor_plan import (
    Replicated,
    base_and_prefix,
    own_parameters,
    used_by_parent,
    with_adapters,
)

_WHERE = "distributed.tp_size"

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
            hint="remove sequence_parallel: tensor parallelism works without it",
        )
    return prefix, [f"{prefix}layers.{number}" for number in range(len(layers))]
