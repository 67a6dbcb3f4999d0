"""``ckpt average``: combine the weights of several checkpoints into one. Imports no torch.

Sources are whatever ``convert/open.py`` reads. The result is a complete checkpoint of weights in a run directory,
written and published in the same way as an import. Tensors are combined block by block, so that memory does not grow
with the model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from automodel_ckpt.base.units import counted, some_of
from automodel_ckpt.checkpoint.export.plan import make_plan
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import ORDINARY_FLOATS
from automodel_ckpt.checkpoint.files.safe_open import json_bytes, parse_json
from automodel_ckpt.checkpoint.files.type_aliases import FileDict, Files, Strings, ValueDict
from automodel_ckpt.checkpoint.jobs.jobs import Blocks
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.sources.model_files import ADAPTER_SIDE_FILES, read_files
from automodel_ckpt.checkpoint.sources.source import MODEL, BaseMaps, Tensors
from automodel_ckpt.checkpoint.state.model_config import CONFIG, config_changes
from automodel_ckpt.checkpoint.tensors.float_cast import cast
from automodel_ckpt.convert.formats.files import faults_of
from automodel_ckpt.convert.imports.new_checkpoint import NewCheckpoint, check_free
from automodel_ckpt.convert.imports.source_files import side_files_of, without_unused_code
from automodel_ckpt.convert.open import Weights, open_weights
from automodel_ckpt.convert.targets.tensor_blocks import tensor_blocks
from automodel_ckpt.errors import RecipeError, unusable

Integers = Literal["equal", "first", "last"]
_SHOWN = 5
_invalid = partial(RecipeError, hint="")
_ADAPTER_FILES = (layout.ADAPTER_CONFIG, layout.AUTOMODEL_PEFT_CONFIG, *ADAPTER_SIDE_FILES)


@dataclass(frozen=True)
class Average:
    """A planned average: the checkpoint to write, and its *sources* with their *weights*.

    *copied* names the tensors that differ and are copied from one source.
    """

    checkpoint: NewCheckpoint
    sources: Sequence[Path]
    weights: Sequence[float]
    copied: Sequence[str]
    notes: Sequence[str]


def last_checkpoints(run: Path, count: int) -> list[Path]:
    """Return the newest *count* complete checkpoints of a run directory, the oldest first.

    Raises :class:`CheckpointUnusable` if there are fewer.
    """
    found = [run / record.name for record in resume.records(run, "")]
    if len(found) < count:
        raise unusable(
            f"there are fewer than {count} complete checkpoints to average",
            run,
            counted(len(found), "checkpoint"),
            "average fewer, or keep more of them (checkpoint.keep_last)",
        )
    return found[:count][::-1]


def prepare(
    sources: Sequence[Path],
    run: Path,
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    integers: Integers = "equal",
    name: layout.CheckpointName | None = None,
) -> Average:
    """Open the sources, check that they can be averaged, and plan the checkpoint. Writes nothing.

    Args:
        sources: What is averaged, for *ema* in the order of training.
        run: The run directory of the result.
        weights: One weight per source, by default equal ones. They are divided by their sum.
        ema: The decay of an exponential moving average, instead of *weights*.
        integers: Tensors that cannot be averaged (integers, bool, 8-bit floats) must be ``equal``, or are copied from
            the ``first`` or ``last`` source.
        name: The name of the result, by default the name of the newest source that is a checkpoint of this program.

    Raises:
        RecipeError: The options contradict each other, or do not fit the number of sources.
        CheckpointUnusable: A source has no weights, or the sources differ.
    """
    shares = _shares(weights, ema, len(sources))
    opened = _opened(sources)
    modules = [weights_in.modules[MODEL] for weights_in in opened]
    copied = _different(modules, integers)
    side_files, notes = _side_files_and_notes(opened)
    lineage, newest = _lineage(opened, shares, ema)
    name = name or newest
    maps = BaseMaps(is_adapter=layout.ADAPTER_CONFIG in side_files)
    plan = make_plan(modules[0].tensors, {}, maps, where=str(sources[0]))
    check_free(run, name)
    copied_from = modules[-1 if integers == "last" else 0]

    def contents(tensor: Tensor) -> Blocks:
        """Return the data of *tensor*, which is computed while it is written."""
        blocks = partial(_mean, modules, shares, tensor)
        if tensor.dtype not in ORDINARY_FLOATS:
            stored = copied_from.tensors[tensor.fqn]
            blocks = partial(tensor_blocks, copied_from.root, stored, tensor.dtype)
        return Blocks(tensor.nbytes, blocks)

    checkpoint = NewCheckpoint(
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
        contents=contents,
        lineage=lineage,
    )
    return Average(checkpoint, [each.path for each in opened], shares, copied, notes)


def sources_in(average: Summary) -> list[str | None]:
    """Return the digests of the manifests of the checkpoints that an average was made from, None for other sources."""
    sources = average.lineage.get("averaged_from")
    return [
        source.get("manifest") if isinstance(source, dict) else None
        for source in (sources if isinstance(sources, list) else ())
    ]


def _shares(weights: Sequence[float] | None, ema: float | None, count: int) -> list[float]:
    """Return the weight of each of *count* sources. The weights sum to 1."""
    if count < 2:
        raise _invalid("at least two checkpoints are needed", "SOURCE", f"{count} given")
    if ema is not None:
        if weights is not None:
            raise _invalid("weights and a moving average exclude each other", "--ema", ema)
        if not 0 <= ema < 1:
            raise _invalid("the decay must be at least 0 and less than 1", "--ema", ema)
        # m_1 = x_1, m_i = ema * m_(i-1) + (1 - ema) * x_i, the oldest first.
        later = [(1 - ema) * ema ** (count - 1 - position) for position in range(1, count)]
        return [ema ** (count - 1), *later]
    weights = weights or [1.0] * count
    if len(weights) != count:
        raise _invalid(
            f"there must be one weight for each of the {count} sources",
            "--weights",
            counted(len(weights), "weight"),
        )
    total = math.fsum(weights)
    if not math.isfinite(total) or total <= 0 or min(weights) < 0:
        raise _invalid(
            "weights must be finite and not negative, and at least one must be positive",
            "--weights",
            weights,
        )
    return [weight / total for weight in weights]


def _opened(sources: Sequence[Path]) -> list[Weights]:
    """Open the sources. Raises :class:`CheckpointUnusable` if one has no model, or another one than the first."""
    opened = []
    for source in sources:
        weights_in = open_weights(source)
        if MODEL not in weights_in.modules:
            raise unusable(
                "this checkpoint has no module named 'model'",
                weights_in.path,
                ", ".join(weights_in.modules),
                "name the directory of one of its modules",
            )
        opened.append(weights_in)
        first, other = opened[0].modules[MODEL], weights_in.modules[MODEL]
        _check_consistent(first, other, opened[0].path, source)
    return opened


def _lineage(
    opened: Sequence[Weights], shares: Sequence[float], ema: float | None
) -> tuple[ValueDict, layout.CheckpointName]:
    """Describe the average for the manifest. Also return the name of the newest source that is a checkpoint."""
    lineage: ValueDict = {"averaged_from": []} | ({} if ema is None else {"average_ema": ema})
    names = [layout.CheckpointName(step=0, epoch=0)]
    for weights_in, share in zip(opened, shares, strict=True):
        lineage["averaged_from"].append({"path": str(weights_in.path), "weight": share})
        if weights_in.checkpoint is not None:
            summary = Summary.read(weights_in.checkpoint)
            lineage["averaged_from"][-1]["manifest"] = summary.digest
            names.append(layout.CheckpointName(step=summary.step, epoch=summary.epoch))
    return lineage, max(names)


def _left_out(opened: Sequence[Weights]) -> Strings:
    """Name what the sources contain in addition to the averaged weights."""
    names = []
    for weights_in in opened:
        names += [f"module {module}" for module in weights_in.modules if module != MODEL]
        names += weights_in.omitted
    return tuple(dict.fromkeys(names))


def _check_consistent(first: Tensors, other: Tensors, first_path: Path, other_path: Path) -> None:
    """Check that names, shapes and dtypes agree."""
    different = sorted(first.tensors.keys() ^ other.tensors.keys())
    what = f"tensors are only here, or only in {first_path}"
    if not different:
        what = f"a tensor has another dtype or shape than in {first_path}"
        for fqn, tensor in first.tensors.items():
            found = other.tensors[fqn]
            if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
                expected = f"{tensor.dtype} {list(tensor.shape)}"
                different.append(f"{fqn}: {found.dtype} {list(found.shape)}, not {expected}")
    if different:
        raise unusable(
            what,
            other_path,
            some_of(different, _SHOWN),
            "average checkpoints of the same model and dtype",
        )


def _different(modules: Sequence[Tensors], integers: Integers) -> list[str]:
    """Return the tensors that cannot be averaged and differ, if that is allowed.

    Packed weights of one source with the scales of all would be wrong without notice.
    """
    different = []
    for fqn, tensor in modules[0].tensors.items():
        if tensor.dtype in ORDINARY_FLOATS:
            continue
        blocks = [tensor_blocks(each.root, each.tensors[fqn], tensor.dtype) for each in modules]
        if any(block != group[0] for group in zip(*blocks, strict=True) for block in group[1:]):
            different.append(f"{fqn} ({tensor.dtype})")
    if different and integers == "equal":
        raise unusable(
            "tensors that cannot be averaged differ between the sources",
            modules[0].root,
            some_of(different, _SHOWN),
            "if they are counters or the like, copy those of one source: --integers first, or last",
        )
    return different


# ---------------------------------------------------------------- side files


def _side_files_and_notes(opened: Sequence[Weights]) -> tuple[FileDict, list[str]]:
    """Return the side files of the first source, and notes for the user.

    Raises :class:`CheckpointUnusable` if only some sources are adapters, or with other options or another base.
    """
    first = opened[0].path
    adapters = [_adapter_files(weights_in.path) for weights_in in opened]
    if any(adapters):
        expected = _adapter_options(first, adapters[0])
        for weights_in, files in zip(opened, adapters, strict=True):
            options = _adapter_options(weights_in.path, files)
            for key in sorted(options.keys() | expected.keys()):
                if options.get(key) != expected.get(key):
                    raise unusable(
                        f"the adapters differ in {key}",
                        weights_in.path,
                        f"{options.get(key)}, not {expected.get(key)}",
                        "merge each adapter into its base (`ckpt export --merge`), and average the results",
                    )
        note = (
            "the factors of the adapters are averaged, which is not the average of their products"
        )
        return adapters[0], [note]
    files = _side_files(first)
    config = _mapping(files.get(CONFIG), first)
    notes = []
    for path in (each.path for each in opened[1:]):
        found = _mapping(_side_files(path).get(CONFIG), path)
        changes = config_changes(found, config, there="there")
        if config and found and changes.function:
            notes.append(
                f"config.json of {path} describes a model that computes something else than {first}. The average "
                f"gets the config of {first}: {some_of(changes.function, _SHOWN)}"
            )
    return files, notes


def _side_files(path: Path) -> FileDict:
    if path.is_file():
        return without_unused_code(side_files_of(path.parent, path.parent))
    return side_files_of(path, path / MODEL if (path / MODEL).is_dir() else path)


def _mapping(content: bytes | None, where: Path) -> ValueDict:
    """Return the JSON mapping *content*. Empty without one. Raises :class:`CheckpointUnusable` if it is damaged."""
    with faults_of(where, "a file that describes the model is not a JSON mapping"):
        return dict(parse_json(content or b"{}"))


def _adapter_files(path: Path) -> FileDict:
    """Return the files that describe an adapter, and its tokenizer. Empty if *path* has no adapter."""
    model = path / MODEL
    for directory in (model / layout.HF_METADATA, path / layout.HF_METADATA, model, path):
        files = read_files(directory, _ADAPTER_FILES)
        if layout.ADAPTER_CONFIG not in files:
            continue
        record = _mapping(files.get(layout.AUTOMODEL_PEFT_CONFIG), directory)
        if isinstance(record.get("base"), dict):
            # It is the path from another run directory.
            record["base"]["relative_to_run"] = None
            files[layout.AUTOMODEL_PEFT_CONFIG] = json_bytes(record)
        return files
    return {}


def _adapter_options(path: Path, files: Files) -> ValueDict:
    """Return what decides the meaning of an adapter's tensors: its config, and the digest of its base."""
    base = _mapping(files.get(layout.AUTOMODEL_PEFT_CONFIG), path).get("base")
    options = _mapping(files.get(layout.ADAPTER_CONFIG), path)
    return {**options, "base": base.get("digest") if isinstance(base, dict) else None}


# ---------------------------------------------------------------- tensors


def _mean(
    modules: Sequence[Tensors], shares: Sequence[float], tensor: Tensor
) -> Iterator[memoryview]:
    """Yield the row-major bytes of the sum of each source's tensor times its weight, in float32 or float64.

    Raises :class:`CheckpointUnusable` for damaged sources.
    """
    number: Any
    wide, number = ("F64", np.float64) if tensor.dtype == "F64" else ("F32", np.float32)
    sources = [tensor_blocks(each.root, each.tensors[tensor.fqn], wide) for each in modules]
    with np.errstate(over="ignore", invalid="ignore"):
        for group in zip(*sources, strict=True):
            weighted = [
                number(share) * np.frombuffer(block, number)
                for block, share in zip(group, shares, strict=True)
            ]
            # Not a sum from 0 on, which would change -0.0.
            yield cast(functools.reduce(np.add, weighted), wide, tensor.dtype).view("u1").data
