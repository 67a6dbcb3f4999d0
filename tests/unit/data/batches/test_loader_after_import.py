"""The position in the data after the steps that another program took."""

from __future__ import annotations

import pytest
import torch

from automodel_ckpt.data.batches.loader import GlobalBatchLoader


def collate(rows: list[int]) -> dict[str, torch.Tensor]:
    values = torch.tensor(rows).reshape(-1, 1)
    return {"input_ids": values, "labels": values}


def loader(dataset: object, *, drop_last: bool = False, size: int = 8) -> GlobalBatchLoader:
    return GlobalBatchLoader(
        dataset,
        global_batch_size=size,
        local_batch_size=2,
        collate_fn=collate,
        shuffle=False,
        drop_last=drop_last,
    )


@pytest.mark.parametrize(
    ("steps", "samples", "drop_last", "position", "before"),
    [
        # 22 samples are 3 steps an epoch; the last one has 6 samples, which the other program counts as 8.
        (5, 40, False, (1, 16), 38),
        (5, None, False, (1, 16), 38),
        (6, 48, False, (2, 0), 44),
        (0, 0, False, (0, 0), 0),
        # With drop_last, 2 steps an epoch.
        (5, 40, True, (2, 8), 40),
        # Another batch size: samples are counted, not steps.
        (5, 20, False, (0, 20), 20),
        (5, 20, True, (1, 4), 20),
    ],
)
def test_steps_and_samples_give_the_position(
    steps: int,
    samples: int | None,
    drop_last: bool,
    position: tuple[int, int],
    before: int,
) -> None:
    found = loader(range(22), drop_last=drop_last)
    found.start_after(steps, samples)
    assert (found.epoch, found.consumed_samples) == position
    assert found.samples_before == before
