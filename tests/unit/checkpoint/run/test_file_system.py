"""The file system of a directory by the kernel's list of mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from automodel_ckpt.checkpoint.files import file_system
from automodel_ckpt.checkpoint.run import lease, shared_storage

MOUNTS = """\
20 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
21 20 0:40 / /data rw - nfs4 server:/data rw
22 21 0:41 / /data rw shared:1 - fuse.sshfs server:/home rw
23 20 0:42 / /data/with\\040a\\040space rw - xfs /dev/sdb1 rw
24 20 0:43 / /data/with rw - tmpfs
25 20 0:44 / /other
"""


@pytest.fixture(autouse=True)
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    listed = tmp_path / "mountinfo"
    listed.write_text(MOUNTS)
    monkeypatch.setattr(file_system, "_MOUNTS", listed)
    return listed


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/user", "ext4"),
        ("/data", "fuse.sshfs"),
        ("/data/run", "fuse.sshfs"),
        ("/database", "ext4"),
        ("/data/with a space/run", "xfs"),
        ("/data/with/run", "tmpfs"),
        ("/other/run", "ext4"),
    ],
)
def test_the_last_mount_on_the_longest_path_counts(path: str, kind: str) -> None:
    assert file_system.file_system_of(Path(path)) == kind


def test_without_a_list_of_mounts_the_file_system_is_unknown(mounts: Path) -> None:
    mounts.unlink()
    assert file_system.file_system_of(Path("/data")) is None
    assert lease._watch_seconds(Path("/data")) == lease.WATCH_SECONDS


@pytest.mark.parametrize("directory", ["/home/run", "/data/with/run"])
def test_no_start_waits_for_a_file_on_a_local_file_system(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_storage.time, "sleep", pytest.fail)
    assert not shared_storage._appears(Path(directory) / "created-on-another-node")


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", None])
def test_a_file_may_appear_late_on_another_file_system(
    kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "created-on-another-node"
    monkeypatch.setattr(shared_storage, "file_system_of", lambda directory: kind)
    monkeypatch.setattr(shared_storage, "_PATIENCE_SECONDS", 1000.0)
    monkeypatch.setattr(shared_storage.time, "sleep", lambda seconds: path.touch())
    assert shared_storage._appears(path)


def test_another_run_is_watched_for_longer_where_the_file_system_caches_its_lock_file() -> None:
    assert lease._watch_seconds(Path("/data/run")) == lease.CACHED_WATCH_SECONDS
    assert lease._watch_seconds(Path("/home/run")) == lease.WATCH_SECONDS
