"""The random state of a rank: restored exactly, different per rank, readable without running code."""

from __future__ import annotations

import io
import random

import numpy
import pytest
import torch

from automodel_ckpt.base.rng import StatefulRNG


def draws() -> list[float]:
    values = [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn()]
    return [
        *map(float, values),
        *torch.rand(3).tolist(),
        *torch.nn.functional.dropout(torch.ones(8)).tolist(),
    ]


def through_a_file(state: object) -> object:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def test_a_restored_state_draws_the_same_numbers_of_all_kinds() -> None:
    rng = StatefulRNG(5, rank=1)
    draws()  # an odd number of gaussians: python and numpy keep the second of a pair
    state = through_a_file(rng.state_dict())
    expected = [draws(), draws()]
    StatefulRNG(6, rank=0)
    rng.load_state_dict(state)  # type: ignore[arg-type]
    assert [draws(), draws()] == expected


def test_ranks_and_seeds_draw_different_numbers() -> None:
    drawn = []
    for seed, rank in [(5, 0), (5, 1), (6, 0), (0, 5)]:
        StatefulRNG(seed, rank)
        drawn.append(tuple(draws()))
    assert len(set(drawn)) == 4


def test_what_is_drawn_inside_preserved_leaves_no_trace() -> None:
    rng = StatefulRNG(5)
    expected = [draws() for _ in range(2)]
    rng = StatefulRNG(5)
    first = draws()
    with rng.preserved():
        draws()
    assert [first, draws()] == expected


def test_a_state_fits_where_the_ranks_share_the_work_as_before() -> None:
    state = StatefulRNG(5, 0, (1, 2, 1, 1)).state_dict()
    assert StatefulRNG(5, 0, (1, 2, 1, 1)).fits(state)
    assert not StatefulRNG(5, 0, (1, 1, 2, 1)).fits(
        state
    )  # as many ranks, which have to draw alike
    del state["grid"]
    assert StatefulRNG(5, 0, (1, 2, 1, 1)).fits(state)


def test_deriving_depends_on_the_step_and_the_rank() -> None:
    drawn = []
    for rank, step in [(0, 20), (1, 20), (0, 40)]:
        StatefulRNG(5, rank).derive(step)
        drawn.append(tuple(draws()))
    assert len(set(drawn)) == 3


def test_a_state_of_other_gpus_is_reported_and_the_rest_of_it_restored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng = StatefulRNG(5)
    state = rng.state_dict()
    expected = draws()
    caplog.set_level("WARNING", "automodel_ckpt")
    rng.load_state_dict(state)
    assert not caplog.records
    num_gpus = torch.cuda.device_count() + 2
    rng.load_state_dict({**state, "cuda": [torch.get_rng_state()] * num_gpus})
    assert draws() == expected
    (record,) = caplog.records
    assert "not bit-exact" in record.message
    StatefulRNG(5, rank=1).load_state_dict({**state, "cuda": [torch.get_rng_state()] * num_gpus})
    assert len(caplog.records) == 1, "other ranks do not repeat it"
