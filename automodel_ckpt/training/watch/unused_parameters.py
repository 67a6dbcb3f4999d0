"""Trained parameters that get no gradient in the first step, because no loss of it depends on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.errors import Problem, RecipeError

log = logging.getLogger("automodel_ckpt")

_NUM_SHOWN = 5


def check_all_trained(
    model: nn.Module, *, has_adapters: bool, is_error: bool, is_resumed: bool = False
) -> None:
    """Look for parameters of *model* that need a gradient and have none after the first step's backward passes.

    Raises :class:`RecipeError` with *is_error*, and with ddp, which waits for each gradient of a model whose parameters
    are known to be used for each batch. Otherwise logs a warning: a later batch may use them.

    With *is_resumed*, it is an error only with ddp: the checkpoint, which another program may have written, has these
    parameters among those that are trained, and would not match a recipe that leaves them out.
    """
    waits_for_all = isinstance(model, DistributedDataParallel) and not model.find_unused_parameters
    name_of = _adapted_module if has_adapters else str
    used: set[str] = set()
    unused: dict[str, None] = {}
    for name, parameter in unwrap(model).named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            unused[name_of(name)] = None
        elif parameter.requires_grad:
            used.add(name_of(name))
    if not unused:
        return
    problem = _problem([*unused], used, has_adapters=has_adapters)
    if waits_for_all:
        hint = f"{problem.hint}; if some do, set distributed.strategy fsdp2"
        raise RecipeError.all_of([replace(problem, hint=hint)])
    if is_resumed:
        hint = "the checkpoint has them among the trained ones, so they stay as they are"
        problem = replace(problem, hint=hint)
    elif is_error:
        raise RecipeError.all_of([problem])
    log.warning("%s: %s; %s", problem.what, problem.value, problem.hint)


def _problem(unused: list[str], used: set[str], *, has_adapters: bool) -> Problem:
    key, hint, patterns_of = "model.freeze", "freeze them", _parameter_patterns
    if has_adapters:
        key, hint, patterns_of = "peft.exclude_modules", "leave them out", _module_patterns
    shown = ", ".join(unused[:_NUM_SHOWN])
    more = " ..." if len(unused) > _NUM_SHOWN else ""
    listed = ", ".join(map(repr, sorted(_selection(unused, used, patterns_of))))
    return Problem(
        "trained parameters got no gradient in the first step",
        key,
        f"{len(unused)} of them: {shown}{more}",
        f"if no batch uses them, {hint}: {key}: [{listed}]",
    )


def _selection(
    unused: Iterable[str], used: set[str], patterns_of: Callable[[str], Iterator[str]]
) -> set[str]:
    """For each of *unused*, the first of its patterns that matches none of *used*."""
    selected = set()
    for name in unused:
        for pattern in patterns_of(name):
            if not any(fnmatchcase(other, pattern) for other in used):
                selected.add(pattern)
                break
    return selected


def _parameter_patterns(name: str) -> Iterator[str]:
    """Patterns for a parameter, the widest first: its module in all layers, its module, itself."""
    module, _, _ = name.rpartition(".")
    if module:
        yield f"{in_all_layers(module)}.*"
        yield f"{module}.*"
    yield name


def _module_patterns(name: str) -> Iterator[str]:
    """Patterns for a module, the widest first: it in all layers, itself."""
    yield in_all_layers(name)
    yield name


def in_all_layers(name: str) -> str:
    """Return a pattern for the module or parameter *name* in all layers: ``layers.*.mlp`` for ``layers.3.mlp``."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _adapted_module(name: str) -> str:
    """The name in the base of the module that the adapter's parameter *name* adapts."""
    module, _, _ = name.removeprefix("base_model.model.").partition(".lora_")
    return module
