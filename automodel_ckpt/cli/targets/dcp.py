"""``ckpt export --to dcp``: a directory for ``torch.distributed.checkpoint``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from automodel_ckpt.cli.targets.target import CAST_DTYPE, PREFIX, Target, finish, log, totals


def _run(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.convert.targets.dcp import export_dcp

    report = export_dcp(
        source,
        arguments.output,
        prefix=arguments.prefix or "",
        cast_dtype=arguments.cast_dtype,
        log=log,
    )
    text = totals(report.num_tensors, report.nbytes, report.seconds, report.checked)
    finish(arguments, report.output, f"wrote {text}")
    return {**asdict(report), "output": str(report.output)}


TARGET = Target(
    "dcp",
    "a directory for torch.distributed.checkpoint",
    "NAME-dcp next to the checkpoint",
    _run,
    (CAST_DTYPE, PREFIX),
)
