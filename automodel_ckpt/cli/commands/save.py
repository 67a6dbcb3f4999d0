"""``ckpt save``: make a running job save a checkpoint."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from automodel_ckpt.base.store_url import is_store_url, public
from automodel_ckpt.base.terminal import print_error
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.cli.common.arguments import RUN
from automodel_ckpt.cli.common.output import print_document
from automodel_ckpt.cli.common.paths import run_with_logs
from automodel_ckpt.errors import RecipeError

USAGE = f"""
Make a running ckpt-train save a checkpoint after a step, and print its path. Training continues.

{RUN}
"""


def run(arguments: Namespace) -> int:
    """Run ``ckpt save``. Raises :class:`RecipeError` if no job runs there, and SaveFailed if it does not save."""
    from automodel_ckpt.checkpoint.run.save_requests import request_save

    if is_store_url(arguments.path):
        raise RecipeError(
            "a running job is found in its local directory, not in its store",
            "ckpt save",
            public(arguments.path),
            "specify the local checkpoint_dir, or checkpoint.scratch_dir, on the node of rank 0",
        )
    directory = Path(arguments.path)
    # A new run has no checkpoint yet.
    if os.path.lexists(directory / "checkpoints" / layout.LOCK_FILE):
        directory /= "checkpoints"
    path = request_save(run_with_logs(directory), print_error)
    return print_document(arguments, {"checkpoint": str(path)}, str(path))
