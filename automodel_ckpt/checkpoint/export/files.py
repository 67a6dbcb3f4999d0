"""What an export holds beside its weights: the index, the base's side files, a config that agrees, and its own list.

Imports no torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.base.durable_io import walk
from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.export.older_config import with_older_keys
from automodel_ckpt.checkpoint.export.plan import Plan, quantized_in_base
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.dtypes import ORDINARY_FLOATS, TORCH_NAMES, main_dtype
from automodel_ckpt.checkpoint.files.durable_file import file_record
from automodel_ckpt.checkpoint.files.safe_open import read_model_file
from automodel_ckpt.checkpoint.files.type_aliases import FileDict, Files, ValueDict
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.sources.base_maps import MAPS, BaseMaps
from automodel_ckpt.checkpoint.sources.model_files import MAX_SIDE_BYTES, is_side_file, unreadable
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.errors import CheckpointUnusable, unusable

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.export.copy_engine import Digested

_DTYPE_KEYS = ("dtype", "torch_dtype")
# The export writes the weights, their index and the manifest itself.
_MADE_ANEW = MAPS | {
    layout.HF_INDEX,
    layout.EXPORT_MANIFEST,
    layout.CONSOLIDATE_SCRIPT,
    layout.SLICE_TABLE,
}


def cast_lines(casts: Mapping[tuple[str, str], int]) -> list[str]:
    """Return lines for the log on *casts*: how many tensors are cast by (from, to). Equal dtypes are no cast."""
    return [
        f"cast {counted(count, 'tensor')} from {before} to {after}"
        for (before, after), count in sorted(casts.items())
        if before != after
    ]


def side_files(source: Source, plan: Plan, maps: BaseMaps) -> tuple[FileDict, list[str]]:
    """Return the content of every file of the export beside the weights, and warnings for the user.

    Raises :class:`CheckpointUnusable` if a file cannot be read, or config.json is not a JSON mapping.
    """
    directory = source.metadata_directory or source.side_files
    if directory is None:
        return {layout.HF_INDEX: plan.index()}, [
            "there is no .hf_metadata: the export has no config.json and no tokenizer"
        ]
    try:
        names = _side_names(source, directory)
        files = {name: read_model_file(directory, name, limit=MAX_SIDE_BYTES) for name in names}
    except OSError as error:
        raise CheckpointUnusable.all_of([unreadable(error)]) from None
    warnings: list[str] = []
    if "config.json" in files:
        path = directory / "config.json"
        content, warnings = agreeing_config(files["config.json"], plan, maps, path)
        config = parse_json(content)
        changed = with_older_keys(config)
        # Earlier checkpoints and imported ones lack the older keys.
        if changed != config:
            content = json.dumps(changed, indent=2).encode() + b"\n"
        files["config.json"] = content
    if not maps.is_adapter:
        files[layout.HF_INDEX] = plan.index()
    return files, warnings


def _side_names(source: Source, directory: Path) -> Iterable[str]:
    """Return the names of the side files. For a checkpoint in Hugging Face files, only those in its manifest."""
    names = _files_below(directory)
    if source.metadata_directory is None or (source.finished and source.manifest is None):
        # Known names only: the weights themselves are in this directory, and whatever else the user keeps there.
        names = filter(is_side_file, names)
    elif source.manifest is not None and source.finished:
        names = [
            path.removeprefix(f"{directory.name}/")
            for path in source.manifest.files
            if not path.endswith(".bin")
        ]
    return [name for name in names if name not in _MADE_ANEW and not name.endswith(".safetensors")]


def _files_below(directory: Path) -> Iterable[str]:
    """Yield the relative paths of the files below *directory*."""
    for parent, _, names in walk(directory):
        for name in sorted(names):
            path = Path(parent, name)
            if path.is_file():
                yield path.relative_to(directory).as_posix()


def agreeing_config(raw: bytes, plan: Plan, maps: BaseMaps, path: Path) -> tuple[bytes, list[str]]:
    """Return config.json with the dtype of most of the weights and without an unused quantization, and warnings.

    If it matches already, its bytes are unchanged. Raises :class:`CheckpointUnusable` if it is not a JSON mapping.
    """
    try:
        config = parse_json(raw)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise unusable("config.json is not a JSON mapping", path, repr(raw[:40]))
    code = main_dtype((tensor.dtype, tensor.nbytes) for tensor in plan.tensors)
    if code is not None:
        _set_dtype(config, TORCH_NAMES[code])
    warnings = _drop_quantization(config, plan, maps)
    if config == parse_json(raw):
        return raw, warnings
    return json.dumps(config, indent=2).encode() + b"\n", warnings


def _set_dtype(config: ValueDict, name: str, *, top: bool = True) -> None:
    """Set the dtype where the config has one (``dtype``; ``torch_dtype`` before transformers 5), also in its parts.

    At the *top*, it is added if it is missing.
    """
    keys = [key for key in _DTYPE_KEYS if config.get(key) is not None]
    if not keys and top:
        keys = ["dtype"]
    for key in keys:
        config[key] = name
    for key, value in config.items():
        if key.endswith("_config") and key != "quantization_config" and isinstance(value, dict):
            _set_dtype(value, name, top=False)


def _drop_quantization(config: ValueDict, plan: Plan, maps: BaseMaps) -> list[str]:
    """Remove quantization_config if all tensors that are quantized in the base are float now. Returns warnings."""
    is_float = [t.dtype in ORDINARY_FLOATS for t in quantized_in_base(plan.tensors, maps)]
    if "quantization_config" not in config or not any(is_float):
        return []
    if not all(is_float):
        return ["config.json keeps its quantization_config: some tensors are still quantized"]
    del config["quantization_config"]
    return ["config.json loses its quantization_config: the weights are float now"]


def write_side_files(files: Files, staging: Path) -> None:
    """Write and fsync the *files* of :func:`side_files`, but not their directory entries. Raises OSError."""
    for name, data in sorted(files.items()):
        path = staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        commit.write_file(path, data)


def write_manifest(plan: Plan, source: Source, staging: Path, parts: Iterable[Digested]) -> None:
    """Write the export's manifest, its last file. *parts* are the digests of all bytes of the weights."""
    manifest = source.manifest
    document = {
        "format": "automodel_ckpt.export",
        "format_version": 1,
        # Exports of one checkpoint are equal, so that a repeated upload finds that nothing has changed.
        "created": manifest.created if manifest else time.time(),
        "step": manifest.step if manifest else None,
        "epoch": manifest.epoch if manifest else None,
        # Files behind links are below the root of the file system.
        "checkpoint": source.root.name or source.model_directory.name,
        "checked": manifest is not None,
        "casts": {f"{old}->{new}": count for (old, new), count in sorted(plan.casts.items())},
        # Lists the directory: all other files must be in it by now.
        "files": _listed(plan, staging, parts),
    }
    commit.write_file(staging / layout.EXPORT_MANIFEST, json.dumps(document).encode() + b"\n")


def _listed(plan: Plan, staging: Path, parts: Iterable[Digested]) -> dict[str, ValueDict]:
    """Return the size and digest of every file; for files of weights, the digests of their parts in order."""
    found: dict[str, list[Digested]] = {file.name: [] for file in plan.files}
    for part in parts:
        found[part.file].append(part)
    listed = {}
    for name in sorted(_files_below(staging)):
        if name in found:
            in_order = sorted(found[name], key=lambda part: part.start)
            digests = [[part.nbytes, part.digest] for part in in_order]
            listed[name] = {"size": sum(part.nbytes for part in in_order), "parts": digests}
        else:
            listed[name] = asdict(file_record(staging / name))
    return listed
