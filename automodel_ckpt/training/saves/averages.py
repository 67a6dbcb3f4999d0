"""The average of a run's last checkpoints, which ``checkpoint.average_last`` requests."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.convert.imports.new_checkpoint import write_checkpoint
from automodel_ckpt.convert.merging.average import (
    last_checkpoints,
    prepare,
    sources_in,
)
from automodel_ckpt.errors import CheckpointUnusable

log = logging.getLogger("automodel_ckpt")

AVERAGED = "averaged"
"""The directory below a run directory that has the averages: a run directory of checkpoints of weights."""


def average_last(run: Path, count: int) -> Path | None:
    """Average the newest *count* complete checkpoints of *run* into ``run/averaged``. Returns the new checkpoint.

    With fewer checkpoints, all of them are averaged. With fewer than two, nothing is, and a warning is logged. An
    average of the same checkpoints that exists already is returned. Raises :class:`SaveFailed` or
    :class:`CheckpointUnusable`.
    """
    existing = len(list(resume.records(run, "")))
    if existing < 2:
        log.warning("average_last: the run has fewer than two checkpoints, so there is no average")
        return None
    if existing < count:
        log.warning("average_last: averaging %d checkpoints, since there are no more", existing)
    sources = last_checkpoints(run, min(count, existing))
    target = run / AVERAGED / sources[-1].name
    if target.is_dir():
        averaged = None
        with contextlib.suppress(CheckpointUnusable):
            averaged = sources_in(Summary.read(target))
        if averaged == [Summary.read(source).digest for source in sources]:
            log.info("average of the last %d checkpoints: %s", len(sources), target)
            return target
        # The run went back to an earlier checkpoint, and has saved this step again.
        commit.supersede(target.parent, target.name)
    # Counters, such as the counters of batch normalization: the newest ones.
    planned = prepare(sources, target.parent, integers="last")
    path = write_checkpoint(planned.checkpoint)
    log.info("average of the last %d checkpoints: %s", len(sources), path)
    return path
