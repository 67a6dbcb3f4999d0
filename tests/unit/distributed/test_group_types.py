"""Trained parameters of different types in a group of fsdp2, which torch reports in the first forward pass only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from automodel_ckpt.distributed.group_types import check_group_types
from automodel_ckpt.errors import RecipeError


def layer() -> nn.Module:
    """A layer in bfloat16 with a router whose bias is in float32."""
    made = nn.Module()
    made.up = nn.Linear(4, 8, dtype=torch.bfloat16)
    made.router = nn.Module()
    made.router.bias = nn.Parameter(torch.zeros(3))
    return made


def test_types_that_differ_are_an_error_that_names_what_to_freeze() -> None:
    with pytest.raises(RecipeError) as raised:
        check_group_types(layer())
    (problem,) = raised.value.problems
    assert problem.where == "model.dtype"
    assert "bfloat16 for 2, float32 for 1 (router.bias)" in problem.value
    assert """--model.freeze='["*.router.bias"]'""" in problem.hint


def test_what_is_not_trained_or_not_sharded_does_not_count() -> None:
    frozen = layer()
    frozen.router.requires_grad_(False)
    check_group_types(frozen)
    check_group_types(layer(), ignored=[torch.bfloat16])
    check_group_types(nn.Linear(2, 2))
