"""Descriptions of stored models, and of those in checkpoints of this program. No tensor is read here. Imports no torch.

A checkpoint has maps of its base model in ``.hf_metadata``: each tensor's file, dtype and shape. Directories of other
programs, and shards without their manifest, are opened by ``convert/open.py``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from automodel_ckpt.base.durable_io import walk
from automodel_ckpt.base.units import values_text
from automodel_ckpt.checkpoint.export.export_manifest import ExportManifest
from automodel_ckpt.checkpoint.export.plan import BaseMaps as BaseMaps
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import dtype_code
from automodel_ckpt.checkpoint.files.safe_open import parse_json, read_safely, sizes_of, text
from automodel_ckpt.checkpoint.files.safetensors_header import read_header_safely
from automodel_ckpt.checkpoint.files.type_aliases import Texts, ValueDict, Values
from automodel_ckpt.checkpoint.parts.manifest import Manifest, Tree, has_manifest
from automodel_ckpt.checkpoint.parts.slices import TensorMap, whole_tensor
from automodel_ckpt.checkpoint.parts.tree import files_of
from automodel_ckpt.errors import unusable

UNCHECKED = "these files are unchecked: there is no manifest with their digests"


@dataclass(frozen=True, slots=True)
class Tensors:
    """The stored tensors of one module: slices in files relative to *root*, and {tied name: stored name}."""

    root: Path
    tensors: TensorMap
    tied: Texts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """The description of a stored model: slices in files relative to *root*, and the notes that its directory gives.

    *tied* maps tied names to stored names. *notes* are further :attr:`warnings`. *omitted* names, in words, what the
    files contain next to the model, such as optimizer state.

    *manifest* is the manifest of a checkpoint of this program, restricted to the files that an export reads. A
    *finished* source consists of Hugging Face files: its tensors are whole and have the names of these files. *files*
    lists them, unless the manifest does. *side_files* is a directory of another program, which contains the model's
    config and tokenizer among other files. If they are an export, *export* is its manifest, and the slices have its
    digests. If these are averages of the weights of a model, *averaged* is that model: it has the metadata, and
    exports have its dtypes. *stated_config* is what the files themselves state of the model's config, under the keys
    of config.json. *misplaced* are tensors that are not in the file that an index names.
    """

    root: Path
    model_directory: Path
    tensors: TensorMap
    tied: Texts = field(default_factory=dict)
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()
    finished: bool = False
    export: ExportManifest | None = None
    files: frozenset[str] = frozenset()
    side_files: Path | None = None
    omitted: tuple[str, ...] = ()
    averaged: Source | None = None
    stated_config: Values = field(default_factory=dict)
    misplaced: tuple[str, ...] = ()

    @property
    def has_digests(self) -> bool:
        """Whether the files can be compared with digests."""
        return self.manifest is not None or self.export is not None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences for the user: that there are no digests, the *notes*, and what is left out."""
        unchecked = () if self.has_digests else (UNCHECKED,)
        return (*unchecked, *self.notes, *(f"left out: {each}" for each in self.omitted))

    @property
    def metadata_directory(self) -> Path | None:
        """The directory of config.json and the tokenizer's files: ``.hf_metadata``, if the source has one.

        A finished source has them next to the weights.
        """
        if self.averaged is not None:
            return self.averaged.metadata_directory
        if self.finished:
            return self.model_directory
        path = self.model_directory / layout.HF_METADATA
        # A link could lead out of the checkpoint.
        if path.is_symlink() or not path.is_dir():
            return None
        return path

    @property
    def config_directory(self) -> Path:
        """The directory where the model's config.json is, if it exists: with metadata, side files, or the weights."""
        return self.metadata_directory or self.side_files or self.model_directory


def check_no_links(root: Path, paths: Iterable[str]) -> None:
    """Raise :class:`CheckpointUnusable` if one of *paths*, relative to *root*, is a symbolic link."""
    for path in paths:
        if (root / path).is_symlink():
            target = os.readlink(root / path)
            raise unusable("a checkpoint contains a symbolic link", root / path, target)


MODEL = "model"
FINISHED = "hf"
_SHARD_SUFFIXES = (".safetensors", ".distcp")


def open_checkpoint(path: Path) -> Source:
    """Describe a model of a checkpoint of this program: *path* is the checkpoint, or a module's directory in it.

    Raises :class:`CheckpointUnusable` if there is no such checkpoint or model, or if files and manifest do not match.
    """
    # A checkpoint that was moved to another disk may be a link, but nothing in a checkpoint may.
    if path.is_symlink() and has_manifest(path.parent):
        raise unusable("a checkpoint contains a symbolic link", path, os.readlink(path))
    path = Path(os.path.realpath(path))
    check_finished(path)
    if has_manifest(path):
        return _from_manifest(path, path / MODEL)
    if has_manifest(path.parent):
        return _from_manifest(path.parent, path)
    raise unusable("this directory is not a checkpoint", path, f"it has no {layout.MANIFEST}")


def is_checkpoint(path: Path) -> bool:
    """Return whether *path* is a checkpoint of this program, or is (or links to) a directory in one."""
    real = Path(os.path.realpath(path))
    places = [real, real.parent]
    if path.is_symlink():
        places.append(path.parent)
    return any(map(has_manifest, places))


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
    return [
        name
        for name, record in manifest.state.items()
        if record.kind == "module" and name in manifest.trees and not is_average(manifest, name)
    ]


def is_average(manifest: Manifest, name: str) -> bool:
    """Return whether the module *name* of a checkpoint is the average of the weights of ``model`` (section ``ema``)."""
    if name != layout.AVERAGE or not {name, MODEL} <= manifest.trees.keys():
        return False
    weights = manifest.trees[MODEL].tensors
    # A user's attribute of this name may be something else.
    return all(
        fqn in weights and weights[fqn].shape == average.shape
        for fqn, average in manifest.trees[name].tensors.items()
    )


def _from_manifest(checkpoint: Path, directory: Path) -> Source:
    manifest = Manifest.read(checkpoint)
    name, tree = module_in(manifest, directory)
    source = _module_of(checkpoint, directory, manifest, name, tree)
    if source.finished or not is_average(manifest, name):
        return source
    # An average, with the tensors of the model that do not train.
    model = _module_of(checkpoint, checkpoint / MODEL, manifest, MODEL, manifest.trees[MODEL])
    assert source.manifest is not None and model.manifest is not None
    combined = dataclasses.replace(
        manifest,
        files={**model.manifest.files, **source.manifest.files},
        trees={**model.manifest.trees, **source.manifest.trees},
    )
    return dataclasses.replace(
        source,
        tensors={**model.tensors, **source.tensors},
        tied=model.tied,
        manifest=combined,
        omitted=(*model.omitted, *source.omitted),
        averaged=model,
    )


def _module_of(
    checkpoint: Path, directory: Path, manifest: Manifest, name: str, tree: Tree
) -> Source:
    """Describe the module *name* of a checkpoint, which is stored in *directory*."""
    prefix = f"{directory.name}/"
    if f"{prefix}{layout.ADAPTER_CONFIG}" in manifest.files:
        ema = " --ema" if name == layout.AVERAGE else ""
        raise unusable(
            "the checkpoint has adapters, which are not a complete model",
            directory,
            layout.ADAPTER_MODEL,
            "peft loads this directory as it is; `ckpt export --merge"
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
    num_values = len(tree.objects)
    omitted = (values_text(num_values),) if num_values else ()
    restricted = dataclasses.replace(manifest, files=files, trees={name: tree})
    return Source(checkpoint, directory, tree.tensors, tree.tied, restricted, omitted=omitted)


def module_in(manifest: Manifest, directory: Path) -> tuple[str, Tree]:
    """Return the name and the tensors of the module that a checkpoint stores in *directory*.

    Raises :class:`CheckpointUnusable` for another directory.
    """
    modules = {
        layout.state_directory(name): name
        for name, record in manifest.state.items()
        if record.kind == "module"
    }
    name = modules.get(directory.name, "")
    if name not in manifest.trees:
        raise unusable(
            "this checkpoint has no such model", directory, f"its modules: {sorted(modules)}"
        )
    return name, manifest.trees[name]


def _finished(checkpoint: Path, directory: Path, manifest: Manifest, tree: Tree) -> Source:
    """Describe a model that was saved as Hugging Face files, under the names in these files."""
    files = {
        path: record
        for path, record in manifest.files.items()
        if path.startswith(f"{directory.name}/")
    }
    tensors = {}
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
    side_files = f"{layout.HF_METADATA}/"
    try:
        names = [name for name in os.listdir(directory) if name.endswith(_SHARD_SUFFIXES)]
        if (directory / side_files).is_dir():
            for parent, _, found in walk(directory / side_files):
                names += [os.path.relpath(os.path.join(parent, name), directory) for name in found]
    except OSError as error:
        raise unusable(
            "a directory of the model cannot be read", Path(error.filename), error.strerror
        ) from error
    for name in sorted(names):
        if name not in listed:
            raise unusable("a file that the manifest does not know", directory / name, name)


# ---------------------------------------------------------------- maps of the base


FILE_INDEX_MAP = "fqn_to_file_index_mapping.json"
DTYPE_MAP = "fqn_to_dtype_mapping.json"
EXPECTED_TENSORS = "expected_tensors.json"
MAPS = frozenset({FILE_INDEX_MAP, DTYPE_MAP, EXPECTED_TENSORS})
# A line of a hundred bytes for each of some hundred thousand tensors; parsed it takes up to 25 times as much.
_MAX_MAP_BYTES = 16 << 20


def maps_of(source: Source) -> BaseMaps:
    """Return the maps of the base of *source*. Hugging Face files are their own base.

    Raises :class:`CheckpointUnusable` for a map in another format.
    """
    if source.averaged is not None:
        maps = maps_of(source.averaged)
        stored = {fqn: tensor.dtype for fqn, tensor in source.averaged.tensors.items()}
        return replace(maps, dtype={**stored, **(maps.dtype or {})})
    if not source.finished:
        return read_maps(source.metadata_directory)
    files = {key: tensor.slices[0].file for key, tensor in source.tensors.items()}
    shapes = {key: tensor.shape for key, tensor in source.tensors.items()}
    return BaseMaps(_numbered(files), None, shapes)


def read_maps(directory: Path | None) -> BaseMaps:
    """Return the maps in ``.hf_metadata``. Raises :class:`CheckpointUnusable` for a map in another format."""
    if directory is None:
        return BaseMaps()
    index = _read_map(directory, FILE_INDEX_MAP)
    dtype_names = _read_map(directory, DTYPE_MAP)
    expected = _read_map(directory, EXPECTED_TENSORS)
    config = _read_map(directory, "config.json") or {}
    # A bool is an int for isinstance, but no file number.
    numbers = list((index or {}).values())
    if index is not None and all(isinstance(value, str) for value in numbers):
        # Other programs write file names.
        index = _numbered(index)
    elif not all(type(value) is int and value > 0 for value in numbers):
        where = directory / FILE_INDEX_MAP
        raise unusable("this map does not give file numbers from 1", where, "see the map")
    dtypes = None
    if dtype_names is not None:
        dtypes = {fqn: dtype_code(str(name)) for fqn, name in dtype_names.items()}
    shapes = {}
    float32_in = {}
    for fqn, entry in (expected or {}).items():
        try:
            shapes[fqn] = sizes_of(entry["shape"])
            codes = frozenset(map(text, entry.get("float32_in", [])))
            if not isinstance(entry.get("float32_in", []), list):
                raise TypeError("float32_in")
        except (KeyError, TypeError, ValueError, AttributeError):
            where = directory / EXPECTED_TENSORS
            raise unusable(f"this map is damaged for {fqn!r}", where, repr(entry)[:200]) from None
        if codes:
            float32_in[fqn] = codes
    return BaseMaps(
        index,
        dtypes,
        None if expected is None else shapes,
        bool(config.get("tie_word_embeddings", False)),
        is_adapter=(directory / layout.ADAPTER_CONFIG).is_file(),
        float32_in=float32_in,
    )


def _read_map(directory: Path, name: str) -> ValueDict | None:
    path = directory / name
    try:
        # From the parent: the directory itself must not be a link either.
        content = read_safely(directory.parent, f"{directory.name}/{name}", limit=_MAX_MAP_BYTES)
        value = parse_json(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise unusable("this side file cannot be read", path, repr(error)[:300]) from None
    if not isinstance(value, dict):
        raise unusable("this side file is not a JSON mapping", path, type(value).__name__)
    return value


def _numbered(files: Texts) -> dict[str, int]:
    """Return {tensor name: file number}. Files are numbered in the order of their names."""
    numbers = {name: number for number, name in enumerate(sorted(set(files.values())), start=1)}
    return {fqn: numbers[name] for fqn, name in files.items()}
