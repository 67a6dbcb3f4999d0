"""Opening a checkpoint of this program for an export: its manifest describes all tensors.

Directories of other programs, and shards without their manifest, are opened by ``convert/open.py``.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from automodel_ckpt.base.durable_io import walk
from automodel_ckpt.base.units import left_out, values_text
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safetensors_header import read_header_safely
from automodel_ckpt.checkpoint.parts.manifest import Manifest, Tree
from automodel_ckpt.checkpoint.parts.slices import Tensor, whole_tensor
from automodel_ckpt.checkpoint.parts.tree import files_of
from automodel_ckpt.checkpoint.sources.source import Source, check_no_links, unusable
from automodel_ckpt.errors import CheckpointUnusable

MODEL = "model"
FINISHED = "hf"
_SHARD_SUFFIXES = (".safetensors", ".distcp")


def open_checkpoint(path: Path) -> Source:
    """Describe a model of a checkpoint of this program: *path* is the checkpoint, or a module's directory in it.

    Raises :class:`CheckpointUnusable` if there is no such checkpoint or model, or if files and manifest do not match.
    """
    # A checkpoint that was moved to another disk may be a link, but nothing in a checkpoint may.
    if path.is_symlink() and os.path.lexists(path.parent / layout.MANIFEST):
        raise unusable("a checkpoint contains a symbolic link", path, os.readlink(path))
    path = Path(os.path.realpath(path))
    check_finished(path)
    if os.path.lexists(path / layout.MANIFEST):
        return _from_manifest(path, path / MODEL)
    if os.path.lexists(path.parent / layout.MANIFEST):
        return _from_manifest(path.parent, path)
    raise unusable("this directory is not a checkpoint", path, f"it has no {layout.MANIFEST}")


def is_checkpoint(path: Path) -> bool:
    """Return whether *path* is a checkpoint of this program, or is (or links to) a directory in one."""
    real = Path(os.path.realpath(path))
    places = [real, real.parent]
    if path.is_symlink():
        places.append(path.parent)
    return any(os.path.lexists(place / layout.MANIFEST) for place in places)


def check_finished(path: Path) -> None:
    """Raise :class:`CheckpointUnusable` unless *path* is a directory, and not what an unfinished save left behind."""
    if not path.is_dir():
        raise unusable("there is no such checkpoint directory", path, "not a directory")
    if is_checkpoint(path):
        return
    if layout.is_staging(path.name) or layout.is_staging(path.parent.name):
        raise unusable("this checkpoint was never finished", path, f"it has no {layout.MANIFEST}")


def without_averages(manifest: Manifest) -> list[str]:
    """Return the modules of a checkpoint, except the average of its ``model``, by attribute name."""
    names = []
    for name, record in manifest.state.items():
        is_stored = record.kind == "module" and name in manifest.trees
        if is_stored and not is_average(manifest, name):
            names.append(name)
    return names


def is_average(manifest: Manifest, name: str) -> bool:
    """Return whether the module *name* of a checkpoint is the average of the weights of ``model`` (section ``ema``)."""
    if name != layout.AVERAGE or not {name, MODEL} <= manifest.trees.keys():
        return False
    weights = manifest.trees[MODEL].tensors
    # A user's attribute of this name may be something else.
    for fqn, average in manifest.trees[name].tensors.items():
        if fqn not in weights or weights[fqn].shape != average.shape:
            return False
    return True


def _from_manifest(checkpoint: Path, directory: Path) -> Source:
    manifest = Manifest.read(checkpoint)
    name, tree = _module_in(manifest, directory)
    source = _module_of(checkpoint, directory, manifest, name, tree)
    if source.finished or not is_average(manifest, name):
        return source
    model = _module_of(checkpoint, checkpoint / MODEL, manifest, MODEL, manifest.trees[MODEL])
    return _with_frozen(source, model)


def _with_frozen(average: Source, model: Source) -> Source:
    """The *average* of a *model*, with the tensors of the model that do not train."""
    assert average.manifest is not None and model.manifest is not None
    combined = dataclasses.replace(
        model.manifest,
        files={**model.manifest.files, **average.manifest.files},
        trees={**model.manifest.trees, **average.manifest.trees},
    )
    return dataclasses.replace(
        average,
        tensors={**model.tensors, **average.tensors},
        tied=model.tied,
        manifest=combined,
        notes=(*model.notes, *average.notes),
        averaged=model,
    )


def _module_of(
    checkpoint: Path, directory: Path, manifest: Manifest, name: str, tree: Tree
) -> Source:
    """Describe the module *name* of a checkpoint, which is stored in *directory*."""
    prefix = f"{directory.name}/"
    if f"{prefix}{layout.ADAPTER_CONFIG}" in manifest.files:
        ema = " --ema" if name == layout.AVERAGE else ""
        raise CheckpointUnusable(
            "the checkpoint has adapters, which are not a complete model",
            where=str(directory),
            value=layout.ADAPTER_MODEL,
            hint="peft loads this directory as it is; `ckpt export --merge"
            f"{ema}` combines them with their base, and the result can be exported to other formats",
        )
    check_no_links(checkpoint, (directory.name, f"{prefix}{layout.HF_METADATA}"))
    _check_no_unlisted_files(directory, {path.removeprefix(prefix) for path in manifest.files})
    if tree.format == FINISHED:
        return _finished(checkpoint, directory, manifest, tree)
    used = files_of(tree)
    if tree.table is not None:
        used.add(tree.table.location.file)
    side_files = f"{prefix}{layout.HF_METADATA}/"
    files = {
        path: record
        for path, record in manifest.files.items()
        if path in used or path.startswith(side_files)
    }
    notes: tuple[str, ...] = ()
    num_values = len(tree.objects)
    if num_values:
        notes = (left_out(values_text(num_values), num_values),)
    restricted = dataclasses.replace(manifest, files=files, trees={name: tree})
    return Source(checkpoint, directory, tree.tensors, tree.tied, restricted, notes)


def _module_in(manifest: Manifest, directory: Path) -> tuple[str, Tree]:
    """Return the name and the tensors of the module that a checkpoint stores in *directory*."""
    modules: dict[str, str] = {}
    for name, record in manifest.state.items():
        if record.kind == "module":
            modules[layout.state_directory(name)] = name
    name = modules.get(directory.name, "")
    if name not in manifest.trees:
        value = f"its modules: {sorted(modules)}"
        raise unusable("this checkpoint has no such model", directory, value)
    return name, manifest.trees[name]


def _finished(checkpoint: Path, directory: Path, manifest: Manifest, tree: Tree) -> Source:
    """Describe a model that was saved as Hugging Face files, under the names in these files."""
    files = {
        path: record
        for path, record in manifest.files.items()
        if path.startswith(f"{directory.name}/")
    }
    tensors: dict[str, Tensor] = {}
    for path in sorted(files_of(tree)):
        try:
            header = read_header_safely(checkpoint, path)
        except OSError as error:
            where = checkpoint / path
            raise unusable("a file of the model cannot be read", where, error.strerror) from error
        for key, entry in header.tensors.items():
            tensors[key] = whole_tensor(key, entry.dtype, entry.shape, path, entry.start)
    restricted = dataclasses.replace(manifest, files=files, trees={directory.name: tree})
    return Source(checkpoint, directory, tensors, {}, restricted, finished=True)


def _check_no_unlisted_files(directory: Path, listed: set[str]) -> None:
    """Raise :class:`CheckpointUnusable` for a shard or side file that the manifest does not list.

    Somebody else added it, and it must not get into an export.
    """
    names = _shards(directory)
    metadata = directory / layout.HF_METADATA
    if metadata.is_dir():
        try:
            for parent, _, found in walk(metadata):
                names += [os.path.relpath(os.path.join(parent, name), directory) for name in found]
        except OSError as error:
            what = "the directory of the side files cannot be read"
            raise unusable(what, Path(error.filename), error.strerror) from error
    for name in names:
        if name not in listed:
            raise unusable("a file that the manifest does not know", directory / name, name)


def _shards(directory: Path) -> list[str]:
    try:
        names = os.listdir(directory)
    except OSError as error:
        what = "the directory of the shards cannot be read"
        raise unusable(what, directory, error.strerror) from error
    return sorted(name for name in names if name.endswith(_SHARD_SUFFIXES))
