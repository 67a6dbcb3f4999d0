"""Attention within documents by calls of torch's ``scaled_dot_product_attention`` for documents of equal length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from automodel_ckpt.models.attention.documents import Documents
from automodel_ckpt.models.attention.kernel_request import Request, pairs_needed


@dataclass(frozen=True)
class SdpaKernel:
    """torch's ``scaled_dot_product_attention``, once for each run of documents of equal length, without a mask."""

    device_type: str = "cpu"
    label: str = "sdpa"

    def unsupported(self, request: Request) -> str:
        """Why it cannot compute *request*; empty if it can."""
        if request.device_type != self.device_type:
            return f"one call per document is slow on {request.device_type}"
        needs = pairs_needed(request)
        if request.softcap is not None:
            needs = "a softcap"
        if request.has_sinks:
            needs = "attention sinks"
        return needs

    def prepare(self, documents: Documents) -> Documents:
        """*documents* themselves."""
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
        """Compute attention: see :class:`~automodel_ckpt.models.attention.kernel_request.Kernel`."""
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
