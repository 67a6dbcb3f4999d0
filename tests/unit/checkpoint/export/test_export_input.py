"""Files that an export reads are closed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch

from automodel_ckpt.checkpoint.export import copy_engine
from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.export.copy_engine import Inputs
from automodel_ckpt.errors import CheckpointUnusable
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


def test_few_files_are_open_at_a_time_and_none_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_engine, "_MAX_OPEN", 3)
    for number in range(6):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 5000)
    inputs = Inputs(tmp_path)
    memory = memoryview(bytearray(5000))
    for number in (0, 1, 2, 0, 3, 4, 5, 1):
        inputs.read(str(number), 0, memory)
        assert bytes(memory) == bytes([number]) * 5000
        assert len(opened_below(tmp_path)) <= 6
    # The files that were read last are the ones that stay open.
    still = {Path(name).name for name in opened_below(tmp_path) if "/" in name[:1]}
    assert still == {"4", "5", "1"}
    with pytest.raises(CheckpointUnusable, match="the file ends here"):
        inputs.read("1", 4000, memory)
    inputs.close()
    assert opened_below(tmp_path) == []


def test_an_export_leaves_nothing_open(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(600, 40), "b": torch.ones(3)}
    pieces = [piece for name, value in tensors.items() for piece in cut(name, value, 3, dim=0)]
    write_checkpoint(tmp_path / "c", tensors, pieces)
    consolidate(tmp_path / "c")
    consolidate(tmp_path / "c", tmp_path / "cast", cast_dtype="bf16")
    assert opened_below(tmp_path) == []
