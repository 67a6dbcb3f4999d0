"""Embeddings of texts from the hidden states of their tokens."""

from typing import Any

import pytest
import torch

from automodel_ckpt.models.loss.pooling import pool


@pytest.mark.parametrize("how", ["mean", "cls", "last"])
def test_pooling_ignores_padding_on_either_side(how: Any) -> None:
    tokens = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
    expected = {"mean": tokens[0].mean(0), "cls": tokens[0, 0], "last": tokens[0, 2]}[how]
    noise = torch.full((1, 2, 4), 9.0)
    right, left = torch.cat([tokens, noise], dim=1), torch.cat([noise, tokens], dim=1)
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    torch.testing.assert_close(pool(right, mask, how, normalize=False)[0], expected)
    torch.testing.assert_close(pool(left, mask.flip(1), how, normalize=False)[0], expected)
    whole = pool(tokens.half(), torch.ones(1, 3), how, normalize=True)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole.norm(dim=-1), torch.ones(1))
