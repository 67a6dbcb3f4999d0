"""One vector for each text from the hidden states of its tokens: pooling that is correct for any padding."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_ckpt.errors import RecipeError

Pooling = Literal["mean", "cls", "last"]


def pool(hidden: Tensor, mask: Tensor, how: Pooling, *, normalize: bool) -> Tensor:
    """Pool hidden states [N, T, H] to embeddings [N, H] in float32, or in float64 where the hidden states are.

    *mask* [N, T] is 1 for tokens and 0 for padding, which may be on the left or the right. ``mean`` is the mean over
    the tokens, ``cls`` the first token and ``last`` the last one. With *normalize*, each embedding has the length 1. A
    row without tokens becomes zeros (``mean``) or its first or last position.
    """
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if how == "mean":
        weights = mask.to(hidden.dtype).unsqueeze(-1)
        num_tokens = weights.sum(dim=1)
        # A row without tokens is divided by 1, not by 0.
        pooled = (hidden * weights).sum(dim=1) / num_tokens.clamp(min=1.0)
    else:
        rows = torch.arange(len(hidden), device=hidden.device)
        pooled = hidden[rows, _position(mask, how)]
    return F.normalize(pooled, dim=-1) if normalize else pooled


def _position(mask: Tensor, how: Pooling) -> Tensor:
    """The position [N] of the first or the last token of each row."""
    is_token = mask.to(torch.int32)
    if how == "cls":
        return is_token.argmax(dim=1)
    # argmax returns the first of equal values, here the first token from the right.
    return mask.shape[1] - 1 - is_token.flip(1).argmax(dim=1)


def hidden_states_of(output: Any) -> Tensor:
    """The hidden states [N, T, H] of the last layer in what a model without an output layer returned.

    Raises :class:`RecipeError` for another output.
    """
    hidden = getattr(output, "last_hidden_state", output)
    if not isinstance(hidden, Tensor) or hidden.dim() != 3:
        raise RecipeError(
            "the model returns no hidden state for each token, which pooling requires",
            where="model",
            value=type(output).__name__,
            hint="use a model that transformers' AutoModel builds, or let yours return last_hidden_state [N, T, H]",
        )
    return hidden
