"""Files that an export reads are closed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from automodel_ckpt.checkpoint.export.consolidate import consolidate
from tests.support.models.shards import cut, write_checkpoint


def opened_below(directory: Path) -> list[str]:
    """What of a directory this process has open or mapped."""
    found = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(entry.path)
            if target.startswith(str(directory)):
                found.append(target)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(directory) in line:
            found.append(line)
    return found


def test_an_export_leaves_nothing_open(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(600, 40), "b": torch.ones(3)}
    pieces = [piece for name, value in tensors.items() for piece in cut(name, value, 3, dim=0)]
    write_checkpoint(tmp_path / "c", tensors, pieces)
    consolidate(tmp_path / "c")
    consolidate(tmp_path / "c", tmp_path / "cast", cast_dtype="bf16")
    assert opened_below(tmp_path) == []
