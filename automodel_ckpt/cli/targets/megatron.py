"""``ckpt export --to megatron``: a distributed checkpoint for Megatron-Core and Megatron-LM."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from automodel_ckpt.cli.targets.target import (
    CAST_DTYPE,
    NUM_THREADS,
    Option,
    Target,
    finish,
    log,
)

VOCABULARY_MULTIPLE = Option(
    "--vocabulary-multiple",
    "pad the rows of the embedding and the output layer with zeros to a multiple of N (default: 1, no padding)",
    {"type": int, "default": 1, "metavar": "N"},
)


def _run(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.convert.targets.megatron import export_megatron

    report = export_megatron(
        source,
        arguments.output,
        vocabulary_multiple=arguments.vocabulary_multiple,
        cast_dtype=arguments.cast_dtype,
        num_threads=arguments.num_threads,
        log=log,
    )
    return finish(arguments, report)


TARGET = Target(
    "megatron",
    "a distributed checkpoint (torch_dist) for Megatron-Core",
    "NAME-megatron next to the checkpoint",
    _run,
    (CAST_DTYPE, NUM_THREADS, VOCABULARY_MULTIPLE),
)
