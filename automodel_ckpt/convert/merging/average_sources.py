"""What the sources of an average must have in common, and the side files of the result. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS, ORDINARY_FLOATS
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.jobs.jobs import Blocks
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.sources.model_files import (
    ADAPTER_SIDE_FILES,
    MAX_SIDE_BYTES,
    read_files,
)
from automodel_ckpt.checkpoint.sources.opening import MODEL
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.checkpoint.state.model_config import CONFIG, config_changes
from automodel_ckpt.checkpoint.tensors.box_reader import BoxReader, boxes
from automodel_ckpt.checkpoint.tensors.float_cast import Array, cast, storage_dtype
from automodel_ckpt.checkpoint.tensors.integrity import require_intact
from automodel_ckpt.convert.imports.source_files import side_files_of, without_unused_code
from automodel_ckpt.convert.open import Weights
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

Integers = Literal["equal", "first", "last"]


@dataclass(frozen=True, slots=True)
class AverageOptions:
    """How sources are combined.

    *weights* has one entry per source and is divided by its sum. Without it, the weights are equal. *ema* is the decay
    of an exponential moving average instead; the sources are then in the order of training. *integers*: tensors that
    cannot be averaged (integers, bool, 8-bit floats) must be ``equal``, or are copied from the ``first`` or ``last``
    source.
    """

    weights: Sequence[float] | None = None
    ema: float | None = None
    integers: Integers = "equal"


def weights_of(options: AverageOptions, count: int) -> list[float]:
    """Return the weight of each of *count* sources; they sum to 1.

    Raises:
        RecipeError: The options contradict each other, or do not fit the number of sources.
    """
    if count < 2:
        raise _invalid("at least two checkpoints are needed", "SOURCE", f"{count} given")
    if options.weights is not None and options.ema is not None:
        raise _invalid("weights and a moving average exclude each other", "--ema", options.ema)
    if options.ema is not None:
        if not 0 <= options.ema < 1:
            raise _invalid("the decay must be at least 0 and less than 1", "--ema", options.ema)
        return _ema_weights(options.ema, count)
    weights = list(options.weights or [1.0] * count)
    if len(weights) != count:
        what = f"there must be one weight for each of the {count} sources"
        raise _invalid(what, "--weights", counted(len(weights), "weight"))
    total = math.fsum(weights)
    if not math.isfinite(total) or total <= 0 or min(weights) < 0:
        what = "weights must be finite and not negative, and at least one must be positive"
        raise _invalid(what, "--weights", weights)
    return [weight / total for weight in weights]


def _ema_weights(decay: float, count: int) -> list[float]:
    """Return the weights of m_1 = x_1, m_i = decay * m_(i-1) + (1 - decay) * x_i, the oldest first."""
    weights = [decay ** (count - 1)]
    for position in range(1, count):
        weights.append((1 - decay) * decay ** (count - 1 - position))
    return weights


def _invalid(what: str, where: str, value: object) -> RecipeError:
    return RecipeError(what, where=where, value=value, hint="`ckpt average --help` describes it")


_MIXED = frozenset({"BF16", "F16", "F32"})
"""Types in which the sources may have the same tensor."""
_SHOWN = 5
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


def model_in(opened: Weights) -> Tensors:
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


def check_consistent(first: Tensors, other: Tensors, first_path: Path, other_path: Path) -> None:
    """Check that names, shapes and dtypes agree; floats of 16 and 32 bits may differ in their dtype.

    Raises :class:`CheckpointUnusable`, which lists the differences.
    """
    names = sorted(first.tensors.keys() ^ other.tensors.keys())
    if names:
        raise _inconsistent(f"tensors are only here, or only in {first_path}", other_path, names)
    different: list[str] = []
    for fqn, tensor in first.tensors.items():
        found = other.tensors[fqn]
        is_same = found.dtype == tensor.dtype or {found.dtype, tensor.dtype} <= _MIXED
        if not is_same or found.shape != tensor.shape:
            expected = f"{tensor.dtype} {list(tensor.shape)}"
            different.append(f"{fqn}: {found.dtype} {list(found.shape)}, not {expected}")
    if different:
        what = f"a tensor has another dtype or shape than in {first_path}"
        raise _inconsistent(what, other_path, different)


def _inconsistent(what: str, path: Path, names: Sequence[str]) -> CheckpointUnusable:
    hint = "average checkpoints of the same model"
    return CheckpointUnusable(what, where=str(path), value=_some(names), hint=hint)


def averaged_types(modules: Sequence[Tensors]) -> dict[str, Tensor]:
    """The tensors of the first module, with the dtypes of the average: float32 where the modules differ.

    A run that moved from a GPU to a CPU has saved frozen weights in two types.
    """
    found: dict[str, Tensor] = {}
    for fqn, tensor in modules[0].tensors.items():
        types = {module.tensors[fqn].dtype for module in modules}
        found[fqn] = tensor if len(types) == 1 else replace(tensor, dtype="F32")
    return found


def check_unaveraged(modules: Sequence[Tensors], integers: Integers) -> list[str]:
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


# ---------------------------------------------------------------- side files


def side_files_and_notes(opened: Sequence[Weights]) -> tuple[dict[str, bytes], list[str]]:
    """Return the side files of the first source, and notes for the user."""
    first = opened[0]
    adapters = [_adapter_files(weights_in.path) for weights_in in opened]
    if any(adapters):
        _check_adapters(opened, adapters)
        tokenizer = read_files(_metadata_directory(first.path), ADAPTER_SIDE_FILES)
        note = (
            "the factors of the adapters are averaged, which is not the average of their products"
        )
        return {**tokenizer, **adapters[0]}, [note]
    files = _side_files(first.path)
    return files, list(_notes_of_configs(first.path, files, opened[1:]))


def _side_files(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return without_unused_code(side_files_of(path.parent, path.parent))
    return side_files_of(path, path / MODEL if (path / MODEL).is_dir() else path)


def _notes_of_configs(
    first: Path, files: Mapping[str, bytes], others: Sequence[Weights]
) -> Iterator[str]:
    """Yield a line for each source whose config.json describes a model that computes something else than *first* does.

    *files* has the files beside the weights of *first*, by name.
    """
    expected = _json(files.get(CONFIG), first)
    for weights_in in others:
        found = _json(_side_files(weights_in.path).get(CONFIG), weights_in.path)
        changes = config_changes(found, expected, there="there")
        if expected and found and changes.function:
            yield (
                f"config.json of {weights_in.path} describes a model that computes something else than {first}, whose "
                f"config the average gets: {_some(changes.function)}"
            )


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
            files[name] = read_safely(directory, name, limit=MAX_SIDE_BYTES)
    if layout.ADAPTER_CONFIG not in files:
        return {}
    record = _json(files.get(layout.AUTOMODEL_PEFT_CONFIG), directory)
    if isinstance(record.get("base"), dict):
        # It is the path from another run directory.
        record["base"]["relative_to_run"] = None
        files[layout.AUTOMODEL_PEFT_CONFIG] = json.dumps(record, indent=2).encode() + b"\n"
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
            "a file that describes the model is not a JSON mapping",
            where=str(where),
            value=repr(content[:40]),
            hint="restore the file from another copy",
        )
    return value


class AveragedTensors:
    """Combines the tensors of *modules*: the sum of each source's tensor times its weight, in float32 or float64."""

    def __init__(
        self, modules: Sequence[Tensors], weights: Sequence[float], integers: Integers
    ) -> None:
        self._modules = modules
        self._weights = weights
        self._integers = integers

    def blocks(self, tensor: Tensor) -> Blocks:
        """Return the data of *tensor* in the result, which is computed while it is written."""
        return Blocks(tensor.nbytes, partial(self._blocks, tensor))

    def _blocks(self, tensor: Tensor) -> Iterator[memoryview]:
        """Yield the row-major bytes of the combined tensor. Raises :class:`CheckpointUnusable` for damaged sources."""
        stored = [module.tensors[tensor.fqn] for module in self._modules]
        readers: list[BoxReader] = []
        for module, each in zip(self._modules, stored, strict=True):
            require_intact(module.root, each)
            readers.append(BoxReader(module.root, each))
        # Boxes are consecutive: each has complete inner dimensions.
        if tensor.dtype not in ORDINARY_FLOATS:
            position = -1 if self._integers == "last" else 0
            for box in boxes(tensor.shape):
                yield _bytes_of(readers[position].read(box))
            return
        wide = "F64" if tensor.dtype == "F64" else "F32"
        with np.errstate(over="ignore", invalid="ignore"):
            for box in boxes(tensor.shape):
                total: Array | None = None
                for reader, each, weight in zip(readers, stored, self._weights, strict=True):
                    bits = reader.read(box).reshape(-1)
                    values = cast(
                        bits.view(storage_dtype(each.dtype, DTYPE_BITS[each.dtype])),
                        each.dtype,
                        wide,
                    )
                    weighted = values.dtype.type(weight) * values
                    total = weighted if total is None else total + weighted
                assert total is not None, "there are two sources or more"
                yield _bytes_of(cast(total, wide, tensor.dtype))


def _bytes_of(values: Array) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
