"""``ckpt export --to compressed-tensors``: Hugging Face files with quantized linear layers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from automodel_ckpt.cli.targets.target import CAST_DTYPE, Option, Target, finish, log
from automodel_ckpt.errors import RecipeError

SCHEME = Option(
    "--scheme",
    "W8A8 (int8), W8A16 or W4A16 (integers, a scale per 128 columns), or FP8_DYNAMIC",
    {"metavar": "S"},
)


def _run(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.convert.targets.compressed_tensors import (
        SCHEMES,
        export_compressed_tensors,
    )

    if arguments.scheme not in SCHEMES:
        raise RecipeError(
            "compressed-tensors needs a scheme of quantization",
            where="ckpt export --scheme",
            value=arguments.scheme,
            hint=f"one of {', '.join(SCHEMES)}",
        )
    from automodel_ckpt.models.inspect.linear_weights import linear_weights

    report = export_compressed_tensors(
        source,
        arguments.output,
        arguments.scheme,
        linear_weights,
        cast_dtype=arguments.cast_dtype,
        log=log,
    )
    return finish(arguments, report, f"{report.num_quantized} of them quantized")


TARGET = Target(
    "compressed-tensors",
    "Hugging Face files with quantized linear layers, for vLLM and transformers",
    "NAME-SCHEME next to the checkpoint",
    _run,
    (SCHEME, CAST_DTYPE),
)
