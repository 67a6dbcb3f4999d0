"""Files that a checkpoint names are opened only if they are regular files below its directory."""

import errno
import os
import stat
from pathlib import Path

import pytest

from automodel_ckpt.checkpoint.files import safe_open
from automodel_ckpt.checkpoint.files.safe_open import (
    SPARSE_FROM_BYTES,
    is_sparse,
    open_regular,
    open_safely,
    read_model_file,
    read_safely,
)


def test_a_file_behind_a_linked_directory_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("real")
    assert read_safely(tmp_path, "real/file") == b"content"
    for path in ("link/file", "link"):
        with pytest.raises(OSError, match="symbolic link") as caught:
            open_safely(tmp_path, path)
        assert caught.value.errno == errno.ELOOP and "link" in str(caught.value.filename)


def test_pipes_and_directories_are_not_even_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    opened: list[object] = []
    monkeypatch.setattr(safe_open.os, "open", lambda path, *_: opened.append(path))
    for name, code in (("pipe", errno.EINVAL), ("directory", errno.EINVAL), ("link", errno.ELOOP)):
        with pytest.raises(OSError, match=name) as caught:
            open_regular(tmp_path / name)
        assert caught.value.errno == code and caught.value.filename == str(tmp_path / name)
    assert opened == []


def test_what_takes_the_place_of_a_file_after_the_check_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    os.mkfifo(tmp_path / "pipe")
    status = os.lstat(tmp_path / "file")
    monkeypatch.setattr(safe_open.os, "lstat", lambda _: status)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "pipe")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_as_large_as_the_limit_is_read_and_a_larger_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_safely(tmp_path, "file", limit=5) == b"12345"
    with pytest.raises(OSError, match="5 bytes exceed the limit"):
        read_safely(tmp_path, "file", limit=4)


def status_of(size: int, bytes_on_disk: int) -> os.stat_result:
    """The status of a regular file of *size* bytes."""
    fields = [stat.S_IFREG, 0, 0, 1, 0, 0, size, 0, 0, 0]
    return os.stat_result(fields, {"st_blocks": bytes_on_disk // 512})


def test_only_a_large_file_with_less_than_a_64th_of_its_bytes_on_disk_is_sparse() -> None:
    large = 2 * SPARSE_FROM_BYTES
    assert is_sparse(status_of(large, large // 64 - 512))
    assert not is_sparse(status_of(large, large // 64))
    assert not is_sparse(status_of(large, large))
    assert is_sparse(status_of(SPARSE_FROM_BYTES + 512, 0))
    assert not is_sparse(status_of(SPARSE_FROM_BYTES, 0))


SNAPSHOT = "hub/models--a--b/snapshots/commit"


@pytest.mark.parametrize(
    ("model", "target", "is_read"),
    [
        ("model", "model/tokenizer/vocab.txt", True),
        ("model", "model/.git/config", False),
        ("model", "id_rsa", False),
        ("model", "hub/models--a--b/blobs/digest", False),
        (SNAPSHOT, f"{SNAPSHOT}/tokenizer/vocab.txt", True),
        (SNAPSHOT, "hub/models--a--b/blobs/digest", True),
        (SNAPSHOT, "hub/models--a--b/refs/main", False),
        (SNAPSHOT, "hub/models--a--other/blobs/digest", False),
        ("hub/models--a--b/copies/commit", "hub/models--a--b/blobs/digest", False),
    ],
)
def test_links_of_a_model_lead_to_its_own_files_and_blobs(
    tmp_path: Path, model: str, target: str, is_read: bool
) -> None:
    for path in (tmp_path / target, tmp_path / model / "file"):
        path.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / target).write_text("content")
    path.symlink_to(os.path.relpath(tmp_path / target, path.parent))
    if is_read:
        assert read_model_file(tmp_path / model, "file") == b"content"
    else:
        with pytest.raises(OSError, match="file") as caught:
            read_model_file(tmp_path / model, "file")
        assert caught.value.errno == errno.ELOOP
