"""What is uploaded of a model: the files of an export or an adapter, verified, without paths of this machine.

Everything that is uploaded has an export manifest, from which ``ckpt pull`` and a start from the model verify it. An
adapter and the layout ``hf`` have none on the local disk, because the manifest of their checkpoint covers them: theirs
is made here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from automodel_ckpt.base.durable_io import owned, owner_digits, walk
from automodel_ckpt.checkpoint.export.export_manifest import ExportManifest
from automodel_ckpt.checkpoint.export.files import Log
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import digest_of, file_record, part_digests
from automodel_ckpt.checkpoint.files.safe_open import (
    json_bytes,
    model_file,
    parse_json,
    read_model_file,
    read_safely,
)
from automodel_ckpt.checkpoint.files.safetensors_header import read_header
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Manifest, has_manifest
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.sources.model_files import unreadable
from automodel_ckpt.errors import CheckpointUnusable

README = "README.md"
_MODEL = "model"
_NOT_UPLOADED = frozenset({layout.CONSOLIDATE_SCRIPT, README, ".gitattributes"})


@dataclass(frozen=True)
class Bundle:
    """The files of a model, by their path in the repository: a local file, or the content.

    *checkpoint* is the one that the model is from, None when it is unknown. *readme* is the text of a README.md next to
    the files. *base* is the local path of an adapter's base that a name of the Hub has to replace.
    """

    directory: Path
    files: Mapping[str, Path | bytes]
    checkpoint: Path | None
    is_adapter: bool
    readme: str | None = None
    base: str | None = None

    def read(self, name: str) -> ValueDict:
        """The content of a JSON file; an empty mapping if there is none. Raises :class:`CheckpointUnusable`."""
        if name not in self.files:
            return {}
        try:
            content = self.files[name]
            if isinstance(content, Path):
                content = read_model_file(self.directory, name)
            found = parse_json(content)
            if isinstance(found, dict):
                return found
            value = "no mapping"
        except (OSError, ValueError) as error:
            value = repr(error)[:200]
        raise CheckpointUnusable(
            "a file of the model cannot be read",
            self.directory / name,
            value,
            "restore the file from another copy, or use another checkpoint",
        )


@contextmanager
def opened(path: Path, log: Log, *, base_model: str | None = None) -> Iterator[Bundle]:
    """Yield the files to upload of a checkpoint, an export, or another directory with a model.

    A checkpoint without an export is exported into a staging directory in its run, which is removed afterwards.
    *base_model* is the name on the Hub of an adapter's base, if the base is a local directory. Raises
    :class:`CheckpointUnusable` for damaged files, and for a directory without a model.
    """
    directory, checkpoint = _place(path)
    if os.path.lexists(directory / layout.EXPORT_MANIFEST):
        yield _of_export(directory, checkpoint, base_model)
    elif checkpoint is None:
        # The files of a model that another program wrote, or of a trained adapter without its checkpoint.
        yield _with_manifest(_described(path, _names_in(path), None, base_model))
    elif any(os.path.lexists(directory / name) for name in (layout.ADAPTER_MODEL, layout.HF_INDEX)):
        yield _of_checkpoint(checkpoint, base_model)
    else:
        with _exported(checkpoint, log) as export:
            yield _of_export(export, checkpoint, base_model)


def _place(path: Path) -> tuple[Path, Path | None]:
    """Return the directory with the files of the model at *path*, and its checkpoint, or None when it is unknown."""
    if os.path.lexists(path / layout.EXPORT_MANIFEST):
        checkpoint = path.parent.parent
        return path, checkpoint if has_manifest(checkpoint) else None
    if not has_manifest(path):
        return path, None
    export = path / _MODEL / layout.CONSOLIDATED
    return export if os.path.lexists(export / layout.EXPORT_MANIFEST) else export.parent, path


def described(path: Path, *, base_model: str | None = None) -> Bundle:
    """Return what :func:`opened` yields, without verifying or exporting anything: only for the model card.

    Weights that an export would have are missing. Raises :class:`CheckpointUnusable` for a directory without a model.
    """
    directory, checkpoint = _place(path)
    if checkpoint is not None and os.path.isdir(directory / layout.HF_METADATA):
        directory /= layout.HF_METADATA
    return _described(directory, _names_in(directory), checkpoint, base_model)


def _described(
    directory: Path, names: Iterable[str], checkpoint: Path | None, base_model: str | None
) -> Bundle:
    """Return the files *names* of *directory*, in which a name replaces the local path of an adapter's base."""
    try:
        readme = read_safely(directory, README).decode("utf-8", "replace")
    except OSError:
        readme = None
    files: dict[str, Path | bytes] = {name: directory / name for name in names}
    bundle = Bundle(directory, files, checkpoint, layout.ADAPTER_CONFIG in files, readme)
    if not bundle.is_adapter:
        return bundle
    settings = bundle.read(layout.ADAPTER_CONFIG)
    base = str(settings.get("base_model_name_or_path") or "")
    is_local = os.path.isabs(base) or os.path.exists(base)
    if not is_local and base_model is None:
        return bundle
    name = base_model or os.path.basename(base.rstrip("/"))
    settings["base_model_name_or_path"] = name
    content = json.dumps(settings, indent=2, sort_keys=True).encode() + b"\n"
    if record := bundle.read(layout.AUTOMODEL_PEFT_CONFIG):
        if isinstance(record.get("base"), dict):
            record["base"] |= {"name": name, "relative_to_run": None}
        files[layout.AUTOMODEL_PEFT_CONFIG] = json_bytes(record)
    files[layout.ADAPTER_CONFIG] = content
    return replace(bundle, base=base if is_local else None)


@contextmanager
def _exported(checkpoint: Path, log: Log) -> Iterator[Path]:
    from automodel_ckpt.checkpoint.export.consolidate import consolidate

    run = checkpoint.parent
    # What a killed process left. A start of the run removes it, too.
    commit.remove_abandoned_exports(run)
    staging = run / layout.staging_name(layout.HUB_EXPORT, owner_digits(run))
    os.mkdir(staging)
    try:
        with owned(staging):
            log(f"exporting {checkpoint.name} in {staging}, which is removed after the upload")
            yield Path(consolidate(checkpoint / _MODEL, staging / _MODEL, log=log).output)
    finally:
        commit.discard(staging)


def _of_export(directory: Path, checkpoint: Path | None, base_model: str | None) -> Bundle:
    manifest = ExportManifest.read(directory)
    CheckpointUnusable.check(manifest.problems())
    if layout.ADAPTER_CONFIG in manifest.files:
        uploaded = filter(_is_uploaded, manifest.files)
        return _with_manifest(_described(directory, uploaded, checkpoint, base_model))
    names = (name for name in (*manifest.files, layout.EXPORT_MANIFEST) if name != README)
    return _described(directory, names, checkpoint, base_model)


def _of_checkpoint(checkpoint: Path, base_model: str | None) -> Bundle:
    """The files of the model's directory in a checkpoint, in which they are the export."""
    manifest = Manifest.read(checkpoint)
    prefix = f"{_MODEL}/"
    records = {
        name: record
        for name, record in manifest.files.items()
        if name.startswith(prefix) and _is_uploaded(name.removeprefix(prefix))
    }
    CheckpointUnusable.check(verify(checkpoint, replace(manifest, files=records), "digest"))
    names = [name.removeprefix(prefix) for name in records]
    return _with_manifest(_described(checkpoint / _MODEL, names, checkpoint, base_model))


def _names_in(directory: Path) -> list[str]:
    """The files of a model in a directory.

    Raises :class:`CheckpointUnusable` if there is no model, OSError for a directory that cannot be read.
    """
    names = []
    # A file, such as one of torch.save, is no model that the Hub's libraries load.
    for parent, directories, files in walk(directory) if directory.is_dir() else ():
        directories[:] = [name for name in directories if not name.startswith(".")]
        names += [os.path.relpath(os.path.join(parent, name), directory) for name in files]
    names = sorted(name for name in names if _is_uploaded(name))
    for name in names:
        # Weights are validated, and may be links out of the directory.
        if not name.endswith(".safetensors"):
            try:
                model_file(directory, name)
            except OSError as error:
                raise CheckpointUnusable.all_of([unreadable(error)]) from error
    if not {"config.json", layout.ADAPTER_CONFIG} & set(names):
        raise CheckpointUnusable(
            "there is no model to upload",
            directory,
            "neither config.json nor adapter_config.json",
            "name a run, a checkpoint, an export (model/consolidated), or an adapter",
        )
    return names


def _is_uploaded(name: str) -> bool:
    parts = name.split("/")
    is_hidden = any(part.startswith(".") for part in parts)
    return not is_hidden and name not in _NOT_UPLOADED and parts[0] not in layout.EXPORTS


def _with_manifest(bundle: Bundle) -> Bundle:
    """Return *bundle* with a manifest of its files."""
    document = {
        "format": "automodel_ckpt.export",
        "format_version": 1,
        "checked": bundle.checkpoint is not None,
        "files": {name: _entry(content) for name, content in bundle.files.items()},
    }
    if bundle.checkpoint is not None:
        document["checkpoint"] = bundle.checkpoint.name
    manifest = json.dumps(document).encode() + b"\n"
    return replace(bundle, files={**bundle.files, layout.EXPORT_MANIFEST: manifest})


def _entry(content: Path | bytes) -> ValueDict:
    """The entry of a file in an export manifest: its size and digest, for weights the digests of its tensors."""
    if isinstance(content, bytes):
        return {"size": len(content), "digest": digest_of(content)}
    if content.suffix != ".safetensors":
        record = file_record(content)
        return {"size": record.size, "digest": record.digest}
    spans = sorted((entry.start, entry.end) for entry in read_header(content).tensors.values())
    size = content.stat().st_size
    sizes = [spans[0][0] if spans else size]
    sizes += [end - start for start, end in spans]
    digests = part_digests(content, sizes)
    return {"size": size, "parts": [list(pair) for pair in zip(sizes, digests, strict=True)]}
