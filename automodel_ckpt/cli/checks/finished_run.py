"""Report a run that has nothing left to do, before torch is imported."""

from __future__ import annotations

import os
from pathlib import Path

from automodel_ckpt.cli.launch.started_ranks import started_by
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.registry import is_own
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.config.tree.urls import with_local_directory


def finished_text(loaded: LoadedRecipe, flags: LaunchFlags) -> str | None:
    """Return the line of a run that is already complete; None in any doubt.

    Ranks that torchrun, srun or several nodes start must act together, so each of them builds the run.
    """
    section = with_local_directory(loaded.config).checkpoint
    # The code of another recipe may have changed, or may do more than train.
    if not section.enabled or section.restore_from is not None or not is_own(loaded.config.recipe):
        return None
    if flags.nnodes != "1" or started_by(os.environ, flags) is not None:
        return None
    from automodel_ckpt.checkpoint.run.finished import reason_if_finished
    from automodel_ckpt.checkpoint.run.pending import TO_HUB, TO_STORE, pending

    root = Path(section.checkpoint_dir)
    if section.remote is not None and root.is_dir() and pending(root, TO_STORE):
        # The run ended before its last checkpoint was uploaded.
        return None
    if loaded.config.hub is not None and root.is_dir() and pending(root, TO_HUB):
        return None
    found = reason_if_finished(root, loaded.to_yaml(), section.verify)
    if found is None:
        return None
    step, reason = found
    return f"already complete at step {step}: {reason}"
