"""Kernels that compute attention within the documents of a row, without the pairs of tokens of different documents.

The rows of a micro-batch are prepared once per forward pass (:meth:`Kernel.prepare`), outside of the layers, and the
layers only pass the result on. Preparing needs no information from the device.

Signatures of ``torch.nn.attention.varlen.varlen_attn`` (read in the sources of the wheels): torch 2.10 has
``is_causal`` as its eighth positional parameter, and neither ``scale`` nor ``window_size``; torch 2.11 replaced
``is_causal`` by the keywords ``scale`` and ``window_size``, where (-1, 0) is causal; torch 2.12 and 2.13 have
``enable_gqa``, without which they reject fewer heads of keys than of queries.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import math
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from automodel_ckpt.models.documents import Documents, mask_of_pairs

log = logging.getLogger(__name__)

KERNELS = ("varlen", "flash", "flex", "sdpa")
"""The names of all kernels, the best of a device first."""
_HALF = (torch.bfloat16, torch.float16)
_BLOCK = 128
"""Tokens per block of flex attention's masks, torch's default."""


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


# ---------------------------------------------------------------- choice


def installed_kernels(device_type: str) -> dict[str, Kernel]:
    """The kernels for a type of device that are installed, by name, the preferred one first."""
    kernels: dict[str, Kernel] = {"sdpa": SdpaKernel()}
    if device_type == "cuda":
        kernels["flex"] = FlexKernel()
        varlen = _imported("torch.nn.attention.varlen", "varlen_attn")
        if varlen is not None:
            kernels["varlen"] = VarlenKernel(varlen)
        flash = _imported("flash_attn", "flash_attn_varlen_func")
        if flash is not None:
            kernels["flash"] = FlashKernel(flash)
    names = preferred_kernels(device_type, kernels, is_compiled=False)
    return {name: kernels[name] for name in names}


def _imported(module: str, function: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module(module), function, None)
    # A package that was built for another version of torch fails with one of these.
    except (ImportError, OSError, RuntimeError) as error:
        log.debug("%s cannot be imported: %r", module, error)
        return None


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


# ---------------------------------------------------------------- cumulative lengths


@dataclass(eq=False, slots=True)
class CumulativeLengths:
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
        cumulative.to(documents.device, non_blocking=True),
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
    query, key, value = [tensor[0].transpose(0, 1) for tensor in heads]
    cumulative, longest = rows.cumulative, rows.longest
    output: torch.Tensor = function(
        query, key, value, cumulative, cumulative, longest, longest, **options
    )
    return output.unsqueeze(0)


def _dimension_problem(request: Request) -> str:
    """Why the flash attention kernels cannot compute heads of this size; empty if they can."""
    if request.dtype not in _HALF:
        return f"{_name(request.dtype)}: only bfloat16 and float16"
    if request.head_dim != request.value_dim:
        return "keys and values of different sizes"
    if request.head_dim % 8 or request.head_dim > 256:
        return f"heads of {request.head_dim}: only multiples of 8 up to 256"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        needs = _pairs_needed(request)
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
        """Compute attention: see :class:`Kernel`."""
        del sinks, dropout  # unsupported
        return _by_lengths(self.function, (query, key, value), rows, self.options(request))


@dataclass(frozen=True)
class FlashKernel:
    """``flash_attn_varlen_func`` of the package flash-attn, version 2."""

    function: Callable[..., Any]
    device_type: str = "cuda"
    label: str = "flash_attn"

    @functools.cached_property
    def parameters(self) -> frozenset[str]:
        """Names of the function's parameters; ``softcap`` is one of them since flash-attn 2.6."""
        return frozenset(inspect.signature(self.function).parameters)

    def unsupported(self, request: Request) -> str:
        """Why it cannot compute *request*; empty if it can."""
        if request.device_type != self.device_type:
            return f"no kernel for {request.device_type}"
        needs = _pairs_needed(request)
        if request.has_sinks:
            needs = "attention sinks"
        if request.softcap is not None and "softcap" not in self.parameters:
            needs = "a softcap"
        return needs or _dimension_problem(request)

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
        """Compute attention: see :class:`Kernel`."""
        del sinks  # unsupported
        options: dict[str, Any] = {
            "dropout_p": dropout,
            "softmax_scale": request.scale,
            "causal": True,
            "window_size": (_tokens_before(request.window), 0),
        }
        if request.softcap is not None:
            options["softcap"] = request.softcap
        if "deterministic" in self.parameters:
            # torch's own kernel reads this setting itself.
            options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        return _by_lengths(self.function, (query, key, value), rows, options)


def _tokens_before(window: int | None) -> int:
    """The number of tokens before itself that a token sees; -1: all. Kernels do not count the token itself."""
    return -1 if window is None else window - 1


def _pairs_needed(request: Request) -> str:
    """The first option that needs all pairs; empty if there is none."""
    return request.other_options[0] if request.other_options else ""


# ---------------------------------------------------------------- blocks


@dataclass(eq=False, slots=True)
class BlockRows:
    """The documents of a row as flex attention needs them; *starts* [T] is where each token's document begins."""

    blocks: BlockMask
    starts: torch.Tensor
    window: int | None

    @property
    def num_tokens(self) -> int:
        """Length of the row."""
        return len(self.starts)

    @property
    def mask(self) -> torch.Tensor:
        """The mask of all pairs, bool [1, 1, T, T]."""
        return mask_of_pairs(self.starts, self.window)


def block_rows(documents: Documents) -> BlockRows:
    """Prepare *documents* for flex attention, from the first and the last token of each block.

    ``create_block_mask`` of torch would compare all pairs of tokens.
    """
    starts, window, length = documents.starts(), documents.window, documents.num_tokens

    def sees(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = (key <= query) & (key >= starts[query])
        if window is not None:
            seen = seen & (query - key < window)
        return seen

    num_blocks = -(-length // _BLOCK)
    first = torch.arange(num_blocks, device=starts.device) * _BLOCK
    last = (first + _BLOCK - 1).clamp(max=length - 1)
    lowest, highest = starts[first], starts[last]
    # Rows of the comparisons are blocks of queries, columns are blocks of keys.
    is_partial = (first <= last[:, None]) & (last >= lowest[:, None])
    is_full = (last <= first[:, None]) & (first >= highest[:, None])
    if window is not None:
        is_partial &= first[:, None] - last < window
        is_full &= last[:, None] - first < window
    # The last block has positions behind the row's end if the length is no multiple.
    is_full &= (first + _BLOCK <= length)[:, None]
    is_partial &= ~is_full
    num_partial, partial = _ordered(is_partial)
    num_full, full = _ordered(is_full)
    blocks = BlockMask.from_kv_blocks(
        num_partial, partial, num_full, full, _BLOCK, sees, (length, length)
    )
    return BlockRows(blocks, starts, window)


def _ordered(is_chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row of *is_chosen* [N, N]: how many columns are chosen, and all columns with the chosen ones first.

    Both int32, [1, 1, N] and [1, 1, N, N].
    """
    columns = torch.argsort(is_chosen.to(torch.int32), dim=1, descending=True, stable=True)
    counts = is_chosen.sum(dim=1)
    return counts.to(torch.int32)[None, None], columns.to(torch.int32)[None, None].contiguous()


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    # Without compilation, flex attention computes all pairs.
    return torch.compile(flex_attention)


def _flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
    """Call flex attention. It is compiled here, except on a CPU and inside a compiled layer."""
    if torch.compiler.is_compiling():
        return flex_attention(query, key, value, **options)
    function: Any = flex_attention if query.device.type == "cpu" else _compiled_flex()
    # torch 2.13 fails on a softcap that it traces as a variable, as it does from the second value on.
    with torch._dynamo.config.patch(specialize_float=True):
        return function(query, key, value, **options)


@dataclass(frozen=True)
class FlexKernel:
    """torch's flex attention, with blocks of the mask that contain no pair of a document left out."""

    device_type: str = "cuda"
    label: str = "flex_attention"

    def unsupported(self, request: Request) -> str:
        """Why it cannot compute *request*; empty if it can."""
        if request.device_type != self.device_type:
            return f"no kernel for {request.device_type}"
        if request.has_dropout:
            return "dropout"
        if request.dtype not in (*_HALF, torch.float32):
            return _name(request.dtype)
        if min(request.head_dim, request.value_dim) < 16:
            return f"heads of {request.head_dim}: at least 16"
        return _pairs_needed(request)

    def prepare(self, documents: Documents) -> BlockRows:
        """The blocks of *documents*."""
        return block_rows(documents)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: BlockRows,
        request: Request,
        sinks: torch.Tensor | None = None,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Compute attention: see :class:`Kernel`."""
        del dropout  # unsupported
        softcap = request.softcap
        options: dict[str, Any] = {
            "block_mask": rows.blocks,
            "scale": request.scale,
            "enable_gqa": request.num_heads != request.num_key_heads,
        }
        if softcap is not None:

            def capped(score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
                return softcap * torch.tanh(score / softcap)

            options["score_mod"] = capped
        if sinks is not None:
            options["return_aux"] = AuxRequest(lse=True)
        output = _flex(query, key, value, **options)
        if sinks is not None:
            output, aux = output
            # A sink is one more score in the softmax of its head, with the value zero.
            share = torch.sigmoid(aux.lse - sinks.reshape(1, -1, 1).to(aux.lse.dtype))
            output = output * share.unsqueeze(-1).to(output.dtype)
        attended: torch.Tensor = output.transpose(1, 2).contiguous()
        return attended


# ---------------------------------------------------------------- one call per document


@dataclass(frozen=True)
class SdpaKernel:
    """torch's ``scaled_dot_product_attention``, once for each run of documents of equal length, without a mask."""

    device_type: str = "cpu"
    label: str = "sdpa"

    def unsupported(self, request: Request) -> str:
        """Why it cannot compute *request*; empty if it can."""
        if request.device_type != self.device_type:
            return f"one call per document is slow on {request.device_type}"
        needs = _pairs_needed(request)
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
        """Compute attention: see :class:`Kernel`."""
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
