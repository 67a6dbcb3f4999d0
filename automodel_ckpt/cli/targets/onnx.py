"""``ckpt export --to onnx``: a directory for onnxruntime."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from automodel_ckpt.cli.targets.target import (
    CAST_DTYPE,
    NUM_THREADS,
    Target,
    finish,
    log,
)


def _run(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.convert.targets.onnx import export_onnx
    from automodel_ckpt.models.onnx_export import export_to_onnx, require_onnx

    require_onnx()
    report = export_onnx(
        source,
        arguments.output,
        export_to_onnx,
        cast_dtype=arguments.cast_dtype,
        num_threads=arguments.num_threads,
        log=log,
    )
    return finish(arguments, report)


TARGET = Target(
    "onnx",
    "model.onnx for onnxruntime: language models, without a cache of keys and values; classifiers; embeddings",
    "NAME-onnx next to the checkpoint",
    _run,
    (CAST_DTYPE, NUM_THREADS),
)
