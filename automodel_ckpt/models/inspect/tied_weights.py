"""Models whose config.json ties weights that their files contain twice, with different values."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)


def note_untied(model: Any, name: str) -> None:
    """Let the config of a *model* that was read from *name* state that its weights are not tied, where they are not.

    transformers does not tie weights whose values differ in the files, whatever the config states, and other programs
    that read the config would lose one of them. If only some of the weights of a model differ, the config stays as it
    is: it has one setting for all.
    """
    expected = model.get_expanded_tied_weights_keys(all_submodels=True)
    apart = {
        alias: source
        for alias, source in expected.items()
        if alias not in model.all_tied_weights_keys
    }
    if not apart:
        return
    outcome = "they are trained and exported as two tensors"
    if not model.all_tied_weights_keys:
        for config in {
            id(each): each for each in (model.config, model.config.get_text_config())
        }.values():
            config.tie_word_embeddings = False
        outcome += ", and config.json of exports has tie_word_embeddings: false"
    pairs = ", ".join(f"{alias} and {source}" for alias, source in apart.items())
    log.warning(
        "%s: config.json ties %s, but the files have different values: %s", name, pairs, outcome
    )


def check_separate_memory(model: nn.Module) -> None:
    """Raise :class:`RecipeError` if a trainable parameter of *model* shares memory with another parameter.

    Two names of one parameter are no error. Separate parameters have separate gradients and optimizer state, and stop
    sharing memory where the model is copied to a device or sharded: the same recipe would train another model there.
    """
    found: list[tuple[int, int, str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        # Tensors of other types may have no memory, or another one than they state.
        if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
            continue
        if parameter.is_meta or not parameter.numel():
            continue
        start = parameter.data_ptr()
        # The ranges of columns of a matrix overlap without a common element.
        size = parameter.nbytes if parameter.is_contiguous() else parameter.itemsize
        found.append((start, start + size, name, parameter))
    found.sort(key=lambda entry: entry[:2])
    for index, (_, end, name, parameter) in enumerate(found):
        for start, _, other_name, other in found[index + 1 :]:
            if start >= end:
                break
            if not (parameter.requires_grad or other.requires_grad):
                continue
            raise RecipeError(
                "two parameters of the model share memory, but they are not one parameter",
                where="model",
                value=f"{name}, {other_name}",
                hint="to tie them, assign the parameter itself (head.weight = embedding.weight), not its .data; to "
                "separate them, copy the values (.data.clone())",
            )
