"""Attention within documents by torch's flex attention, which leaves out blocks of tokens of different documents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from automodel_ckpt.models.attention.document_kernels import HALF, Request
from automodel_ckpt.models.attention.documents import Documents, PreparedRow, mask_of_pairs

_BLOCK = 128
"""Tokens per block of flex attention's masks, torch's default."""
_MOST_VARIANTS = 128
"""How often torch may compile flex attention: for windows, strides, lengths, types, with and without gradients.

Above its own limit of 8, it computes all pairs of tokens. Local and global layers of a single model need 4 to 8.
"""
_KERNEL_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}
"""torch's kernel for decoding, its choice for rows of less than 128 tokens, does not compile for these masks."""


@dataclass(eq=False, slots=True)
class BlockRows(PreparedRow):
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
    limit = max(torch._dynamo.config.recompile_limit, _MOST_VARIANTS)
    # torch 2.13 fails on a softcap that it traces as a variable, as it does from the second value on.
    with torch._dynamo.config.patch(specialize_float=True, recompile_limit=limit):
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
        if request.dtype not in (*HALF, torch.float32):
            return str(request.dtype)
        if min(request.head_dim, request.value_dim) < 16:
            return f"heads of {request.head_dim}: at least 16"
        return request.needs_pairs

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
        """Compute attention: see :meth:`~automodel_ckpt.models.attention.document_kernels.SdpaKernel.attend`."""
        del dropout  # unsupported
        softcap = request.softcap
        options: dict[str, Any] = {
            "block_mask": rows.blocks,
            "kernel_options": _KERNEL_OPTIONS,
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
