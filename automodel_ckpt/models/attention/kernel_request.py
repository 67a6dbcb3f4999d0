"""What a layer requests of attention within documents, and what a kernel for it provides."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from automodel_ckpt.models.attention.documents import Documents

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Request:
    """What a layer requests of attention, besides its tensors. Counts are those of this rank."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    num_heads: int
    num_key_heads: int
    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(head_dim)."""
    window: int | None = None
    """Number of tokens that a token sees, itself included; None: all of its document."""
    softcap: float | None = None
    has_sinks: bool = False
    has_dropout: bool = False
    other_options: tuple[str, ...] = ()
    """Names of options that need all pairs of tokens, such as a bias of each pair."""

    @property
    def is_default_scale(self) -> bool:
        """Whether the scores are scaled as they are by default."""
        return self.scale is None or math.isclose(self.scale, self.head_dim**-0.5, rel_tol=1e-6)


class Kernel(Protocol, Hashable):
    """A way to compute attention within documents. Kernels are compared by value."""

    @property
    def label(self) -> str:
        """Name of the function that computes it, for logs."""

    def unsupported(self, request: Request) -> str:
        """Why this kernel cannot compute *request*; empty if it can."""

    def prepare(self, documents: Documents) -> Any:
        """What :meth:`attend` needs of a row; it has ``num_tokens``, ``window``, and ``mask`` of all pairs."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Any,
        request: Request,
        sinks: torch.Tensor | None = None,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Compute attention of *query*, *key*, *value* [1, heads, T, D]; returns [1, T, heads, D].

        *rows* are the result of :meth:`prepare`, *sinks* [heads] what the softmax of each head contains besides scores.
        """


def pairs_needed(request: Request) -> str:
    """The first option that needs all pairs; empty if there is none."""
    return request.other_options[0] if request.other_options else ""


def name_of(dtype: torch.dtype) -> str:
    """The name of *dtype*, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
