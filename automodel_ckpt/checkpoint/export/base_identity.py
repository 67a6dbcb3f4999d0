"""Identify the base model of an adapter by a name, to find it, and by a digest of its content.

The digest covers the bytes of ``config.json`` and of the weight files, so that a base with other values in the same
shapes has another digest. The files are read once. The digest is then cached, and valid while the files' sizes, inodes
and times are unchanged. The record of the base in a checkpoint of adapters is automodel_peft_config.json. Imports no
torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from automodel_ckpt.base.hub_access import is_revision_name
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import FileRecord, digest_of, file_record
from automodel_ckpt.checkpoint.files.safe_open import parse_json, read_safely
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.files.weight_map import read_weight_map
from automodel_ckpt.checkpoint.run.notes import read_note, write_note
from automodel_ckpt.errors import RecipeError, unusable

_SINGLES = ("model.safetensors", "pytorch_model.bin")
_NUM_THREADS = 4


@dataclass(frozen=True)
class BaseIdentity:
    """A base model: the *name* that finds it (Hub name or absolute path), for a local one its path *relative* to the
    run's directory, and the digests of its files."""

    name: str
    relative: str | None
    files: Mapping[str, FileRecord]

    @property
    def digest(self) -> str:
        """One digest of all files. It does not depend on the base's name."""
        lines = [f"{name} {record.digest}\n" for name, record in sorted(self.files.items())]
        return digest_of("".join(lines).encode())

    def to_dict(self) -> ValueDict:
        """Return the identity as values for JSON."""
        files = {name: asdict(record) for name, record in self.files.items()}
        return {
            "name": self.name,
            "relative_to_run": self.relative,
            "digest": self.digest,
            "files": files,
        }


def identify_base(
    name: str, directory: Path, *, run: Path | str | None, cache: Path | None = None
) -> BaseIdentity:
    """Return the identity of the base called *name* with files in *directory*. Digests are stored in *cache*.

    Raises :class:`RecipeError` if there are no weight files, or they cannot be read.
    """
    relative = None
    real = os.path.realpath(directory)
    if Path(name).expanduser().is_dir():
        name = real
        relative = None if run is None else os.path.relpath(real, os.path.realpath(run))
    note = f"{xxhash.xxh3_128(os.fsencode(real)).hexdigest()}.json"
    notes = None if cache is None else cache / "base-digests"
    known = {} if notes is None else read_note(notes, note)

    def entry_of(file: str) -> list[Any]:
        # Resolved: in the Hub's cache these files are links, which file_record does not follow.
        path = Path(os.path.realpath(directory / file))
        # Before the file is read: one that changes meanwhile has another stamp at the next start.
        stamp = _stamp(path)
        entry = known.get(file)
        if isinstance(entry, list) and entry[:-1] == stamp:
            return entry
        return [*stamp, file_record(path).digest]

    try:
        names = _weight_files(directory)
        with ThreadPoolExecutor(_NUM_THREADS, "base") as executor:
            entries = dict(zip(names, executor.map(entry_of, names), strict=True))
    except OSError as error:
        what = "a file of the base model cannot be read"
        raise RecipeError.of_system(error, what, hint="download the base model again") from error
    if entries != known and notes is not None:
        # Without the note, the next start reads the base again.
        with suppress(OSError):
            notes.mkdir(parents=True, exist_ok=True)
            write_note(notes / note, entries)
    files = {file: FileRecord(entry[0], str(entry[-1])) for file, entry in entries.items()}
    return BaseIdentity(name, relative, files)


def _weight_files(directory: Path) -> list[str]:
    """Return config.json and the files from which transformers reads the weights. Raises :class:`RecipeError`."""
    for single in _SINGLES:
        index = f"{single}.index.json"
        if files := files_of_index(directory / index):
            return ["config.json", index, *files]
        if (directory / single).is_file():
            return ["config.json", single]
    raise RecipeError(
        "the base model has no weights: neither model.safetensors, nor its index with the files",
        where="model.from_pretrained",
        value=str(directory),
        hint="",
    )


def files_of_index(index: Path) -> list[str]:
    """Return the names of the base model's weight files, sorted, from its *index*; none without one, or if it is not
    used. Raises :class:`RecipeError` if the index is not valid.
    """
    weight_map = read_weight_map(index, follow_links=True, kind=RecipeError)
    return sorted(set((weight_map or {}).values()))


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    # A program can set mtime back, but not ctime.
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


# ---------------------------------------------------------------- the record in a checkpoint


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
