"""The documents that share a row (packing), found from the mask that transformers requests for the row.

transformers separates the documents of a row by a mask over all pairs of the row's tokens. :func:`documents_of` finds
the lengths of the documents instead, if the mask is causal attention within each document.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from types import CellType
from typing import Any

import torch

from automodel_ckpt.base.device_copies import to_device


class PreparedRow:
    """The documents of a row as a kernel needs them, which takes the place of the mask between transformers' functions.

    It has ``num_tokens``, ``window``, and the ``mask`` of all pairs.
    """

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Documents(PreparedRow):
    """Causal attention within the documents of one row, limited to the last *window* tokens if that is not None.

    *runs* are pairs (length, count): consecutive documents of equal length, in the row's order.
    """

    runs: tuple[tuple[int, int], ...]
    window: int | None
    device: torch.device

    @property
    def sizes(self) -> list[int]:
        """Number of tokens of each run."""
        return [length * count for length, count in self.runs]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each document."""
        lengths = []
        for length, count in self.runs:
            lengths += [length] * count
        return lengths

    @property
    def num_tokens(self) -> int:
        """Length of the row."""
        return sum(self.sizes)

    def starts(self) -> torch.Tensor:
        """The position where the document of each token begins: int64 [T], on the device."""
        lengths = torch.tensor(self.lengths)
        first = lengths.cumsum(0) - lengths
        return to_device(torch.repeat_interleave(first, lengths), self.device)

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        """Attention mask of all pairs of a row: bool [1, 1, T, T], true where a query (row) sees a key (column)."""
        return mask_of_pairs(self.starts(), self.window)

    def mask_of(self, length: int) -> torch.Tensor | None:
        """The mask of one document of *length* tokens, bool [1, 1, T, T]; None if causal is the same."""
        if self.window is None or length <= self.window:
            return None
        starts = torch.zeros(length, dtype=torch.long, device=self.device)
        return mask_of_pairs(starts, self.window)


def mask_of_pairs(starts: torch.Tensor, window: int | None) -> torch.Tensor:
    """The mask of all pairs, bool [1, 1, T, T], of a row whose documents begin at *starts* [T] for each token."""
    positions = torch.arange(len(starts), device=starts.device)
    distances = positions[:, None] - positions
    seen = (distances >= 0) & (positions >= starts[:, None])
    if window is not None:
        seen &= distances < window
    return seen[None, None]


def documents_of(
    *,
    batch_size: int,
    mask_function: Callable[..., torch.Tensor],
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    device: Any = "cpu",
    **others: Any,
) -> Documents | None:
    """Find the documents of the mask that transformers requests with these arguments of ``sdpa_mask``.

    Returns None if the mask is not causal attention within documents of one row. The mask is read off *mask_function*
    at the positions where it must change. On a GPU, this waits for the device once, unless the host knows the positions
    (:mod:`~automodel_ckpt.models.attention.host_positions`).
    """
    is_one_row = batch_size == 1 and q_length == kv_length >= 2 and attention_mask is None
    has_offset = (q_offset, kv_offset) != (0, 0)
    # transformers allows the skip if there are no documents. It combines documents with the causal pattern by "and".
    has_documents = not others.get("allow_is_causal_skip", True)
    is_narrowed = getattr(mask_function, "__name__", "") == "and_mask"
    if not is_one_row or has_offset or not has_documents:
        return None
    if not is_narrowed or widens(mask_function) or others.get("use_vmap", False):
        return None
    target = torch.device(device)
    if target.type != "cpu":
        from automodel_ckpt.models.attention.host_positions import on_host

        if (of_host := on_host(mask_function)) is not None:
            mask_function, device = of_host, "cpu"
    row = torch.zeros(1, dtype=torch.long, device=device)

    def sees(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return mask_function(row, row, queries, keys).expand(queries.shape)

    positions = torch.arange(q_length, device=device)
    is_first = torch.ones(q_length, dtype=torch.bool, device=device)
    is_first[1:] = ~sees(positions[1:], positions[:-1])
    starts = torch.where(is_first, positions, 0).cummax(0).values
    is_causal = _is_causal_within(sees, positions, starts, local_size)
    # One copy to the host for both results: each copy waits for the device.
    found = torch.cat([is_first, is_causal.reshape(1)]).cpu()
    if not found[-1]:
        return None
    borders = found[:-1].nonzero().flatten().tolist()
    lengths = [end - start for start, end in pairwise([*borders, q_length])]
    runs = tuple((length, len(list(same))) for length, same in groupby(lengths))
    return Documents(runs, local_size, target)


def widens(mask_function: Callable[..., Any]) -> bool:
    """Whether a mask lets tokens see more than causal attention does, such as the other tokens of an image.

    transformers joins such patterns to the causal one by "or". Documents are joined by "and": before the other patterns
    up to transformers 5.23, after them since 5.24. Both joints keep the functions that they join in their closures.
    """
    return any(each.__name__ == "or_mask" for each in _joined(mask_function))


def _joined(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield *function*, and the functions in its closure and in theirs."""
    if not inspect.isfunction(function):
        return
    yield function
    for cell in function.__closure__ or ():
        for value in _values(cell):
            yield from _joined(value)


def _values(cell: CellType) -> tuple[Any, ...]:
    try:
        value = cell.cell_contents
    except ValueError:  # empty
        return ()
    return value if isinstance(value, tuple) else (value,)


def _is_causal_within(
    sees: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    positions: torch.Tensor,
    starts: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Whether each position sees exactly the range from the start of its document (or window) to itself: bool, 0-dim.

    Tested at both ends of the range, in its middle, and one position outside of each end.
    """
    lowest = starts
    if window is not None:
        lowest = torch.maximum(starts, positions - window + 1)
    # Not all pairs: they would take the quadratic memory that this module avoids.
    inside = torch.cat([positions, lowest, (positions + lowest) // 2])
    seen = sees(positions.repeat(3), inside)
    # Selecting by a mask would wait for the device. The last position has no next one, and the first document no
    # token before it: these positions are clamped, and do not count.
    last = len(positions) - 1
    sees_next = sees(positions, (positions + 1).clamp(max=last)) & (positions < last)
    sees_previous = sees(positions, (lowest - 1).clamp(min=0)) & (lowest > 0)
    return seen.all() & ~sees_next.any() & ~sees_previous.any()
