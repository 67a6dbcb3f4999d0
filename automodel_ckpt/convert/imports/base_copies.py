"""Copies of the base's own weights in the file of an adapter. Imports no torch, and numpy only to compare values.

peft saves them beside adapters on an embedding or on the output layer, as ``<layer>.base_layer.weight``, and with
``save_embedding_layers`` (peft 0.21, ``get_peft_model_state_dict``). A copy that equals the base is not needed. One
that differs was resized or trained, so that the adapter does not belong to the base alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS, ORDINARY_FLOATS
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.sources.opening import MODEL
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.checkpoint.tensors.box_reader import BoxReader, boxes
from automodel_ckpt.convert.open import open_base
from automodel_ckpt.errors import CheckpointUnusable

_MAX_NAMED = 5


def check_copies(
    directory: Path,
    adapter: Tensors,
    copies: Iterable[str],
    base: Path,
    names: Mapping[str, Sequence[str]],
) -> None:
    """Raise :class:`CheckpointUnusable` unless the tensors *copies* of the *adapter* in *directory* equal the *base*.

    *names* maps them to names in the base's files, of which a tied tensor has several, and the files one or more. The
    base's values are rounded to the dtype of the copy first: peft saves the dtype that the base had during training.
    """
    stored = open_base(base).modules[MODEL]
    lines: list[str] = []
    for copy in sorted(copies):
        fault = difference(adapter.root, adapter.tensors[copy], stored, names[copy])
        if fault:
            lines.append(f"{copy[:200]}: {fault}")
    if lines:
        raise CheckpointUnusable(
            "the adapter's file has weights of the base that differ from the base",
            where=str(directory / layout.ADAPTER_MODEL),
            value="\n    " + "\n    ".join(lines[:_MAX_NAMED]),
            hint=f"{base} is not the base that it was trained on: name that one with --base; or the weights were "
            "resized or trained with the adapter: merge them in your own code (load the adapter with peft, "
            "merge_and_unload, save_pretrained), and import the result",
        )


def check_same(path: Path, root: Path, one: Tensor, other: Tensor) -> None:
    """Raise :class:`CheckpointUnusable` unless two tensors of the adapter's file *path* have equal values."""
    if difference(root, one, Tensors(root, {"": other}), [""]):
        raise CheckpointUnusable(
            "the adapter's file has two different copies of a module that was trained in full",
            where=str(path),
            value=f"{one.fqn[:200]}, {other.fqn[:200]}",
            hint="restore the file from another copy",
        )


def difference(root: Path, copy: Tensor, base: Tensors, names: Sequence[str]) -> str:
    """Return how the tensor *copy* differs from that of the base with one of the *names*; empty if it does not."""
    found = [base.tensors[name] for name in names if name in base.tensors]
    if not found:
        return f"the base has no {names[0]}"
    original = found[0]
    if copy.shape != original.shape:
        return f"in the file {list(copy.shape)}, in the base {list(original.shape)}"
    if not {copy.dtype, original.dtype} <= ORDINARY_FLOATS and copy.dtype != original.dtype:
        return f"in the file {copy.dtype}, in the base {original.dtype}"
    return "" if _is_equal(BoxReader(root, copy), copy, base.root, original) else "other values"


def _is_equal(reader: BoxReader, copy: Tensor, root: Path, original: Tensor) -> bool:
    import numpy as np

    from automodel_ckpt.checkpoint.tensors.float_cast import cast, storage_dtype

    other = BoxReader(root, original)
    for box in boxes(copy.shape):
        ours = reader.read(box)
        raw = other.read(box)
        if copy.dtype != original.dtype:
            source = storage_dtype(original.dtype, DTYPE_BITS[original.dtype])
            raw = cast(raw.view(source), original.dtype, copy.dtype).view(ours.dtype)
        if not np.array_equal(ours, raw):
            return False
    return True
