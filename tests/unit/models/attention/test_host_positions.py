"""Masks of packed rows from the positions that the host knows. The device has no values: reading one is an error."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.masking_utils import (
    AttentionMaskInterface,
    create_causal_mask,
    create_sliding_window_causal_mask,
)

from automodel_ckpt.models.attention import positions
from automodel_ckpt.models.attention.by_document import documents_of
from automodel_ckpt.models.attention.positions import note_positions

META = "meta"
WINDOW = 4
KINDS: dict[str, Any] = {"causal": create_causal_mask, "window": create_sliding_window_causal_mask}
LENGTHS = st.lists(st.integers(1, 9), min_size=2, max_size=6)


@pytest.fixture(autouse=True)
def _known_nothing() -> Iterator[None]:
    yield
    positions._newest.clear()


def positions_of(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)


def asked_for(kind: str, positions: torch.Tensor, **more: Any) -> dict[str, Any]:
    """With what transformers asks for the mask of rows with these *positions*."""
    found: list[dict[str, Any]] = []
    config = copy.deepcopy(LlamaConfig(hidden_size=16, num_attention_heads=2))
    config._attn_implementation_internal = "noting"
    config.sliding_window = WINDOW
    AttentionMaskInterface.register("noting", lambda **wanted: found.append(wanted))
    try:
        inputs = torch.zeros(*positions.shape, 4, device=positions.device)
        KINDS[kind](config, inputs, None, None, position_ids=positions, **more)
    finally:
        del AttentionMaskInterface._global_mapping["noting"]
    return found[0]


@settings(max_examples=30)
@given(LENGTHS, st.sampled_from([*KINDS]))
def test_documents_are_those_that_the_device_would_find(lengths: list[int], kind: str) -> None:
    on_host = positions_of(lengths)
    on_device = on_host.to(META)
    expected = documents_of(**asked_for(kind, on_host))
    note_positions(on_device, on_host)
    found = documents_of(**asked_for(kind, on_device))
    assert found is not None and expected is not None
    assert (found.runs, found.window) == (expected.runs, expected.window)
    assert found.device == torch.device(META)


@pytest.mark.parametrize(
    "change",
    [
        "none noted",
        "others noted",
        "changed",
        "changed on the host",
        "on the host",
        "not on the host",
    ],
)
def test_other_positions_are_read_from_the_device(change: str) -> None:
    on_host = positions_of([3, 2])
    on_device = on_host.to(META)
    if change != "none noted":
        note_positions(on_device, on_host)
    if change == "others noted":
        others = positions_of([1, 4])
        note_positions(others.to(META), others)
    if change == "changed":
        on_device += 0
    if change == "changed on the host":
        on_host.zero_()
    if change == "not on the host":
        # A recipe may pass rows that are on the device already.
        note_positions(on_device, on_device)
        assert not positions._newest
    if change == "on the host":
        # The newest rows are on the host, and need no copy.
        note_positions(on_host, on_host)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        asked_for("causal", on_device)


def test_a_mask_that_reads_other_tensors_is_read_from_the_device() -> None:
    on_host = positions_of([3, 2])
    on_device = on_host.to(META)
    note_positions(on_device, on_host)
    wanted = asked_for("causal", on_device)
    seen, samples = torch.ones(5, dtype=torch.bool, device=META), wanted["mask_function"]

    def and_mask(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        both: torch.Tensor = samples(batch, head, query, key) & seen[key]
        return both

    wanted["mask_function"] = and_mask
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        documents_of(**wanted)
