"""Describe directories that other programs wrote, for ``ckpt ls`` and ``ckpt show``. They have no digests."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.cli.common.checkpoint_tables import statistics
from automodel_ckpt.cli.common.output import problem_json

if TYPE_CHECKING:
    from automodel_ckpt.convert.formats.format import Counters
    from automodel_ckpt.convert.imports.external import ExternalTree

Number = TypeVar("Number", int, float)
_UNVERIFIABLE = "external checkpoint, unverifiable: no MANIFEST.json"
_EXPORT = "export: verify it with `ckpt verify`"


def is_external(path: Path) -> bool:
    """Whether *path* is a directory, not a link, that another program wrote in a known format.

    False for a directory that cannot be read, such as lost+found.
    """
    from automodel_ckpt.convert.formats.registry import formats_in

    try:
        return not path.is_symlink() and bool(formats_in(path))
    except PermissionError:
        return False


def counters_in(path: Path) -> Counters:
    """Return the step, the epoch and the samples that the files in *path* state; empty if they cannot be read."""
    from automodel_ckpt.convert.formats.format import Counters
    from automodel_ckpt.convert.formats.registry import detect, detect_parts
    from automodel_ckpt.errors import CheckpointUnusable

    try:
        known = detect(path, readable_only=True) or detect_parts(path)
        return Counters() if known is None else known.counters(path)
    except (CheckpointUnusable, OSError):
        return Counters()


def row_fields(path: Path) -> ValueDict | None:
    """Return the fields of a row of ``ckpt ls``. Returns None when the directory is in no known format."""
    from automodel_ckpt.convert.imports import external

    found = external.read_external(path)
    if found is None:
        return None
    stated = counters_in(path)
    return {
        "nbytes": found.nbytes,
        "created": found.written,
        "reason": f"external, unverified: {found.kind}",
        "foreign": True,
        "step": stated.step,
        "epoch": stated.epoch,
        "train_loss": found.losses.get("train_loss"),
        "val_loss": found.losses.get("val_loss"),
    }


def first(stated: Number | None, named: Number | None) -> Number | None:
    """The number that the files state, else the one in the name."""
    return named if stated is None else stated


def document(path: Path, stats: bool = False) -> ValueDict | None:
    """Return the document of ``ckpt show --json``. Returns None when the directory is in no known format.

    With *stats*, reads the tensors and adds their statistics.
    """
    from automodel_ckpt.convert.imports import external

    found = external.read_external(path)
    if found is None:
        return None
    name = layout.parse_checkpoint_name(path.name)
    stated = counters_in(path)
    return {
        "path": str(path),
        "foreign": True,
        "kind": found.kind,
        "note": _EXPORT if layout.EXPORT_MANIFEST in found.files else _UNVERIFIABLE,
        "step": first(stated.step, name and name.step),
        "epoch": first(stated.epoch, name and name.epoch),
        "created": found.written,
        "nbytes": found.nbytes,
        "losses": dict(found.losses),
        "files": dict(found.files),
        "trees": {
            tree_name: {
                "format": tree.format.name,
                "problem": next((f"{each.what}: {each.value}" for each in tree.problems), ""),
                "damaged": [problem_json(problem) for problem in tree.problems],
                "values": tree.inventory.num_values,
                "tensors": _tensors(path / tree_name, tree, stats),
                "details": {title: list(content) for title, content in tree.details.items()},
            }
            for tree_name, tree in found.trees().items()
        },
    }


def _tensors(directory: Path, tree: ExternalTree, stats: bool) -> dict[str, ValueDict]:
    entries = {fqn: asdict(tensor) for fqn, tensor in tree.inventory.tensors.items()}
    if stats and not tree.problems:
        stored = tree.format.stored_tensors(directory)
        for fqn, entry in entries.items():
            entry.update(statistics(stored.root, stored.tensors[fqn]))
    return entries
