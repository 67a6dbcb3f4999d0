"""Read automodel_peft_config.json of a checkpoint of adapters, and find their base. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from automodel_ckpt.base.hub_access import is_revision_name
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.errors import unusable

FORMAT_VERSION = 1
_MAX_BYTES = 16 << 20
_WITHOUT_ADAPTERS = (
    "resume without a peft section, or start a new run in another checkpoint.checkpoint_dir"
)


def read_peft_record(
    checkpoint: Path, directory: str, *, without: str = _WITHOUT_ADAPTERS
) -> ValueDict:
    """The content of automodel_peft_config.json in a module's *directory*, with at least ``base`` and ``adapter``.

    Raises :class:`CheckpointUnusable` where there is none, with the hint *without*, or none of ours.
    """
    places = [f"{directory}/{layout.AUTOMODEL_PEFT_CONFIG}"]
    places.append(f"{directory}/{layout.HF_METADATA}/{layout.AUTOMODEL_PEFT_CONFIG}")
    for place in places:
        try:
            record = parse_json(read_safely(checkpoint, place, limit=_MAX_BYTES))
            fault = _fault(record)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            record, fault = {}, repr(error)[:200]
        if fault:
            raise unusable(
                "the description of the adapters cannot be read", checkpoint / place, fault
            )
        return dict(record)
    raise unusable(
        "this checkpoint holds no adapters",
        checkpoint / directory,
        f"no {layout.AUTOMODEL_PEFT_CONFIG}",
        without,
    )


def _fault(record: Any) -> str | None:
    if not isinstance(record, dict) or record.get("format_version") != FORMAT_VERSION:
        return f"its format_version is not {FORMAT_VERSION}"
    base, adapter = record.get("base"), record.get("adapter")
    if not isinstance(base, dict) or not isinstance(adapter, dict):
        return "it lacks base or adapter"
    relative = base.get("relative_to_run")
    if not _is_path(base.get("name")) or not (relative is None or _is_path(relative)):
        return "it does not state where the base is"
    return None


def _is_path(value: object) -> bool:
    try:
        return isinstance(value, str) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def base_revision(config: Values, path: Path) -> str | None:
    """Return the revision of an adapter's base on the Hub, from peft's *config* at *path*; None: the main branch.

    Raises :class:`CheckpointUnusable` for a value that cannot be the name of a branch, tag or commit.
    """
    revision = config.get("revision")
    if revision is None:
        return None
    if not isinstance(revision, str) or not is_revision_name(revision):
        raise unusable(
            "the revision of the adapter's base is not a branch, tag or commit",
            path,
            f"revision: {revision!r:.100}",
            "correct the file, or name the directory of the base with --base",
        )
    return revision


def find_base(record: Values, run: Path) -> str:
    """Return the present path of an adapter's base: the recorded path, or the relative one if both were moved.

    A Hub name is returned unchanged. Raises :class:`CheckpointUnusable` if the base does not exist.
    """
    base = record["base"]
    name, relative = str(base["name"]), base.get("relative_to_run")
    if not isinstance(relative, str):
        return name
    moved = os.path.normpath(run.resolve() / relative)
    for place in (name, moved):
        if Path(place).is_dir():
            return place
    raise unusable(
        "the base model of this adapter is not where it was",
        name,
        f"nor at {moved}",
        "put it back, or name its place with --base",
    )
