"""Rows with few widths: which widths there are, and that padding changes nothing but the length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from automodel_ckpt.data.batches.packing import IS_TOKEN, PackedDataset, RowLayout
from automodel_ckpt.data.batches.row_widths import RowWidths, WidenedRows
from automodel_ckpt.data.collate import PadCollator
from automodel_ckpt.models.attention.by_document import attend_by_document
from automodel_ckpt.models.layers.compiling import num_row_widths
from tests.unit.models.building.test_packing_probe import build, loss_and_gradients, samples


@given(
    st.integers(1, 100_000), st.integers(1, 20), st.sampled_from([1, 8, 64]), st.integers(1, 10**6)
)
def test_widths_are_few_multiples_that_hold_every_row(
    longest: int, count: int, multiple: int, length: int
) -> None:
    widths = RowWidths(longest, count, multiple)
    found = widths.widths
    assert 1 <= len(found) <= count
    assert found[-1] == -(-longest // multiple) * multiple
    width = widths(length)
    assert width >= length and width % multiple == 0
    assert widths(width) == width
    if length <= longest:
        assert width in found


def test_auto_rounds_where_each_length_would_be_compiled() -> None:
    assert num_row_widths("auto", None, "cuda") == 8
    assert num_row_widths("auto", False, "cpu") == 8
    assert num_row_widths("auto", None, "cpu") is None
    assert num_row_widths(3, None, "cpu") == 3
    assert num_row_widths(None, False, "cuda") is None


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


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_sample_per_row_without_padding_needs_no_mask(num_samples: int) -> None:
    # The widths of rows that three samples share: 12 is none of them.
    layout = RowLayout(32, one_row=True, unpadded_length=12)
    widened = WidenedRows(layout, RowWidths(36, 4), unpadded_length=12)
    assert 12 not in RowWidths(36, 4).widths

    def of_length(length: int) -> dict[str, torch.Tensor]:
        sample = {"input_ids": list(range(1, length + 1)), "labels": list(range(length))}
        return widened(PadCollator(0)([sample] * num_samples))

    longest = of_length(12)
    assert longest.keys() == {"input_ids", "labels"}
    assert longest["labels"].shape == (num_samples, 12)
    shorter = of_length(11)
    assert shorter["labels"].shape == (1, RowWidths(36, 4)(11 * num_samples))
    assert "attention_mask" not in shorter
    starts = (shorter["position_ids"] == 0).flatten().nonzero().flatten().tolist()
    assert starts[: num_samples + 1] == [11 * number for number in range(num_samples + 1)]


def test_rows_with_images_are_not_widened() -> None:
    rows = {
        "input_ids": torch.zeros(1, 5),
        "labels": torch.zeros(1, 5),
        "pixel_values": torch.ones(3),
    }
    assert WidenedRows(None, RowWidths(50, 1))(rows).keys() == rows.keys()
    assert WidenedRows(None, RowWidths(50, 1))(rows)["labels"].shape == (1, 5)
