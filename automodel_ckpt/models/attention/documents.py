"""The documents that share a row (packing), and the kernels that compute attention within them.

A row is prepared once per forward pass (:meth:`SdpaKernel.prepare`), outside of the layers, which pass the result on.
Preparing needs no information from the device. What a layer asks for are its tensors, and the *options* that
transformers passes to attention functions: ``scaling``, ``dropout`` and others.
"""

from __future__ import annotations

import functools
import inspect
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from automodel_ckpt.base.device_copies import to_device
from automodel_ckpt.checkpoint.files.type_aliases import Values


class Documents:
    """Causal attention within the documents of one row, limited to the last *window* tokens if that is not None.

    *runs* are pairs (length, count): consecutive documents of equal length, in the row's order. It takes the place of
    the mask between transformers' functions. Not a dataclass: fsdp2 looks for tensors in their fields.
    """

    cumulative: Tensor
    """Set for :class:`VarlenKernel`, int32 [N + 1]: the position where each document begins, and the length of the row.
    N is a power of two: the last documents can be empty."""
    longest: int
    """Set for :class:`VarlenKernel`: the length of the longest document, rounded up to a power of two. Without the
    rounding, layers that torch.compile specializes on these sizes would be compiled for each row."""

    def __init__(
        self, runs: tuple[tuple[int, int], ...], window: int | None, device: torch.device
    ) -> None:
        self.runs, self.window, self.device = runs, window, device
        # Compiled layers read it, and would be compiled for each value of *runs*.
        self.num_tokens = sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """Number of tokens of each run."""
        return [length * count for length, count in self.runs]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each document."""
        return [length for length, count in self.runs for _ in range(count)]

    @functools.cached_property
    def mask(self) -> Tensor:
        """Attention mask of all pairs of a row: bool [1, 1, T, T], true where a query (row) sees a key (column)."""
        lengths = torch.tensor(self.lengths)
        first = lengths.cumsum(0) - lengths
        starts = to_device(torch.repeat_interleave(first, lengths), self.device)
        return mask_of_pairs(starts, self.window)

    def mask_of(self, length: int) -> Tensor | None:
        """The mask of one document of *length* tokens, bool [1, 1, T, T]. None when causal is the same."""
        if self.window is None or length <= self.window:
            return None
        starts = torch.zeros(length, dtype=torch.long, device=self.device)
        return mask_of_pairs(starts, self.window)


def mask_of_pairs(starts: Tensor, window: int | None) -> Tensor:
    """The mask of all pairs, bool [1, 1, T, T], of a row with the beginning of each token's document in *starts*
    [T]."""
    positions = torch.arange(len(starts), device=starts.device)
    distances = positions[:, None] - positions
    seen = (distances >= 0) & (positions >= starts[:, None])
    if window is not None:
        seen &= distances < window
    return seen[None, None]


Kernel: TypeAlias = "SdpaKernel | VarlenKernel"
_HALF = (torch.bfloat16, torch.float16)
_NEEDS_PAIRS = ("softcap", "s_aux", "position_bias", "cache", "output_attentions")
"""Options of attention that the kernels do not have: they need the mask, unless they are None or false."""


def document_kernel(device_type: str, *, is_compiled: bool = False) -> Kernel | None:
    """The kernel for a type of device; None: attention uses the mask.

    *is_compiled*: whether torch.compile compiles the layers. One call per document would then be compiled again for
    each row.
    """
    if device_type == "cpu":
        return None if is_compiled else SdpaKernel()
    if device_type != "cuda":
        return None
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.10 has neither windows nor a scale.
    has_windows = "window_size" in inspect.signature(varlen_attn).parameters
    return VarlenKernel(varlen_attn) if has_windows else None


def _needing_pairs(options: Values) -> str:
    """The name of an option that needs the mask; empty if there is none."""
    for name in _NEEDS_PAIRS:
        if options.get(name) is not None and options[name] is not False:
            return name
    return ""


class SdpaKernel:
    """torch's ``scaled_dot_product_attention``, once for each run of documents of equal length, without a mask."""

    label = "sdpa"

    def unsupported(self, query: Tensor, value: Tensor, options: Values) -> str:
        """Why it cannot compute attention of *query* and *value* with *options*; empty if it can."""
        return _needing_pairs(options)

    def prepare(self, documents: Documents) -> Documents:
        """What :meth:`attend` needs of a row: here, *documents* themselves."""
        return documents

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Documents,
        options: Values,
    ) -> Tensor:
        """Compute attention of *query*, *key*, *value* [1, heads, T, D]; returns [1, T, heads, D].

        *rows* are the result of :meth:`prepare`.
        """
        outputs = []
        parts = [torch.split(tensor, rows.sizes, dim=2) for tensor in (query, key, value)]
        for (length, count), run in zip(rows.runs, zip(*parts, strict=True), strict=True):
            if count > 1:
                # [1, heads, n * length, D] of n documents, viewed as [n, heads, length, D].
                run = tuple(
                    part.view(part.shape[1], -1, length, part.shape[3]).transpose(0, 1)
                    for part in run
                )
            query, key, value = run
            output = _sdpa(query, key, value, rows.mask_of(length), options).transpose(1, 2)
            outputs.append(output.reshape(1, length * count, *output.shape[2:]))
        return torch.cat(outputs, dim=1)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: Values,
) -> Tensor:
    """torch's attention of *query*, *key*, *value* [B, heads, T, D], causal if *mask* is None; returns that shape."""
    repeats = query.shape[1] // key.shape[1]
    # With a mask or large heads, torch's fast kernels do not accept fewer heads of keys.
    if repeats > 1 and (mask is not None or query.shape[3] > 256):
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
        repeats = 1
    return nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=options.get("dropout") or 0.0,
        scale=options.get("scaling"),
        is_causal=mask is None,
        enable_gqa=repeats > 1,
    )


def _power_of_2(number: int) -> int:
    """The smallest power of two that is at least *number*."""
    return 1 << (number - 1).bit_length()


class VarlenKernel:
    """torch's ``varlen_attn``, a *function* that reads the lengths of the documents of a row (torch 2.11 and later)."""

    label = "varlen_attn"

    def __init__(self, function: Any) -> None:
        self._function = function
        # Without it, torch 2.12 and later reject fewer heads of keys than of queries.
        self._has_groups = "enable_gqa" in inspect.signature(function).parameters

    def unsupported(self, query: Tensor, value: Tensor, options: Values) -> str:
        """Why it cannot compute attention of *query* and *value* with *options*; empty if it can."""
        size = query.shape[3]
        if needing := _needing_pairs(options):
            return needing
        if options.get("dropout"):
            return "dropout"
        if query.dtype not in _HALF:
            return f"{query.dtype}: only bfloat16 and float16"
        if size != value.shape[3] or size % 8 or size > 256:
            return f"heads of {size} and {value.shape[3]}: only equal multiples of 8 up to 256"
        return ""

    def prepare(self, documents: Documents) -> Documents:
        """Set what :meth:`attend` reads of *documents*, and return them."""
        borders = [0, *accumulate(documents.lengths)]
        num_documents = _power_of_2(len(borders) - 1)
        borders += [documents.num_tokens] * (num_documents + 1 - len(borders))
        documents.cumulative = to_device(torch.tensor(borders, dtype=torch.int32), documents.device)
        documents.longest = _power_of_2(max(length for length, _ in documents.runs))
        return documents

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Documents,
        options: Values,
    ) -> Tensor:
        """Compute attention: see :meth:`SdpaKernel.attend`."""
        groups = {"enable_gqa": query.shape[1] != key.shape[1]} if self._has_groups else {}
        # The gradient of tensor[0] would be copied into zeros.
        heads = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
        # -1: all tokens before. The kernel does not count the token itself.
        before = -1 if rows.window is None else rows.window - 1
        output: Tensor = self._function(
            *heads,
            rows.cumulative,
            rows.cumulative,
            rows.longest,
            rows.longest,
            scale=options.get("scaling"),
            window_size=(before, 0),
            **groups,
        )
        return output.unsqueeze(0)
