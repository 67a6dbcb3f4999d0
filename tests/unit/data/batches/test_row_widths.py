"""Rows with few widths: which widths there are, and that padding changes nothing but the length."""

from typing import Any

import pytest
import torch

from automodel_ckpt.data.batches.packing import (
    IS_TOKEN,
    PackedDataset,
    RowLayout,
    RowWidths,
    WidenedRows,
)
from automodel_ckpt.data.collate import PadCollator
from automodel_ckpt.models.attention.by_document import attend_by_document
from tests.unit.models.building.test_packing_probe import build, loss_and_gradients, samples


def packs() -> dict[str, torch.Tensor]:
    packed = PackedDataset(samples(), 13)
    return PadCollator(0)([packed[number] for number in range(len(packed))])


LAYOUTS: dict[str, Any] = {
    "padded": (None, lambda: PadCollator(0)(samples())),
    "one row": (RowLayout(32, one_row=True), lambda: PadCollator(0)(samples())),
    "several rows": (RowLayout(8), lambda: PadCollator(0)(samples())),
    "packs": (RowLayout(32), packs),
    "without padding": (RowLayout(32), lambda: PadCollator(0)(samples()[:1] * 2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("by_document", [False, True])
def test_wider_rows_have_the_same_loss_and_gradients(name: str, by_document: bool) -> None:
    layout, make = LAYOUTS[name]
    widened = WidenedRows(layout, RowWidths(50, 1, 50))
    before = dict(make()) if layout is None else layout(make())
    after = widened(make())
    assert after["labels"].shape == (len(before["labels"]), 50)
    assert int((after["labels"] != -100).sum()) == int((before["labels"] != -100).sum())
    if "position_ids" in after:
        assert int(after["position_ids"].max()) == int(before["position_ids"].max())
        assert after[IS_TOKEN][:, before["labels"].shape[1] :].sum() == 0
    for rows in (before, after):
        rows.pop(IS_TOKEN, None)
    model = build("llama", "sdpa").double()
    if by_document:
        assert attend_by_document(model, {"use_cache": False})
    expected_loss, expected = loss_and_gradients(model, before)
    loss, gradients = loss_and_gradients(model, after)
    assert loss == pytest.approx(expected_loss, rel=1e-9)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
