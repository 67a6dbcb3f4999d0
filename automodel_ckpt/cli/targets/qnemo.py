"""``ckpt export --to qnemo``: a checkpoint of TensorRT-LLM."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from automodel_ckpt.cli.common.arguments import number_at_least
from automodel_ckpt.cli.targets.target import CAST_DTYPE, FORCE, Option, Target, finish, log

TENSOR_PARALLEL = Option(
    "--tensor-parallel",
    "number of tensor-parallel ranks, each with its own file of weights (default: 1)",
    {"type": number_at_least(1), "default": 1, "metavar": "N"},
)
COMPRESS = Option(
    "--compress",
    "true: one .qnemo file; false: a directory (default: true)",
    {"choices": ("true", "false"), "default": "true"},
)


def _run(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.convert.targets.tensorrt_llm import export_tensorrt_llm

    report = export_tensorrt_llm(
        source,
        arguments.output,
        num_ranks=arguments.tensor_parallel,
        compress=arguments.compress == "true",
        cast_dtype=arguments.cast_dtype,
        overwrite=arguments.force,
        log=log,
    )
    return finish(arguments, report)


TARGET = Target(
    "qnemo",
    "a checkpoint of TensorRT-LLM: Llama and Mistral, not quantized",
    "NAME.qnemo next to the checkpoint",
    _run,
    (CAST_DTYPE, FORCE, TENSOR_PARALLEL, COMPRESS),
)
