"""The teacher that counts pairs of tokens."""

from __future__ import annotations

import math

import pytest
import torch

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.examples.data.pair_counts import pair_counts
from automodel_ckpt.examples.data.python_docs import language_modeling, train_tokenizer


def test_its_probabilities_are_those_of_the_pairs_in_the_text() -> None:
    teacher = pair_counts(300, prior=5.0)
    tokens = torch.from_numpy(language_modeling(train_tokenizer(300)).tokens.astype("int64"))
    token = int(tokens[7])
    following = tokens[1:][tokens[:-1] == token]
    counts = torch.bincount(following, minlength=300).double()
    frequencies = torch.bincount(tokens, minlength=300).double() + 1
    smoothed = counts + 5 * frequencies / frequencies.sum()
    logits = teacher(input_ids=torch.tensor([[3, token]]), attention_mask=torch.ones(1, 2))
    assert logits.shape == (1, 2, 300)
    torch.testing.assert_close(
        logits[0, 1].double().exp(), smoothed / smoothed.sum(), atol=1e-6, rtol=1e-4
    )
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"prior": 0.0}, "prior"),
        ({"prior": math.nan}, "prior"),
        ({"vocab_size": 8193}, "vocab_size"),
    ],
)
def test_what_it_cannot_count_is_an_error(options: dict[str, float], where: str) -> None:
    with pytest.raises(RecipeError) as raised:
        pair_counts(**options)  # type: ignore[arg-type]
    (problem,) = raised.value.problems
    assert problem.where == where
    assert problem.hint
    assert str(problem.value)
