"""The rate of matrix products that the model FLOPs utilization is relative to."""

from __future__ import annotations

import torch

from automodel_ckpt.logs.device_rate import device_rate, measured_rate

CPU = torch.device("cpu")


def test_a_given_rate_is_used_and_a_cpu_is_not_measured() -> None:
    assert device_rate(CPU, torch.bfloat16, 989.0) == 989e12
    assert device_rate(CPU, torch.bfloat16, None) is None


def test_measuring_a_device_draws_no_random_number_of_the_run() -> None:
    before = torch.get_rng_state()
    rate = measured_rate(CPU, torch.float32, size=64)
    assert 1e6 < rate < 1e15
    assert torch.equal(torch.get_rng_state(), before)
