from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automodel_ckpt.data.batches.sampler import (
    _splitmix64,
    accumulation_steps,
    derive_seed,
    permutation,
    rank_part,
)
from automodel_ckpt.errors import RecipeError


@given(st.integers(0, 300), st.integers(0, 2**63), st.integers(0, 5))
def test_an_epoch_holds_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    order = permutation(num_samples, seed, epoch, shuffle=True).tolist()
    assert sorted(order) == list(range(num_samples))
    assert order == permutation(num_samples, seed, epoch, shuffle=True).tolist()


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = {
        tuple(permutation(50, seed, epoch, True).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_the_order_is_the_same_for_ever() -> None:
    assert permutation(10, 42, 0, True).tolist() == [7, 6, 0, 3, 9, 8, 4, 1, 5, 2]
    assert derive_seed(1, 2, 3) == 2904650318439132554


def test_the_generator_gives_the_published_values_of_splitmix64() -> None:
    assert _splitmix64(1234567, 2).tolist() == [6457827717110365317, 3203168211198807973]


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 5))
def test_ranks_share_a_global_batch_evenly_and_in_order(
    num_ids: int, dp_size: int, local: int
) -> None:
    ids = list(range(100, 100 + num_ids))
    parts = [rank_part(ids, rank, dp_size, local) for rank in range(dp_size)]
    assert [sample for part in parts for micro in part for sample in micro] == ids
    assert len({len(part) for part in parts}) == 1
    assert all(len(micro) <= local for part in parts for micro in part)
    filled = [sum(1 for micro in part if micro) for part in parts]
    assert max(filled) - min(filled) <= 1
    assert max(filled) == len(parts[0])


def test_batch_sizes_that_do_not_divide_are_refused_with_the_nearest_that_do() -> None:
    assert accumulation_steps(24, 2, 3) == 4
    with pytest.raises(RecipeError, match="multiple of local_batch_size x ranks = 6: 6 or 12"):
        accumulation_steps(10, 2, 3)
    with pytest.raises(RecipeError, match="at least 1"):
        accumulation_steps(8, 0, 1)
