"""The random state of a rank: restored exactly, different per rank, readable without running code."""

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
