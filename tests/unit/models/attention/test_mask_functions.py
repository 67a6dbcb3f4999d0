"""Reading transformers' functions for masks: patterns that are wider than causal ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_overlay,
)

from automodel_ckpt.models.attention.documents import widens


def test_a_pattern_that_widens_the_mask_is_found_wherever_documents_are_joined() -> None:
    def same_block(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        same: torch.Tensor = query // 2 == key // 2
        return same

    documents = packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1]]))
    causal = and_masks(sliding_window_overlay(2), causal_mask_function)
    assert not widens(causal_mask_function)
    assert not widens(and_masks(documents, causal))
    # transformers up to 5.23 joins documents first, and since 5.24 last.
    assert widens(or_masks(and_masks(documents, causal), same_block))
    assert widens(and_masks(or_masks(causal, same_block), documents))
