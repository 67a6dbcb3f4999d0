"""Errors that are stored until the backward pass, and become the weight's gradient: beside float64, on the CPU."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from automodel_ckpt.models.loss import fused_cross_entropy, head_gradients
from automodel_ckpt.models.loss.fused_cross_entropy import (
    LogitTransform,
    VocabularyPart,
    linear_cross_entropy,
)
from automodel_ckpt.models.loss.head_gradients import head_bytes
from tests.support import ranks

HIDDEN = 16


@pytest.fixture(autouse=True)
def _stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store errors on the CPU, too, in several blocks of columns and chunks of rows."""

    def always(*arguments: Any, trains_weight: bool) -> bool:
        return trains_weight

    monkeypatch.setattr(fused_cross_entropy, "stores_errors", always)
    monkeypatch.setattr(fused_cross_entropy, "_FEW", 2**20)
    monkeypatch.setattr(head_gradients, "CHUNK_ELEMENTS_STORED", 53 * 5)
    monkeypatch.setattr(head_gradients, "BLOCK_ELEMENTS", 16 * HIDDEN)


def leaves(num: int, vocabulary: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num)
    found = []
    for shape in ((num, HIDDEN), (vocabulary, HIDDEN), (vocabulary,)):
        found.append(torch.randn(shape, generator=generator).to(dtype).requires_grad_())
    return found


def labels(num: int, vocabulary: int) -> torch.Tensor:
    found = torch.randint(vocabulary, (num,), generator=torch.Generator().manual_seed(1))
    found[num // 2] = -100
    return found


@pytest.mark.parametrize("vocabulary", [7, 16, 53, 64, 131])
@pytest.mark.parametrize("num", [1, 5, 15, 16, 17, 40])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients_are_those_of_float64(num: int, vocabulary: int, with_bias: bool) -> None:
    # float32 instead of 16 bits, so that each misplaced element is seen.
    hidden, weight, bias = leaves(num, vocabulary, torch.float32)
    ours = [hidden, weight, bias] if with_bias else [hidden, weight]
    others = [leaf.detach().double().requires_grad_() for leaf in ours]
    targets = labels(num, vocabulary)
    (linear_cross_entropy(hidden, weight, bias if with_bias else None, targets) * 0.3).backward()
    (F.cross_entropy(F.linear(*others), targets, reduction="sum") * 0.3).backward()
    for mine, other in zip(ours, others, strict=True):
        assert mine.grad is not None and mine.grad.is_contiguous()
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-5, atol=1e-5)


def test_ranks_with_parts_of_the_vocabulary_store_the_errors_of_their_columns() -> None:
    vocabulary, num_ranks = 53, 3

    def compare(num: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        # The last rank has one row less.
        most = -(-vocabulary // num_ranks)
        first = most * dist.get_rank()
        rows = slice(first, first + most)
        hidden, weight, bias = leaves(num, vocabulary, torch.float32)
        wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias)]
        targets = torch.arange(num)
        transform = LogitTransform(0.5, 3.0)
        local = [leaf[rows].detach().requires_grad_() for leaf in (weight, bias)]
        part = VocabularyPart(group, first, most)
        loss = linear_cross_entropy(hidden, *local, targets, part, transform)
        expected = F.cross_entropy(transform(F.linear(*wide)), targets, reduction="sum")
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
        of_hidden, *found = torch.autograd.grad(loss * 0.3, [hidden, *local])
        dist.all_reduce(of_hidden)
        wanted = torch.autograd.grad(expected * 0.3, wide)
        parts = [wanted[0], wanted[1][rows], wanted[2][rows]]
        for mine, other in zip((of_hidden, *found), parts, strict=True):
            torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)

    def on_ranks() -> None:
        for num in (1, 16, 40):
            compare(num)

    ranks.run(on_ranks, num_ranks)


@pytest.mark.parametrize("num", [32, 64])
def test_the_forecast_of_its_memory_is_what_it_allocates(
    num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_gradients, "BLOCK_ELEMENTS", 512 * 64)
    monkeypatch.setattr(head_gradients, "CHUNK_ELEMENTS_STORED", 8 * 20_000)
    weight = torch.randn(20_000, 64).requires_grad_()
    hidden = torch.randn(num, 64, requires_grad=True)
    targets = torch.zeros(num, dtype=torch.int64)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        linear_cross_entropy(hidden, weight, None, targets).backward()
    now, peak = 0, 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    forecast = head_bytes(num, 20_000, 64, torch.float32, "cpu", trains_weight=True, stores=True)
    returned = hidden.nbytes + weight.nbytes
    assert peak == pytest.approx(forecast.peak + returned, rel=0.15)
    assert forecast.kept <= forecast.peak
