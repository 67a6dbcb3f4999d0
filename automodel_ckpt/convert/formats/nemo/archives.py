"""``ckpt unpack`` and ``ckpt pack``: models that NeMo and TensorRT-LLM keep in one tar archive, as a directory to edit.

Only archives that contain such a model are unpacked: ``.nemo`` (``model_config.yaml``) and ``.qnemo`` (``config.json``
and ``rank0.safetensors``). Both functions publish their result at the end: a failure leaves nothing. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.export.files import Log
from automodel_ckpt.checkpoint.files.safe_open import parse_json, without_links
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.convert.formats.files import faults_of
from automodel_ckpt.convert.formats.nemo.nemo import CONFIG
from automodel_ckpt.convert.formats.nemo.packed_files import (
    PackedFiles,
    files_in_directory,
)
from automodel_ckpt.convert.formats.nemo.tar_files import (
    TarMember,
    TarReader,
    TarWriter,
)
from automodel_ckpt.convert.publishing import (
    check_directory_target,
    check_file_target,
    published_directory,
    published_file,
)
from automodel_ckpt.errors import RecipeError, unusable

QNEMO_CONFIG = "config.json"
_QNEMO_WEIGHTS = "rank0.safetensors"
_RANK_FILE = re.compile(r"rank(0|[1-9][0-9]{0,5})\.safetensors", re.ASCII)
_MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True)
class ArchiveReport:
    """What was packed or unpacked to *output*: ``nemo`` or ``qnemo``, and its files."""

    output: Path
    kind: str
    num_files: int
    nbytes: int


def unpack(source: Path, target: Path, log: Log) -> ArchiveReport:
    """Unpack the ``.nemo`` or ``.qnemo`` file *source*, compressed or not, to the directory *target*.

    *target* must not exist, or be empty. Only regular files and directories with safe names are written, with the
    permissions that the umask gives. Raises :class:`CheckpointUnusable` for a damaged archive, for one with links or
    other members, and for one of another program; :class:`SaveFailed` if it cannot be written. Then nothing remains.
    """
    real = without_links(source)
    if not real.is_file():
        raise unusable(
            "there is no archive to unpack",
            source,
            "no such file",
            "name a .nemo or .qnemo file; `ckpt pack` packs a directory",
        )
    target = without_links(target)
    check_directory_target(target)
    files = {}
    with published_directory(target, log) as staging:
        with TarReader(real) as reader:
            for member in reader:
                _extract(reader, member, staging)
                if not member.is_directory:
                    files[member.name] = member.nbytes
        kind = _kind(files, source)
    return ArchiveReport(target, kind, len(files), sum(files.values()))


def pack(source: Path, target: Path, log: Log, *, overwrite: bool = False) -> ArchiveReport:
    """Pack the directory *source* as the ``.nemo`` or ``.qnemo`` file *target*, an uncompressed tar archive.

    The bytes of the archive depend only on the names and contents of the files. Raises :class:`CheckpointUnusable` if
    the directory has no model of NeMo or TensorRT-LLM, lacks the weights of a rank, or contains links or special
    files; :class:`RecipeError` for a *target* in the directory;
    :class:`SaveFailed` if the archive cannot be written.
    """
    directory = without_links(source)
    if not directory.is_dir():
        raise unusable(
            "there is no directory to pack",
            source,
            "no such directory",
            "name a directory that `ckpt unpack` wrote; `ckpt unpack` unpacks an archive",
        )
    target = without_links(target)
    if target.is_relative_to(directory):
        raise RecipeError(
            "the archive would be in the directory that it packs",
            target,
            target.name,
            "",
        )
    check_file_target(target, overwrite=overwrite)
    packed = files_in_directory(directory)
    kind = _kind(packed.files, source)
    if kind == "qnemo":
        _check_qnemo(packed)
    with (
        published_file(target, log, what=f"the .{kind} file") as staging,
        open(staging, "r+b") as file,
    ):
        writer = TarWriter(file)
        # The config first: readers recognize the archive without reading the weights.
        config = CONFIG if kind == "nemo" else QNEMO_CONFIG
        for name in sorted(packed.files, key=lambda name: (name != config, name)):
            writer.add_file(name, directory, name)
        writer.finish()
    nbytes = sum(file.nbytes for file in packed.files.values())
    return ArchiveReport(target, kind, len(packed.files), nbytes)


def _extract(reader: TarReader, member: TarMember, staging: Path) -> None:
    if member.name == ".":
        return
    path = staging / member.name
    try:
        if member.is_directory:
            path.mkdir(parents=True, exist_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # x: an existing file, for example on a file system that ignores case, is an error.
        file = open(path, "xb")  # noqa: SIM115
    except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        raise unusable(
            "a file and another member of this tar archive have one name", reader.path, member.name
        ) from error
    with file:
        for block in reader.blocks(member):
            file.write(block)


def _kind(files: Collection[str], where: Path) -> str:
    """Return ``nemo`` or ``qnemo``. Raises :class:`CheckpointUnusable` for other files."""
    if CONFIG in files:
        return "nemo"
    if QNEMO_CONFIG in files and _QNEMO_WEIGHTS in files:
        return "qnemo"
    raise unusable(
        "this is neither a model of NeMo (.nemo) nor of TensorRT-LLM (.qnemo)",
        where,
        ", ".join(sorted(files)[:5]) or "no files",
        f"a .nemo file contains {CONFIG}; a .qnemo file {QNEMO_CONFIG} and {_QNEMO_WEIGHTS}",
    )


def _check_qnemo(packed: PackedFiles) -> None:
    """Raise :class:`CheckpointUnusable` if the weights of a rank are missing."""
    with faults_of(packed.path / QNEMO_CONFIG, "the weights of some ranks are missing"):
        config = parse_json(packed.read(QNEMO_CONFIG, _MAX_CONFIG_BYTES))
        num_ranks = config["mapping"]["world_size"]
        present = [name for name in packed.files if _RANK_FILE.fullmatch(name)]
        if len(present) != num_ranks:
            raise Fault(
                f"mapping.world_size {num_ranks}, but files of {counted(len(present), 'rank')}"
            )
