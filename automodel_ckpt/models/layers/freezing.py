"""Exclude parameters from training by their names."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.models.inspect.error_texts import did_you_mean
from automodel_ckpt.models.inspect.vision import PARTS, parameters_of

log = logging.getLogger(__name__)


def freeze(model: nn.Module, patterns: Sequence[str], if_present: Sequence[str] = ()) -> int:
    """Exclude from training the parameters with names that match a glob. Returns the number of trainable elements.

    The parts of a multimodal model are also patterns: ``vision_tower``, ``audio_tower``, ``projector``,
    ``language_model``. Raises :class:`RecipeError` for *patterns* without a match, and if no parameter is left to
    train. The patterns *if_present* may match nothing, which is logged.
    """
    # With duplicates, because a pattern may match only the second name of a tied parameter.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parts = [part for part in PARTS if parameters_of(part, parameters)]
    frozen: set[str] = set()
    problems = []
    for pattern in (*patterns, *if_present):
        names = fnmatch.filter(parameters, pattern)
        if pattern in PARTS:
            names = parameters_of(pattern, parameters)
        frozen.update(names)
        if not names and pattern not in patterns:
            log.info("model.freeze_if_present: the model has no parameters %s", pattern)
        elif not names:
            hint = did_you_mean(pattern, {*parameters, *parts})
            problems.append(Problem("no parameter's name matches", "model.freeze", pattern, hint))
    if problems:
        raise RecipeError.all_of(problems)
    for name in frozen:
        parameters[name].requires_grad_(False)
    num_trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if num_trainable == 0:
        raise RecipeError(
            "no parameter is left to train",
            where="model.freeze",
            value=[*patterns, *if_present],
            hint="freeze fewer parameters",
        )
    return num_trainable


def narrow_frozen(model: nn.Module, types: Mapping[str, torch.dtype]) -> None:
    """Give the frozen parameters of *model* the types of 16 bits that their names have in *types*.

    Nothing is lost if these are the types of the files that the values come from.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad and types.get(name) in (torch.bfloat16, torch.float16):
            # The parameter stays the same object, so that ties are kept.
            parameter.data = parameter.data.to(types[name])
