"""Two runs in one directory: the second is refused, a dead one's place is taken."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.checkpoint.files.layout import LOCK_FILE
from automodel_ckpt.checkpoint.run import lease
from automodel_ckpt.checkpoint.run.lease import Lease
from automodel_ckpt.errors import LeaseLost, RecipeError

HOLD = """
import sys, time
from pathlib import Path
from automodel_ckpt.checkpoint.run.lease import Lease
lease = Lease(Path(sys.argv[1]))
print("held", flush=True)
if len(sys.argv) > 2:
    import os
    if os.fork() == 0:
        print("forked", flush=True)
        time.sleep(60)
time.sleep(60)
"""


def holder(root: Path, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_second_run_is_rejected_until_the_first_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = holder(tmp_path)
    try:
        with pytest.raises(RecipeError, match=f"process {first.pid} on .*, running -c") as caught:
            Lease(tmp_path)
        assert caught.value.exit_code == 2
    finally:
        end(first)
    # Its place is taken immediately.
    monkeypatch.delattr(lease, "is_beating")
    taken = Lease(tmp_path)
    assert taken.taken_over is not None
    taken.release()


def test_a_worker_forked_by_the_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    first = holder(tmp_path, "fork")
    assert first.stdout is not None and first.stdout.readline() == "forked\n"
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    Lease(tmp_path).release()
    end(first)


def test_a_clean_end_leaves_no_file(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    held = Lease(tmp_path)
    assert (tmp_path / LOCK_FILE).exists()
    held.release()
    held.release()
    assert list(tmp_path.iterdir()) == []
    assert os.listdir("/proc/self/fd") == before


def elsewhere(root: Path, beat: int, **fields: Any) -> None:
    """Write the lock file as a run does whose locks are not shared with this process: another node, another mount."""
    content = {
        "host": "node7",
        "boot_id": "another",
        "pid": 1,
        "command": "ckpt-train x.yaml",
        "beat": beat,
    }
    new = root / "new"
    new.write_text(json.dumps(content | fields).ljust(2048))
    new.rename(
        root / LOCK_FILE
    )  # what a reader's open descriptor shows stays as it was, like a mount's cache


OTHER_MOUNT = {
    "boot_id": lease.kernel_boot_id(),
    "pid": os.getpid(),
    "device": 1,
    "file_system_id": 1,
}
"""A run of this node that has the directory through another mount."""
SAME_NUMBERS = {"device": 0, "file_system_id": 0}
"""A run of another node whose file system happens to have the numbers of this one's."""


@pytest.mark.parametrize(
    "fields", [SAME_NUMBERS, OTHER_MOUNT], ids=["another node", "another mount"]
)
def test_a_run_elsewhere_whose_heart_beats_is_respected(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    if fields is SAME_NUMBERS:
        fields = {"device": os.stat(tmp_path).st_dev, "file_system_id": os.statvfs(tmp_path).f_fsid}
    elsewhere(tmp_path, 1, **fields)
    beat = threading.Timer(0.2, elsewhere, (tmp_path, 2), fields)
    beat.start()
    with pytest.raises(RecipeError, match=r"process \d+ on node7"):
        Lease(tmp_path, watch_seconds=5)
    beat.join()


def test_a_run_elsewhere_that_is_dead_is_taken_over(tmp_path: Path) -> None:
    elsewhere(tmp_path, 1)
    started = time.monotonic()
    held = Lease(tmp_path, watch_seconds=0.3)
    assert time.monotonic() - started > 0.3
    assert held.taken_over is not None and held.taken_over.host == "node7"
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_a_run_on_another_mount_whose_process_is_gone_is_taken_over_immediately(
    tmp_path: Path,
) -> None:
    ended = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True)
    fields = {
        **OTHER_MOUNT,
        "pid": int(ended.stdout),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
    }
    elsewhere(tmp_path, 1, **fields)
    Lease(tmp_path, watch_seconds=60).release()


def test_a_run_that_lost_its_lease_says_who_has_it_and_leaves_that_ones_file_alone(
    tmp_path: Path,
) -> None:
    held = Lease(tmp_path, beat_seconds=0.02)
    held.check()
    elsewhere(tmp_path, 1, token="theirs")
    theirs, end = (tmp_path / LOCK_FILE).read_bytes(), time.monotonic() + 60
    while not held.is_lost and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(LeaseLost, match="another run has taken over") as caught:
        held.check()
    assert caught.value.exit_code == 4 and "process 1 on node7" in str(caught.value)
    held.release()
    assert (tmp_path / LOCK_FILE).read_bytes() == theirs


def test_a_run_whose_lock_file_was_removed_does_not_hold_the_directory(tmp_path: Path) -> None:
    held = Lease(tmp_path)
    record = (tmp_path / LOCK_FILE).read_bytes()
    (tmp_path / LOCK_FILE).unlink()
    with pytest.raises(LeaseLost, match="its lock file was removed"):
        held.check()
    Lease(tmp_path).release()  # a run that has ended since
    with pytest.raises(LeaseLost):
        held.check()
    (tmp_path / LOCK_FILE).write_bytes(record)  # restored from a backup
    with pytest.raises(LeaseLost):
        held.check()
    held.release()


def test_where_there_are_no_locks_the_beat_alone_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    Lease(tmp_path, watch_seconds=0.3).release()
    alive = Lease(tmp_path, beat_seconds=0.05)
    with pytest.raises(RecipeError, match="this process uses this directory already"):
        Lease(tmp_path, watch_seconds=5)
    alive.release()


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\x00 nonsense",
        b"",
        b"[]",
        b'{"host": 1, "boot_id": "", "pid": 2, "command": "", "beat": 0}',
    ],
)
def test_a_lock_file_of_any_other_content_is_no_obstacle(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK_FILE).write_bytes(content)
    Lease(tmp_path).release()


@pytest.mark.parametrize("kind", ["pipe", "link", "directory"])
def test_a_lock_file_that_is_no_regular_file_is_rejected_and_kept(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / LOCK_FILE
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    with pytest.raises(RecipeError, match="lock file of this directory is not a regular file"):
        Lease(tmp_path)
    assert os.listdir(tmp_path) == [LOCK_FILE]
