"""Directories that other programs wrote, understood as far as their own files tell: nothing in them can be checked.

Known are PyTorch DCP (``.metadata``), shards of PyTorch's HuggingFaceStorageWriter, whole Hugging Face files, PEFT
adapters, and what holds several of these, such as a checkpoint of NeMo AutoModel (``model/``, ``optim/``). Imports no
torch.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.slices import Tensor
from automodel_ckpt.checkpoint.sources.dcp_directory import read_content, read_tensors
from automodel_ckpt.checkpoint.sources.opening import open_source
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.sources.hugging_face import is_hf_directory, open_hf, tensors_in
from automodel_ckpt.errors import CheckpointUnusable

DCP, SHARDS, HF, ADAPTER = "PyTorch DCP", "safetensors shards", "Hugging Face files", "PEFT adapter"
_MAX_LOSSES_BYTES = 1 << 20
_MAX_FILES = 100_000


@dataclass(frozen=True, slots=True)
class ExternalTensor:
    """A tensor as its files describe it: safetensors dtype code, global shape, in how many slices."""

    dtype: str
    shape: tuple[int, ...]
    slices: int


@dataclass(frozen=True, slots=True)
class ExternalTree:
    """A directory of tensors: its kind, what it holds, and how many values that are not tensors; or why it cannot be
    read."""

    kind: str
    tensors: Mapping[str, ExternalTensor] = field(default_factory=dict)
    num_values: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ExternalDirectory:
    """What a directory of another program holds: the kind of each tree by relative path (``.``: itself), files with
    their sizes in bytes, the content of losses.json, and when it was last written to (seconds since 1970)."""

    path: Path
    kinds: Mapping[str, str]
    files: Mapping[str, int]
    losses: Mapping[str, Any]
    written: float

    @property
    def kind(self) -> str:
        """In words: ``model: safetensors shards, optim: PyTorch DCP``."""
        return ", ".join(
            kind if name == "." else f"{name}: {kind}" for name, kind in self.kinds.items()
        )

    def trees(self) -> dict[str, ExternalTree]:
        """What each tree holds, from headers and metadata: no tensor is read."""
        return {name: _tree(self.path / name, kind) for name, kind in self.kinds.items()}

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def kind_of(directory: Path) -> str | None:
    """Which known form the files right in *directory* have; None: none of them, or a checkpoint of ours."""
    if os.path.lexists(directory / layout.MANIFEST):
        return None
    if os.path.lexists(directory / layout.DCP_METADATA):
        return DCP
    if os.path.lexists(directory / layout.ADAPTER_MODEL):
        return ADAPTER
    if is_hf_directory(directory):
        return HF
    return SHARDS if any(name.endswith(".safetensors") for name in _names(directory)) else None


def kinds_in(directory: Path) -> dict[str, str]:
    """The form of a directory and of those right below it, by relative path; empty where nothing is known."""
    found = {} if (own := kind_of(directory)) is None else {".": own}
    for name in _names(directory):
        path = directory / name
        if not path.is_symlink() and path.is_dir() and (kind := kind_of(path)) is not None:
            found[name] = kind
    return found


def read_external(directory: Path) -> ExternalDirectory | None:
    """What *directory* holds; None where nothing in it is of a known form."""
    kinds = kinds_in(directory)
    if not kinds or os.path.lexists(directory / layout.MANIFEST):
        return None
    return ExternalDirectory(
        directory, kinds, dict(_files(directory)), losses_in(directory), directory.stat().st_mtime
    )


def open_external(directory: Path) -> Source:
    """The model in a directory that another program wrote. Raises :class:`CheckpointUnusable`."""
    for path in (directory, directory / layout.state_directory("model")):
        if path.is_dir() and kind_of(path) == HF:
            return open_hf(Path(os.path.realpath(path)))
    return open_source(directory)


def stored_tensors(directory: Path, kind: str) -> tuple[Path, Mapping[str, Tensor]]:
    """All tensors of a tree of that kind: (what their files are relative to, tensors by name), for reading them.

    Raises :class:`CheckpointUnusable` for files that are not what their metadata says.
    """
    if kind == DCP:
        return directory, {
            tensor.fqn: tensor for tensor in read_tensors(directory, read_content(directory))
        }
    if kind == ADAPTER:
        return directory, tensors_in(
            directory, layout.ADAPTER_MODEL, find_export_manifest(directory)
        )
    source = open_hf(directory) if kind == HF else open_source(directory)
    return source.root, source.tensors


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _tree(directory: Path, kind: str) -> ExternalTree:
    try:
        if kind == DCP:
            content = read_content(directory)
            described = {
                fqn: ExternalTensor(entry.dtype, entry.shape, len(entry.chunks))
                for fqn, entry in content.tensors.items()
            }
            return ExternalTree(kind, described, len(content.values))
        _, tensors = stored_tensors(directory, kind)
    except CheckpointUnusable as error:
        problem = error.problems[0]
        return ExternalTree(kind, problem=f"{problem.what}: {problem.value}")
    except OSError as error:
        return ExternalTree(kind, problem=str(error.strerror))
    return ExternalTree(
        kind, {f: ExternalTensor(t.dtype, t.shape, len(t.slices)) for f, t in tensors.items()}
    )


def _files(directory: Path) -> Iterator[tuple[str, int]]:
    """Relative paths and sizes; of links the links themselves."""
    count = 0
    for parent, directories, names in os.walk(directory):
        directories.sort()
        for name in sorted(names):
            count += 1
            if count > _MAX_FILES:
                return
            path = os.path.join(parent, name)
            with contextlib.suppress(FileNotFoundError):  # what is being written or removed
                yield os.path.relpath(path, directory), os.lstat(path).st_size


def losses_in(directory: Path) -> Mapping[str, Any]:
    """What losses.json says; empty where there is none, or none that can be read."""
    try:
        value = json.loads(read_safely(directory, layout.LOSSES, limit=_MAX_LOSSES_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
