"""Weights to start from, wherever they lie: a checkpoint of ours in any form, bare shards, or Hugging Face files.

All of them become slices (``slices.py``), so that a rank reads of them what it needs, as of its own checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.export_manifest import ExportManifest, find_export_manifest
from automodel_ckpt.checkpoint.files.safetensors_header import read_header
from automodel_ckpt.checkpoint.files.weight_map import read_weight_map
from automodel_ckpt.checkpoint.manifest import Manifest
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.slices import Tensor, in_one_piece, whole_tensor
from automodel_ckpt.checkpoint.sources.opening import MODEL, SHARDING_INFO, open_source
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.checkpoint.verify import Level, verify
from automodel_ckpt.convert.sources.hugging_face import is_hf_directory
from automodel_ckpt.convert.sources.unsupported import file_format, unsupported_directory
from automodel_ckpt.errors import CheckpointUnusable, Problem

_REMEDY = "name a run directory, a checkpoint, a pointer such as checkpoints/LATEST, or a directory of *.safetensors"


@dataclass(frozen=True, slots=True)
class Weights:
    """The modules found in *path*, by attribute name. A *checkpoint* and an *export* have manifests, by which they can
    be verified."""

    path: Path
    modules: Mapping[str, Tensors]
    checkpoint: Path | None = None
    export: ExportManifest | None = None
    files: frozenset[str] = frozenset()
    """Names of the Hugging Face files that were opened; empty for other sources."""

    def verify(self, level: Level, rank: int, num_ranks: int) -> None:
        """Compare this rank's share of the files with the manifest, where there is one: :class:`CheckpointUnusable`."""
        problems: list[Problem] = []
        if self.checkpoint is not None:
            manifest = Manifest.read(self.checkpoint)
            problems = verify(self.checkpoint, manifest, level, rank=rank, num_ranks=num_ranks)
        elif self.export is not None:
            used = {*self.files, layout.HF_INDEX}
            problems = self.export.problems(only=used, level=level, rank=rank, num_ranks=num_ranks)
        if problems:
            raise CheckpointUnusable.all_of(problems)


def open_weights(path: str | os.PathLike[str]) -> Weights:
    """The weights in *path*: a run directory (its newest complete checkpoint), a checkpoint, a pointer to one, a
    module's directory in one, bare shards, a directory of Hugging Face files, or a single .safetensors file.

    Reads manifests and headers only. Raises :class:`CheckpointUnusable` where there are none, or not in order.
    """
    if (whole := Path(path).expanduser()).is_file() and not _is_pointer(whole):
        return open_file(whole)
    found = _resolved(whole)
    if os.path.lexists(found / layout.MANIFEST):
        return Weights(found, _modules_of(found), found)
    if os.path.lexists(found.parent / layout.MANIFEST):
        return Weights(found, {MODEL: _module_in(found)}, found.parent)
    if is_hf_directory(found, follow_links=True):
        export = find_export_manifest(found, follow_links=True)
        names = _file_names(found, export)
        return Weights(
            found,
            {MODEL: _hugging_face(found, names, export)},
            export=export,
            files=frozenset(names),
        )
    if unsupported := unsupported_directory(found):
        raise unsupported.error(found)
    return Weights(found, {MODEL: _opened(found)})


def open_file(path: Path) -> Weights:
    """The weights in a single .safetensors file, which is a whole model's.

    Raises :class:`CheckpointUnusable` for a file of another format, by its name, and for a part of a model.
    """
    try:
        if unsupported := file_format(path):
            raise unsupported.error(path)
    except OSError as error:
        raise _unusable("the file cannot be read", path, error.strerror) from error
    directory = Path(os.path.realpath(path.parent))
    export = find_export_manifest(directory, follow_links=True)
    if (directory / layout.HF_INDEX).is_file() and len(names := _file_names(directory, export)) > 1:
        raise _unusable(
            "this file is a part of a model", path, f"one of {len(names)}: name the directory"
        )
    if SHARDING_INFO in read_header(_real(path)).metadata:
        raise _unusable(
            "this file is a rank's shard of a model", path, "name the directory of the shards"
        )
    if path.name == layout.ADAPTER_MODEL:
        raise _unusable("this file is an adapter, not a model", path, "name its directory")
    names = [path.name]
    return Weights(
        path,
        {MODEL: _hugging_face(directory, names, export)},
        export=export,
        files=frozenset(names),
    )


def _is_pointer(path: Path) -> bool:
    return path.name.removesuffix(".txt") in layout.POINTERS


def _resolved(path: Path) -> Path:
    """A pointer's or run directory's checkpoint; any other path as it is."""
    path = Path(os.path.realpath(resume.pointed_path(path) or path))
    if not path.is_dir():
        found = "a file, not a directory" if path.exists() else "no such directory"
        raise _unusable("there are no weights here", path, found)
    if os.path.lexists(path / layout.MANIFEST):
        return path
    newest = resume.newest(path)
    return path / newest.name if newest else path


def _modules_of(checkpoint: Path) -> dict[str, Tensors]:
    manifest = Manifest.read(checkpoint)
    modules = {name for name, record in manifest.state.items() if record.kind == "module"}
    trees = {name: tree for name, tree in manifest.trees.items() if name in modules}
    if not trees:
        raise _unusable(
            "this checkpoint holds no module", checkpoint, ", ".join(manifest.state) or "no state"
        )
    whole = {
        name: {
            fqn: replace(tensor, slices=in_one_piece(tensor))
            for fqn, tensor in tree.tensors.items()
        }
        for name, tree in trees.items()
    }
    return {name: Tensors(checkpoint, whole[name], tree.tied) for name, tree in trees.items()}


def _module_in(directory: Path) -> Tensors:
    """The module that a checkpoint keeps in *directory*."""
    modules = {
        layout.state_directory(name): module
        for name, module in _modules_of(directory.parent).items()
    }
    if directory.name not in modules:
        raise _unusable(
            "this directory of a checkpoint holds no module",
            directory,
            f"those of it: {sorted(modules)}",
        )
    return modules[directory.name]


def _opened(directory: Path) -> Tensors:
    source = open_source(directory)
    return Tensors(source.root, source.tensors, source.tied)


def _hugging_face(directory: Path, names: Iterable[str], export: ExportManifest | None) -> Tensors:
    """The tensors of the files *names*, with the digests of the *export* that they belong to. Links are followed: the
    Hub's cache is made of them."""
    tensors: dict[str, Tensor] = {}
    for name in names:
        real = _real(directory / name)
        if not real.is_file():
            raise _unusable("a file of weights is missing", directory / name, "the index names it")
        if export is not None:
            export.check_header(name)
        for fqn, entry in read_header(real).tensors.items():
            if fqn in tensors:
                raise _unusable(f"two files hold the tensor {fqn!r}", directory, name)
            tensor = whole_tensor(fqn, entry.dtype, entry.shape, str(real).lstrip("/"), entry.start)
            tensors[fqn] = tensor if export is None else export.with_digests(name, tensor)
    return Tensors(Path("/"), tensors)


def _file_names(directory: Path, export: ExportManifest | None = None) -> list[str]:
    index = directory / layout.HF_INDEX
    if not index.is_file():
        return sorted(path.name for path in directory.glob("*.safetensors"))
    check_bytes = None if export is None else export.check_bytes
    weight_map = read_weight_map(index, follow_links=True, check_bytes=check_bytes) or {}
    return sorted(set(weight_map.values()))


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _unusable(what: str, where: Path, value: object) -> CheckpointUnusable:
    return CheckpointUnusable(what, where=str(where), value=value, hint=_REMEDY)
