"""A checkpoint's model as an archive of named tensors: arrays of zarr (version 2), compressed with zstd. No torch.

The output is a directory with one array for each tensor, under the names of the Hugging Face files, and the model's
config and tokenizer. Written with tensorstore (the extra ``zarr``), some rows at a time.
"""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.export.export_leftovers import Log
from automodel_ckpt.checkpoint.export.files import cast_lines, side_files
from automodel_ckpt.checkpoint.export.plan import ExportTensor, parse_cast_dtype
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.parts.slices import Box
from automodel_ckpt.checkpoint.sources.base_maps import maps_of
from automodel_ckpt.convert.formats.nemo.zarr_arrays import DTYPES, load_tensorstore
from automodel_ckpt.convert.open import open_source
from automodel_ckpt.convert.publishing import published_directory
from automodel_ckpt.convert.targets.output_paths import directory_output, nbytes_below
from automodel_ckpt.convert.targets.report import ExportReport
from automodel_ckpt.convert.targets.source_checks import check_files, plan_in_stored_dtypes
from automodel_ckpt.errors import CheckpointUnusable

log_default = logging.getLogger("automodel_ckpt")

_SUFFIX = "-zarr"
_LEVEL = 3
_CHUNK_BYTES = 16 << 20


def export_zarr(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    cast_dtype: str | None = None,
    log: Log = log_default.info,
) -> ExportReport:
    """Write the model in *source* (anything that ``open_source`` of ``convert/open.py`` accepts) as arrays of zarr.

    *output* defaults to the source's name with ``-zarr``, next to it. Tensors keep the dtype of the checkpoint, unless
    *cast_dtype* (bf16, fp16, fp32, fp64) casts the floating-point ones.

    Raises :class:`CheckpointUnusable` for a damaged source and for a tensor that zarr cannot represent,
    :class:`SaveFailed` if the directory cannot be written, and :class:`RecipeError` for a wrong argument, or if
    tensorstore is not installed. In each case nothing was written.
    """
    started = time.monotonic()
    library = load_tensorstore("ckpt export --to zarr")
    cast_code = parse_cast_dtype(cast_dtype)
    opened = open_source(Path(source))
    target = directory_output(opened, output, _SUFFIX)
    check_files(opened)
    for text in opened.notes:
        log(f"warning: {text}")
    where = str(opened.model_directory)
    plan = plan_in_stored_dtypes(opened, cast_code)
    for text in cast_lines(plan.casts):
        log(text)
    tensors = [tensor for file in plan.files for tensor in file.tensors]
    for tensor in tensors:
        _check_writable(tensor, where)
    beside, _ = side_files(opened, plan, maps_of(opened))
    # The index of Hugging Face files, which are not written here.
    beside.pop(layout.HF_INDEX, None)
    with published_directory(target, log, what="the arrays of zarr") as directory:
        for name, content in beside.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(content)
        for tensor in tensors:
            _write(library, directory / tensor.fqn, opened.root, tensor)
    nbytes = nbytes_below(target)
    seconds = time.monotonic() - started
    return ExportReport(target, len(tensors), nbytes, seconds, opened.has_digests, opened.notes)


def _check_writable(tensor: ExportTensor, where: str) -> None:
    reason = layout.unsafe_path(tensor.fqn)
    if reason is None and "/" in tensor.fqn:
        reason = "its name contains a slash"
    if reason is None and tensor.dtype not in DTYPES.values():
        reason = f"zarr has no dtype {tensor.dtype}"
    if reason is None and 0 in tensor.stored.shape:
        reason = "it has no elements"
    if reason is not None:
        raise CheckpointUnusable(
            "a tensor cannot be written as an array of zarr",
            where=where,
            value=f"{tensor.fqn[:200]}: {reason}",
            hint="export another format, such as hf or torch",
        )


def _write(library: Any, path: Path, root: Path, tensor: ExportTensor) -> None:
    """Write one array: the rows of a chunk at a time. The stored bytes are compared with their digests first."""
    # Imported here: the command must answer --help without numpy.
    from automodel_ckpt.checkpoint.tensors.box_reader import BoxReader
    from automodel_ckpt.checkpoint.tensors.float_cast import cast, storage_dtype
    from automodel_ckpt.checkpoint.tensors.integrity import require_intact

    stored = tensor.stored
    require_intact(root, stored)
    reader = BoxReader(root, stored)
    stored_dtype = storage_dtype(stored.dtype, DTYPE_BITS[stored.dtype])
    name = next(name for name, code in DTYPES.items() if code == tensor.dtype)
    row_shape = stored.shape[1:]
    row_bytes = math.prod(row_shape) * DTYPE_BITS[tensor.dtype] // 8
    num_rows = stored.shape[0] if stored.shape else 1
    step = min(num_rows, max(1, _CHUNK_BYTES // row_bytes))
    array = library.open(_specification(path, name, stored.shape, step), create=True).result()
    numpy_dtype = array.dtype.numpy_dtype
    zeros = (0,) * len(row_shape)
    for first in range(0, num_rows, step):
        sizes = (min(step, num_rows - first), *row_shape) if stored.shape else ()
        offsets = (first, *zeros) if stored.shape else ()
        values = reader.read(Box(offsets, sizes)).reshape(-1).view(stored_dtype)
        converted = cast(values, stored.dtype, tensor.dtype).view(numpy_dtype).reshape(sizes)
        region = array[first : first + sizes[0]] if stored.shape else array
        region.write(converted).result()


def _specification(path: Path, dtype: str, shape: tuple[int, ...], step: int) -> dict[str, Any]:
    chunks = [step, *shape[1:]] if shape else []
    return {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(path)},
        "metadata": {
            "dtype": dtype,
            "shape": list(shape),
            "chunks": chunks,
            "compressor": {"id": "zstd", "level": _LEVEL},
            "fill_value": None,
        },
        # Without this, a chunk of zeros is not written.
        "store_data_equal_to_fill_value": True,
    }
