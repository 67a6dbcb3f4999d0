"""``ckpt average``: combine the weights of several checkpoints into one. Imports no torch.

Sources are whatever ``convert/open.py`` reads. The result is a complete checkpoint of weights in a run directory,
written and published in the same way as an import. Tensors are combined block by block, so that memory does not grow
with the model. ``average_methods.py`` has the formulas.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS, ORDINARY_FLOATS
from automodel_ckpt.checkpoint.export.plan import make_plan
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.manifest import Summary
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.slices import Box, Tensor
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps
from automodel_ckpt.checkpoint.sources.model_files import is_tokenizer_file
from automodel_ckpt.checkpoint.sources.opening import MODEL
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.checkpoint.tensors.box_reader import BoxReader, boxes
from automodel_ckpt.checkpoint.tensors.float_cast import Array, cast, storage_dtype
from automodel_ckpt.checkpoint.tensors.integrity import require_intact
from automodel_ckpt.checkpoint.writing.jobs import Blocks
from automodel_ckpt.convert.average_methods import METHODS, Method, ema_weights
from automodel_ckpt.convert.import_checkpoint import (
    Import,
    check_free,
    run_import,
    side_files_of,
    without_unused_code,
)
from automodel_ckpt.convert.open import Weights, open_weights
from automodel_ckpt.errors import CheckpointUnusable, Problem, RecipeError
from automodel_ckpt.units import counted

Integers = Literal["equal", "first", "last"]
_HINT = "average checkpoints of the same model"
_SHOWN = 5
_DENSITY = {"ties": 0.2, "dare": 0.5}
# Options of an adapter that decide what its tensors mean. The base decides, too; it is compared by its digest.
_ADAPTER_OPTIONS = (
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
)
_ADAPTER_FILES = (layout.ADAPTER_CONFIG, layout.AUTOMODEL_PEFT_CONFIG)
_MAX_SIDE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class AverageOptions:
    """How sources are combined.

    *weights* has one entry per source and is divided by its sum; None for equal weights. *ema* is the decay of an
    exponential moving average instead; the sources are then in the order of training. *base*, *density* (the share of
    elements that are kept, None for the method's default), *scale* and *seed* are used by the methods ``ties`` and
    ``dare``. *integers*: tensors that cannot be averaged (integers, bool, 8-bit floats) must be ``equal``, or are
    copied from the ``first`` or ``last`` source.
    """

    weights: Sequence[float] | None = None
    ema: float | None = None
    method: str = "linear"
    base: Path | None = None
    density: float | None = None
    scale: float = 1.0
    seed: int = 0
    integers: Integers = "equal"


@dataclass(frozen=True, slots=True)
class Average:
    """A planned average: the checkpoint to write, its *sources* with their *weights*, and the number of tensors.

    *copied* names the tensors that differ and are copied from one source.
    """

    checkpoint: Import
    sources: Sequence[Path]
    weights: Sequence[float]
    method: str
    num_tensors: int
    copied: Sequence[str]
    notes: Sequence[str]


def last_checkpoints(run: Path, count: int) -> list[Path]:
    """Return the newest *count* complete checkpoints of a run directory, the oldest first.

    Raises :class:`CheckpointUnusable` if there are fewer.
    """
    found = [run / record.name for record in resume.records(run, "")]
    if len(found) < count:
        raise CheckpointUnusable(
            f"there are fewer than {count} complete checkpoints to average",
            where=str(run),
            value=counted(len(found), "checkpoint"),
            hint="average fewer, or keep more of them (checkpoint.keep_last)",
        )
    return found[:count][::-1]


def prepare(
    sources: Sequence[Path],
    run: Path,
    options: AverageOptions,
    *,
    name: layout.CheckpointName | None = None,
) -> Average:
    """Open *sources*, check that they can be averaged, and plan the checkpoint *name* in the run directory *run*.

    Writes nothing. Without *name*, it is that of the newest source that is a checkpoint of this program. Raises
    :class:`RecipeError` for options that contradict each other, and :class:`CheckpointUnusable` if a source has no
    weights, or if names, shapes or dtypes of the sources differ.
    """
    weights = _weights(options, len(sources))
    _check_options(options, len(sources))
    opened = [open_weights(source) for source in sources]
    modules = [_module(weights_in) for weights_in in opened]
    base = None
    if options.base is not None:
        base = _module(open_weights(options.base))
        _check_consistent(modules[0], base, opened[0].path, options.base)
    for source, module in zip(sources[1:], modules[1:], strict=True):
        _check_consistent(modules[0], module, opened[0].path, source)
    copied = _check_unaveraged(modules, options.integers)
    name = name or _newest_name(opened)
    side_files, notes = _side_files(opened)
    plan = make_plan(
        modules[0].tensors,
        {},
        BaseMaps(is_adapter=layout.ADAPTER_CONFIG in side_files),
        where=str(sources[0]),
    )
    check_free(run, name)
    merge = _Merge(modules, base, weights, options)
    checkpoint = Import(
        source=opened[0].path,
        kind=f"average of {len(sources)} checkpoints",
        weights=modules[0],
        plan=plan,
        side_files=side_files,
        other_files={},
        losses={},
        run=run,
        name=name,
        left_out=_left_out(opened),
        contents=merge.blocks,
        lineage=_lineage(opened, weights, options),
    )
    return Average(
        checkpoint,
        [weights_in.path for weights_in in opened],
        weights,
        options.method,
        len(modules[0].tensors),
        copied,
        notes,
    )


def run_average(planned: Average) -> Path:
    """Write and publish the checkpoint that :func:`prepare` planned, and return its path.

    Raises :class:`SaveFailed` if it cannot be written, and :class:`CheckpointUnusable` if a source is damaged; then
    nothing of it remains.
    """
    return run_import(planned.checkpoint)


# ---------------------------------------------------------------- options


def _weights(options: AverageOptions, count: int) -> list[float]:
    """Return the weight of each source; they sum to 1. Raises :class:`RecipeError`."""
    if options.weights is not None and options.ema is not None:
        raise _invalid("weights and a moving average exclude each other", "--ema", options.ema)
    if options.ema is not None:
        if not 0 <= options.ema < 1:
            raise _invalid("the decay must be at least 0 and less than 1", "--ema", options.ema)
        return ema_weights(options.ema, count)
    weights = list(options.weights or [1.0] * count)
    if len(weights) != count:
        what = f"there must be one weight for each of the {count} sources"
        raise _invalid(what, "--weights", f"{len(weights)} weights")
    total = math.fsum(weights)
    if not math.isfinite(total) or total <= 0 or min(weights) < 0:
        what = "weights must be finite and not negative, and at least one must be positive"
        raise _invalid(what, "--weights", weights)
    return [weight / total for weight in weights]


def _check_options(options: AverageOptions, count: int) -> None:
    needs_base = METHODS[options.method].needs_base
    if count < 2 and not needs_base:
        raise _invalid("at least two checkpoints are needed", "SOURCE", f"{count} given")
    if options.method == "slerp" and count != 2:
        raise _invalid("slerp interpolates between exactly two checkpoints", "--method", count)
    if needs_base and options.base is None:
        what = f"{options.method} averages differences to a base model, which is missing"
        raise _invalid(what, "--base", "not given")
    if not needs_base:
        for flag, value in (("--base", options.base), ("--density", options.density)):
            if value is not None:
                what = f"the method {options.method} does not use this option"
                raise _invalid(what, flag, value)
    if options.density is not None and not 0 < options.density <= 1:
        what = "the density must be greater than 0 and at most 1"
        raise _invalid(what, "--density", options.density)
    if not math.isfinite(options.scale):
        raise _invalid("the scale must be a finite number", "--scale", options.scale)


def _invalid(what: str, where: str, value: object) -> RecipeError:
    return RecipeError(what, where=where, value=value, hint="`ckpt average --help` describes it")


# ---------------------------------------------------------------- comparing the sources


def _module(opened: Weights) -> Tensors:
    """Return the module to average: ``model``. Raises :class:`CheckpointUnusable` if there is none."""
    module = opened.modules.get(MODEL)
    if module is None:
        raise CheckpointUnusable(
            "this checkpoint has no module named 'model'",
            where=str(opened.path),
            value=", ".join(opened.modules),
            hint="name the directory of one of its modules",
        )
    return module


def _check_consistent(first: Tensors, other: Tensors, first_path: Path, other_path: Path) -> None:
    """Check that names, shapes and dtypes agree. Raises :class:`CheckpointUnusable`, which lists the differences."""
    problems: list[Problem] = []
    for what, names in (
        ("a tensor is missing", first.tensors.keys() - other.tensors.keys()),
        (f"a tensor is not in {first_path}", other.tensors.keys() - first.tensors.keys()),
    ):
        if names:
            problems.append(Problem(what, str(other_path), _some(sorted(names)), _HINT))
    different: list[str] = []
    for fqn, tensor in first.tensors.items():
        found = other.tensors.get(fqn)
        if found is not None and (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
            expected = f"{tensor.dtype} {list(tensor.shape)}"
            different.append(f"{fqn}: {found.dtype} {list(found.shape)}, not {expected}")
    if different:
        what = f"a tensor has another dtype or shape than in {first_path}"
        problems.append(Problem(what, str(other_path), _some(different), _HINT))
    if problems:
        raise CheckpointUnusable.all_of(problems)


def _check_unaveraged(modules: Sequence[Tensors], integers: Integers) -> list[str]:
    """Compare the tensors that cannot be averaged; return those that differ, if that is allowed.

    Raises :class:`CheckpointUnusable` if it is not: packed weights of one source with the scales of all would be wrong
    without notice.
    """
    different: list[str] = []
    for fqn, tensor in modules[0].tensors.items():
        if tensor.dtype in ORDINARY_FLOATS or _are_equal(fqn, modules):
            continue
        for module in modules:
            # Otherwise damage would be reported as a difference.
            require_intact(module.root, module.tensors[fqn])
        different.append(f"{fqn} ({tensor.dtype})")
    if different and integers == "equal":
        raise CheckpointUnusable(
            "tensors that cannot be averaged differ between the sources",
            where=str(modules[0].root),
            value=_some(different),
            hint="if they are counters or the like, copy those of one source: --integers first, or last",
        )
    return different


def _are_equal(fqn: str, modules: Sequence[Tensors]) -> bool:
    readers = [BoxReader(module.root, module.tensors[fqn]) for module in modules]
    for box in boxes(modules[0].tensors[fqn].shape):
        first = readers[0].read(box).tobytes()
        if any(reader.read(box).tobytes() != first for reader in readers[1:]):
            return False
    return True


def _some(names: Sequence[str]) -> str:
    text = "; ".join(names[:_SHOWN])
    if len(names) <= _SHOWN:
        return text
    return f"{text}; and {len(names) - _SHOWN} more"


# ---------------------------------------------------------------- what the result contains


def _newest_name(opened: Sequence[Weights]) -> layout.CheckpointName:
    """Return the name of the newest source that is a checkpoint of this program; step 0 if there is none."""
    names = [layout.CheckpointName(step=0, epoch=0)]
    for weights_in in opened:
        if weights_in.checkpoint is not None:
            summary = Summary.read(weights_in.checkpoint)
            names.append(layout.CheckpointName(step=summary.step, epoch=summary.epoch))
    return max(names)


def _side_files(opened: Sequence[Weights]) -> tuple[dict[str, bytes], list[str]]:
    """Return the side files of the first source, and notes for the user."""
    first = opened[0]
    directory = first.path / MODEL if (first.path / MODEL).is_dir() else first.path
    adapters = [_adapter_files(weights_in.path) for weights_in in opened]
    if any(adapters):
        _check_adapters(opened, adapters)
        tokenizer = _tokenizer_files(_metadata_directory(first.path))
        note = (
            "the factors of the adapters are averaged, which is not the average of their products"
        )
        return {**tokenizer, **adapters[0]}, [note]
    if first.path.is_file():
        directory = first.path.parent
        return without_unused_code(side_files_of(directory, directory)), []
    return side_files_of(first.path, directory), []


def _metadata_directory(path: Path) -> Path:
    """Return the directory with the side files of an adapter."""
    for directory in (path / MODEL / layout.HF_METADATA, path / layout.HF_METADATA, path / MODEL):
        if (directory / layout.ADAPTER_CONFIG).is_file():
            return directory
    return path


def _adapter_files(path: Path) -> dict[str, bytes]:
    """Return the files that describe an adapter; empty if *path* has no adapter."""
    directory = _metadata_directory(path)
    files: dict[str, bytes] = {}
    for name in _ADAPTER_FILES:
        with suppress(FileNotFoundError, NotADirectoryError):
            files[name] = read_safely(directory, name, limit=_MAX_SIDE_BYTES)
    if layout.ADAPTER_CONFIG not in files:
        return {}
    record = _json(files.get(layout.AUTOMODEL_PEFT_CONFIG), directory)
    if isinstance(record.get("base"), dict):
        # It is the path from another run directory.
        record["base"]["relative_to_run"] = None
        files[layout.AUTOMODEL_PEFT_CONFIG] = json.dumps(record, indent=2).encode() + b"\n"
    return files


def _tokenizer_files(directory: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name in sorted(os.listdir(directory)):
        if is_tokenizer_file(name) and (directory / name).is_file():
            files[name] = read_safely(directory, name, limit=_MAX_SIDE_BYTES)
    return files


def _check_adapters(opened: Sequence[Weights], adapters: Sequence[Mapping[str, bytes]]) -> None:
    """Check that all sources are adapters with the same options and the same base."""
    described = []
    for weights_in, files in zip(opened, adapters, strict=True):
        config = _json(files.get(layout.ADAPTER_CONFIG), weights_in.path)
        base = _json(files.get(layout.AUTOMODEL_PEFT_CONFIG), weights_in.path).get("base")
        options = {name: config.get(name) for name in _ADAPTER_OPTIONS}
        if isinstance(base, dict):
            options["digest of the base"] = base.get("digest")
        described.append(options)
    for weights_in, options in zip(opened[1:], described[1:], strict=True):
        for key in {*described[0], *options}:
            if options.get(key) != described[0].get(key):
                raise CheckpointUnusable(
                    f"the adapters differ in {key}",
                    where=str(weights_in.path),
                    value=f"{options.get(key)}, not {described[0].get(key)}",
                    hint="merge each adapter into its base (`ckpt export --merge`), and average the results",
                )


def _json(content: bytes | None, where: Path) -> dict[str, Any]:
    if content is None:
        return {}
    try:
        value = parse_json(content)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise CheckpointUnusable(
            "a file that describes an adapter is not a JSON mapping",
            where=str(where),
            value=repr(content[:40]),
            hint="restore the file from another copy",
        )
    return value


def _left_out(opened: Sequence[Weights]) -> tuple[str, ...]:
    """Name what the sources contain beside the averaged weights."""
    names: dict[str, None] = {}
    for weights_in in opened:
        for module in weights_in.modules:
            if module != MODEL:
                names[f"module {module}"] = None
        for text in weights_in.omitted:
            names[text] = None
    return tuple(names)


def _lineage(
    opened: Sequence[Weights], weights: Sequence[float], options: AverageOptions
) -> dict[str, Any]:
    """Describe the average for the manifest: the sources with their weights, and the options that were used."""
    sources = []
    for weights_in, weight in zip(opened, weights, strict=True):
        source: dict[str, Any] = {"path": str(weights_in.path), "weight": weight}
        if weights_in.checkpoint is not None:
            source["manifest"] = Summary.read(weights_in.checkpoint).digest
        sources.append(source)
    lineage: dict[str, Any] = {"averaged_from": sources, "average_method": options.method}
    if options.ema is not None:
        lineage["average_ema"] = options.ema
    if METHODS[options.method].needs_base:
        lineage["average_base"] = str(options.base)
        lineage["average_density"] = density_of(options)
        lineage["average_scale"] = options.scale
    if options.method == "dare":
        lineage["average_seed"] = options.seed
    return lineage


def sources_in(average: Summary) -> list[str | None]:
    """Return the digests of the manifests of the checkpoints that an average was made from, None for other sources."""
    sources = average.lineage.get("averaged_from")
    if not isinstance(sources, list):
        return []
    digests: list[str | None] = []
    for source in sources:
        digests.append(source.get("manifest") if isinstance(source, dict) else None)
    return digests


def density_of(options: AverageOptions) -> float:
    """Return the share of elements that the methods ``ties`` and ``dare`` keep; 1 for other methods."""
    if options.density is not None:
        return options.density
    return _DENSITY.get(options.method, 1.0)


# ---------------------------------------------------------------- averaging


class _Merge:
    """Combines the tensors of *modules*, and those of *base* where the method needs them."""

    def __init__(
        self,
        modules: Sequence[Tensors],
        base: Tensors | None,
        weights: Sequence[float],
        options: AverageOptions,
    ) -> None:
        self._modules = modules
        self._base = base
        self._weights = weights
        self._options = options

    def blocks(self, tensor: Tensor) -> Blocks:
        """Return the data of *tensor* in the result, which is computed while it is written."""
        return Blocks(tensor.nbytes, partial(self._blocks, tensor))

    def _blocks(self, tensor: Tensor) -> Iterator[memoryview]:
        """Yield the row-major bytes of the combined tensor. Raises :class:`CheckpointUnusable` for damaged sources."""
        sources = [_Reader(module, tensor.fqn) for module in self._modules]
        # Boxes are consecutive: each has complete inner dimensions.
        if tensor.dtype not in ORDINARY_FLOATS:
            position = -1 if self._options.integers == "last" else 0
            for box in boxes(tensor.shape):
                yield _bytes_of(sources[position].raw(box))
            return
        base = None if self._base is None else _Reader(self._base, tensor.fqn)
        method = self._method(tensor.fqn)
        with np.errstate(over="ignore", invalid="ignore"):
            method.prepare(
                [source.passes for source in sources],
                None if base is None else base.passes,
                math.prod(tensor.shape),
            )
            for box in boxes(tensor.shape):
                values = [source.values(box) for source in sources]
                start = None if base is None else base.values(box)
                yield _bytes_of(
                    cast(method.combine(values, start), sources[0].wide_dtype, tensor.dtype)
                )

    def _method(self, fqn: str) -> Method:
        options = self._options
        return METHODS[options.method](
            fqn,
            self._weights,
            density=density_of(options),
            scale=options.scale,
            seed=options.seed,
        )


class _Reader:
    """Reads one tensor of a module in boxes, after its stored bytes were compared with their digests."""

    def __init__(self, module: Tensors, fqn: str) -> None:
        self._tensor = module.tensors[fqn]
        require_intact(module.root, self._tensor)
        self._reader = BoxReader(module.root, self._tensor)
        self.wide_dtype = "F64" if self._tensor.dtype == "F64" else "F32"

    def raw(self, box: Box) -> Array:
        """Return the bits of the elements in *box*."""
        return self._reader.read(box)

    def values(self, box: Box) -> Array:
        """Return the elements in *box*, row-major, shape [N], in float32, or in float64 if they are stored in it."""
        dtype = self._tensor.dtype
        stored = self.raw(box).reshape(-1).view(storage_dtype(dtype, DTYPE_BITS[dtype]))
        return cast(stored, dtype, self.wide_dtype)

    def passes(self) -> Iterator[Array]:
        """Start a pass over the tensor, box by box."""
        for box in boxes(self._tensor.shape):
            yield self.values(box)


def _bytes_of(values: Array) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
