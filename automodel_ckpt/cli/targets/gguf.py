"""``ckpt export --to gguf``: one file for llama.cpp."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from automodel_ckpt.cli.targets.target import (
    CAST_DTYPE,
    FORCE,
    NUM_THREADS,
    Option,
    Target,
    finish,
    log,
)

TYPE = Option(
    "--type",
    "type of the tensors: F32, F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1 or Q4_0 (default: as stored)",
    {"metavar": "KIND"},
)


def _run(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.checkpoint.export.next_steps import gguf_lines
    from automodel_ckpt.convert.targets.gguf import export_gguf, write_modelfile

    report = export_gguf(
        source,
        arguments.output,
        cast_dtype=arguments.cast_dtype,
        tensor_type=arguments.type,
        overwrite=arguments.force,
        num_threads=arguments.num_threads,
        log=log,
    )
    kinds = ", ".join(f"{count} {name}" for name, count in report.kinds.items())
    document = finish(arguments, report, kinds)
    for line in gguf_lines(report.output, write_modelfile(report.output)):
        log(line)
    return document


TARGET = Target(
    "gguf",
    "one file for llama.cpp: Llama, Mistral, Qwen 2 and 3, SmolLM, Gemma 2 and 3",
    "NAME.gguf next to the checkpoint",
    _run,
    (CAST_DTYPE, TYPE, NUM_THREADS, FORCE),
)
