"""Which modules and parameters of a model get an adapter, and which modules are trained in full.

Names are resolved here, because peft matches suffixes without a message: ``head`` in ``modules_to_save`` would also
match ``lm_head``.
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.models.layers.lora import ADAPTER_NAME, ALL_EXPERTS, ALL_LINEAR, Lora
from automodel_ckpt.models.loss.mtp import is_of_mtp, mtp_of

log = logging.getLogger("automodel_ckpt")

_LINEAR = (nn.Linear, Conv1D)
_ADAPTABLE = (*_LINEAR, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FUSED_DIMENSIONS = 3
"""Fused experts have the shape (experts, inputs, outputs) or (experts, outputs, inputs)."""
Named = TypeVar("Named")


def is_match(pattern: str, name: str) -> bool:
    """Whether a glob matches the full name, or a pattern without wildcards the name or its last components."""
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return name == pattern or name.endswith(f".{pattern}")


def within(parents: Sequence[str], names: Iterable[str]) -> set[str]:
    """The names of modules that are in *parents* or inside of one of them."""
    prefixes = tuple(f"{parent}." for parent in parents)
    return {name for name in names if name in parents or name.startswith(prefixes)}


def leaf_names(names: Iterable[str]) -> list[str]:
    """The last components of module names, without numbers and duplicates."""
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return [leaf for leaf in leaves if not leaf.isdecimal()]


def pattern_hint(pattern: str, wanted: Mapping[str, nn.Module]) -> str:
    """A hint with the names that are similar to the unknown component of *pattern*, and with all names.

    The suggestion for a component that is not the last one of a name is a glob.
    """
    leaves = leaf_names(wanted)
    components: dict[str, None] = {}
    for name in wanted:
        components.update(dict.fromkeys(name.split(".")))
    words = [word for word in re.split(r"[^\w-]+", pattern) if word]
    unknown = [word for word in words if word not in components]
    word = unknown[-1] if unknown else pattern.rpartition(".")[2]
    names = [component for component in components if not component.isdecimal()]
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    if not near:
        return available(wanted)
    suggestions = [name if name in leaves else f"*.{name}.*" for name in near]
    return f"did you mean {' or '.join(suggestions)}? {available(wanted)}"


def available(wanted: Iterable[str]) -> str:
    """A hint with the last components of up to 20 names."""
    leaves = leaf_names(wanted)
    if not leaves:
        return "the model has no such layer"
    more = f" and {len(leaves) - 20} more" if len(leaves) > 20 else ""
    return f"there are {', '.join(leaves[:20])}{more}"


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


def mistaken_for_experts(model: Any, adaptable: Iterable[str]) -> set[str]:
    """The names of layers that peft would replace by the fused experts of the model.

    peft interprets such names as those of experts in older versions of the model.
    """
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a version of peft without support for fused experts
        return set()

    def is_unchanged(leaf: str) -> bool:
        config: Any = LoraConfig(target_modules=[leaf])
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=None)
        except ValueError:  # peft rejects a part of a fused tensor
            return False
        return leaf in config.target_modules

    experts = {leaf for leaf in leaf_names(adaptable) if not is_unchanged(leaf)}
    return {name for name in adaptable if name.rpartition(".")[2] in experts}


def rejected_by_peft(model: Any, names: Iterable[str]) -> set[str]:
    """The *names* of layers that peft rejects in models of this type, such as those whose kernels read the weight."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    def is_rejected(leaf: str) -> bool:
        try:
            _check_lora_target_modules_mamba(LoraConfig(), model, leaf)
        except ValueError:
            return True
        return False

    candidates = set(names)
    rejected = {leaf for leaf in leaf_names(candidates) if is_rejected(leaf)}
    return {name for name in candidates if name.rpartition(".")[2] in rejected}


def lost_by_peft(model: nn.Module, names: Iterable[str]) -> set[str]:
    """The *names* of layers whose adapters peft saves, and ignores when it loads them, with a warning.

    peft applies the renamings that transformers has for old weights to adapters, too, and some rename the present name
    of a layer (peft 0.21: shared_experts of Laguna).
    """
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import (
            convert_peft_adapter_state_dict_for_transformers as loaded_state,
        )
    except ImportError:  # a version of peft that renames nothing
        return set()
    keys = {f"base_model.model.{name}.lora_A.weight": name for name in names}
    # Only the names matter. Adapters on the meta device take no memory.
    state = {key: torch.empty(1, 1, device="meta") for key in keys}
    config: Any = LoraConfig(target_modules=list(keys.values()))
    loaded = loaded_state(model, config, state, ADAPTER_NAME)
    found = {key.replace(f".{ADAPTER_NAME}.", ".") for key in loaded}
    return {name for key, name in keys.items() if key not in found}


def not_linear_layers(model: nn.Module, adaptable: Mapping[str, nn.Module]) -> set[str]:
    """The names of layers that the model's code derives from ``nn.Linear``, but that compute something else.

    Examples are routers that return scores and indices, and block-diagonal projections. peft adds the output of an
    adapter to what such a layer returns, and the forward pass fails.
    """
    found = set()
    for name, layer in adaptable.items():
        # Classes of other packages, such as quantized layers, have adapters of their own in peft.
        is_own_class = type(layer).__module__ == type(model).__module__
        if isinstance(layer, nn.Linear) and is_own_class and not _maps_rows(layer):
            found.add(name)
    return found


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
    return isinstance(output, torch.Tensor) and output.shape == (2, 3, layer.out_features)
