"""The kernels that compute attention within the documents of a row: what they are asked, and which one is chosen.

The kernels leave out the pairs of tokens of different documents. The rows of a micro-batch are prepared once per
forward pass (:meth:`SdpaKernel.prepare`), outside of the layers, and the layers only pass the result on. Preparing
needs no information from the device.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from automodel_ckpt.models.attention.documents import Documents

KERNELS = ("varlen", "flex", "sdpa")
"""The names of all kernels, the best of a device first."""
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
    needs_pairs: str = ""
    """The name of an option that needs all pairs of tokens, such as a bias of each pair; empty: none does."""

    @property
    def is_default_scale(self) -> bool:
        """Whether the scores are scaled as they are by default."""
        return self.scale is None or math.isclose(self.scale, self.head_dim**-0.5, rel_tol=1e-6)


def preferred_kernels(
    device_type: str, installed: Collection[str], *, is_compiled: bool
) -> tuple[str, ...]:
    """The names of the kernels to try on a type of device, the best first.

    *is_compiled*: whether torch.compile compiles the layers. One call per document would then be compiled again for
    each row.
    """
    if device_type == "cpu":
        return () if is_compiled else ("sdpa",)
    if device_type != "cuda":
        return ()
    return tuple(name for name in KERNELS if name in installed and name != "sdpa")


@dataclass(frozen=True)
class SdpaKernel:
    """torch's ``scaled_dot_product_attention``, once for each run of documents of equal length, without a mask."""

    device_type: str = "cpu"
    label: str = "sdpa"

    def unsupported(self, request: Request) -> str:
        """Why it cannot compute *request*; empty if it can."""
        if request.device_type != self.device_type:
            return f"one call per document is slow on {request.device_type}"
        needs = request.needs_pairs
        if request.softcap is not None:
            needs = "a softcap"
        if request.has_sinks:
            needs = "attention sinks"
        return needs

    def prepare(self, documents: Documents) -> Documents:
        """What :meth:`attend` needs of a row: here, *documents* themselves."""
        return documents

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Documents,
        request: Request,
        sinks: torch.Tensor | None = None,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Compute attention of *query*, *key*, *value* [1, heads, T, D]; returns [1, T, heads, D].

        *rows* are the result of :meth:`prepare`, *sinks* [heads] what the softmax of each head contains besides scores.
        """
        del sinks  # unsupported
        outputs = []
        parts = [torch.split(tensor, rows.sizes, dim=2) for tensor in (query, key, value)]
        for (length, count), run in zip(rows.runs, zip(*parts, strict=True), strict=True):
            if count > 1:
                run = tuple(_one_row_each(part, length) for part in run)
            mask = rows.mask_of(length)
            output = sdpa(run[0], run[1], run[2], mask, request, dropout)
            output = output.transpose(1, 2)
            outputs.append(output.reshape(1, length * count, *output.shape[2:]))
        return torch.cat(outputs, dim=1)


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    request: Request,
    dropout: float = 0.0,
) -> torch.Tensor:
    """torch's attention of *query*, *key*, *value* [B, heads, T, D], causal if *mask* is None; returns that shape."""
    is_grouped = request.num_heads != request.num_key_heads
    # With a mask or large heads, torch's fast kernels do not accept fewer heads of keys.
    if is_grouped and (mask is not None or request.head_dim > 256):
        repeats = request.num_heads // request.num_key_heads
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
        is_grouped = False
    return nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=request.scale,
        is_causal=mask is None,
        enable_gqa=is_grouped,
    )


def _one_row_each(part: torch.Tensor, length: int) -> torch.Tensor:
    """View *part* [1, heads, n * length, D] of n documents as [n, heads, length, D]."""
    return part.view(part.shape[1], -1, length, part.shape[3]).transpose(0, 1)
