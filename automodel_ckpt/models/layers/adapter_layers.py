"""Which modules and parameters of a model get an adapter, and which modules are trained in full.

Names are resolved here, because peft matches suffixes without a message: ``head`` in ``modules_to_save`` would also
match ``lm_head``.
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.models.layers.lora import ADAPTER_NAME, ALL_EXPERTS, ALL_LINEAR, Lora
from automodel_ckpt.models.loss.mtp import is_of_mtp, mtp_of

log = logging.getLogger("automodel_ckpt")

_LINEAR = (nn.Linear, Conv1D)
_ADAPTABLE = (*_LINEAR, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FUSED_DIMENSIONS = 3
"""Fused experts have the shape (experts, inputs, outputs) or (experts, outputs, inputs)."""
_UNSUITED = "peft does not support adapters on these layers of this model"
Named = TypeVar("Named")


def _is_match(pattern: str, name: str) -> bool:
    """Whether a glob matches the full name, or a pattern without wildcards the name or its last components."""
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return name == pattern or name.endswith(f".{pattern}")


def _as_list(patterns: Sequence[str] | str) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _within(parents: Sequence[str], names: Iterable[str]) -> set[str]:
    """The names of modules that are in *parents* or inside of one of them."""
    prefixes = tuple(f"{parent}." for parent in parents)
    return {name for name in names if name in parents or name.startswith(prefixes)}


def _leaf_names(names: Iterable[str]) -> list[str]:
    """The last components of module names, without numbers and duplicates."""
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return [leaf for leaf in leaves if not leaf.isdecimal()]


def _available(wanted: Iterable[str], pattern: str = "") -> str:
    """A hint with the last components of up to 20 names, and with those that are similar to the last of *pattern*."""
    leaves = _leaf_names(wanted)
    if not leaves:
        return "the model has no such layer"
    more = f" and {len(leaves) - 20} more" if len(leaves) > 20 else ""
    hint = f"there are {', '.join(leaves[:20])}{more}"
    near = difflib.get_close_matches(pattern.rpartition(".")[2], leaves, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}? {hint}" if near else hint


def find_layers(
    model: nn.Module, lora: Lora, head: Sequence[str] = ()
) -> tuple[list[str], list[str], list[str], dict[str, int], dict[str, int]]:
    """Find what the settings of *lora* select in *model*, which may be on the meta device.

    Returns:
        What :func:`find_parameters`, :func:`find_modules` and :func:`numbers_of_layers` return.

    Raises:
        RecipeError: If a pattern matches nothing, or nothing that can have an adapter.
    """
    parameters = find_parameters(model, lora.target_parameters)
    targets, saved = find_modules(model, lora, head)
    return parameters, targets, saved, *numbers_of_layers(lora, targets)


def find_modules(
    model: nn.Module, lora: Lora, head: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Find the full names of the modules that get an adapter, and of those that are fully trained.

    The modules *head* are among the latter, and have no adapters, whatever the patterns match.
    The layers for multi-token prediction are not among them: peft's users load adapters into models without them.
    Raises :class:`RecipeError` with every pattern that matches no module.
    """
    modules = _without_mtp(model, dict(model.named_modules(remove_duplicate=False)))
    del modules[""]
    problems: list[Problem] = []
    given = _matching(lora.modules_to_save, modules, modules, "peft.modules_to_save", problems)
    # In the order of the model.
    saved = [name for name in modules if name in given or name in head]
    adaptable = {name: module for name, module in modules.items() if isinstance(module, _ADAPTABLE)}
    excluded = _matching(lora.exclude_modules, adaptable, modules, "peft.exclude_modules", problems)
    for pattern in lora.exclude_if_present:
        excluded.update(name for name in adaptable if _is_match(pattern, name))
    patterns = _as_list(lora.target_modules)
    unsuited = _unsuited(model, adaptable)
    key = "peft.target_modules"
    found: set[str] = set()
    if ALL_LINEAR in patterns:
        linear = _all_linear(model, adaptable) - _within(saved, adaptable)
        if omitted := sorted(linear & unsuited - excluded):
            log.warning("%s, so they get none: %s", _UNSUITED, ", ".join(_leaf_names(omitted)))
        found = linear - unsuited
    named = [pattern for pattern in patterns if pattern != ALL_LINEAR]
    found |= _matching(named, adaptable, modules, key, problems, _of_fused_experts(model))
    found -= excluded | _within(head, adaptable)
    if wrong := sorted(found & unsuited):
        hint = "leave them out (peft.exclude_modules), or use all-linear"
        problems.append(Problem(_UNSUITED, key, wrong[:5], hint))
    if both := sorted(found & _within(saved, adaptable)):
        what = "these modules would be both fully trained and adapted"
        hint = "list them in only one of the two settings"
        problems.append(Problem(what, "peft.modules_to_save", both[:5], hint))
    if not found and not problems and not find_parameters(model, lora.target_parameters):
        problems.append(Problem("no layer is left to adapt", key, patterns, _available(adaptable)))
    RecipeError.check(problems)
    return [name for name in modules if name in found], saved


def find_parameters(model: nn.Module, patterns: Sequence[str] | str) -> list[str]:
    """Find the full names of the parameters with three dimensions (fused experts) that *patterns* match.

    A glob matches the full name, other patterns the name or its last components. ``all-experts`` selects all, also if
    there are none. Raises :class:`RecipeError` with every other pattern that matches none.
    """
    fused = _of_fused_experts(model)
    found: set[str] = set()
    problems: list[Problem] = []
    for pattern in _as_list(patterns):
        if pattern == ALL_EXPERTS:
            # Embeddings of positions can have three dimensions, too.
            found.update(name for name in fused if "experts" in name.rpartition(".")[0])
            continue
        matches = [name for name in fused if _is_match(pattern, name)]
        found.update(matches)
        if not matches:
            what = "no parameter with three dimensions (fused experts) has this name"
            hint = "the model has no fused experts: use peft.target_modules"
            if fused:
                hint = _available(fused, pattern)
            problems.append(Problem(what, "peft.target_parameters", pattern, hint))
    RecipeError.check(problems)
    return [name for name in fused if name in found]


def _of_fused_experts(model: nn.Module) -> list[str]:
    """The full names of the parameters with three dimensions, without the parameters of layers."""
    modules = dict(model.named_modules())
    # The kernel of a convolution can have three dimensions, too.
    return [
        name
        for name, parameter in _without_mtp(model, dict(model.named_parameters())).items()
        if parameter.dim() == _FUSED_DIMENSIONS
        and not isinstance(modules[name.rpartition(".")[0]], _ADAPTABLE)
    ]


def numbers_of_layers(lora: Lora, targets: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """The ranks and the alphas of the layers *targets* that a pattern matches.

    Raises :class:`RecipeError` with every pattern that matches none of them.
    """
    ranks: dict[str, int] = {}
    alphas: dict[str, int] = {}
    problems: list[Problem] = []
    for key, patterns, numbers in (
        ("peft.rank_pattern", lora.rank_pattern, ranks),
        ("peft.alpha_pattern", lora.alpha_pattern, alphas),
    ):
        for pattern, number in patterns.items():
            matches = [name for name in targets if _is_match(pattern, name)]
            for name in matches:
                numbers.setdefault(name, number)
            if not matches:
                what = "no adapted layer has this name"
                problems.append(Problem(what, key, pattern, _available(targets)))
    RecipeError.check(problems)
    return ranks, alphas


def _without_mtp(model: Any, named: dict[str, Named]) -> dict[str, Named]:
    """The modules or parameters of *model* without the layers for multi-token prediction."""
    if mtp_of(model) is None:
        return named
    return {name: value for name, value in named.items() if not is_of_mtp(name)}


def _matching(
    patterns: Iterable[str],
    wanted: Mapping[str, nn.Module],
    modules: Mapping[str, nn.Module],
    key: str,
    problems: list[Problem],
    fused: Iterable[str] = (),
) -> set[str]:
    """The names in *wanted* that patterns match. Adds a problem for each pattern without a match.

    The hint for one that matches a name in *fused*, the weights of experts, is another key.
    """
    found: set[str] = set()
    for pattern in patterns:
        matches = [name for name in wanted if _is_match(pattern, name)]
        found.update(matches)
        if matches:
            continue
        what, hint = "no module has this name", _available(wanted, pattern)
        for name, module in modules.items():
            if _is_match(pattern, name):
                kind = type(module).__name__
                what = f"{name} is a {kind}: only single layers can have an adapter"
                break
        if weights := [name for name in fused if _is_match(pattern, name)]:
            what = f"no module has this name: {weights[0]} has the weights of fused experts"
            hint = "list it in peft.target_parameters"
        problems.append(Problem(what, key, pattern, hint))
    return found


def _all_linear(model: Any, adaptable: Mapping[str, nn.Module]) -> set[str]:
    """The names of all linear layers except the output layer."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {
        name
        for name, layer in adaptable.items()
        if isinstance(layer, _LINEAR) and layer is not output
    }


def _unsuited(model: Any, adaptable: Mapping[str, nn.Module]) -> set[str]:
    """The names of layers that can have no adapter."""
    leaves = {leaf for leaf in _leaf_names(adaptable) if not _accepts(model, leaf)}
    rejected = {name for name in adaptable if name.rpartition(".")[2] in leaves}
    return rejected | _not_linear(model, adaptable) | _lost_by_peft(model, adaptable)


def _accepts(model: Any, leaf: str) -> bool:
    """Whether peft puts adapters on layers with this name.

    It rejects layers of some types of models, such as those with kernels that read the weight. It interprets other
    names as names of experts in older versions of the model: it would adapt the fused experts instead, and the saved
    adapter would give other outputs in peft.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config: Any = LoraConfig(target_modules=[leaf])
    try:
        _check_lora_target_modules_mamba(config, model, leaf)
        convert_peft_config_for_transformers(config, model=model, conversions=None)
    except ValueError:
        return False
    return leaf in config.target_modules


def _lost_by_peft(model: nn.Module, names: Iterable[str]) -> set[str]:
    """The *names* of layers with adapters that peft saves, and ignores with a warning when it loads them.

    peft applies the renamings that transformers has for old weights to adapters, too, and some rename the present name
    of a layer (peft 0.21: shared_experts of Laguna).
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import (
        convert_peft_adapter_state_dict_for_transformers as loaded_state,
    )

    keys = {f"base_model.model.{name}.lora_A.weight": name for name in names}
    # Only the names matter. Adapters on the meta device take no memory.
    state = {key: torch.empty(1, 1, device="meta") for key in keys}
    config: Any = LoraConfig(target_modules=list(keys.values()))
    loaded = loaded_state(model, config, state, ADAPTER_NAME)
    found = {key.replace(f".{ADAPTER_NAME}.", ".") for key in loaded}
    return {name for key, name in keys.items() if key not in found}


def _not_linear(model: nn.Module, adaptable: Mapping[str, nn.Module]) -> set[str]:
    """The names of layers that the model's code derives from ``nn.Linear``, but that compute something else.

    Examples are routers that return scores and indices, and block-diagonal projections. peft adds the output of an
    adapter to what such a layer returns, and the forward pass fails.
    """
    # Classes of other packages, such as quantized layers, have adapters of their own in peft.
    code = type(model).__module__
    return {
        name
        for name, layer in adaptable.items()
        if isinstance(layer, nn.Linear) and type(layer).__module__ == code and not _maps_rows(layer)
    }


def _maps_rows(layer: nn.Linear) -> bool:
    """Whether *layer* maps rows of ``in_features`` values to a tensor with rows of ``out_features`` values."""
    if type(layer).forward is nn.Linear.forward:
        return True
    # On the meta device, nothing is computed and no random numbers are drawn.
    state = [*layer.named_parameters(), *layer.named_buffers()]
    tensors = {name: torch.empty_like(tensor, device="meta") for name, tensor in state}
    rows = torch.empty(2, 3, layer.in_features, dtype=layer.weight.dtype, device="meta")
    try:
        with torch.no_grad():
            output = torch.func.functional_call(layer, tensors, (rows,))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return isinstance(output, Tensor) and output.shape == (2, 3, layer.out_features)
