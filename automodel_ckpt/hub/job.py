"""What the trainer passes to the process that uploads to the Hub, and the names of their files in the run directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automodel_ckpt.checkpoint.run.pending import TO_HUB

LINK = TO_HUB
STATUS = ".hub.json"
LOCK = ".hub.lock"


@dataclass(frozen=True, slots=True)
class Job:
    """What to upload where: the section ``hub``, with the text of the card. *went_back_to* is the step that the run
    resumed from, and *makes_exports* whether the run exports each checkpoint."""

    repo: str
    push: Literal["final", "best", "every"]
    private: bool
    revision: str | None = None
    card: str | None = None
    base_model: str | None = None
    license: str | None = None
    went_back_to: int = 0
    makes_exports: bool = False
