"""Which modules and parameters of a model get an adapter, and which modules are trained in full.

Names are resolved here, because peft matches suffixes without a message: ``head`` in ``modules_to_save`` would also
match ``lm_head``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn
from transformers.pytorch_utils import Conv1D

from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.models.inspect.module_patterns import (
    available,
    is_match,
    leaf_names,
    pattern_hint,
    within,
)
from automodel_ckpt.models.layers.adapter_limits import (
    lost_by_peft,
    mistaken_for_experts,
    not_linear_layers,
    rejected_by_peft,
)
from automodel_ckpt.models.layers.lora import ALL_EXPERTS, ALL_LINEAR, Lora
from automodel_ckpt.models.loss.mtp import is_of_mtp, mtp_of

log = logging.getLogger("automodel_ckpt")

_LINEAR = (nn.Linear, Conv1D)
_ADAPTABLE = (*_LINEAR, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FUSED_DIMENSIONS = 3
"""Fused experts have the shape (experts, inputs, outputs) or (experts, outputs, inputs)."""
Named = TypeVar("Named")


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
        excluded += [name for name in adaptable if is_match(pattern, name)]
    patterns = lora.target_modules
    if isinstance(patterns, str):
        patterns = [patterns]
    found: set[str] = set()
    experts = mistaken_for_experts(model, adaptable)
    not_linear = not_linear_layers(model, adaptable)
    lost = lost_by_peft(model, adaptable)
    if ALL_LINEAR in patterns:
        found |= _all_linear(model, adaptable) - within(saved, adaptable)
        # peft would adapt the fused experts instead, and the saved adapter would give other outputs
        # in peft.
        reasons = {
            "peft treats layers with these names as experts, so they get no adapter": experts,
            "peft does not support adapters on these layers of this model": rejected_by_peft(
                model, found - experts
            ),
            "these layers do not return what a linear layer does, so they get no adapter": not_linear,
            "peft cannot load adapters of these layers, so they get none": lost,
        }
        for reason, names in reasons.items():
            if omitted := sorted(found & names - set(excluded)):
                log.warning("%s: %s", reason, ", ".join(leaf_names(omitted)))
            found -= names
    named = [pattern for pattern in patterns if pattern != ALL_LINEAR]
    fused = _of_fused_experts(model)
    key = "peft.target_modules"
    found |= set(_matching(named, adaptable, modules, key, problems, fused))
    found -= {*excluded, *within(head, adaptable)}
    problems += _unsuited_problems(found, experts, not_linear, lost)
    if both := sorted(found & within(saved, adaptable)):
        what = "these modules would be both fully trained and adapted"
        hint = "list them in only one of the two settings"
        problems.append(Problem(what, "peft.modules_to_save", both[:5], hint))
    if not found and not problems and not find_parameters(model, lora.target_parameters):
        what = "no layer is left to adapt"
        hint = available(adaptable)
        problems.append(Problem(what, "peft.target_modules", list(patterns), hint))
    if problems:
        raise RecipeError.all_of(problems)
    return [name for name in modules if name in found], saved


def find_parameters(model: nn.Module, patterns: Sequence[str] | str) -> list[str]:
    """Find the full names of the parameters with three dimensions (fused experts) that *patterns* match.

    A glob matches the full name, other patterns the name or its last components. ``all-experts`` selects all, also if
    there are none. Raises :class:`RecipeError` with every other pattern that matches none.
    """
    parameters = _without_mtp(model, dict(model.named_parameters()))
    fused = _of_fused_experts(model)
    found: set[str] = set()
    problems: list[Problem] = []
    if isinstance(patterns, str):
        patterns = [patterns]
    for pattern in patterns:
        if pattern == ALL_EXPERTS:
            # Embeddings of positions can have three dimensions, too.
            found.update(name for name in fused if _is_of_experts(name))
            continue
        matches = [name for name in fused if is_match(pattern, name)]
        found.update(matches)
        if matches:
            continue
        what = "no parameter with three dimensions (fused experts) has this name"
        if others := [name for name in parameters if is_match(pattern, name)]:
            other, num_dimensions = others[0], parameters[others[0]].dim()
            what = f"{other} has {num_dimensions} dimensions: only fused experts, with three, are adapted like this"
        leaves = leaf_names(fused)
        hint = "the model has no fused experts: use peft.target_modules"
        if leaves:
            hint = f"there are {', '.join(leaves)}"
        problems.append(Problem(what, "peft.target_parameters", pattern, hint))
    if problems:
        raise RecipeError.all_of(problems)
    return [name for name in fused if name in found]


def _of_fused_experts(model: nn.Module) -> list[str]:
    """The full names of the parameters with three dimensions, without those of layers."""
    modules = dict(model.named_modules())
    fused: list[str] = []
    for name, parameter in _without_mtp(model, dict(model.named_parameters())).items():
        # The kernel of a convolution can have three dimensions, too.
        is_layer = isinstance(modules[name.rpartition(".")[0]], _ADAPTABLE)
        if parameter.dim() == _FUSED_DIMENSIONS and not is_layer:
            fused.append(name)
    return fused


def numbers_of_layers(lora: Lora, targets: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """The ranks and the alphas of the layers *targets* that a pattern matches.

    Raises :class:`RecipeError` with every pattern that matches none of them.
    """
    found: list[dict[str, int]] = []
    problems: list[Problem] = []
    for key, patterns in (
        ("peft.rank_pattern", lora.rank_pattern),
        ("peft.alpha_pattern", lora.alpha_pattern),
    ):
        numbers: dict[str, int] = {}
        for pattern, number in patterns.items():
            matches = [name for name in targets if is_match(pattern, name)]
            for name in matches:
                numbers.setdefault(name, number)
            if not matches:
                what = "no adapted layer has this name"
                problems.append(Problem(what, key, pattern, available(targets)))
        found.append(numbers)
    if problems:
        raise RecipeError.all_of(problems)
    ranks, alphas = found
    return ranks, alphas


def _without_mtp(model: Any, named: dict[str, Named]) -> dict[str, Named]:
    """The modules or parameters of *model* without those of the layers for multi-token prediction."""
    if mtp_of(model) is None:
        return named
    return {name: value for name, value in named.items() if not is_of_mtp(name)}


def _is_of_experts(name: str) -> bool:
    """Whether a module that a parameter is in has the name that transformers gives to experts."""
    return any("experts" in component for component in name.split(".")[:-1])


def _matching(
    patterns: Iterable[str],
    wanted: Mapping[str, nn.Module],
    modules: Mapping[str, nn.Module],
    key: str,
    problems: list[Problem],
    fused: Iterable[str] = (),
) -> list[str]:
    """The names in *wanted* that patterns match. Adds a problem for each pattern without a match.

    The hint for one that matches a name in *fused*, the weights of experts, is another key.
    """
    found: set[str] = set()
    for pattern in patterns:
        matches = [name for name in wanted if is_match(pattern, name)]
        found.update(matches)
        if not matches:
            what = "no module has this name"
            others = [name for name in modules if is_match(pattern, name)]
            if others:
                kind = type(modules[others[0]]).__name__
                what = f"{others[0]} is a {kind}: only single layers can have an adapter"
            hint = pattern_hint(pattern, wanted)
            if "," in pattern:
                names = ", ".join(part.strip() for part in pattern.split(","))
                hint = f"write several names as a list, [{names}]; {hint}"
            if weights := leaf_names(name for name in fused if is_match(pattern, name)):
                what = f"no module has this name: {weights[0]} has the weights of fused experts"
                hint = f"list it in peft.target_parameters, not here; {available(wanted)}"
            problems.append(Problem(what, key, pattern, hint))
    return [name for name in wanted if name in found]


def _all_linear(model: Any, adaptable: Mapping[str, nn.Module]) -> set[str]:
    """The names of all linear layers except the output layer."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = set()
    for name, layer in adaptable.items():
        if isinstance(layer, _LINEAR) and layer is not output:
            found.add(name)
    return found


def _unsuited_problems(
    found: set[str], experts: set[str], not_linear: set[str], lost: set[str]
) -> list[Problem]:
    """The problems of the layers *found* that were selected by name and can have no adapter."""
    leave_out = "leave them out: peft.exclude_modules"
    causes = [
        (
            "peft treats layers with these names as experts, and would adapt the experts instead",
            experts,
            "select other layers, or use all-linear",
        ),
        (
            "these layers do not return what a linear layer does, so they can have no adapter",
            not_linear,
            leave_out,
        ),
        ("peft saves adapters of these layers, and cannot load them", lost, leave_out),
    ]
    problems = []
    for what, names, hint in causes:
        if wrong := sorted(found & names):
            problems.append(Problem(what, "peft.target_modules", wrong[:5], hint))
    return problems
