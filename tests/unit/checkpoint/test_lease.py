"""Two runs in one directory: the second is refused, a dead one's place is taken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from automodel_ckpt.checkpoint.run import lease
from automodel_ckpt.checkpoint.run.lease import LOCK_FILE, Lease, release_all
from automodel_ckpt.errors import RecipeError

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
        [sys.executable, "-c", HOLD, str(root), *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_second_run_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    first = holder(tmp_path)
    try:
        with pytest.raises(RecipeError, match=f"process {first.pid} on .*, running -c") as caught:
            Lease(tmp_path)
        assert caught.value.exit_code == 2
    finally:
        end(first)


def test_a_killed_runs_place_is_taken_at_once(tmp_path: Path) -> None:
    end(holder(tmp_path))
    started = time.monotonic()
    taken = Lease(tmp_path)
    assert time.monotonic() - started < 1 and taken.taken_over
    taken.release()


def test_a_worker_forked_by_the_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    first = holder(tmp_path, "fork")
    assert first.stdout is not None and first.stdout.readline() == "forked\n"
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    Lease(tmp_path).release()
    end(first)


def test_a_process_told_to_stop_while_it_takes_the_place_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told_to_stop(lease: Lease) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Lease, "_beat", told_to_stop)
        with pytest.raises(KeyboardInterrupt):
            Lease(tmp_path)
    assert (tmp_path / LOCK_FILE).exists()
    release_all()
    assert not (tmp_path / LOCK_FILE).exists()
    Lease(tmp_path).release()


def test_a_clean_end_leaves_no_file(tmp_path: Path) -> None:
    held = Lease(tmp_path)
    assert (tmp_path / LOCK_FILE).exists()
    held.release()
    held.release()
    assert list(tmp_path.iterdir()) == []


def elsewhere(root: Path, beat: int) -> None:
    """The lock file as a run on another machine leaves it, where locks are not shared."""
    content = {"host": "node7", "boot_id": "another", "pid": 1, "command": "ckpt-train x.yaml", "beat": beat}
    (root / LOCK_FILE).write_text(json.dumps(content).ljust(1024))


def test_a_run_elsewhere_whose_heart_beats_is_respected(tmp_path: Path) -> None:
    elsewhere(tmp_path, 1)
    beat = threading.Timer(0.3, elsewhere, (tmp_path, 2))
    beat.start()
    with pytest.raises(RecipeError, match="process 1 on node7"):
        Lease(tmp_path, watch_seconds=5)
    beat.join()


def test_a_run_elsewhere_that_is_dead_is_taken_over(tmp_path: Path) -> None:
    elsewhere(tmp_path, 1)
    held = Lease(tmp_path, watch_seconds=0.5)
    assert held.taken_over["host"] == "node7"
    held.release()


def test_the_holders_heart_beats(tmp_path: Path) -> None:
    held = Lease(tmp_path, beat_seconds=0.05)
    before, end = json.loads((tmp_path / LOCK_FILE).read_text())["beat"], time.monotonic() + 20
    while json.loads((tmp_path / LOCK_FILE).read_text())["beat"] == before and time.monotonic() < end:
        time.sleep(0.01)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["beat"] > before
    held.release()


def test_where_there_are_no_locks_the_beat_alone_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(lease.errno.EOPNOTSUPP, "no locks")

    monkeypatch.setattr(lease.fcntl, "flock", unsupported)
    Lease(tmp_path, watch_seconds=0.3).release()
    alive = Lease(tmp_path, beat_seconds=0.05)
    with pytest.raises(RecipeError, match="another run is alive"):
        Lease(tmp_path, watch_seconds=5)
    alive.release()


def test_a_lock_file_of_any_other_content_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_bytes(b"\xff\x00 nonsense")
    Lease(tmp_path).release()
