"""What stands in a run directory, and which of the promises it breaks. Reads only; shares nothing with a run."""

import os
from pathlib import Path

import xxhash

from automodel_ckpt.checkpoint import Manifest
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.verify import unlisted_files, verify
from automodel_ckpt.checkpoint.run.notes import recall_losses
from automodel_ckpt.errors import CheckpointUnusable


def contents(root: Path) -> dict[str, str]:
    """{name: digest of all that it holds} of every directory that is not hidden; exports aside."""
    return {
        e.name: tree_digest(Path(e.path)) for e in directories(root) if not e.name.startswith(".")
    }


def directories(root: Path) -> list[os.DirEntry[str]]:
    """The directories in *root*; none where it does not exist."""
    entries = os.scandir(root) if root.is_dir() else ()
    return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]


def tree_digest(directory: Path) -> str:
    """One digest for the names and bytes of all files; exports and their staging directories aside."""
    hashed = xxhash.xxh3_128()
    for parent, directories, names in os.walk(directory):
        directories[:] = sorted(
            d for d in directories if not d.startswith((layout.CONSOLIDATED, ".consolidated."))
        )
        for name in sorted(names):
            path = os.path.join(parent, name)
            hashed.update(os.path.relpath(path, directory).encode() + b"\0")
            with open(path, "rb") as file:
                hashed.update(file.read())
    return hashed.hexdigest()


def checkpoints(root: Path) -> list[layout.CheckpointName]:
    """The names of checkpoints, newest first, complete or not."""
    named = [layout.parse_checkpoint_name(entry.name) for entry in directories(root)]
    return sorted((name for name in named if name), reverse=True)


def damage(root: Path) -> list[str]:
    """Checkpoints that have their final name and are not whole: that must never be."""
    found = []
    for name in checkpoints(root):
        path = root / str(name)
        try:
            manifest = Manifest.read(path)
        except CheckpointUnusable as error:
            found.append(f"{name} has its name but no manifest: {error.problems[0].value}")
            continue
        found += [f"{name}: {p.what} ({p.where}: {p.value})" for p in verify(path, manifest)]
        strangers = unlisted_files(path, manifest)
        found += [f"{name}: {file} is not in the manifest" for file in strangers]
    return found


def leftovers(root: Path, *, running: bool) -> list[str]:
    """Entries that neither a checkpoint, nor a pointer, nor (while *running*) the lock of the run account for."""
    known = {*layout.POINTERS, layout.LATE_VALIDATIONS, layout.TEXT_LOG, layout.TIMELINE_STATE}
    if running:
        known.add(layout.LOCK_FILE)
    return sorted(
        f"left over: {e.name}"
        for e in (os.scandir(root) if root.is_dir() else ())
        if e.name not in known
        and not layout.parse_checkpoint_name(e.name)
        and not layout.is_superseded(e.name)
    )


def wrong_pointers(root: Path) -> list[str]:
    """LATEST must name the newest checkpoint, LOWEST_VAL the best validated one; without one, neither may be there."""
    manifests = {
        str(name): manifest for name in checkpoints(root) if (manifest := _read(root, name))
    }
    latest = next(iter(manifests), None)
    losses = {
        name: {**m.losses, **recall_losses(root / name, m.digest)}["val_loss"]
        for name, m in manifests.items()
    }
    validated = {name: loss for name, loss in losses.items() if loss is not None}
    lowest = min(validated, key=lambda name: validated[name]) if validated else None
    return [
        f"{pointer} is {target(root / pointer)}, not {right}"
        for pointer, right in ((layout.LATEST, latest), (layout.LOWEST_VAL, lowest))
        if target(root / pointer) != right
    ]


def unclean(root: Path, *, running: bool) -> list[str]:
    """What a start should have removed or corrected."""
    return leftovers(root, running=running) + wrong_pointers(root)


def _read(root: Path, name: layout.CheckpointName) -> Manifest | None:
    try:
        return Manifest.read(root / str(name))
    except CheckpointUnusable:
        return None


def target(link: Path) -> str | None:
    return os.readlink(link) if link.is_symlink() else None
