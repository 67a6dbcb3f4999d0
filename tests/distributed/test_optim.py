"""The default optimizer on parameters that are shared out."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from automodel_ckpt.distributed.parallelize import Parallelism, clip_gradients, parallelize
from automodel_ckpt.training.optim import FusedAdamW
from tests.support import ranks
from tests.support.parallel import VOCABULARY, layout_here, model_of

LIMIT = 0.01


def values_after_steps(optimizer_class: Any, sizes: dict[str, int]) -> tuple[list[float], list[torch.Tensor]]:
    """The gradient norms of three clipped steps, and this rank's parts of the parameters and averages after them."""
    model = parallelize(model_of(), layout_here(**sizes), Parallelism(strategy="fsdp2"))
    optimizer = optimizer_class(model.parameters(), lr=0.01, fused=True)
    tokens = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
    norms = []
    for _ in range(3):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        parameters = list(model.parameters())
        norms.append(clip_gradients(parameters, LIMIT, in_step=getattr(optimizer, "divide_in_step", None)))
        optimizer.step()
        optimizer.zero_grad()
    states = [optimizer.state[parameter]["exp_avg"] for parameter in parameters]
    assert any(isinstance(state, DTensor) for state in states)
    return norms, [value.to_local() if isinstance(value, DTensor) else value for value in [*parameters, *states]]


def test_it_does_with_shards_what_torchs_does() -> None:
    def on_two_ranks() -> None:
        for sizes in ({}, {"tp_size": 2}):
            (our_norms, ours), (norms, theirs) = (
                values_after_steps(each, sizes) for each in (FusedAdamW, torch.optim.AdamW)
            )
            assert min(norms) > 2 * LIMIT
            torch.testing.assert_close(our_norms, norms, rtol=1e-4, atol=0)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)

    ranks.run(on_two_ranks, 2)
