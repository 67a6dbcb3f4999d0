"""The file system of a directory by the kernel's list of mounts."""

from pathlib import Path

import pytest

from automodel_ckpt.base import durable_io

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
    monkeypatch.setattr(durable_io, "_MOUNTS", listed)
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
    assert durable_io.file_system_of(Path(path)) == kind
