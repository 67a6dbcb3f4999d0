"""Weights in files of ``torch.save``: one file (.pt, .pth, .bin, .ckpt), or a directory with ``pytorch_model.bin``.

The pickle in such a file is read as a description (``torch_objects.py``): no code of it runs, whatever it contains. The
bytes of tensors are uncompressed at an offset in the file, so that a tensor is a slice of the file and is never copied.

The model is the state dict at the top level or under one of the usual keys. A training state of PyTorch Lightning, of
a plain training script, or of FSDP's full state dict has the model under such a key.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from automodel_ckpt.base.other_weights import is_torch_script
from automodel_ckpt.base.units import some_of
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.safe_open import open_regular, without_links
from automodel_ckpt.checkpoint.files.type_aliases import TextDict
from automodel_ckpt.checkpoint.files.weight_map import read_weight_map
from automodel_ckpt.checkpoint.parts.slices import Tensor, TensorMap, shape_fault, whole_tensor
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.formats.files import (
    BIN_FILE,
    BIN_INDEX,
    config_beside,
    faults_of,
    first_bytes,
    names_in,
    omitted_texts,
    tensors_by_file,
)
from automodel_ckpt.convert.formats.format import Format
from automodel_ckpt.convert.formats.nested_state import MODEL_KEYS, names_without_wrappers
from automodel_ckpt.convert.formats.torch.torch_objects import (
    Archive,
    Opaque,
    StoredView,
    describe_file,
    has_tensor,
    views_in,
)
from automodel_ckpt.convert.formats.unsupported_files import PICKLE, first_zip_entry
from automodel_ckpt.errors import CheckpointUnusable, unusable

# The second model and others that accelerate's save_state writes to one directory.
_OTHER_MODEL = re.compile(r"pytorch_model_[0-9]{1,6}\.bin", re.ASCII)
_MAX_NAMED = 5
LIGHTNING_VERSION = "pytorch-lightning_version"
"""The key in every file of PyTorch Lightning."""
_ROOT = Path("/")
_MAX_DEPTH = 32
# The elements of a tensor that is larger than its storage.
_MAX_REPEATED_ELEMENTS = 1 << 16
_TORCH_RECORDS = ("data.pkl", "byteorder", ".format_version", "version", ".storage_alignment")
_HEAD_BYTES = 512
# Keys of training states that look like a model and are not one, with what to do.
_PARTS = {
    "ds_version": (
        "a rank's file of DeepSpeed",
        "name the directory that the files of all ranks are in, or the directory with the file `latest`",
    ),
    "checkpoint_version": (
        "a rank's file of Megatron-LM",
        "convert it to Hugging Face files with Megatron Bridge, or tools/checkpoint/convert.py of Megatron-LM",
    ),
    "param_groups": (
        "the state of an optimizer, not a model",
        "use the file with the model's weights",
    ),
}


class TorchFile(Format):
    """A single file of ``torch.save``, in the zip format that PyTorch has written since 1.6."""

    name = "a file of torch.save"
    has_own_names = True

    def detect(self, path: Path) -> bool:
        # The name of the first entry shows that torch.save wrote the zip archive.
        entry = first_zip_entry(first_bytes(path, _HEAD_BYTES))
        return entry.rpartition("/")[2] in _TORCH_RECORDS

    def open(self, path: Path) -> Source:
        """Describe the model in the file. Symbolic links are followed: the user chose this file."""
        model = _read_below_root(path)
        omitted = omitted_texts(model.num_others, model.num_values)
        side_files = config_beside(path.parent)
        return Source(_ROOT, path.parent, model.tensors, omitted=omitted, side_files=side_files)

    def training_left(self, path: Path) -> str:
        try:
            value = read_archive(without_links(path)).value
        except CheckpointUnusable:
            return ""
        if not isinstance(value, dict) or not any(map(_is_optimizer, _states(value)[1].values())):
            return ""
        return "only the weights of a training script's file are read"


class TorchModelDirectory(Format):
    """A directory with ``pytorch_model.bin``, or with several such files and their index, as transformers 4 wrote."""

    name = "PyTorch files of transformers"

    def detect(self, path: Path) -> bool:
        names = names_in(path)
        has_model = BIN_FILE in names and not is_torch_script(path / BIN_FILE)
        return has_model or BIN_INDEX in names

    def open(self, path: Path) -> Source:
        """Describe the model. Raises :class:`CheckpointUnusable` if the files and their index disagree."""
        weight_map = read_weight_map(path / BIN_INDEX, follow_links=True)
        names = [BIN_FILE] if weight_map is None else sorted(set(weight_map.values()))
        models = {name: _read_below_root(path / name) for name in names}
        tensors, files = tensors_by_file(path, names, lambda name: models[name].tensors)
        for fqn, name in (weight_map or {}).items():
            if files.get(fqn) != name:
                raise unusable(
                    "the index names a tensor that is not in its file",
                    path / BIN_INDEX,
                    f"{fqn} ({name})",
                )
        omitted = omitted_texts(
            sum(model.num_others for model in models.values()),
            sum(model.num_values for model in models.values()),
        )
        others = [name for name in names_in(path) if _OTHER_MODEL.fullmatch(name)]
        if others:
            omitted = (*omitted, f"{some_of(others, _MAX_NAMED)} beside {BIN_FILE}")
        side_files = config_beside(path)
        return Source(_ROOT, path, tensors, omitted=omitted, side_files=side_files)


@dataclass(frozen=True)
class TorchModel:
    """The model in one file: its tensors by name, and the number of other tensors and of other values."""

    tensors: TensorMap
    num_others: int
    num_values: int


def _read_below_root(path: Path) -> TorchModel:
    """Describe the model in a file, behind links or not, as slices below the root of the file system."""
    real = without_links(path)
    return read_model(real, str(real.relative_to(_ROOT)))


def read_model(path: Path, file: str, *, start: int = 0, nbytes: int | None = None) -> TorchModel:
    """Describe the model in the file *path*, which is not a symbolic link, as slices of *file* below a root.

    If the model's file is packed in another one, *start* and *nbytes* are its byte range in *path*.
    Raises :class:`CheckpointUnusable` if the file is damaged, contains no model, or only a part of one.
    """
    archive = read_archive(path, start=start, nbytes=nbytes)
    with faults_of(path):
        return _model_of(archive, path, file)


def read_archive(path: Path, *, start: int = 0, nbytes: int | None = None) -> Archive:
    """Describe the object in the file *path*, which is not a symbolic link, or in a byte range of it.

    The storages of the archive are byte ranges of *path* in both cases.
    Raises :class:`CheckpointUnusable` if the file is missing or damaged.
    """
    with faults_of(path), os.fdopen(open_regular(path), "rb") as file:
        if os.pread(file.fileno(), 1, start) == b"\x80":
            PICKLE.open(path)  # raises an error with the command that converts it
        return describe_file(file.fileno(), start, nbytes)


def _model_of(archive: Archive, path: Path, file: str) -> TorchModel:
    value = archive.value
    if not isinstance(value, dict):
        kind = value.kind if isinstance(value, Opaque) else type(value).__name__
        raise _no_model(path, f"an object of the class {kind}")
    for key, (what, hint) in _PARTS.items():
        if key in value:
            raise unusable(f"this file is {what}", path, key, hint)
    state_dict, _ = _states(value)
    views = {}
    num_values = 0
    for name, item in _leaves(state_dict):
        if isinstance(item, StoredView):
            views[name] = item
        elif has_tensor(item):
            kind = item.kind if isinstance(item, Opaque) else type(item).__name__
            raise unusable(
                "a tensor of the model is of a class that is not read",
                path,
                f"{name[:200]}: {kind}",
                "save plain tensors (of a DTensor: .full_tensor(); of a quantized one: .dequantize())",
            )
        else:
            num_values += 1
    if not views:
        raise _no_model(path, "no tensors")
    num_all = len(set(map(id, views_in(value))))
    num_used = len(set(map(id, views.values())))
    if state_dict is not value:
        num_values += len(value) - 1
    plain = plain_names(value, list(views))
    tensors = {
        plain[name]: tensor_of_view(plain[name], view, archive, file)
        for name, view in views.items()
    }
    return TorchModel(tensors, num_all - num_used, num_values)


def _states(value: dict[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return the model's state dict in *value*, and the mapping that has it.

    It is the first usual key of *value*, or of the only mapping in it, under which there are tensors.
    """
    mappings = (item for item in value.values() if isinstance(item, dict))
    nested = [item for item in mappings if not _is_optimizer(item) and any(views_in(item))]
    for outer in (value, *(nested if len(nested) == 1 else ())):
        for key in MODEL_KEYS:
            found = outer.get(key)
            if isinstance(found, dict) and any(views_in(found)):
                inner = next(filter(found.__contains__, MODEL_KEYS), None)
                is_nested = inner is not None and isinstance(found[inner], dict)
                return (found[inner], {**found, **outer}) if is_nested else (found, outer)
    return value, value


def _is_optimizer(value: object) -> bool:
    """Return whether *value* is the state dict of an optimizer."""
    return isinstance(value, dict) and {"state", "param_groups"} <= value.keys()


def _leaves(mapping: dict[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a nested mapping, with the keys joined by dots, without the states of optimizers."""
    if depth > _MAX_DEPTH:
        raise Fault(f"its mappings are nested more than {_MAX_DEPTH} levels deep")
    for key, item in mapping.items():
        if isinstance(key, (Opaque, tuple, bytes)):
            raise Fault(f"a name of its model is not text: {type(key).__name__}")
        name = f"{prefix}{key}"
        # A lone surrogate would fail much later, when the name is written.
        if not name.isprintable():
            raise Fault(f"a name of its model is not printable: {name[:100]!r}")
        if _is_optimizer(item):
            continue
        if isinstance(item, dict) and item:
            yield from _leaves(item, f"{name}.", depth + 1)
        else:
            yield name, item


def is_text_name(name: object) -> bool:
    """Return whether *name* can be a tensor's name. A lone surrogate would fail much later, when it is written."""
    return isinstance(name, str) and name.isprintable()


def tensor_of_view(fqn: str, view: StoredView, archive: Archive, file: str) -> Tensor:
    """Return a tensor as a slice of *file*, with strides if its elements are not in row-major order there.

    Raises :class:`Fault` unless the elements of *view* are in the storage that the archive has.
    """
    begin, end = archive.storages.get(view.key, (0, 0))
    if end - begin != view.storage_bytes:
        raise Fault(
            f"the storage of {fqn[:100]!r} has {end - begin} bytes, not {view.storage_bytes}"
        )
    fault = shape_fault(view.shape)
    if fault:
        raise Fault(f"the tensor {fqn[:100]!r}: {fault}")
    bits = DTYPE_BITS[view.dtype]
    tensor = whole_tensor(fqn, view.dtype, view.shape, file, begin + view.offset * bits // 8)
    if not tensor.nbytes:
        return tensor
    # Strides are counts, never negative: the last index has the largest offset.
    last = view.offset
    for extent, stride in zip(view.shape, view.strides, strict=True):
        last += (extent - 1) * stride
    if (last + 1) * bits // 8 > view.storage_bytes:
        raise Fault(f"the tensor {fqn[:100]!r} ends after its storage")
    # Elements are repeated where a stride is 0: a small file could describe any number of them.
    num_elements = math.prod(view.shape)
    if tensor.nbytes > view.storage_bytes and num_elements > _MAX_REPEATED_ELEMENTS:
        raise Fault(
            f"the tensor {fqn[:100]!r} repeats the elements of a smaller one (it was saved expanded): "
            "save its .contiguous()"
        )
    if view.num_outer_dimensions == 0:
        return tensor
    (stored,) = tensor.slices
    return replace(tensor, slices=(replace(stored, strides=view.strides),))


def plain_names(value: dict[Any, Any], names: list[str]) -> TextDict:
    """Return {name in the file: name in the model}: without the names that wrappers and Lightning add.

    *value* is the object in the file.
    """
    plain = names_without_wrappers(names)
    attribute = attribute_prefix(list(plain.values())) if LIGHTNING_VERSION in value else ""
    return {name: plain[name].removeprefix(attribute) for name in names}


def attribute_prefix(names: Sequence[str]) -> str:
    """Return the attribute of a LightningModule that all *names* begin with, often ``model.``; else an empty text.

    A model of transformers has a prefix too (``model.``), but not for all tensors: its output layer has none.
    """
    attribute = names[0].partition(".")[0] + "."
    return attribute if all(name.startswith(attribute) for name in names) else ""


_no_model = partial(
    unusable,
    "there is no model in this file",
    hint="save model.state_dict(), at the top level or under the key state_dict",
)
