"""Stand-ins that take the place of the modules of other pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


class PassThrough(nn.Module):
    """Takes the place of a module of another stage, and returns its first argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument unchanged."""
        return _first(args, kwargs)


class NoEmbedding(PassThrough):
    """Takes the place of an embedding (of positions, for example) of width N: returns zeros [1, 1, N]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros on the device of the first argument."""
        return torch.zeros(1, 1, self.width, device=_first(args, kwargs).device)


class StageInput(PassThrough):
    """Takes the place of the layer before a stage, and returns the hidden states that the stage received."""

    received: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the received hidden states, once."""
        assert self.received is not None, "a stage runs without the hidden states of the one before"
        hidden, self.received = self.received, None
        return hidden


class StageOutput(PassThrough):
    """Takes the place of the layer after a stage, and keeps the hidden states that the stage computed."""

    computed: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the first argument and return it."""
        self.computed = _first(args, kwargs)
        return self.computed

    def take(self) -> torch.Tensor:
        """Return the hidden states of the latest forward pass, once."""
        assert self.computed is not None
        hidden, self.computed = self.computed, None
        return hidden


def _first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def stand_in_for(module: nn.Module) -> PassThrough:
    """The stand-in of a module outside of the layers."""
    if isinstance(module, nn.Embedding):
        return NoEmbedding(module.embedding_dim)
    return PassThrough()


def take_place(stand_in: PassThrough, layer: nn.Module) -> None:
    """Make *stand_in* look like *layer* to the model, with plain attributes such as ``attention_type``."""
    for name, value in vars(layer).items():
        if isinstance(value, (str, int, float)) and name != "training":
            setattr(stand_in, name, value)
