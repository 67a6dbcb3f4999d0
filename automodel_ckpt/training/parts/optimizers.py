"""Build the ``optimizer`` section: one optimizer, or several that step together, over the parameter groups."""

from __future__ import annotations

import fnmatch
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.state.module_tensors import stored_layout, trained_by_all, unwrap
from automodel_ckpt.config.callables.plugins import build, callable_of
from automodel_ckpt.config.keys.optimizer import (
    OptimizerConfig,
    OptimizerGroup,
    OptimizerTarget,
    OptionsGroup,
    TargetGroup,
)
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.models.inspect.interface import did_you_mean
from automodel_ckpt.optim.build import FusedAdamW, check_optimizer, parts_of

if TYPE_CHECKING:
    from automodel_ckpt.optim.adam8bit import AdamW8bit


Section = OptimizerConfig | OptimizerTarget
Group = OptimizerGroup | OptionsGroup | TargetGroup
AddUp = Callable[[list[int]], list[int]]
"""Sums counts over the pipeline stages. Without stages it returns them unchanged."""

HIDDEN_MATRICES = "hidden_matrices"
"""A pattern for all matrices except embeddings and the output layer, the parameters that Muon is made for."""
_PEFT_PREFIX = "base_model.model."
_NORM_CLASS = re.compile(r"norm(gated|\d+d)?", re.IGNORECASE)


@dataclass(frozen=True)
class Trained:
    """A parameter that needs gradients, and the *names* by which globs find it, its FQN first."""

    parameter: nn.Parameter
    names: tuple[str, ...]
    is_norm_or_bias: bool
    is_hidden_matrix: bool
    is_output: bool = False
    """Whether it belongs to the output layer."""
    scales_with_width: bool = False
    """Whether its number of inputs grows with the width of the model: matrices, except embeddings, and experts."""

    def matches(self, pattern: str) -> bool:
        """Whether a glob, or the name of a set of parameters, matches this one."""
        if pattern == HIDDEN_MATRICES:
            return self.is_hidden_matrix
        from automodel_ckpt.models.inspect.interface import PARTS, parameters_of

        if pattern in PARTS:
            return bool(parameters_of(pattern, self.names))
        return bool(fnmatch.filter(self.names, pattern))


def trained_parameters(model: nn.Module) -> list[Trained]:
    """The parameters of *model* that need gradients, each once, in the model's order."""
    inner = unwrap(model)
    output_layer: Any = getattr(inner, "get_output_embeddings", lambda: None)()
    of_output_layer = (
        {id(p) for p in output_layer.parameters()} if isinstance(output_layer, nn.Module) else set()
    )
    owners = {id(p): module for module in inner.modules() for p in module.parameters(recurse=False)}
    layout = stored_layout(inner)
    names: dict[int, list[str]] = {}
    # A tied parameter has several names. Patterns may use each, with peft's prefix, or as in files.
    for fqn, parameter in inner.named_parameters(remove_duplicate=False):
        plain = fqn.removeprefix(_PEFT_PREFIX)
        names.setdefault(id(parameter), []).extend([fqn, plain, layout.name_of(fqn)])
    found = []
    for parameter in inner.parameters():
        if not parameter.requires_grad:
            continue
        known = tuple(dict.fromkeys(names[id(parameter)]))
        owner = owners[id(parameter)]
        is_matrix = parameter.dim() == 2 and not isinstance(owner, nn.Embedding)
        found.append(
            Trained(
                parameter,
                known,
                is_norm_or_bias=is_norm_or_bias(known[0], owner),
                is_hidden_matrix=is_matrix and id(parameter) not in of_output_layer,
                is_output=id(parameter) in of_output_layer,
                scales_with_width=parameter.dim() >= 2 and not isinstance(owner, nn.Embedding),
            )
        )
    return found


def is_norm_or_bias(name: str, owner: nn.Module) -> bool:
    """Whether weight decay leaves out the parameter *name* of the module *owner*: biases, and all that norms have.

    What transformers' Trainer leaves out is left out here too, which it finds by the words in the name and by
    ``torch.nn.LayerNorm``. Any other class of norms counts here as well.
    """
    name = name.lower()
    if "bias" in name or _NORM_CLASS.search(type(owner).__name__):
        return True
    return any(
        "layernorm" in part or "rmsnorm" in part or part == "norm" or part.endswith("_norm")
        for part in name.split(".")
    )


@dataclass(slots=True)
class PlannedGroup:
    """Parameters that get the same options. *section* is the entry of ``optimizer.groups`` at the recipe's key *key*;
    None for those that no entry has."""

    key: str
    section: Group | None
    options: ValueDict
    label: str
    members: list[Trained] = field(default_factory=list)


def plan_groups(section: Section, trained: Sequence[Trained], add_up: AddUp) -> list[PlannedGroup]:
    """Put each of the *trained* parameters into one group, and return the groups that have parameters.

    A parameter belongs to the first of ``optimizer.groups`` that matches it, or to the rest. Each of these is two
    groups: parameters with weight decay, and parameters for which ``no_decay`` disables it. A collective where
    *add_up* is one. Raises :class:`RecipeError` for globs that match nothing, and for a group that earlier ones leave
    without parameters.
    """
    _check_patterns(section, trained, add_up)
    # Two for the rest, then two for each entry: with weight decay, and without.
    planned = _empty_groups("optimizer", None, section)
    for number, group in enumerate(section.groups):
        planned += _empty_groups(f"optimizer.groups.{number}", group, section)
    for each in trained:
        place = 0
        for number, group in enumerate(section.groups, 1):
            if any(map(each.matches, group.params)):
                place = 2 * number
                break
        is_without_decay = section.no_decay == "auto" and each.is_norm_or_bias
        if isinstance(section.no_decay, list):
            is_without_decay = any(map(each.matches, section.no_decay))
        applies = _no_decay_applies(section, planned[place].section)
        planned[place + (applies and is_without_decay)].members.append(each)
    sizes = add_up([len(group.members) for group in planned])
    for number, group in enumerate(section.groups, 1):
        if not any(sizes[2 * number : 2 * number + 2]):
            raise RecipeError(
                "earlier groups have all parameters of a group",
                where=planned[2 * number].key,
                value=group.params,
                hint="a parameter belongs to the first group that matches it: put the narrower group first",
            )
    # By the sum over the stages: checkpoints store the groups of all stages as one optimizer,
    # so a group that is empty on this stage has to exist if another stage has it.
    return [group for group, size in zip(planned, sizes, strict=True) if size]


def _empty_groups(key: str, group: Group | None, section: Section) -> list[PlannedGroup]:
    """The groups of an entry of ``optimizer.groups`` at *key*. None: of what matches no entry."""
    options: ValueDict = {}
    if isinstance(group, OptimizerGroup):
        for name in ("lr", "betas", "eps", "weight_decay"):
            if getattr(group, name) is not None:
                options[name] = getattr(group, name)
    elif isinstance(group, OptionsGroup):
        options = dict(group.kwargs)
    label = "all others" if section.groups else ""
    if group is not None:
        label = ", ".join(group.params)
    what = "norms and biases" if section.no_decay == "auto" else "no_decay"
    without_label = f"{label}: {what}" if label else what
    return [
        PlannedGroup(key, group, options, label),
        PlannedGroup(key, group, {**options, "weight_decay": 0.0}, without_label),
    ]


def _check_patterns(section: Section, trained: Sequence[Trained], add_up: AddUp) -> None:
    """Raise :class:`RecipeError` with every glob that matches no trained parameter of any pipeline stage."""
    patterns = [
        (f"optimizer.groups.{n}.params", p)
        for n, group in enumerate(section.groups)
        for p in group.params
    ]
    if isinstance(section.no_decay, list):
        patterns += [("optimizer.no_decay", pattern) for pattern in section.no_decay]
    # A pattern may match parameters of other pipeline stages only.
    counts = add_up([sum(each.matches(pattern) for each in trained) for _, pattern in patterns])
    known = {name for each in trained for name in each.names}
    problems = [
        Problem(
            "no trained parameter's name matches",
            key,
            pattern,
            did_you_mean(pattern, known | {HIDDEN_MATRICES}),
        )
        for (key, pattern), count in zip(patterns, counts, strict=True)
        if not count
    ]
    if problems:
        raise RecipeError.all_of(problems)


def _no_decay_applies(section: Section, group: Group | None) -> bool:
    """Whether ``no_decay`` applies to a group: not where it sets its own weight decay."""
    if isinstance(group, OptimizerGroup):
        return group.weight_decay is None
    if group is not None and "weight_decay" in group.kwargs:
        return False
    target = group if isinstance(group, TargetGroup) else section
    if section.no_decay != "auto" or isinstance(target, OptimizerConfig):
        return True
    function = callable_of(target)
    # A function may make its own parameter groups of what it is given.
    is_class = isinstance(function, type) and issubclass(function, Optimizer)
    return is_class and "weight_decay" in inspect.signature(function).parameters


def divided_by_width(
    section: Section, groups: Sequence[PlannedGroup], factor: float, add_up: AddUp
) -> list[PlannedGroup]:
    """Divide each group into the parameters that keep its options, and those that scale with the width.

    The latter get the learning rate times *factor*. Their weight decay is divided by it, because AdamW multiplies the
    decay by the learning rate. Raises :class:`RecipeError` for another optimizer than AdamW.
    """
    from automodel_ckpt.optim.adam8bit import AdamW8bit

    adamws: tuple[Any, ...] = (torch.optim.AdamW, AdamW8bit)
    for each in (section, *section.groups):
        if not isinstance(each, Target) or (callable_of(each) in adamws and each is section):
            continue
        raise RecipeError(
            "learning rates by width are defined for AdamW, and for one optimizer",
            where="optimizer",
            value=each._target_,
        )
    known = _defaults(section)
    divided = []
    for group in groups:
        options = {**known, **group.options}
        rest = replace(group, members=[m for m in group.members if not m.scales_with_width])
        scaled = replace(
            group,
            members=[member for member in group.members if member.scales_with_width],
            options={
                **group.options,
                "lr": float(options["lr"]) * factor,
                "weight_decay": float(options["weight_decay"]) / factor,
            },
            label=f"{group.label or 'all'}: scaled by width",
        )
        divided += [rest, scaled]
    sizes = add_up([len(group.members) for group in divided])
    return [group for group, size in zip(divided, sizes, strict=True) if size]


def inherited(section: Section, group: TargetGroup) -> ValueDict:
    """Return the settings of *section* that the optimizer of *group* takes and that the group does not set.

    The defaults of betas and eps are left out, because they are AdamW's. A class that has a pair where the section has
    a number, or the reverse, does not take the setting.
    """
    if isinstance(section, OptimizerConfig):
        usual = OptimizerConfig()
        settings: ValueDict = {"lr": section.lr, "weight_decay": section.weight_decay}
        for name in ("betas", "eps"):
            if getattr(section, name) != getattr(usual, name):
                settings[name] = getattr(section, name)
    else:
        settings = section.kwargs
        settings = {
            name: value for name, value in settings.items() if not isinstance(value, Target)
        }
    parameters = inspect.signature(callable_of(group)).parameters
    found = {}
    for name, value in settings.items():
        if name not in parameters or name in group.kwargs:
            continue
        default = parameters[name].default
        # Adafactor's eps is a pair, AdamW's a number.
        has_form = isinstance(default, tuple | list) == isinstance(value, tuple | list)
        if has_form or default is None or default is inspect.Parameter.empty:
            found[name] = value
    return found


def _defaults(section: Section) -> ValueDict:
    """The options of an AdamW for groups that do not set them."""
    if isinstance(section, OptimizerConfig):
        return {"lr": section.lr, "weight_decay": section.weight_decay}
    parameters = inspect.signature(callable_of(section)).parameters
    return {name: each.default for name, each in parameters.items()} | section.kwargs


log = logging.getLogger("automodel_ckpt")


def build_optimizer(
    section: Section,
    model: nn.Module,
    *,
    add_up: AddUp,
    takes_own_steps: bool,
    width_factor: float = 1.0,
) -> tuple[Optimizer, list[str]]:
    """The optimizer of all parameters of *model* that need gradients, and a label for each parameter group.

    A collective where *add_up* is one. *width_factor* multiplies the learning rates of the parameters that scale with
    the width, and divides their weight decay (:func:`divided_by_width`).

    Raises :class:`RecipeError` for globs that match nothing, options that the optimizer does not have, and what is no
    optimizer of torch.
    """
    trained = trained_parameters(model)
    groups = plan_groups(section, trained, add_up)
    if width_factor != 1:
        groups = divided_by_width(section, groups, width_factor, add_up)
    optimizers, labels = [], list[str]()
    for own, members in _by_optimizer(section, groups):
        shared = inherited(section, own) if isinstance(own, TargetGroup) else {}
        optimizer = _build_one(own, members, shared)
        check_optimizer(optimizer, takes_own_steps)
        _check_options(optimizer, members)
        optimizers.append(optimizer)
        labels += [group.label for group in members]
    if len(optimizers) == 1:
        return optimizers[0], labels
    from automodel_ckpt.optim.combined_optimizer import CombinedOptimizer

    return CombinedOptimizer(optimizers), labels


def _by_optimizer(
    section: Section, groups: Sequence[PlannedGroup]
) -> Iterator[tuple[Any, list[PlannedGroup]]]:
    """(section of the optimizer, its groups): the recipe's section first, then each group that has its own."""
    shared = [group for group in groups if not isinstance(group.section, TargetGroup)]
    if shared:
        yield section, shared
    for target in section.groups:
        if isinstance(target, TargetGroup):
            yield target, [group for group in groups if group.section is target]


def _build_one(
    section: OptimizerConfig | OptimizerTarget | TargetGroup,
    groups: Sequence[PlannedGroup],
    shared: Values,
) -> Any:
    """Build the optimizer of *section* for *groups*. *shared* are the settings that it has from another section."""
    params: list[Any] = [
        {"params": [each.parameter for each in group.members], **group.options} for group in groups
    ]
    if len(groups) == 1 and not groups[0].options:
        # A user's function may expect a list of parameters instead of groups.
        params = params[0]["params"]
    if isinstance(section, OptimizerConfig):
        return FusedAdamW(
            params,
            lr=section.lr,
            betas=section.betas,
            eps=section.eps,
            weight_decay=section.weight_decay,
        )
    function = callable_of(section)
    if function.__module__.startswith("torchao."):
        raise RecipeError(
            "the state of torchao's optimizers is made of tensors that cannot be saved",
            where=groups[0].key,
            value=f"{function.__module__}.{function.__qualname__}",
            hint="set _target_: automodel_ckpt.optim.adam8bit.AdamW8bit, which has the codes of torchao's AdamW8bit",
        )
    if function is torch.optim.SparseAdam:
        raise RecipeError(
            "torch.optim.SparseAdam updates parameters with sparse gradients only",
            where=groups[0].key,
            value="models of transformers have dense gradients",
            hint="use torch.optim.AdamW",
        )
    if function is torch.optim.Muon or function.__module__ == "automodel_ckpt.optim.muon":
        from automodel_ckpt.optim.muon import Muon

        _check_matrices(groups)
        # torch's class computes with shards: it rounds their products before it adds them up.
        section = replace(section, _target_=f"{Muon.__module__}.{Muon.__qualname__}")
    return build(section, params=params, **shared)


def _check_matrices(groups: Sequence[PlannedGroup]) -> None:
    """Raise :class:`RecipeError` if Muon would get a parameter that is not a matrix."""
    others = [each for group in groups for each in group.members if each.parameter.dim() != 2]
    if others:
        shape = list(others[0].parameter.shape)
        raise RecipeError(
            "torch.optim.Muon takes matrices only",
            where=groups[0].key,
            value=f"{len(others)} other parameters, the first {others[0].names[0]} of shape {shape}",
            hint="give it a separate group, and another optimizer to the rest: "
            "optimizer: {lr: 1e-4, groups: [{params: [hidden_matrices], _target_: torch.optim.Muon, lr: 2e-2}]}",
        )


def _check_options(optimizer: Optimizer, groups: Sequence[PlannedGroup]) -> None:
    """Raise :class:`RecipeError` if a group has an option that the optimizer does not have: torch would ignore it."""
    for group in groups:
        unknown = sorted(group.options.keys() - optimizer.defaults.keys())
        if unknown:
            raise RecipeError(
                f"{type(optimizer).__name__} has no option {unknown[0]} for a group of parameters",
                where=f"{group.key}.{unknown[0]}",
                value=f"{group.options[unknown[0]]}; it has {', '.join(sorted(optimizer.defaults))}",
            )


def log_groups(optimizer: Optimizer, labels: Sequence[str]) -> None:
    """One line for each parameter group: how many tensors and elements it trains, with which options."""
    of_all_stages = trained_by_all(optimizer)
    kinds = [type(each).__name__ for each in parts_of(optimizer) for _ in each.param_groups]
    # A user's function may have made other groups.
    labels = labels if len(labels) == len(kinds) else [""] * len(kinds)
    for number, (group, kind, label) in enumerate(
        zip(optimizer.param_groups, kinds, labels, strict=True)
    ):
        tensors = group["params"]
        if of_all_stages is not None:
            tensors = list(of_all_stages[number].values())
        num_elements = sum(tensor.numel() for tensor in tensors)
        options = ""
        for key, name in _LOGGED.items():
            if group.get(key) is not None:
                options += f", {name} {float(group[key]):g}"
        log.debug(
            "%s, parameter group %d%s: %s in %s%s",
            kind,
            number,
            f" ({label})" if label else "",
            counted(num_elements, "element"),
            counted(len(tensors), "tensor"),
            options,
        )


def optimizers_8bit(optimizer: Optimizer) -> list[AdamW8bit]:
    """The optimizers with 8-bit moments among those that *optimizer* combines, or *optimizer* itself."""
    # By an attribute of the class, which is imported only where a recipe names it.
    return [each for each in parts_of(optimizer) if hasattr(each, "state_options")]


_LOGGED = {"lr": "lr", "weight_decay": "weight decay"}
