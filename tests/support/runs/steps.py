"""Steps of training whose numbers are known, for what counts and reports them."""

from __future__ import annotations

import torch

from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.training.values.readback import LaunchedStep, Mark, Readback
from automodel_ckpt.training.values.records import Control, StepPosition


def launched_step(
    number: int, *, start: float | None = None, end: float | None = None
) -> LaunchedStep:
    """Step *number* of a run on a CPU, of 8 tokens and 1 TFLOP. It lasts a second, or from *start* to *end*."""
    device = torch.device("cpu")
    numbers = Readback({"loss": 1.0, "aux_loss": 0.0, "grad_norm": 1.0}, device)
    began = Mark(device)
    began._seconds = number - 1.0 if start is None else start
    numbers.end._seconds = float(number) if end is None else end
    return LaunchedStep(
        position=StepPosition(number, 0),
        batch=GlobalBatch(0, 0, 0, [0], [], last_of_epoch=False),
        control=Control(8, 8, 8, False, flops=1e12),
        lr=0.1,
        start=began,
        numbers=numbers,
        metrics=(),
        may_be_skipped=False,
    )
