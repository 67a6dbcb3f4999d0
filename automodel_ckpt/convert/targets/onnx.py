"""A checkpoint's model as ONNX: a directory with model.onnx, config.json and the tokenizer.

The exporter loads Hugging Face files. A source that is none is verified and written as such first, inside of the
staging directory. Imports no torch: the exporter is passed in.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.export.files import Log, write_side_files
from automodel_ckpt.checkpoint.files.dtypes import ORDINARY_FLOATS, TORCH_NAMES
from automodel_ckpt.checkpoint.sources.model_files import base_files
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.targets.flow import Export, ExportReport
from automodel_ckpt.errors import CheckpointUnusable

MODEL_FILE = "model.onnx"
_WEIGHTS = ".weights"

Exporter = Callable[[Path, Path, str], str]
"""Writes the model in a directory of Hugging Face files as an .onnx file, in a dtype such as ``float32``. Returns what
its users must know."""


def write(export: Export, *, exporter: Exporter, num_threads: int = 5) -> ExportReport:
    """Export the model with *exporter*.

    Weights are float32 unless they are cast to fp16 or bf16: onnxruntime computes few operations in other types on a
    CPU.
    """
    cast_code = export.cast_code or "F32"
    opened = export.source
    export.required_config("exporting ONNX")
    export.directory("-onnx")
    with export.published_directory() as staging:
        files = _hugging_face_files(opened, staging / _WEIGHTS, num_threads, export.log)
        codes = [tensor.dtype for tensor in opened.tensors.values()]
        export.log_casts((code, cast_code) for code in codes if code in ORDINARY_FLOATS)
        export.log("exporting with torch; this can take minutes")
        note = exporter(files, staging / MODEL_FILE, TORCH_NAMES[cast_code])
        write_side_files(base_files(files), staging)
        shutil.rmtree(staging / _WEIGHTS, ignore_errors=True)
    if note:
        export.warn(note)
    return export.report(len(opened.tensors))


def _hugging_face_files(source: Source, directory: Path, num_threads: int, log: Log) -> Path:
    """Return a directory with the model as Hugging Face files: the source's, or *directory*, which is written.

    Raises :class:`CheckpointUnusable` if the files of the source do not have their digests.
    """
    if not source.finished or source.manifest is not None:
        consolidate(
            source.model_directory,
            directory,
            num_threads=num_threads,
            keep_dtypes=True,
            log=log,
            opener=lambda _: source,
        )
        return directory
    if source.export is not None:
        CheckpointUnusable.check(source.export.problems(num_threads=num_threads))
    return source.model_directory
