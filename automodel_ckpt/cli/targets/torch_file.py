"""``ckpt export --to torch``: one state dict for ``torch.load``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from automodel_ckpt.cli.targets.target import (
    CAST_DTYPE,
    FORCE,
    PREFIX,
    Target,
    finish,
    log,
    totals,
)


def _run(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.convert.targets.torch_file import export_torch

    report = export_torch(
        source,
        arguments.output,
        prefix=arguments.prefix or "",
        cast_dtype=arguments.cast_dtype,
        overwrite=arguments.force,
        log=log,
    )
    text = totals(report.num_tensors, report.nbytes, report.seconds, report.checked)
    finish(arguments, report.output, f"wrote {text}")
    return {**asdict(report), "output": str(report.output)}


TARGET = Target(
    "torch",
    "one state dict for torch.load",
    "NAME.pt next to the checkpoint",
    _run,
    (CAST_DTYPE, FORCE, PREFIX),
)
