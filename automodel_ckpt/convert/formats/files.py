"""What several external formats do with files: list names, reject links and special files, read JSON."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import others_text, values_text
from automodel_ckpt.checkpoint.export.export_manifest import ExportManifest
from automodel_ckpt.checkpoint.files.safe_open import (
    is_sparse,
    open_regular,
    parse_json,
    read_model_file,
    without_links,
)
from automodel_ckpt.checkpoint.files.type_aliases import Shape, Strings, TextDict, Texts, ValueDict
from automodel_ckpt.checkpoint.parts.manifest import tiling_fault
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, TensorDict, TensorMap
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.errors import TAKE_ANOTHER, CheckpointUnusable, RecipeError, unusable

BIN_FILE = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
# Parsed JSON takes up to 25 times its size in memory.
_MAX_JSON_BYTES = 16 << 20


def library(name: str, purpose: str, where: str, extra: str) -> Any:
    """Return the module *name* for a *purpose* in words. Raises :class:`RecipeError`, which names the *extra*."""
    try:
        return import_module(name)
    except ImportError as error:
        hint = f"pip install 'automodel_ckpt[{extra}]'"
        raise RecipeError(f"{purpose} needs another package", where, str(error), hint) from error


def omitted_texts(num_others: int, num_values: int) -> Strings:
    """Return what is omitted of files, in words: tensors and values."""
    numbers = ((num_others, others_text), (num_values, values_text))
    return tuple(text(number) for number, text in numbers if number)


def names_in(directory: Path) -> list[str]:
    """Return the sorted names in *directory*, or an empty list if it is not a directory that can be read."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def first_bytes(path: Path, num_bytes: int) -> bytes:
    """Return the first bytes of the file *path*, after following links. Raises OSError, also for special files."""
    # A plain open() of a FIFO would wait for a writer forever.
    with os.fdopen(open_regular(without_links(path)), "rb", buffering=0) as file:
        return file.read(num_bytes)


def is_gzip(head: bytes) -> bool:
    """Return whether a file that begins with *head* is compressed with gzip."""
    return head[:2] == b"\x1f\x8b"


def config_beside(directory: Path) -> Path | None:
    """Return *directory* if it has a config.json, the directory of the side files; else None."""
    return directory if (directory / "config.json").is_file() else None


def tiled(fqn: str, dtype: str, shape: Shape, slices: Sequence[Slice], where: Path) -> Tensor:
    """Return a tensor of *slices* in *where*. Raises :class:`CheckpointUnusable` unless they tile its *shape*."""
    fault = tiling_fault([stored.box for stored in slices], shape)
    if fault:
        raise unusable(f"the slices of {fqn!r} do not make it up", where, fault)
    return Tensor(fqn, dtype, shape, tuple(slices))


def renamed(tensors: TensorMap, names: Texts) -> TensorDict:
    """Return those *tensors* that *names* maps to another name, under it."""
    return {name: tensors[stored].renamed(name) for stored, name in names.items()}


def tensors_by_file(
    directory: Path, names: Iterable[str], tensors_in: Callable[[str], TensorMap]
) -> tuple[TensorDict, TextDict]:
    """Return the tensors of the files *names* in *directory*, and the file of each.

    Raises :class:`CheckpointUnusable` if two files hold the same tensor.
    """
    tensors: TensorDict = {}
    files: TextDict = {}
    for name in names:
        found = tensors_in(name)
        for fqn in found.keys() & files.keys():
            raise unusable(
                f"two files hold the tensor {fqn!r}", directory / name, f"also in {files[fqn]}"
            )
        tensors |= found
        files |= dict.fromkeys(found, name)
    return tensors, files


def check_regular_files(directory: Path, names: Iterable[str]) -> None:
    """Raise :class:`CheckpointUnusable` unless the files *names* in *directory* are regular, and not sparse."""
    for name in names:
        path = directory / name
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            value, hint = stat.filemode(status.st_mode), "remove it"
            if stat.S_ISLNK(status.st_mode):
                value = f"a symbolic link to {os.readlink(path)}"
                hint = "replace it by a copy of the file that it leads to, or remove it"
            raise unusable("a file of the model is not a regular file", path, value, hint)
        if is_sparse(status):
            # A file of some bytes on disk could claim terabytes of zeros, which an export would write.
            raise unusable("this shard is nearly all hole", path, f"{status.st_size} bytes")


def read_json(directory: Path, name: str, export: ExportManifest | None = None) -> ValueDict | None:
    """Return the JSON mapping in the file *name* of *directory*, or None when there is no such file.

    It is compared with the manifest of the *export* that it belongs to. Raises :class:`CheckpointUnusable`.
    """
    path = directory / name
    try:
        content = read_model_file(directory, name, limit=_MAX_JSON_BYTES)
        if export is not None:
            export.check_bytes(name, content)
        value = parse_json(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise unusable("this file cannot be read", path, repr(error)[:300]) from error
    if not isinstance(value, dict):
        raise unusable("this file is not a JSON mapping", path, type(value).__name__)
    return value


def optional_json(directory: Path, name: str) -> ValueDict:
    """Return the JSON mapping in the file *name*. Empty if it is missing, not readable, or something else."""
    try:
        return read_json(directory, name) or {}
    except CheckpointUnusable:
        return {}


@contextmanager
def faults_of(
    path: Path,
    what: str = "this file of torch.save cannot be read",
    hint: str = TAKE_ANOTHER,
) -> Iterator[None]:
    """Raise any error in the block, other than CheckpointUnusable, as one that names the file *path*."""
    try:
        yield
    except CheckpointUnusable:
        raise
    except Exception as error:  # a damaged pickle makes the unpickler raise anything
        value = str(error) if isinstance(error, Fault | OSError) else repr(error)
        raise unusable(what, path, value.split("\n")[0][:300], hint) from error
