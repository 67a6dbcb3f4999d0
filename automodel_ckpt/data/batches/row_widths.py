"""Row lengths rounded up to a few widths: torch.compile and CUDA graphs specialize on the shapes of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from automodel_ckpt.data.batches.packing import IS_TOKEN
from automodel_ckpt.data.collate import (
    IGNORE_INDEX,
    Batch,
    Tensors,
)

_SPAN = 16
"""The largest width of a grid divided by the smallest."""
_FILLERS = {"input_ids": 0, "labels": IGNORE_INDEX, "attention_mask": 0, IS_TOKEN: 0}
_WIDENED = {*_FILLERS, "position_ids"}


@dataclass(frozen=True, slots=True)
class RowWidths:
    """Rounds the lengths of rows up to at most *count* widths, the largest of which is *longest*.

    The widths are a geometric sequence from *longest* / 16, so that the padding of long and of short rows is the same
    fraction. All are multiples of *multiple*. Longer rows continue the sequence. The result depends on the length only,
    not on earlier rows, so a resumed run has the same widths.
    """

    longest: int
    count: int
    multiple: int = 1

    @property
    def widths(self) -> list[int]:
        """The widths, ascending."""
        found = set()
        for number in range(self.count):
            width = self.longest / self._ratio**number
            found.add(self._rounded(width))
        return sorted(found)

    def __call__(self, length: int) -> int:
        """The width of a row of *length* tokens."""
        widths = self.widths
        for width in widths:
            if length <= width:
                return width
        width = widths[-1]
        while width < length:
            width = self._rounded(max(width * self._ratio, width + self.multiple))
        return width

    @property
    def _ratio(self) -> float:
        return float(_SPAN ** (1 / max(self.count - 1, 1)))

    def _rounded(self, width: float) -> int:
        # Without the subtraction, rounding errors of the powers would add a multiple.
        num_multiples = -(-(width - 1e-6) // self.multiple)
        return max(int(num_multiples), 1) * self.multiple


@dataclass(frozen=True, slots=True)
class WidenedRows:
    """Arranges a micro-batch with *layout* (None: it is padded already), and pads the rows to the next width.

    In rows that samples share, the added tokens are separate samples, no longer than the longest one, without labels.
    In other rows, they are hidden by the attention mask. The sum of the losses over the labels does not change.

    Rows of one sample each that have *unpadded_length* tokens stay as they are, without a mask. The widths are those
    of rows that several samples share, which are longer, and the sample's length need not be one of them.
    """

    layout: Callable[[Tensors], Batch] | None
    widths: RowWidths
    unpadded_length: int | None = None

    def __call__(self, batch: Tensors) -> Batch:
        """Arrange *batch*; rows with other tensors than tokens, labels, masks and positions are not padded."""
        rows = dict(batch) if self.layout is None else self.layout(batch)
        is_text = {"input_ids", "labels"} <= rows.keys() <= _WIDENED
        if not is_text or any(tensor.ndim != 2 for tensor in rows.values()):
            return rows
        length = rows["labels"].shape[1]
        if length == self.unpadded_length and not {"position_ids", "attention_mask"} & rows.keys():
            return rows
        num_added = self.widths(length) - length
        if num_added == 0:
            return rows
        return _padded(rows, num_added)


def _padded(rows: Tensors, num_added: int) -> Batch:
    """Append *num_added* positions to each of *rows*, tensors [rows, T]."""
    labels = rows["labels"]
    padded = dict(rows)
    if "position_ids" not in padded and "attention_mask" not in padded:
        padded["attention_mask"] = torch.ones_like(labels)
    if "attention_mask" not in padded and IS_TOKEN not in padded:
        # Routers must not count the added tokens.
        padded[IS_TOKEN] = torch.ones_like(labels, dtype=torch.bool)
    for name, filler in _FILLERS.items():
        if name in padded:
            added = padded[name].new_full((len(labels), num_added), filler)
            padded[name] = torch.cat([padded[name], added], dim=1)
    positions = padded.get("position_ids")
    if positions is not None:
        # Longer than every sample, they could exceed the model's context.
        longest = int(positions.max()) + 1
        added = torch.arange(num_added, dtype=positions.dtype) % longest
        padded["position_ids"] = torch.cat([positions, added.expand(len(labels), -1)], dim=1)
    return padded
