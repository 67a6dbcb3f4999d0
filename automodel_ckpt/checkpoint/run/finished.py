"""The note of a run that has nothing left to do, so that the next start can report this before torch is imported.

The run itself writes it after its last save, validation, export and average. It names the recipe and the
newest checkpoint by their digests, the exports, and the sizes of the logs. :func:`reason_if_finished` accepts it only
if all of that is as it was. Imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from automodel_ckpt.base.durable_io import replace_file
from automodel_ckpt.base.version import __version__
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.digests import digest_of
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.verify import Level, verify
from automodel_ckpt.checkpoint.run.resume import checkpoint_names
from automodel_ckpt.errors import CheckpointUnusable

_MAX_BYTES = 1 << 16


def note(run: Path, step: int, config_yaml: str, reason: str) -> None:
    """Record that the run ended after *step*, its newest checkpoint, for *reason*. *config_yaml* is its recipe.

    Writes nothing if the newest checkpoint is of another step. Raises OSError, or :class:`CheckpointUnusable` for an
    invalid manifest.
    """
    names = checkpoint_names(run)
    if not names or names[0].step != step:
        return
    newest = str(names[0])
    content = {
        "version": __version__,
        "recipe": _digest(config_yaml),
        "checkpoint": newest,
        "manifest": Manifest.read(run / newest).digest,
        "made": _made(run),
        "log_bytes": _log_bytes(run),
        "step": step,
        "reason": reason,
    }
    if content != _read(run):
        replace_file(run / layout.FINISHED, (json.dumps(content, indent=1) + "\n").encode())


def reason_if_finished(run: Path, config_yaml: str, level: Level) -> tuple[int, str] | None:
    """Return the last step and the reason of the end if *run* has certainly nothing left to do for this recipe.

    The files of its newest checkpoint are verified at *level*. Returns None in any doubt: another recipe or version, a
    newer or damaged checkpoint, a missing export or pointer, or a run that is still live or did not end in order.
    """
    try:
        found = _read(run)
        # The end of a run removes its lock. Logs have other sizes after a later start that was killed.
        if (run / layout.LOCK_FILE).exists() or found["log_bytes"] != _log_bytes(run):
            return None
        step, reason = found["step"], found["reason"]
        is_valid = type(step) is int and isinstance(reason, str) and isinstance(found["made"], list)
        if not is_valid or found["version"] != __version__:
            return None
        if found["recipe"] != _digest(config_yaml):
            return None
        names = [str(name) for name in checkpoint_names(run)[:1]]
        if names != [found["checkpoint"]] or commit.pointed(run, layout.LATEST) != names[0]:
            return None
        missing = set(found["made"]) - set(_made(run))
        manifest = Manifest.read(run / names[0])
        if missing or manifest.digest != found["manifest"] or manifest.step != step:
            return None
        if verify(run / names[0], manifest, level):
            return None
    except (OSError, ValueError, KeyError, TypeError, CheckpointUnusable):
        return None
    return step, reason


def _read(run: Path) -> dict[str, Any]:
    """Return the content of the note; empty if there is none."""
    try:
        found = parse_json(read_safely(run, layout.FINISHED, limit=_MAX_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _log_bytes(run: Path) -> dict[str, int]:
    """Return the sizes of the logs that exist. Raises OSError."""
    sizes = {}
    for name in (layout.TRAINING_LOG, layout.VALIDATION_LOG):
        if (run / name).exists():
            sizes[name] = (run / name).stat().st_size
    return sizes


def _made(run: Path) -> list[str]:
    """List the exports and averages that exist, relative to the run directory."""
    found = [*run.glob(f"epoch_*/*/{layout.CONSOLIDATED}"), *run.glob(f"{layout.AVERAGED}/*")]
    return sorted(path.relative_to(run).as_posix() for path in found)


def _digest(config_yaml: str) -> str:
    return digest_of(config_yaml.encode())
