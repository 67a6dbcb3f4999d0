"""``ckpt export --to zarr``: compressed arrays, one for each tensor."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from automodel_ckpt.cli.targets.target import CAST_DTYPE, Target, finish, log


def _run(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.convert.targets.zarr import export_zarr

    report = export_zarr(source, arguments.output, cast_dtype=arguments.cast_dtype, log=log)
    return finish(arguments, report)


TARGET = Target(
    "zarr",
    "a directory of arrays, compressed with zstd",
    "NAME-zarr next to the checkpoint",
    _run,
    (CAST_DTYPE,),
)
