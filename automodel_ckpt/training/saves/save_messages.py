"""The texts about saves in the log and the progress line."""

from __future__ import annotations

from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint import SaveReport
from automodel_ckpt.checkpoint.checkpointer import Saving
from automodel_ckpt.logs.progress import SavingView


def saving_view(saving: Saving | None, num_ranks: int) -> SavingView | None:
    """How far a save is, for the progress line; with several ranks, how far rank 0 is."""
    if saving is None:
        return None
    written = min(saving.written_bytes, saving.total_bytes)
    total = max(saving.total_bytes, 1)
    amount = f"{size_text(written)} of {size_text(saving.total_bytes)}"
    if num_ranks > 1:
        amount += " on rank 0"
    return SavingView(saving.step, written / total, amount)


def saved_line(report: SaveReport, figures: str = "") -> str:
    """The log message about a published checkpoint. *figures* describe training at its step."""
    start = f"step {report.step}: {figures}; saved" if figures else f"step {report.step}: saved"
    text = (
        f"{start} {report.path.name} in {report.total_seconds:.2f} s, "
        f"training waited {report.stall_seconds:.2f} s: "
        f"{size_text(report.nbytes)} at {size_text(report.bytes_per_second)}/s"
    )
    if report.free_bytes is not None:
        text += f", {size_text(report.free_bytes)} free"
    if report.pruned:
        text += f", removed {' '.join(report.pruned)}"
    return text
