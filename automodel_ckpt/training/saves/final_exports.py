"""What is exported at the end of a run: the best model, the average of the weights, the average of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.config.keys.checkpoint import CheckpointConfig


def make_final_exports(
    checkpointer: Checkpointer,
    section: CheckpointConfig,
    newest: Path | None,
    wait: Callable[[], None],
) -> None:
    """Export the best model, and the averages that *section* asks for. Collective.

    *newest* is the newest checkpoint; None if there is none. *wait* waits for saves in the background. Exports that
    exist are not made again. Raises :class:`ExportFailed` on all ranks.
    """
    if section.export_best:
        checkpointer.exports.export_best()
    if section.export_ema and newest is not None:
        checkpointer.exports.export_average(newest)
    if section.average_last is not None:
        wait()
        _average_last(checkpointer, section.average_last)


def _average_last(checkpointer: Checkpointer, count: int) -> None:
    def average() -> Path | None:
        checkpointer.check_lease()
        from automodel_ckpt.training.saves.averages import average_last

        return average_last(checkpointer.directory, count)

    checkpointer.exports.run_on_rank0(
        f"averaging the last {count} checkpoints (the checkpoints themselves are safe)", average
    )
