"""Uploads from several nodes, each with a part of the files: a checkpoint in the store is complete or absent."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.remote import child_process, parts
from automodel_ckpt.checkpoint.remote.background import LINK
from automodel_ckpt.checkpoint.remote.child_process import UploadLoop
from automodel_ckpt.checkpoint.remote.part_uploader import PartUploader
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.remote.uploader import Job, Uploader
from automodel_ckpt.checkpoint.run.links import link, pending
from automodel_ckpt.checkpoint.store.store import Store
from tests.support.runs.stored_runs import FIRST, SECOND, URL, write_run
from tests.support.servers.object_store import ObjectStore
from tests.unit.checkpoint.remote.test_remote import failing_after, is_sound

NUM_NODES = 3
MAX_FAILURES = 5


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(child_process, "_LONGEST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(child_process, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(parts, "LOOK_SECONDS", 0.1)


def divide(run: Path, base: Path, names: Sequence[str] = (SECOND,)) -> list[Path]:
    """Distribute the files of checkpoints of *run* over the directories of nodes; all get the manifests."""
    roots = [base / f"node-{number}" for number in range(NUM_NODES)]
    for root in roots:
        root.mkdir(parents=True)
    for name in names:
        files = list(Manifest.read(run / name).files)
        for number, root in enumerate(roots):
            for file in [*files[number::NUM_NODES], layout.MANIFEST]:
                (root / name / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(run / name / file, root / name / file)
        link(roots[0], LINK, name)
    return roots


def uploads(roots: list[Path], url: str, token: str, went_back_to: int = 0) -> list[UploadLoop]:
    """The uploading processes of a start of the run."""
    job = Job(
        url, {}, token, "val_loss", num_threads=2, went_back_to=went_back_to, num_nodes=NUM_NODES
    )
    loops: list[UploadLoop] = [Uploader(roots[0], job)]
    for number, root in enumerate(roots[1:], start=1):
        loops.append(PartUploader(root, Job(url, {}, token, node=number, num_threads=2)))
    return loops


def run_all(loops: list[UploadLoop], until: Callable[[], bool] | None = None) -> None:
    """Run the processes until all is uploaded, or *until* is true: then they are killed.

    Without *until*, repeated failures are an error: something is wrong that a repetition does not repair.
    """
    threads = [threading.Thread(target=loop.run) for loop in loops]
    for loop, thread in zip(loops, threads, strict=True):
        loop.finish()
        thread.start()
    failing: list[str] = []
    end = time.monotonic() + 60
    while any(thread.is_alive() for thread in threads):
        failing = [each.status.error for each in loops if each.status.failures > MAX_FAILURES]
        is_over = bool(failing) if until is None else until()
        if is_over or time.monotonic() > end:
            break
        time.sleep(0.005)
    has_ended = not any(thread.is_alive() for thread in threads)
    for loop in loops:
        loop.stop()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert has_ended or until is not None, failing or "the uploads do not end"


def check_all_uploaded(url: str, local: Path, roots: list[Path]) -> None:
    run = RemoteRun(Store(url))
    is_sound(run, local)
    assert [str(name) for name in run.names()] == [SECOND]
    assert run.pointed(layout.LATEST) == SECOND
    assert not [name for name in run.store.sizes() if layout.PARTS in name]
    assert not pending(roots[0], LINK)
    assert not [path for root in roots for path in root.glob(f"{LINK}*")]


def test_processes_that_are_killed_at_any_request_leave_no_incomplete_checkpoint(
    s3: ObjectStore, local: Path, tmp_path: Path
) -> None:
    roots = divide(local, tmp_path / "all")
    run_all(uploads(roots, URL, "first"))
    check_all_uploaded(URL, local, roots)
    num_requests = len(s3.requests)
    assert num_requests > 50
    attempts = [name for method, name in s3.requests if method == "PUT" and "request.json" in name]
    assert len(attempts) == 1, "the coordinator has not waited for the other nodes"
    points = range(num_requests) if os.environ.get("REMOTE_POINTS") else [num_requests // 2]
    for point in points:
        url = f"s3://bucket/runs/{point}"
        roots = divide(local, tmp_path / str(point))
        loops = uploads(roots, url, "first")
        s3.fault = failing_after(point)
        run_all(loops, until=lambda loops=loops: any(each.status.failures for each in loops))
        s3.fault = None
        is_sound(RemoteRun(Store(url)), local)
        run_all(uploads(roots, url, "second", went_back_to=20))
        check_all_uploaded(url, local, roots)


def test_files_of_an_abandoned_checkpoint_of_this_name_are_replaced(
    s3: ObjectStore, local: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write_run(other, seed=1)
    abandoned = divide(other, tmp_path / "abandoned")
    loops = uploads(abandoned, URL, "first")
    store = Store(URL)
    # The coordinator dies before the manifest. Then one dies that has uploaded everything.
    manifest = f"{SECOND}/{layout.MANIFEST}"

    def before_the_manifest(request: object) -> None:
        if getattr(request, "method", "") == "PUT" and getattr(request, "path", "").endswith(
            manifest
        ):
            raise ConnectionError("killed")

    s3.fault = before_the_manifest
    run_all(loops, until=lambda: loops[0].status.failures > 0)
    s3.fault = None
    assert store.sizes(SECOND) and RemoteRun(store).manifest(SECOND) is None
    for start, run in enumerate((other, local)):
        roots = divide(run, tmp_path / str(start))
        run_all(uploads(roots, URL, f"start-{start}"))
        check_all_uploaded(URL, run, roots)


def a_file_of(checkpoint: Path) -> Path:
    return next(
        path for path in checkpoint.rglob("*") if path.is_file() and path.name != layout.MANIFEST
    )


def test_a_damaged_part_is_reported_and_the_next_checkpoint_is_uploaded(
    local: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/store"
    roots = divide(local, tmp_path / "nodes", (FIRST, SECOND))
    damaged = a_file_of(roots[2] / SECOND)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    missing = a_file_of(roots[1] / FIRST)
    loops = uploads(roots, url, "start")
    run_all(loops, until=lambda: not pending(roots[0], LINK))
    run = RemoteRun(Store(url))
    assert [str(name) for name in run.names()] == [FIRST]
    said = capfd.readouterr().err
    assert f"warning: {SECOND} is not uploaded" in said and damaged.name in said
    # A file that no node has: the node that had it is not there any more.
    missing.unlink()
    link(roots[0], LINK, FIRST)
    run.store.delete([f"{FIRST}/{layout.MANIFEST}"])
    run_all(uploads(roots, url, "next"), until=lambda: not pending(roots[0], LINK))
    assert RemoteRun(Store(url)).newest() is None
    assert not [name for name in run.store.sizes() if layout.PARTS in name]
    assert f"no node has {missing.relative_to(roots[1] / FIRST)}" in capfd.readouterr().err


def test_a_process_of_an_earlier_start_uploads_nothing_for_a_later_one(
    local: Path, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store"
    roots = divide(local, tmp_path / "nodes")
    late = uploads(roots, url, "early")[1:]
    loops = [uploads(roots, url, "late")[0], *late]
    waited = []

    def has_waited() -> bool:
        waited.append(1)
        return len(waited) > 60

    run_all(loops, until=has_waited)
    run = RemoteRun(Store(url))
    assert run.newest() is None and pending(roots[0], LINK) == [SECOND]
    assert not [path for root in roots[1:] for path in root.glob(f"{LINK}*")]
