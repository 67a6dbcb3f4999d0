"""The directory of an export: its side files and manifest, how it is published, and leftovers of killed exports.

It is staged in ``.NAME.staging-HEX`` next to its target ``NAME``, and locked (flock) while it is written. Then it is
made durable and renamed, complete or not at all. A directory is replaced only if an export of this program wrote every
file in it. If the file system can swap two directories in one step (RENAME_EXCHANGE), a reader always finds the old
export or the new one. Otherwise there is a short gap, which the log mentions, and in which the old export is
``.NAME.previous-HEX``. The next export restores it after a kill. Leftovers belong to no checkpoint, so a checkpoint
that holds them is intact.

Its config.json has the dtype of the weights, and the keys that programs before transformers 5 read. Imports no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from automodel_ckpt.base.durable_io import (
    fsync_directories,
    fsync_directory,
    is_abandoned,
    owned,
    owner_digits,
    walk,
)
from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.export.export_manifest import ExportManifest
from automodel_ckpt.checkpoint.export.plan import Plan, main_dtype, quantized_in_base
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import ORDINARY_FLOATS, TORCH_NAMES
from automodel_ckpt.checkpoint.files.durable_file import file_record
from automodel_ckpt.checkpoint.files.safe_open import parse_json, read_model_file
from automodel_ckpt.checkpoint.files.type_aliases import FileDict, Files, ValueDict, Values
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.sources.model_files import (
    MAX_SIDE_BYTES,
    SIDE_FILES,
    fits,
    unreadable,
)
from automodel_ckpt.checkpoint.sources.source import MAPS, BaseMaps, Source
from automodel_ckpt.errors import (
    AutomodelError,
    CheckpointUnusable,
    SaveFailed,
    unusable,
    writing_hint,
)

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
    """Return the content of every file of the export other than the weights, and warnings for the user.

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
    names: Iterable[str] = (name for name in _files(directory) if (directory / name).is_file())
    if source.metadata_directory is None or (source.finished and source.manifest is None):
        # Known names only: the weights themselves are in this directory, and whatever else the user keeps there.
        names = (name for name in names if fits(name, SIDE_FILES))
    elif source.manifest is not None and source.finished:
        names = [
            path.removeprefix(f"{directory.name}/")
            for path in source.manifest.files
            if not path.endswith(".bin")
        ]
    return [name for name in names if name not in _MADE_ANEW and not name.endswith(".safetensors")]


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


@dataclass(frozen=True)
class Digested:
    """Bytes ``start .. start + nbytes`` of an output file, and their digest."""

    file: str
    start: int
    nbytes: int
    digest: str


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
    for name in sorted(_files(staging)):
        if name in found:
            in_order = sorted(found[name], key=lambda part: part.start)
            digests = [[part.nbytes, part.digest] for part in in_order]
            listed[name] = {"size": sum(part.nbytes for part in in_order), "parts": digests}
        else:
            listed[name] = asdict(file_record(staging / name))
    return listed


# ---------------------------------------------------------------- leftovers


Log = Callable[[str], None]

# A live process replaces an export between two renames, which takes milliseconds.
_REPLACED_SECONDS = 60.0


def clear_checkpoint(checkpoint: Path, log: Log) -> None:
    """Remove what killed exports left in the directories of a checkpoint's modules; one that was killed while it
    replaced another is undone.

    *checkpoint* is no symbolic link, which can point outside the run directory. What cannot be removed is logged, and
    tried again at the next start.
    """
    try:
        modules = [entry for entry in os.scandir(checkpoint) if entry.is_dir(follow_symlinks=False)]
        for module in sorted(modules, key=lambda entry: entry.name):
            names = [
                layout.export_of(entry.name)
                for entry in os.scandir(module.path)
                if entry.is_dir(follow_symlinks=False)
            ]
            for name in sorted({name for name in names if name is not None}):
                clear_leftovers(Path(module.path, name), log)
    except OSError as error:
        log(f"could not remove the leftovers of an interrupted export in {checkpoint}: {error}")


def clear_leftovers(target: Path, log: Log) -> None:
    """Remove what killed exports to *target* left next to it, and undo a replacement that was interrupted.

    Raises OSError.
    """
    name = re.escape(target.name)
    for entry in sorted(os.listdir(target.parent)):
        match = re.fullmatch(rf"\.{name}\.(staging|previous)-[0-9a-f]{{32}}", entry)
        if match is None:
            continue
        path = target.parent / entry
        is_only_export = match[1] == "previous" and not os.path.lexists(target)
        if is_only_export and is_abandoned(path, after_seconds=_REPLACED_SECONDS):
            # The kill was between two renames, where the file system cannot swap directories.
            os.rename(path, target)
            log(f"restored {target}: an earlier export was interrupted while replacing it")
        elif not is_only_export and is_abandoned(path):
            log(f"removing {path}, left by an interrupted export")
            commit.discard(path)


# ---------------------------------------------------------------- publishing


Check = Callable[[], None]

_NUM_SHOWN = 5
ANOTHER_OUTPUT = "choose another output path"


def unwritable(error: OSError, what: str) -> AutomodelError:
    """Return the error of an output that could not be written."""
    return SaveFailed.of_system(error, what, hint=f"{writing_hint(error)}, or {ANOTHER_OUTPUT}")


def resolved_target(output: str | os.PathLike[str] | None, default: Path) -> Path:
    """Return the directory of an export without links: *output*, or else *default*, which is in the checkpoint.

    Raises :class:`SaveFailed` if *default* is used and is a symbolic link: a checkpoint from elsewhere must not choose
    where an export is written.
    """
    if output is None and default.is_symlink():
        raise SaveFailed(
            "the default directory of the export is a symbolic link",
            where=default,
            value=os.readlink(default),
            hint=ANOTHER_OUTPUT,
        )
    # A rename onto a link would replace the link, and the staging directory must be on the file system of the target.
    return Path(os.path.realpath(default if output is None else output))


def check_target(target: Path) -> None:
    """Raise :class:`SaveFailed` unless an export may replace *target*: it does not exist, is empty, or is an export."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise _not_replaceable(target, "not a directory")
    exported = set()
    with contextlib.suppress(CheckpointUnusable):
        exported = {*ExportManifest.read(target).files, layout.EXPORT_MANIFEST}
    others = (file for file in _files(target) if file not in exported)
    # Not all of them: the target may be the root of a file system.
    shown = list(itertools.islice(others, _NUM_SHOWN))
    if shown:
        raise _not_replaceable(target, ", ".join(map(repr, shown)))


def _not_replaceable(target: Path, value: str) -> SaveFailed:
    return SaveFailed(
        "the output directory holds files that no export made",
        where=target,
        value=value,
        hint=ANOTHER_OUTPUT,
    )


def _files(directory: Path) -> Iterator[str]:
    """Yield the relative paths of all files below *directory*, and of links, which are not followed."""
    for parent, directories, names in walk(directory):
        directories.sort()
        links = [name for name in directories if os.path.islink(os.path.join(parent, name))]
        for name in sorted([*names, *links]):
            yield os.path.relpath(os.path.join(parent, name), directory)


@contextlib.contextmanager
def staged(target: Path, log: Log, *, before_publishing: Check = lambda: None) -> Iterator[Path]:
    """Yield a staging directory, which replaces *target* when the block ends and is removed if the block raises.

    *before_publishing* is called last. If it raises, *target* is unchanged. An OSError in the block or in publishing
    becomes :class:`SaveFailed` with path and errno.
    """
    staging = None
    try:
        commit.make_run_directory(target.parent)
        clear_leftovers(target, log)
        staging = target.with_name(layout.staging_name(target.name, owner_digits(target.parent)))
        os.mkdir(staging)
        # Locked: another export could remove an unlocked staging directory as a leftover.
        with owned(staging):
            yield staging
            # Again: files may have been added to the target while the export was written.
            check_target(target)
            # Right before the rename: a run may have lost its lease during a long copy.
            before_publishing()
            _publish(staging, target, log)
    except OSError as error:
        raise unwritable(error, "the export could not be written; nothing was changed") from error
    finally:
        # After a swap, the export that was replaced has the staging directory's name.
        if staging is not None:
            commit.discard(staging)


def _publish(staging: Path, target: Path, log: Log) -> None:
    # The names in each directory must be durable before the staging directory gets the export's name.
    fsync_directories(staging)
    # What has the staging directory's name is deleted next: after a failure it must be the new export.
    with contextlib.ExitStack() as undo:
        if not os.path.lexists(target):
            os.rename(staging, target)
            undo.callback(os.rename, target, staging)
        elif commit.exchange(staging, target):
            undo.callback(commit.exchange, staging, target)
        else:
            _replace_with_gap(staging, target, log)
            return
        fsync_directory(target.parent)
        undo.pop_all()


def _replace_with_gap(staging: Path, target: Path, log: Log) -> None:
    aside = target.with_name(f".{target.name}.previous-{owner_digits(target.parent)}")
    log(f"this filesystem cannot swap directories: for a moment {target} is missing")
    # Another process must not take the export that is aside for a leftover: it is locked, and was changed just now.
    with owned(target), contextlib.ExitStack() as undo:
        os.utime(target)
        # After a kill between the two renames, clear_leftovers gives the old export its name back.
        os.rename(target, aside)
        undo.callback(os.rename, aside, target)
        os.rename(staging, target)
        undo.callback(os.rename, target, staging)
        # Durable before the old export is deleted: a power failure must leave one of the two.
        fsync_directory(target.parent)
        undo.pop_all()
        commit.discard(aside)


# ---------------------------------------------------------------- keys of config.json before transformers 5

# transformers 5 writes the settings of rotary positions as one mapping, rope_parameters, and gave other settings new
# names. transformers 4 and programs that have their own readers (mlx-lm 0.32) ignore the new names: they compute with
# their defaults (a rotary base of 10000), without an error. transformers 5 reads both.

_PARAMETERS = "rope_parameters"
_KIND = "rope_type"
_THETA = "rope_theta"
_PARTIAL = "partial_rotary_factor"
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Types of model with other names of the older keys for the base and for the rotated part.
_GPT_NEOX = {_THETA: "rotary_emb_base", _PARTIAL: "rotary_pct"}
_OTHER_NAMES = {"gpt_neox": _GPT_NEOX, "gpt_neox_japanese": _GPT_NEOX}
# Types of model with positions by the kind of a layer: the older keys of the bases of full and of sliding attention,
# which are the same where both have one base.
_BASES = {
    "gemma3_text": (_THETA, "rope_local_base_freq"),
    "gemma3n_text": (_THETA, "rope_local_base_freq"),
    "modernbert": ("global_rope_theta", "local_rope_theta"),
    "modernbert-decoder": ("global_rope_theta", "local_rope_theta"),
    "olmo3": (_THETA, _THETA),
}
# {older name: name in transformers 5}, also by the type of model. Programs of 2025 read torch_dtype.
_DTYPE = {"torch_dtype": "dtype"}
_EXPERTS = {"num_experts": "num_local_experts"}
_RENAMED = {
    "qwen3_moe": _EXPERTS,
    "qwen3_vl_moe_text": _EXPERTS,
    "qwen3_omni_moe_text": _EXPERTS,
    "qwen3_omni_moe_talker_text": _EXPERTS,
}
_MAX_DEPTH = 20


def with_older_keys(config: Values, *, depth: int = 0) -> ValueDict:
    """Return *config*, the content of config.json, with the older keys of what it and its parts state.

    Keys that it has are unchanged.
    """
    return {**_older_keys(config), **_with_parts(config, with_older_keys, depth)}


def without_older_keys(config: Values, *, depth: int = 0) -> ValueDict:
    """Return *config* without the older keys that repeat what it states."""
    older = _older_keys(config)
    changed = _with_parts(config, without_older_keys, depth)
    return {
        key: value
        for key, value in changed.items()
        if key not in older or config[key] != older[key]
    }


def _with_parts(config: Values, change: Callable[..., ValueDict], depth: int) -> ValueDict:
    """Return *config* with its changed parts."""
    changed = {}
    for key, value in config.items():
        is_part = key.endswith("_config") and isinstance(value, dict) and depth < _MAX_DEPTH
        changed[key] = change(value, depth=depth + 1) if is_part else value
    return changed


def _older_keys(config: Values) -> ValueDict:
    """Return the older keys of what *config* itself states."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return {}
    found = {
        older: config[name]
        for older, name in {**_DTYPE, **_RENAMED.get(kind, {})}.items()
        if name in config
    }
    parameters = config.get(_PARAMETERS)
    if isinstance(parameters, dict):
        found |= _rotary(kind, parameters)
    return found


def _rotary(kind: str, parameters: Values) -> ValueDict:
    """Return the older keys of the rotary *parameters*; none for those that no older key can state."""
    names = {_THETA: _THETA, _PARTIAL: _PARTIAL, **_OTHER_NAMES.get(kind, {})}
    found = {}
    if any(isinstance(value, dict) for value in parameters.values()):
        full, sliding = parameters.get(_FULL), parameters.get(_SLIDING)
        if kind not in _BASES or not isinstance(full, dict) or not isinstance(sliding, dict):
            return {}
        names[_THETA], local_name = _BASES[kind]
        if local_name == names[_THETA] and full.get(_THETA) != sliding.get(_THETA):
            return {}
        if _THETA in sliding:
            found[local_name] = sliding[_THETA]
        parameters = full
    for name, older in names.items():
        if name in parameters:
            found[older] = parameters[name]
    scaling = {name: value for name, value in parameters.items() if name not in names}
    if scaling.keys() - {_KIND} or scaling.get(_KIND, "default") != "default":
        found["rope_scaling"] = scaling
    return found
