"""Build the ``optimizer`` section: one optimizer, or several that step together, over the parameter groups."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.state.optimizer_names import trained_by_all
from automodel_ckpt.config.callables.plugins import build, callable_of
from automodel_ckpt.config.keys.optimizer import (
    OptimizerConfig,
    OptimizerTarget,
    TargetGroup,
)
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.optim.build import FusedAdamW, check_optimizer
from automodel_ckpt.training.parts.parameter_groups import (
    AddUp,
    PlannedGroup,
    Section,
    divided_by_width,
    inherited,
    plan_groups,
    trained_parameters,
)

if TYPE_CHECKING:
    from automodel_ckpt.optim.adam8bit import AdamW8bit

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
    shared: Mapping[str, Any],
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
                value=group.options[unknown[0]],
                hint=f"it has {', '.join(sorted(optimizer.defaults))}",
            )


def log_groups(optimizer: Optimizer, labels: Sequence[str]) -> None:
    """One line for each parameter group: how many tensors and elements it trains, with which options."""
    of_all_stages = trained_by_all(optimizer)
    kinds = [type(each).__name__ for each in _combined(optimizer) for _ in each.param_groups]
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
        log.info(
            "%s, parameter group %d%s: %s in %s%s",
            kind,
            number,
            f" ({label})" if label else "",
            counted(num_elements, "element"),
            counted(len(tensors), "tensor"),
            options,
        )
    for each in optimizers_8bit(optimizer):
        log.info("%s: %s", type(each).__name__, each.state_summary)


def optimizers_8bit(optimizer: Optimizer) -> list[AdamW8bit]:
    """The optimizers with 8-bit moments among those that *optimizer* combines, or *optimizer* itself."""
    # By an attribute of the class, which is imported only where a recipe names it.
    return [each for each in _combined(optimizer) if hasattr(each, "state_options")]


def _combined(optimizer: Any) -> list[Any]:
    """The optimizers that *optimizer* combines, or *optimizer* itself."""
    return list(getattr(optimizer, "optimizers", [optimizer]))


_LOGGED = {"lr": "lr", "weight_decay": "weight decay"}
