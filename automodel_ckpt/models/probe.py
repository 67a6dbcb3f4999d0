"""What a model does with samples that share a row, found by asking it rather than by its name.

Some models take ``position_ids`` and still let attention cross from one sample to the next (OPT); a state space model
carries its state over. Two short samples in a row show it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)

_FIRST, _OTHER, _SECOND = [1, 2, 3], [3, 1, 2], [2, 2, 1, 3]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a few tokens through a model showed; *error* is what the model raised, empty where it ran."""

    holds: bool
    error: str = ""

    def __bool__(self) -> bool:
        return self.holds

    @property
    def reason(self) -> str:
        """The model's error as the end of a message; empty where it ran."""
        return f" (a forward pass of a few tokens raised {self.error})" if self.error else ""


def attention_of(model: nn.Module) -> str:
    """The name of the attention implementation, ``its own`` for a model that is not transformers'."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) or "its own"


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """What the model's forward takes; that of the base where adapters wrap one, which pass everything on."""
    base: Any = getattr(model, "get_base_model", None)
    return inspect.signature((base() if base is not None else model).forward).parameters


def logits_of(output: Any) -> torch.Tensor:
    """What a model returned, or the logits in it."""
    plain = isinstance(output, Mapping) and not hasattr(output, "logits")
    logits: torch.Tensor = (
        output.get("logits", output) if plain else getattr(output, "logits", output)
    )
    return logits


def keeps_samples_apart(
    model: nn.Module,
    one_row: bool,
    options: Mapping[str, Any],
    multiple: int = 1,
    device: torch.device | None = None,
) -> Answer:
    """Whether samples in one row, told apart by ``position_ids`` alone, give the outputs that they give by themselves.

    Runs *model*, on *device* (its parameters') and with *options*, on a few tokens without a trace in its mode or in
    the random numbers. *one_row*: with one row at a time. False also for a model that cannot be asked so, and for
    transformers' with ``use_cache``: they look for samples in a row only without a cache.
    """
    if "position_ids" not in forward_parameters(model):
        return Answer(False)
    rest = _rest(multiple)
    rows = [
        row + rest
        for row in (_FIRST + _SECOND, _OTHER + _SECOND, _FIRST + _SECOND, _SECOND + _FIRST)
    ]
    restarted, continued = [*range(3), *range(4), *rest], [*range(7), *rest]
    positions = [restarted, restarted, continued, [*range(4), *range(3), *rest]]
    try:
        with undisturbed(model):
            device = device or next(model.parameters()).device
            outputs = _logits(
                model, torch.tensor([rows, positions], device=device), one_row, options
            )
        after_first, after_other, crossed = outputs[0, 3:7], outputs[1, 3:7], outputs[2, 3:7]
        alone = outputs[3, :4]
        # What crossing attention does is the measure: rounding is far below it in every dtype.
        allowed = 0.1 * _distance(crossed, alone)
        return Answer(max(_distance(after_first, alone), _distance(after_other, alone)) <= allowed)
    except Exception as error:
        log.debug("could not probe the model for packed samples", exc_info=True)
        return Answer(False, described(error))


def described(error: Exception) -> str:
    """The class of an exception and the first line of what it says, 200 characters at most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}"[:200] if lines else type(error).__name__


def rows_to_ask(
    multiple: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [1, T] of a few samples, a number divisible by *multiple*; their positions, and those of one sample."""
    rest = _rest(multiple)
    rows = [[*_FIRST, *_SECOND, *rest], [*range(3), *range(4), *rest], [*range(7 + len(rest))]]
    tokens, restarted, continued = torch.split(torch.tensor(rows, device=device), 1)
    return tokens, restarted, continued


def _rest(multiple: int) -> list[int]:
    """Samples of one token that round a row up."""
    return [0] * (-len(_FIRST + _SECOND) % multiple)


def _logits(
    model: nn.Module, rows: torch.Tensor, one_row: bool, options: Mapping[str, Any]
) -> torch.Tensor:
    """Logits [B, T, V] of *rows* [2, B, T], which are token ids and position ids."""
    parts = torch.split(rows, 1 if one_row else rows.shape[1], dim=1)
    outputs = [
        model(input_ids=tokens, position_ids=positions, **options) for tokens, positions in parts
    ]
    return torch.cat([logits_of(output) for output in outputs]).float()


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, *model* is in evaluation mode without gradients; after it, as before, and so are the random numbers."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        # A few tokens are not worth compiling for.
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
