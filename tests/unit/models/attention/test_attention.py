"""Attention of each document of a row by itself: loss and gradients as alone, and the mask wherever in doubt."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig
from transformers.masking_utils import (
    AttentionMaskInterface,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from automodel_ckpt.data.batches.packing import RowLayout
from automodel_ckpt.data.collate import PadCollator
from automodel_ckpt.models.attention.by_document import attend_by_document, documents_of
from automodel_ckpt.models.attention.documents import Documents
from automodel_ckpt.models.inspect.interface import attention_of
from tests.unit.models.building.test_packing_probe import APART, build, loss_and_gradients, samples

OPTIONS = {"use_cache": False}


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """(tokens, whether there was a mask) of each call of torch's attention."""
    calls: list[tuple[int, bool]] = []
    attention = nn.functional.scaled_dot_product_attention

    def noting(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        calls.append((query.shape[2], options["attn_mask"] is not None))
        return attention(query, *args, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", noting)
    return calls


def by_document(model_type: str) -> Any:
    model = build(model_type, "sdpa")
    assert attend_by_document(model, OPTIONS)
    return model


def one_row() -> dict[str, torch.Tensor]:
    """All samples, two of equal length, and five empty places."""
    return RowLayout(32, one_row=True, multiple=8)(PadCollator(0)([*samples(), samples()[-1]]))


@pytest.mark.parametrize("model_type", APART)
def test_each_document_alone_has_its_loss_and_gradients(
    model_type: str, looked_at: list[tuple[int, bool]]
) -> None:
    model = by_document(model_type).double().eval()
    alone = (PadCollator(0)([sample]) for sample in [*samples(), samples()[-1]])
    expected_loss, expected = loss_and_gradients(model, *alone)
    looked_at.clear()
    loss, gradients = loss_and_gradients(model, one_row())
    assert max(tokens for tokens, _ in looked_at) == 12  # the longest sample's
    assert any(masked for _, masked in looked_at) == (
        model_type in ("mistral", "gemma3_text")
    )  # windows of 4
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_other_attention_stays_as_it_is() -> None:
    model = build("llama", "flex_attention")
    assert not attend_by_document(model, OPTIONS)
    assert attention_of(model) == "flex_attention"


def test_a_model_that_works_on_the_mask_keeps_its_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", "sdpa")
    layer, forward = model.model.layers[0], model.model.layers[0].forward

    def adding(hidden: torch.Tensor, attention_mask: Any = None, **options: Any) -> Any:
        return forward(hidden, attention_mask=attention_mask & True, **options)

    monkeypatch.setattr(layer, "forward", adding)
    assert not attend_by_document(model, OPTIONS)
    loss_and_gradients(model, one_row())


def test_attention_that_has_to_look_at_pairs_gets_the_mask() -> None:
    name = attention_of(by_document("llama"))
    attention, module = ALL_ATTENTION_FUNCTIONS[name], nn.Module()
    rows = Documents(((3, 2), (2, 1)), None, torch.device("cpu"))
    tensors = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    bias = torch.randn(1, 2, 8, 8)
    ours, _ = attention(module, *tensors, rows, position_bias=bias)
    theirs, _ = attention(module, *tensors, rows.mask, position_bias=bias)
    torch.testing.assert_close(ours, theirs)


# ---------------------------------------------------------------- masks

CONFIG = AutoConfig.for_model(
    "llama", attn_implementation="sdpa", sliding_window=1, attention_chunk_size=1
)
KINDS: dict[str, Callable[..., Any]] = {
    "causal": create_causal_mask,
    "window": create_sliding_window_causal_mask,
    "chunk": create_chunked_causal_mask,
}


def asked_for(kind: str, lengths: list[int], width: int, **more: Any) -> dict[str, Any]:
    """With what transformers asks for a mask of documents of these *lengths*."""
    found: list[dict[str, Any]] = []
    config = copy.deepcopy(CONFIG)
    config._attn_implementation_internal = "noting"
    config.sliding_window = config.attention_chunk_size = width
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    AttentionMaskInterface.register("noting", lambda **wanted: found.append(wanted))
    try:
        KINDS[kind](
            config, torch.zeros(1, sum(lengths), 4), None, None, position_ids=positions, **more
        )
    finally:
        del AttentionMaskInterface._global_mapping["noting"]
    return found[0]


def the_mask(**wanted: Any) -> torch.Tensor:
    mask = sdpa_mask(**wanted)
    assert mask is not None
    return mask


LENGTHS = st.lists(st.integers(1, 9), min_size=2, max_size=6)


@settings(max_examples=30)
@given(LENGTHS, st.sampled_from([*KINDS]), st.integers(2, 10))
def test_documents_say_what_the_mask_says(lengths: list[int], kind: str, width: int) -> None:
    wanted = asked_for(kind, lengths, width)
    found = documents_of(**wanted)
    assert found is not None
    assert sum(found.sizes) == sum(lengths)
    assert torch.equal(found.mask, the_mask(**wanted))


def test_blocks_that_look_ahead_are_masks() -> None:
    """As of image tokens; here of one that is cut into two."""
    for blocks in ([-1, 0, 0, -1, -1, -1], [0, -1, -1, -1, 0, -1]):
        assert (
            documents_of(
                **asked_for("causal", [3, 3], 4, block_sequence_ids=torch.tensor([blocks]))
            )
            is None
        )


@pytest.mark.parametrize(
    "more",
    [
        {"or_mask_function": lambda batch, head, query, key: query < 2},
        {"and_mask_function": lambda batch, head, query, key: key > 1},
    ],
)
def test_patterns_of_a_models_own_are_masks(more: dict[str, Any]) -> None:
    assert documents_of(**asked_for("causal", [3, 2], 4)) is not None
    assert documents_of(**asked_for("causal", [3, 2], 4, **more)) is None


def test_a_narrower_mask_than_is_told_of_is_a_mask() -> None:
    wanted = asked_for("window", [5, 3], 2)
    assert documents_of(**wanted) is not None
    assert documents_of(**wanted | {"local_size": None}) is None
    assert documents_of(**wanted | {"local_size": 3}) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"batch_size": 2},
        {"kv_length": 9},
        {"q_offset": 1},
        {"attention_mask": torch.ones(1, 5, dtype=torch.bool)},
        {"allow_is_causal_skip": True},
        {"use_vmap": True},
    ],
)
def test_other_rows_are_masks(changed: dict[str, Any]) -> None:
    assert documents_of(**asked_for("causal", [3, 2], 4) | changed) is None
