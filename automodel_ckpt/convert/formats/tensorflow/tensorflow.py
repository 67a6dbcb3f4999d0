"""Checkpoints of TensorFlow: ``PREFIX.index`` and ``PREFIX.data-*``, read without TensorFlow. Imports no torch.

The index (``tensorflow_index.py``) has the byte range of each variable in a data file. Names are those of the
variables. A checkpoint of objects (``tf.train.Checkpoint``, Keras) adds ``/.ATTRIBUTES/VARIABLE_VALUE`` to each, which
is removed.
Variables of optimizers, counters and text are not part of the model.

The kernel of a dense layer is stored as [inputs, outputs], the transpose of torch's; it is not transposed here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from automodel_ckpt.base.units import others_text
from automodel_ckpt.checkpoint.files.safe_open import open_regular, read_safely
from automodel_ckpt.checkpoint.parts.slices import Tensor, nbytes_of, shape_fault, whole_tensor
from automodel_ckpt.checkpoint.sources.source import Source, unusable
from automodel_ckpt.checkpoint.tensors.difference import StoredTensors
from automodel_ckpt.convert.formats.files import check_regular_files, faults_of, names_in, reports
from automodel_ckpt.convert.formats.format import Format
from automodel_ckpt.convert.formats.tensorflow.tensorflow_index import (
    FOOTER_BYTES,
    MAX_INDEX_BYTES,
    Variable,
    is_index,
    read_index,
)

INDEX_SUFFIX = ".index"
_STATE_FILE = "checkpoint"
_MAX_STATE_BYTES = 1 << 20
_LATEST = re.compile(r'^model_checkpoint_path: "([^"\\]{1,1000})"$', re.MULTILINE)
_VALUE_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
# Variables that are not weights: those of tf.train.Checkpoint and Keras, of Estimators, and of BERT's own optimizer.
_OPTIMIZER = re.compile(
    r"(.*/\.OPTIMIZER_SLOT/.*|_?optimizer/.*|keras_api/.*|.*/(adam_[mv]|Adam(_1)?|Momentum|RMSProp(_1)?|Adagrad)"
    r"|save_counter|global_step|(.*/)?beta[12]_power|_CHECKPOINTABLE_OBJECT_GRAPH)",
    re.ASCII,
)


class TensorFlowCheckpoint(Format):
    """A directory with ``*.index`` and ``*.data-*``, or the index file of one of several checkpoints in a directory."""

    name = "a checkpoint of TensorFlow"

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        if path.is_file():
            return _is_index_file(path)
        names = names_in(path)
        indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
        return any(_has_data(name, names) and _is_index_file(path / name) for name in indexes)

    def open(self, path: Path, *, follow_links: bool = False) -> Source:
        """Describe the variables that do not belong to an optimizer. Links in the directory are not followed."""
        checkpoint = _Checkpoint(_index_of(path))
        model = {
            name: tensor
            for name, tensor in checkpoint.tensors.items()
            if not _OPTIMIZER.fullmatch(name)
        }
        num_others = len(checkpoint.tensors) - len(model)
        if not model:
            raise unusable(
                "there are no weights in this checkpoint", checkpoint.index, others_text(num_others)
            )
        notes, omitted = reports(num_others, checkpoint.num_values)
        root = checkpoint.index.parent
        return Source(root, root, model, notes=notes, omitted=omitted)

    def stored_tensors(self, path: Path) -> StoredTensors:
        checkpoint = _Checkpoint(_index_of(path))
        return StoredTensors(checkpoint.index.parent, checkpoint.tensors)


class _Checkpoint:
    """The content of one checkpoint: *tensors* by name, and the number of variables that are no tensors.

    Raises :class:`CheckpointUnusable` if the files are damaged, missing or links, or a variable is not stored whole.
    """

    def __init__(self, index: Path) -> None:
        self.index = index
        self.tensors: dict[str, Tensor] = {}
        self.num_values = 0
        with faults_of(index, "this index of TensorFlow cannot be read"):
            num_shards, variables = read_index(
                read_safely(index.parent, index.name, limit=MAX_INDEX_BYTES)
            )
        prefix = index.name.removesuffix(INDEX_SUFFIX)
        ends: dict[str, int] = {}
        for variable in variables:
            file = f"{prefix}.data-{variable.shard:05d}-of-{num_shards:05d}"
            ends[file] = max(variable.offset + variable.nbytes, ends.get(file, 0))
            name = variable.name.removesuffix(_VALUE_SUFFIX)
            if variable.dtype is None:
                self.num_values += 1
                continue
            if name in self.tensors:
                raise unusable("two variables have the same name", index, name)
            self.tensors[name] = _tensor(name, variable, variable.dtype, file, index)
        for file, end in ends.items():
            path = index.parent / file
            try:
                check_regular_files(index.parent, [file])
                nbytes = os.lstat(path).st_size
            except OSError as error:
                raise unusable(
                    "a data file of this checkpoint cannot be read", path, error.strerror
                ) from error
            if end > nbytes:
                raise unusable(
                    "a data file is truncated", path, f"{nbytes} bytes, the index refers to {end}"
                )


def _tensor(name: str, variable: Variable, dtype: str, file: str, index: Path) -> Tensor:
    if variable.partitioned:
        raise unusable(
            "this checkpoint has a partitioned variable, which is not read",
            index,
            name,
            "load it with TensorFlow, without a partitioner, and save it again",
        )
    fault = shape_fault(variable.shape)
    nbytes = 0 if fault else nbytes_of(dtype, variable.shape)
    if fault is None and nbytes != variable.nbytes:
        fault = f"{variable.nbytes} bytes for {dtype} {list(variable.shape)}"
    if fault is not None:
        raise unusable(f"the variable {name[:200]!r} is described wrongly", index, fault)
    return whole_tensor(name, dtype, variable.shape, file, variable.offset)


# ---------------------------------------------------------------- files


def _index_of(path: Path) -> Path:
    """Return the index file of *path*: itself, or the newest checkpoint of a directory.

    Raises :class:`CheckpointUnusable` if the directory has several checkpoints and does not name the newest.
    """
    if path.is_file():
        return Path(os.path.realpath(path))
    names = names_in(path)
    found = [name for name in names if name.endswith(INDEX_SUFFIX) and _has_data(name, names)]
    if len(found) > 1:
        latest = _latest(path)
        if latest not in found:
            raise unusable(
                "there are several checkpoints of TensorFlow in this directory",
                path,
                ", ".join(found[:5]),
                "name one of the .index files",
            )
        found = [latest]
    return path / found[0]


def _latest(directory: Path) -> str:
    """Return the name of the index file of the newest checkpoint, from the text file ``checkpoint``; or ``""``."""
    try:
        text = read_safely(directory, _STATE_FILE, limit=_MAX_STATE_BYTES).decode()
    except (OSError, ValueError):
        return ""
    match = _LATEST.search(text)
    # An absolute path is that of the machine that wrote it.
    return match[1].rpartition("/")[2] + INDEX_SUFFIX if match else ""


def _has_data(index: str, names: Iterable[str]) -> bool:
    prefix = index.removesuffix(INDEX_SUFFIX) + ".data-"
    return any(name.startswith(prefix) for name in names)


def _is_index_file(path: Path) -> bool:
    try:
        descriptor = open_regular(Path(os.path.realpath(path)))
    except OSError:
        return False
    try:
        size = os.fstat(descriptor).st_size
        return is_index(os.pread(descriptor, FOOTER_BYTES, max(size - FOOTER_BYTES, 0)))
    finally:
        os.close(descriptor)
