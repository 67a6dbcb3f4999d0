"""From the shards of a checkpoint to the files that Hugging Face's loaders read: checked, cast, staged, published.

    report = consolidate("checkpoints/epoch_0_step_20")        # or its model/, or a bare directory of shards
    report.output                                              # .../model/consolidated

The order is: open the source, check all of it but the tensors, plan (pure), write everything beside the target and
check the tensors on the way, make it durable, give it its name. Until the last step nothing that was there is touched.
Imports no torch, and numpy only for casts and interleaved slices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.consolidate_script import consolidate_script
from automodel_ckpt.checkpoint.copy_engine import Digested, Workers, copy
from automodel_ckpt.checkpoint.durable import file_record
from automodel_ckpt.checkpoint.export_blocks import shares
from automodel_ckpt.checkpoint.export_output import create_output
from automodel_ckpt.checkpoint.export_plan import (
    INDEX,
    ExportTensor,
    OutputFile,
    Plan,
    make_plan,
    parse_cast_dtype,
    quantized_in_base,
)
from automodel_ckpt.checkpoint.export_publish import EXPORT_MANIFEST, Log, check_target, staged
from automodel_ckpt.checkpoint.export_source import MAPS, BaseMaps, Source, maps_of, open_source
from automodel_ckpt.checkpoint.inside import open_inside, read_inside
from automodel_ckpt.checkpoint.manifest import digest_of
from automodel_ckpt.checkpoint.shard_header import sealed_by_slices
from automodel_ckpt.checkpoint.slices import DTYPE_BITS, ORDINARY_FLOATS, Slice
from automodel_ckpt.checkpoint.verify import Level, verify
from automodel_ckpt.errors import AutomodelError, CheckpointUnusable, Problem, RecipeError, os_problem

__all__ = ["ConsolidationReport", "consolidate", "consolidate_script"]

log_default = logging.getLogger("automodel_ckpt")

_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
# Tokenizers of large vocabularies take some ten megabytes.
_MAX_SIDE_BYTES = 128 << 20
_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class ConsolidationReport:
    """An export that was published: where, how many files and bytes of weights, and how many tensors were cast by
    (from, to) dtype. *checked* says whether the source's digests were known, and so compared."""

    output: Path
    num_files: int
    num_tensors: int
    nbytes: int
    seconds: float
    checked: bool
    casts: Mapping[tuple[str, str], int]
    warnings: tuple[str, ...]


def consolidate(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    cast_dtype: str | None = None,
    num_threads: int = 5,
    num_procs: int = 1,
    log: Log = log_default.info,
) -> ConsolidationReport:
    """Export the model in *source* (checkpoint, its ``model/``, or a bare directory of shards) as Hugging Face files.

    *output* defaults to ``consolidated`` in the model's directory (a model that is Hugging Face files already is only
    checked then); *cast_dtype* is one of bf16, fp16, fp32, fp64 or a
    long name. *num_procs* greater than 1 forks: only for a process without threads of its own.

    Raises :class:`CheckpointUnusable` for a source that is damaged, incomplete or not what the base says,
    :class:`SaveFailed` where the output cannot be written, and :class:`RecipeError` for a wrong argument. In each case
    nothing was written, and an earlier export stands as it was.
    """
    started = time.monotonic()
    workers = _workers(num_procs, num_threads)
    cast_code = parse_cast_dtype(cast_dtype)
    opened = open_source(Path(source))
    if opened.finished and output is None and cast_code is None:
        return _no_need(opened, workers, log)
    target = Path(os.path.realpath(output if output is not None else opened.model_directory / layout.CONSOLIDATED))
    check_target(target)
    _check_source(opened, workers)
    maps = maps_of(opened)
    plan = make_plan(opened.tensors, opened.tied, maps, cast_dtype=cast_code, where=str(opened.model_directory))
    side_files, more = _side_files(opened, plan, maps)
    warnings = (*opened.notes, *plan.warnings, *more)
    for text in [*(f"warning: {text}" for text in warnings), *_cast_lines(plan)]:
        log(text)
    with staged(target, log) as staging:
        parts = _write(plan, opened, staging, workers)
        _write_side_files(side_files, staging)
        _write_manifest(plan, opened, staging, parts)
    return ConsolidationReport(
        target, len(plan.files), sum(len(file.tensors) for file in plan.files), plan.nbytes,
        time.monotonic() - started, opened.manifest is not None, plan.casts, warnings,
    )  # fmt: skip


def _workers(num_procs: int, num_threads: int) -> Workers:
    for name, value in (("--nproc (NPROC_PER_NODE)", num_procs), ("--num-threads (NUM_THREADS)", num_threads)):
        if value < 1:
            raise RecipeError("not a number of workers", where=name, value=value, remedy="give 1 or more")
    return Workers(num_procs, num_threads)


def _no_need(source: Source, workers: Workers, log: Log) -> ConsolidationReport:
    started = time.monotonic()
    if problems := _problems(source, workers, "digest"):
        raise CheckpointUnusable.all_of(problems)
    log(f"no need: the files in {source.model_directory} are the Hugging Face files already")
    files = {tensor.slices[0].file for tensor in source.tensors.values()}
    nbytes = sum(tensor.nbytes for tensor in source.tensors.values())
    return ConsolidationReport(
        source.model_directory, len(files), len(source.tensors), nbytes, time.monotonic() - started, True, {}, ()
    )


def _check_source(source: Source, workers: Workers) -> None:
    """Every file that the export reads is the one that was saved, but for the bytes of its slices: those are checked
    while they are copied. All that is wrong is named."""
    if source.manifest is None:
        return
    if problems := _problems(source, workers, "size"):
        raise CheckpointUnusable.all_of(problems)
    if _problems(source, workers, "digest", sealed_by_slices(source.root, source.manifest)):
        raise CheckpointUnusable.all_of(_problems(source, workers, "digest"))


def _problems(source: Source, workers: Workers, level: Level, without: Set[str] = frozenset()) -> list[Problem]:
    assert source.manifest is not None
    files = {path: record for path, record in source.manifest.files.items() if path not in without}
    manifest = dataclasses.replace(source.manifest, files=files)
    return verify(source.root, manifest, level, num_threads=workers.num_procs * workers.num_threads)


def _cast_lines(plan: Plan) -> list[str]:
    return [f"cast {count} tensors from {a} to {b}" for (a, b), count in sorted(plan.casts.items())]


def _write(plan: Plan, source: Source, staging: Path, workers: Workers) -> list[Digested]:
    """Write the weights; returns the digest of every byte of them. Nothing damaged comes past it."""
    with contextlib.ExitStack() as stack:
        descriptors, clones = [], {}
        for file in plan.files:
            descriptor, clones[file.name] = create_output(
                staging / file.name, file.header, file.nbytes, _donor(source, file, stack)
            )
            stack.callback(os.close, descriptor)
            descriptors.append(descriptor)
        written = workers.run(partial(copy, source.root, staging, clones), shares(plan.files, workers.num_procs))
        if damaged := [piece for part in written for piece in part.damaged]:
            raise _damaged(source, damaged, workers)
        # Through descriptors open since before the first write: a failed write-back is reported here in any case.
        for descriptor in descriptors:
            os.fsync(descriptor)
    headers = [Digested(file.name, 0, len(file.header), digest_of(file.header)) for file in plan.files]
    return [*headers, *(part for result in written for part in result.parts)]


def _donor(source: Source, file: OutputFile, stack: contextlib.ExitStack) -> int | None:
    """A file that the output takes blocks from, opened to try whether it can."""
    piece = next((piece for tensor in file.tensors for piece in tensor.stored.slices), None)
    if piece is None:
        return None
    descriptor = open_inside(source.root, piece.file)
    stack.callback(os.close, descriptor)
    return descriptor


def _damaged(source: Source, damaged: Sequence[Slice], workers: Workers) -> AutomodelError:
    """What stopped the copy; all other damage is named with it."""
    if problems := _problems(source, workers, "digest"):
        return CheckpointUnusable.all_of(problems)
    return CheckpointUnusable(
        "a slice changed while it was read",
        where=str(source.root / damaged[0].file),
        value=f"tensor {damaged[0].fqn} (slice at {list(damaged[0].offsets)})",
        remedy="look for another program that writes there, or for failing memory; then export again",
    )


def _side_files(source: Source, plan: Plan, maps: BaseMaps) -> tuple[dict[str, bytes], list[str]]:
    """The content of every other file of the export, and what the user should know about them."""
    directory = source.metadata_directory
    if directory is None:
        return {INDEX: plan.index()}, ["there is no .hf_metadata: the export has no config.json and no tokenizer"]
    try:
        names = _side_names(source, directory)
        files = {name: read_inside(directory, name, limit=_MAX_SIDE_BYTES) for name in names}
    except OSError as error:
        problem = os_problem(error, "a side file cannot be read", remedy="restore it from another copy")
        raise CheckpointUnusable.all_of([problem]) from None
    warnings = []
    if clash := sorted(name for name in files if name == INDEX or name.endswith(".safetensors")):
        warnings.append(f"left out, since the export writes such files itself: {', '.join(map(repr, clash))}")
    kept = {name: data for name, data in files.items() if name not in clash and name != EXPORT_MANIFEST}
    if "config.json" in kept:
        kept["config.json"], more = agreeing_config(kept["config.json"], plan, maps, directory / "config.json")
        warnings += more
    return {**kept, INDEX: plan.index()}, warnings


def _side_names(source: Source, directory: Path) -> Iterable[str]:
    """What stands beside the weights; of Hugging Face files only what the checkpoint names."""
    if not source.finished or source.manifest is None:
        return [name for name in _regular_files(directory) if name not in MAPS]
    names = [path.removeprefix(f"{directory.name}/") for path in source.manifest.files]
    made_anew = {INDEX, layout.CONSOLIDATE_SCRIPT}
    return [name for name in names if name not in made_anew and not name.endswith((".safetensors", ".bin"))]


def _regular_files(directory: Path) -> Iterable[str]:
    """Files below *directory*, relative; links are not followed, as they may lead anywhere."""
    for parent, _, names in os.walk(directory):
        for name in sorted(names):
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(directory).as_posix()


def agreeing_config(raw: bytes, plan: Plan, maps: BaseMaps, path: Path) -> tuple[bytes, list[str]]:
    """config.json with the dtype that most of the weights have, and without a quantization that none of them has.

    Returned unchanged, byte for byte, where it agrees already.
    """
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise CheckpointUnusable(
            "config.json is not a JSON mapping", where=str(path), value="", remedy="restore the file from another copy"
        )
    before = json.dumps(config)
    tensors = [tensor for file in plan.files for tensor in file.tensors]
    if (code := _main_dtype(tensors)) is not None:
        _set_dtype(config, _TORCH_NAMES[code])
    warnings = _drop_quantization(config, tensors, maps)
    unchanged = json.dumps(config) == before
    return (raw if unchanged else json.dumps(config, indent=2).encode() + b"\n"), warnings


def _main_dtype(tensors: Iterable[ExportTensor]) -> str | None:
    """The ordinary float dtype of most elements; None where there is none."""
    numels: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in ORDINARY_FLOATS:
            numels[tensor.dtype] += tensor.nbytes * 8 // DTYPE_BITS[tensor.dtype]
    return max(numels, key=lambda code: numels[code], default=None)


def _set_dtype(config: dict[str, Any], name: str, *, top: bool = True) -> None:
    """State the dtype where the config states one (``dtype``, ``torch_dtype`` before transformers 5), nested too."""
    stated = [key for key in _DTYPE_KEYS if config.get(key) is not None]
    for key in stated or (["dtype"] if top else []):
        config[key] = name
    for key, value in config.items():
        if key.endswith("_config") and key != "quantization_config" and isinstance(value, dict):
            _set_dtype(value, name, top=False)


def _drop_quantization(config: dict[str, Any], tensors: list[ExportTensor], maps: BaseMaps) -> list[str]:
    floated = {tensor.fqn for tensor in quantized_in_base(tensors, maps)}
    if "quantization_config" not in config or not floated:
        return []
    originals = maps.dtype or {}
    still = [t.fqn for t in tensors if originals.get(t.fqn, "F32") not in ORDINARY_FLOATS and t.fqn not in floated]
    if still:
        return [f"config.json keeps its quantization_config: {len(still)} tensors are still quantized, some are float"]
    del config["quantization_config"]
    return ["config.json loses its quantization_config: the weights are float now"]


def _write_side_files(files: Mapping[str, bytes], staging: Path) -> None:
    for name, data in sorted(files.items()):
        path = staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        commit.write_file(path, data)


def _write_manifest(plan: Plan, source: Source, staging: Path, parts: Iterable[Digested]) -> None:
    manifest = source.manifest
    document = {
        "format": "automodel_ckpt.export",
        "format_version": 1,
        "created": time.time(),
        "step": manifest.step if manifest else None,
        "epoch": manifest.epoch if manifest else None,
        "checkpoint": source.root.name,
        "checked": manifest is not None,
        "casts": {f"{a}->{b}": count for (a, b), count in sorted(plan.casts.items())},
        "files": _listed(plan, staging, parts),
    }
    commit.write_file(staging / EXPORT_MANIFEST, json.dumps(document).encode() + b"\n")


def _listed(plan: Plan, staging: Path, parts: Iterable[Digested]) -> dict[str, dict[str, Any]]:
    """Size and digest of every file; of the weights, the digests of the parts that make a file up, in their order."""
    found: dict[str, list[tuple[int, int, str]]] = {file.name: [] for file in plan.files}
    for part in parts:
        found[part.file].append((part.start, part.nbytes, part.digest))
    listed: dict[str, dict[str, Any]] = {}
    for name in sorted(_regular_files(staging)):
        if name in found:
            ends = sorted(found[name])
            listed[name] = {"size": sum(nbytes for _, nbytes, _ in ends), "parts": [[n, d] for _, n, d in ends]}
        else:
            record = file_record(staging / name)
            listed[name] = {"size": record.size, "digest": record.digest}
    return listed
