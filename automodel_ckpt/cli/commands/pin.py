"""``ckpt pin`` and ``ckpt unpin``: protect a checkpoint from removal by ``ckpt prune`` and by a run's keep policy."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from automodel_ckpt.checkpoint.run import maintenance
from automodel_ckpt.cli.common.output import print_document
from automodel_ckpt.cli.common.paths import whole_checkpoint

_PATH = "path PATH | a checkpoint, or a pointer such as checkpoints/LATEST"
USAGE = f"Protect a checkpoint from removal.\n\n{_PATH}"
USAGE_UNPIN = f"Remove a pin.\n\n{_PATH}"


def run(arguments: Namespace) -> int:
    """Run ``ckpt pin`` or ``ckpt unpin``. Raises :class:`CheckpointUnusable` if the checkpoint does not exist."""
    path = Path(arguments.path)
    is_pin = arguments.command == "pin"
    if is_pin:
        run_directory, name = maintenance.run_of(whole_checkpoint(path))
        maintenance.pin(run_directory, name)
        changed = True
    else:
        # The pin still exists if its checkpoint was removed by hand: look for it first.
        run_directory, name = maintenance.pin_at(path) or maintenance.run_of(whole_checkpoint(path))
        changed = maintenance.unpin(run_directory, name)
    document = {"checkpoint": name, "pinned": is_pin, "changed": changed}
    text = f"{arguments.command}ned {name}" if changed else f"{name} was not pinned"
    return print_document(arguments, document, text)
