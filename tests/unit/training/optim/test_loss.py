"""The loss is a sum over labels, so that it does not matter how a global batch is cut up."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.loss.causal import LossFn, check_is_sum, next_token_loss, num_label_tokens


def batch(
    seed: int, rows: int = 4, length: int = 6, vocabulary: int = 11
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < 0.4] = -100
    return torch.randn(rows, length, vocabulary, generator=generator), labels


@given(st.integers(0, 1000), st.integers(1, 4))
def test_micro_batches_add_up_to_the_whole_batch(seed: int, size: int) -> None:
    logits, labels = batch(seed)
    parts = zip(logits.split(size), labels.split(size), strict=True)
    total = sum(float(next_token_loss(part, part_labels)) for part, part_labels in parts)
    assert total == pytest.approx(float(next_token_loss(logits, labels)), rel=1e-5)


def test_it_is_the_mean_of_transformers_times_the_label_tokens() -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits, labels = batch(3)
    mean = ForCausalLMLoss(logits, labels, vocab_size=11)
    assert float(next_token_loss(logits, labels) / num_label_tokens(labels)) == pytest.approx(
        float(mean), rel=1e-6
    )


def test_a_batch_without_labels_has_the_loss_zero_and_zero_gradients() -> None:
    logits, labels = batch(1)
    logits.requires_grad_()
    loss = next_token_loss(logits, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_a_loss_that_returns_one_value_per_position_is_refused() -> None:
    logits, labels = batch(2)
    with pytest.raises(RecipeError, match=r"the sum over all positions[\s\S]*shape \[24\]"):
        next_token_loss(logits, labels, torch.nn.CrossEntropyLoss(reduction="none"))
    for returned in (None, 3.0):
        with pytest.raises(RecipeError, match=rf"must be a scalar tensor[\s\S]*value:  {returned}"):
            next_token_loss(logits, labels, lambda logits, labels, found=returned: found)


def focal(losses: torch.Tensor) -> torch.Tensor:
    return (1 - torch.exp(-losses)) ** 2 * losses


def test_only_a_mean_is_rejected_and_no_random_numbers_are_drawn() -> None:
    rows, row_labels = batch(3)
    logits, labels = rows.flatten(0, 1), row_labels.flatten()
    weight = torch.linspace(0.1, 2, logits.shape[1])

    def each(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels, reduction="none")

    sums: list[LossFn] = [
        nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1, reduction="sum"),
        lambda logits, labels: focal(each(logits, labels)).sum(),
        lambda logits, labels: F.cross_entropy(logits, labels) * (labels != -100).sum(),
        # The loss of the harder half, and one of complete rows only.
        lambda logits, labels: each(logits, labels).topk(len(labels) // 2).values.sum(),
        lambda logits, labels: each(logits.reshape(24, -1), labels).sum(),
        lambda logits, labels: (
            each(logits, labels).sum() * random.random() * float(np.random.rand())
        ),
    ]
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    assert all(check_is_sum(loss_fn, logits, labels) for loss_fn in sums)
    assert states == (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())
    # Of a loss that is not finite, nothing is known yet. The run reports it.
    assert not check_is_sum(sums[0], logits * torch.inf, labels)
    assert not check_is_sum(lambda logits, labels: logits.sum() + torch.inf, logits, labels)
    for mean in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=weight)):
        with pytest.raises(RecipeError, match="the loss is a mean"):
            check_is_sum(mean, logits, labels)
