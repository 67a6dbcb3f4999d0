"""The kernel that reads the lengths of the documents of a row: torch's ``varlen_attn``.

Signatures of ``torch.nn.attention.varlen.varlen_attn`` (read in the sources of the wheels): torch 2.10 has
``is_causal`` as its eighth positional parameter, and neither ``scale`` nor ``window_size``; torch 2.11 replaced
``is_causal`` by the keywords ``scale`` and ``window_size``, where (-1, 0) is causal; torch 2.12 and 2.13 have
``enable_gqa``, without which they reject fewer heads of keys than of queries.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from automodel_ckpt.base.device_copies import to_device
from automodel_ckpt.models.attention.document_kernels import HALF, Request
from automodel_ckpt.models.attention.documents import Documents, PreparedRow, mask_of_pairs


@dataclass(eq=False, slots=True)
class CumulativeLengths(PreparedRow):
    """The documents of a row as kernels with variable lengths need them.

    *cumulative* is int32 [N + 1]: the position where each document begins, and the length of the row. N is a power of
    two: the last documents can be empty. *longest* is the length of the longest document, rounded up to a power of two.
    Without the rounding, layers that torch.compile specializes on these sizes would be compiled for each row.
    """

    cumulative: torch.Tensor
    longest: int
    num_tokens: int
    window: int | None

    @property
    def mask(self) -> torch.Tensor:
        """The mask of all pairs, bool [1, 1, T, T]."""
        positions = torch.arange(self.num_tokens, device=self.cumulative.device)
        ends = torch.searchsorted(self.cumulative[1:], positions, right=True)
        return mask_of_pairs(self.cumulative[ends].long(), self.window)


def cumulative_lengths(documents: Documents) -> CumulativeLengths:
    """Prepare *documents* for a kernel with variable lengths."""
    borders = [0]
    for length in documents.lengths:
        borders.append(borders[-1] + length)
    num_documents = _power_of_2(len(borders) - 1)
    total = borders[-1]
    borders += [total] * (num_documents + 1 - len(borders))
    cumulative = torch.tensor(borders, dtype=torch.int32)
    longest = max(length for length, _ in documents.runs)
    return CumulativeLengths(
        to_device(cumulative, documents.device),
        _power_of_2(longest),
        total,
        documents.window,
    )


def _power_of_2(number: int) -> int:
    """The smallest power of two that is at least *number*."""
    return 1 << (number - 1).bit_length()


def _by_lengths(
    function: Callable[..., Any],
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: CumulativeLengths,
    options: dict[str, Any],
) -> torch.Tensor:
    """Call a kernel with variable lengths. *heads* are query, key, value [1, heads, T, D]; returns [1, T, heads, D]."""
    # The gradient of tensor[0] would be copied into zeros.
    query, key, value = [tensor.squeeze(0).transpose(0, 1) for tensor in heads]
    cumulative, longest = rows.cumulative, rows.longest
    output: torch.Tensor = function(
        query, key, value, cumulative, cumulative, longest, longest, **options
    )
    return output.unsqueeze(0)


def _dimension_problem(request: Request) -> str:
    """Why the flash attention kernels cannot compute heads of this size; empty if they can."""
    if request.dtype not in HALF:
        return f"{request.dtype}: only bfloat16 and float16"
    if request.head_dim != request.value_dim:
        return "keys and values of different sizes"
    if request.head_dim % 8 or request.head_dim > 256:
        return f"heads of {request.head_dim}: only multiples of 8 up to 256"
    return ""


@dataclass(frozen=True)
class VarlenKernel:
    """torch's ``varlen_attn``, in the signature of any of its versions."""

    function: Callable[..., Any]
    device_type: str = "cuda"
    label: str = "varlen_attn"

    @functools.cached_property
    def parameters(self) -> frozenset[str]:
        """Names of the function's parameters."""
        return frozenset(inspect.signature(self.function).parameters)

    def unsupported(self, request: Request) -> str:
        """Why it cannot compute *request*; empty if it can."""
        if request.device_type != self.device_type:
            return f"no kernel for {request.device_type}"
        needs = request.needs_pairs
        if request.softcap is not None:
            needs = "a softcap"
        if request.has_sinks:
            needs = "attention sinks"
        if request.has_dropout:
            needs = "dropout"
        if request.window is not None and "window_size" not in self.parameters:
            needs = "a sliding window"
        if not request.is_default_scale and "scale" not in self.parameters:
            needs = "a scale"
        return needs or _dimension_problem(request)

    def options(self, request: Request) -> dict[str, Any]:
        """The arguments after the tensors and lengths."""
        options: dict[str, Any] = {}
        if "window_size" in self.parameters:
            options["window_size"] = (_tokens_before(request.window), 0)
        else:
            options["is_causal"] = True
        if "scale" in self.parameters:
            options["scale"] = request.scale
        if "enable_gqa" in self.parameters:
            options["enable_gqa"] = request.num_heads != request.num_key_heads
        return options

    def prepare(self, documents: Documents) -> CumulativeLengths:
        """The cumulative lengths of *documents*."""
        return cumulative_lengths(documents)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: CumulativeLengths,
        request: Request,
        sinks: torch.Tensor | None = None,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Compute attention: see :meth:`~automodel_ckpt.models.attention.document_kernels.SdpaKernel.attend`."""
        del sinks, dropout  # unsupported
        return _by_lengths(self.function, (query, key, value), rows, self.options(request))


def _tokens_before(window: int | None) -> int:
    """The number of tokens before itself that a token sees; -1: all. Kernels do not count the token itself."""
    return -1 if window is None else window - 1
