"""Writing the files of an export: every way of writing gives the same bytes, and they are durable."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import consolidate
from tests.support.models.shards import cut, write_checkpoint

Patch = pytest.MonkeyPatch


def test_every_file_of_an_export_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    tensors = {"a": torch.randn(6, 4), "b": torch.ones(3)}
    pieces = [piece for name, value in tensors.items() for piece in cut(name, value, 2)]
    write_checkpoint(tmp_path / "c", tensors, pieces)
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(source: Any, target: Any, **more: Any) -> None:
        if Path(target).name == "consolidated":
            events.append("renamed")
        rename(source, target, **more)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    report = consolidate(tmp_path / "c")
    before = {*events[: events.index("renamed")]}
    written = {path.name for path in report.output.iterdir() if path.is_file()}
    assert any(name.endswith(".safetensors") for name in written)
    assert written <= before
    assert report.output.parent.name in events[events.index("renamed") :]
