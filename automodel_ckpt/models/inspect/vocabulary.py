"""The vocabulary of a model: its size, and resizing its embedding and output layer."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)


def wanted_size(option: str | int | None, tokenizer: Any) -> int | None:
    """The number of tokens that ``model.vocab_size`` sets. None when it does not change the model's vocabulary.

    Raises :class:`RecipeError` for ``tokenizer`` without a tokenizer.
    """
    if option is None:
        return None
    if option != "tokenizer":
        return int(option)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor's
    if tokenizer is None:
        raise RecipeError(
            "vocab_size tokenizer requires a tokenizer",
            where="model.vocab_size",
            value=option,
            hint="add a tokenizer section, or set a number",
        )
    return len(tokenizer)


def num_embeddings(model: nn.Module) -> int | None:
    """The number of rows of the input embedding. None when the model does not declare one."""
    weight = getattr(_layer_of(model, "get_input_embeddings"), "weight", None)
    return None if weight is None else len(weight)


def _layer_of(model: nn.Module, getter: str) -> Any:
    """What the method *getter* of a transformers model returns; None without one."""
    try:
        return getattr(model, getter, lambda: None)()
    except NotImplementedError:
        # A model of transformers that does not state its embedding, such as CANINE, which hashes characters.
        return None


def check_token_ids(batches: Iterable[Mapping[str, Tensor]], size: int | None, where: str) -> None:
    """Validate that a model of *size* embeddings has a row for all tokens and labels; None does not limit the ids.

    Raises :class:`RecipeError` with the setting *where*.
    """
    for name, ignored in (("input_ids", 0), ("labels", -100)):
        for ids in (batch[name] for batch in batches if name in batch):
            unknown = ids[(ids != ignored) & ((ids < 0) | (ids >= (size or math.inf)))]
            if len(unknown):
                raise RecipeError(
                    f"a sample has {name} outside of the model's vocabulary",
                    where=where,
                    value=f"{int(unknown[0])}; the model has tokens from 0 to {size - 1 if size else '?'}",
                    hint="prepare the data with the model's own tokenizer, or set model.vocab_size",
                )


def vocabulary_names(model: nn.Module) -> list[str]:
    """The names of parameters with one row per token, of the embedding and of an output layer that is not tied."""
    return list(dict(_vocabulary(model)))


def _vocabulary(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    wanted: set[int] = set()
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        layer = _layer_of(model, getter)
        # Perceiver returns a parameter with rows that are not tokens.
        if isinstance(layer, nn.Module):
            wanted.update(id(parameter) for parameter in layer.parameters(recurse=False))
    for name, parameter in model.named_parameters():
        if id(parameter) in wanted:
            yield name, parameter


def resize_vocabulary(
    model: nn.Module, size: int, new_tokens: Literal["mean", "init"]
) -> list[str]:
    """Resize the vocabulary of a transformers model to *size* tokens. Returns the names of the changed parameters.

    The first rows are unchanged, and tied layers stay tied. New rows are drawn from torch's generator (``init``), or
    are the mean of the existing rows (``mean``). The changes are logged.
    """
    before = {name: parameter.detach() for name, parameter in _vocabulary(model)}
    if all(len(parameter) == size for parameter in before.values()):
        return []
    resizable: Any = model
    # mean_resizing draws new rows with the covariance of all rows, which no rank holds.
    resizable.resize_token_embeddings(size, mean_resizing=False)
    for name, parameter in _vocabulary(model):
        old = before[name]
        if new_tokens == "mean" and size > len(old):
            with torch.no_grad():
                parameter[len(old) :] = old.double().mean(0).to(parameter.dtype)
        log_resized(name, old.shape, parameter.shape, new_tokens)
    return list(before)


def log_resized(
    name: str, old: Sequence[int], new: Sequence[int], new_tokens: Literal["mean", "init"]
) -> None:
    """Log that the parameter *name* was resized from the shape *old* to *new*."""
    filled = "the mean of the others" if new_tokens == "mean" else "fresh"
    rows = f", new rows are {filled}" if new[0] > old[0] else ", the last rows are dropped"
    log.debug("resized %s: %s -> %s%s", name, list(old), list(new), rows)


def set_size(config: PreTrainedConfig, size: int) -> None:
    """Set the size of the vocabulary in *config*, for a model that is built later."""
    config.get_text_config().vocab_size = size
