"""System calls may transfer fewer bytes than they are asked for, as on a network file system or after a signal."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from automodel_ckpt.checkpoint.files.durable_file import FileRecord, digest_of, file_record
from tests.support.checkpoints import is_intact
from tests.support.models import tiny

_MOST = 1000


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every positioned read and write transfer at most 1,000 bytes."""
    read, write = os.preadv, os.pwrite

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        (buffer,) = buffers
        return read(descriptor, [memoryview(buffer)[:_MOST]], offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, memoryview(data)[:_MOST], at))


@pytest.mark.usefixtures("short")
def test_all_bytes_of_a_file_are_digested(tmp_path: Path) -> None:
    data = os.urandom(2 * _MOST + 1)
    (tmp_path / "file").write_bytes(data)
    assert file_record(tmp_path / "file") == FileRecord(len(data), digest_of(data))


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "options", [{}, {"model_save_format": "torch_save"}, {"model_layout": "hf"}]
)
def test_what_is_written_and_read_in_short_transfers_is_whole(
    tmp_path: Path, options: dict[str, str]
) -> None:
    made = tiny.recipe(seed=1)
    made.model.register_buffer("large", torch.arange(5000.0))
    tiny.train(made)
    path = tiny.save(tmp_path, made, **options).path
    assert is_intact(path, deep=True)
    other = tiny.recipe(seed=2)
    other.model.register_buffer("large", torch.zeros(5000))
    assert tiny.load(tmp_path, other) is not None
    tiny.assert_equal_state(made, other)
