"""Checkpoints in an object store: complete or absent, whatever fails, against an S3 server on this machine."""

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from werkzeug.wrappers import Request, Response

from automodel_ckpt.base.store_url import check_library, check_url
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.options import RemoteStorage
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.remote import background, child_process
from automodel_ckpt.checkpoint.remote.child_process import Status
from automodel_ckpt.checkpoint.remote.pull import pull_checkpoint
from automodel_ckpt.checkpoint.remote.push import push_checkpoint
from automodel_ckpt.checkpoint.remote.retention import prune
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.run import notes
from automodel_ckpt.checkpoint.run.links import pending
from automodel_ckpt.checkpoint.run.resume import KeepPolicy
from automodel_ckpt.checkpoint.store import transfer
from automodel_ckpt.checkpoint.store.store import Store, StoreError
from automodel_ckpt.checkpoint.store.transfer import Throttle, UploadMemory
from automodel_ckpt.errors import CheckpointUnusable, LeaseLost, RecipeError, SaveFailed
from tests.support.models import tiny
from tests.support.runs.idle_process import use_idle_processes
from tests.support.runs.stored_runs import FIRST, SECOND, URL
from tests.support.servers.object_store import ObjectStore


def failing_after(count: int, status: int = 400) -> Any:
    """The first *count* requests succeed, all others fail: a store that dies, or a client that is killed."""
    left = [count]

    def fault(request: Request) -> Response | None:
        left[0] -= 1
        return None if left[0] >= 0 else Response("<Error><Code>Dead</Code></Error>", status)

    return fault


def is_sound(run: RemoteRun, root: Path) -> None:
    """Each checkpoint with a manifest, and each that a pointer names, is complete and has the right bytes."""
    named = {run.pointed(pointer) for pointer in layout.POINTERS} - {None}
    complete = [str(name) for name in run.names() if run.manifest(str(name)) is not None]
    assert named <= set(complete)
    for name in complete:
        manifest = Manifest.read(root / name)
        assert run.manifest(name) == (root / name / layout.MANIFEST).read_bytes()
        for file in manifest.files:
            assert run.store.read(f"{name}/{file}") == (root / name / file).read_bytes()


def test_a_checkpoint_comes_back_as_it_was(s3: ObjectStore, local: Path, tmp_path: Path) -> None:
    run = RemoteRun(Store(URL))
    for name in (FIRST, SECOND):
        assert push_checkpoint(run, local / name, tmp_path / "memory") > 0
        run.point("val_loss", "min")
    # A listing shows that all files have arrived, and not a request for each.
    assert not [path for method, path in s3.requests if method == "HEAD" and "/model/" in path]
    assert push_checkpoint(run, local / SECOND, tmp_path / "memory") == 0
    is_sound(run, local)
    newest = run.newest()
    assert newest is not None and str(newest.name) == SECOND == run.pointed("LATEST")
    pulled = pull_checkpoint(run, SECOND, tmp_path)
    assert verify(pulled, Manifest.read(pulled)) == []
    assert (pulled / layout.MANIFEST).read_bytes() == (
        local / SECOND / layout.MANIFEST
    ).read_bytes()
    assert prune(run, KeepPolicy(last=1), "val_loss") == [FIRST]
    assert not any(name.startswith(FIRST) for name in run.store.sizes())
    with pytest.raises(ValueError, match="referenced"):
        run.withdraw(SECOND)


def test_a_download_that_is_stopped_ends_soon_and_leaves_nothing(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RemoteRun(Store(f"file://{tmp_path}/store"))
    push_checkpoint(run, local / FIRST, tmp_path / "memory")
    root = tmp_path / "run"
    root.mkdir()
    stopping, released = threading.Event(), threading.Event()
    stream = Store.stream

    def slow(store: Store, name: str, write: Any) -> None:
        if name.endswith("MANIFEST.json"):
            stream(store, name, write)
            return
        # The request of another file is in progress.
        stopping.set()
        released.wait(60)
        stream(store, name, write)

    monkeypatch.setattr(Store, "stream", slow)
    try:
        with pytest.raises(InterruptedError, match="the download was stopped"):
            pull_checkpoint(run, FIRST, root, stopping=stopping)
    finally:
        released.set()
    assert list(root.iterdir()) == []


def test_a_store_that_dies_at_any_request_has_no_incomplete_checkpoint(
    s3: ObjectStore, local: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Uploads, publishes, points, and removes, with the store dead from the Nth request on; then again without."""

    def everything(url: str) -> None:
        run = RemoteRun(Store(url))
        run.take_over()
        for name in (FIRST, SECOND):
            push_checkpoint(run, local / name, tmp_path / f"memory-{name}", num_threads=1)
            run.point("val_loss", "min")
        prune(run, KeepPolicy(last=1), "val_loss")

    everything(URL)
    num_requests = len(s3.requests)
    points = range(num_requests) if os.environ.get("REMOTE_POINTS") else [num_requests // 2]
    assert num_requests > 40
    for point in points:
        url = f"s3://bucket/runs/{point}"
        s3.fault = failing_after(point)
        with pytest.raises((StoreError, CheckpointUnusable, LeaseLost)):
            everything(url)
        s3.fault = None
        is_sound(RemoteRun(Store(url)), local)
        everything(url)
        run = RemoteRun(Store(url))
        is_sound(run, local)
        assert run.pointed("LATEST") == SECOND
        assert [str(name) for name in run.names()] == [SECOND]


def test_an_interrupted_upload_continues_where_it_was(
    s3: ObjectStore, local: Path, tmp_path: Path
) -> None:
    run = RemoteRun(Store(URL))
    num_files = len(Manifest.read(local / FIRST).files)
    s3.fault = failing_after(3 + num_files // 2)
    with pytest.raises(StoreError):
        push_checkpoint(run, local / FIRST, tmp_path / "memory", num_threads=1)
    done = json.loads((tmp_path / "memory").read_text())["done"]
    assert 0 < len(done) < num_files
    s3.fault = None
    s3.requests.clear()
    push_checkpoint(run, local / FIRST, tmp_path / "memory")
    sent = [path for method, path in s3.requests if method == "PUT"]
    # The missing files, and the manifest.
    assert len(sent) == num_files - len(done) + 1
    assert not (tmp_path / "memory").exists()


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_parts_of_a_large_file_are_sent_once_unless_the_store_lost_them(
    s3: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    monkeypatch.setattr(transfer, "PART_BYTES", 5 << 20)
    large = tmp_path / "large"
    large.write_bytes(os.urandom(17 << 20))
    store = Store(URL)
    memory = UploadMemory(tmp_path / "memory", "digest", URL)
    # HEAD, the creation of the upload, and two parts.
    s3.fault = failing_after(4)
    with ThreadPoolExecutor(1) as pool, pytest.raises(StoreError):
        transfer.upload_in_parts(store, "large", large, "xxh3", memory, Throttle(), pool)
    s3.fault = None
    with pytest.raises(FileNotFoundError):
        store.size("large")
    if is_lost:
        transfer.abort_uploads(Store("s3://bucket"), "runs")
    memory = UploadMemory.read(tmp_path / "memory", "digest", URL)
    throttle = Throttle()
    with ThreadPoolExecutor(1) as pool:
        transfer.upload_in_parts(store, "large", large, "xxh3", memory, throttle, pool)
    assert throttle.nbytes == (17 << 20 if is_lost else 7 << 20)
    assert store.read("large") == large.read_bytes()


def test_a_run_that_went_back_supersedes_what_it_left(
    s3: ObjectStore, local: Path, tmp_path: Path
) -> None:
    run = RemoteRun(Store(URL))
    run.take_over()
    for name in (FIRST, SECOND):
        push_checkpoint(run, local / name, tmp_path / "memory")
    run.point("val_loss", "min")
    later = RemoteRun(Store(URL))
    later.take_over()
    assert later.supersede([SECOND], "val_loss", "min") == [SECOND]
    assert later.pointed("LATEST") == FIRST
    newest = later.newest()
    assert newest is not None and str(newest.name) == FIRST
    with pytest.raises(LeaseLost, match="another run writes"):
        run.publish(SECOND, b"")
    # A kill after the marks and before the pointers.
    later.store.write("LATEST", f"{SECOND}\n".encode())
    assert later.supersede([SECOND], "val_loss", "min") == []
    assert later.pointed("LATEST") == FIRST
    # The new timeline reaches the step again.
    push_checkpoint(later, local / SECOND, tmp_path / "memory")
    later.point("val_loss", "min")
    assert later.pointed("LATEST") == SECOND
    is_sound(later, local)


def test_training_goes_on_without_a_store_and_the_end_reports_it(
    s3: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(child_process, "STALLED_SECONDS", 1.0)
    root = tmp_path / "run"
    options = {"remote": RemoteStorage(URL), "keep_last": 1}
    made = tiny.recipe()
    s3.fault = failing_after(0)
    checkpointer = tiny.checkpointer(root, **options)
    checkpointer.open()
    with pytest.raises(StoreError):
        checkpointer.load(vars(made))
    # Without a local checkpoint, the store must answer: it may have the run.
    s3.fault = None
    assert checkpointer.load(vars(made)) is None
    s3.fault = failing_after(0)
    for step in (10, 20):
        tiny.train(made)
        checkpointer.save(vars(made), step=step, epoch=0)
    deadline = time.monotonic() + 60
    while not Status.read(root, background.STATUS).failures and time.monotonic() < deadline:
        time.sleep(0.05)
    # Both wait for the store, although only the newest is kept.
    assert {FIRST, SECOND} <= {path.name for path in root.iterdir()}
    with pytest.raises(SaveFailed, match="are not in the store") as failure:
        checkpointer.transfers.finish()
    assert f"ckpt push {root / SECOND} {URL}" in str(failure.value)
    s3.fault = None
    checkpointer.close()
    deadline = time.monotonic() + 60
    while pending(root, background.LINK) and time.monotonic() < deadline:
        time.sleep(0.1)
    run = RemoteRun(Store(URL))
    assert run.pointed("LATEST") == SECOND
    is_sound(run, root)
    shown = capfd.readouterr()
    assert "an upload failed, and is repeated" in shown.err
    assert "a-secret-that-no-log-has" not in shown.err + shown.out


def test_the_end_of_a_run_waits_for_a_store_that_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "STALLED_SECONDS", 0.0)
    root, store, url = tmp_path / "run", tmp_path / "store", f"file://{tmp_path}/store"
    made = tiny.recipe()
    checkpointer = tiny.checkpointer(root, remote=RemoteStorage(url, required=True))
    checkpointer.open()
    checkpointer.load(vars(made))
    shutil.rmtree(store, ignore_errors=True)
    store.write_text("no directory")
    checkpointer.save(vars(made), step=10, epoch=0)

    def revive() -> None:
        while not Status.read(root, background.STATUS).failures:
            time.sleep(0.05)
        store.unlink()

    thread = threading.Thread(target=revive, daemon=True)
    thread.start()
    checkpointer.transfers.finish()
    checkpointer.close()
    thread.join(1)
    assert RemoteRun(Store(url)).pointed("LATEST") == FIRST


def test_a_stop_by_signal_waits_for_the_upload(
    local: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk may be lost with the node."""
    caplog.set_level("INFO", logger="automodel_ckpt")
    root = tmp_path / "run"
    shutil.copytree(local, root)
    settings = RemoteStorage(url=f"file://{tmp_path}/store")
    uploads = background.Uploads(root, settings, "val_loss", "min")
    uploads.process.start()
    uploads.note_published(SECOND)
    uploads.finish_before_stop(600.0, lambda: False)
    assert not pending(root, background.LINK)
    is_sound(RemoteRun(Store(settings.url)), root)
    assert f"waiting up to 600 s for the upload of {SECOND}" in caplog.text
    assert "not in the store yet" not in caplog.text
    uploads.close()


def test_an_uploading_process_that_is_killed_is_started_again(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the run trains, without another save, and as it ends."""
    monkeypatch.setattr(child_process, "_RESTART_SECONDS", 0.0)
    root = tmp_path / "run"
    shutil.copytree(local, root)
    settings = RemoteStorage(url=f"file://{tmp_path}/store")
    uploads = background.Uploads(root, settings, "val_loss", "min")

    def kill() -> None:
        assert uploads.process._process is not None
        uploads.process._process.kill()

    uploads.process.start()
    uploads.note_published(FIRST)
    kill()
    end = time.monotonic() + 300
    while pending(root, background.LINK):
        assert time.monotonic() < end
        time.sleep(0.05)
    monkeypatch.setattr(child_process, "_RESTART_SECONDS", 1000.0)
    monkeypatch.setattr(child_process, "_LONGEST_RESTART_SECONDS", 1000.0)
    kill()
    uploads.note_published(SECOND)
    uploads.finish()
    uploads.close()
    is_sound(RemoteRun(Store(settings.url)), root)
    assert [str(name) for name in RemoteRun(Store(settings.url)).names()] == [SECOND, FIRST]
    assert caplog.text.count("ended unexpectedly; it is started again") == 2


def test_an_empty_disk_gets_the_newest_checkpoint(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    options = {"remote": RemoteStorage(url, keep_last=1)}
    made = tiny.recipe()
    first = tiny.checkpointer(tmp_path / "first", **options)
    first.open()
    assert first.load(vars(made)) is None
    for step in (10, 20):
        tiny.train(made)
        first.save(vars(made), step=step, epoch=0)
    first.transfers.finish()
    first.close()
    assert [str(name) for name in RemoteRun(Store(url)).names()] == [SECOND]
    other = tiny.recipe(seed=1)
    second = tiny.checkpointer(tmp_path / "second", **options)
    second.open()
    resumed = second.load(vars(other))
    second.transfers.finish()
    second.close()
    assert resumed is not None and resumed.step == 20
    tiny.assert_equal_state(made, other)


def test_an_interrupted_removal_is_completed(s3: ObjectStore, local: Path, tmp_path: Path) -> None:
    run = RemoteRun(Store(URL))
    for name in (FIRST, SECOND):
        push_checkpoint(run, local / name, tmp_path / "memory")
    run.point("val_loss", "min")
    deleted: list[str] = []

    def fault(request: Request) -> Response | None:
        if request.method == "DELETE":
            deleted.append(request.path)
        # The manifest is deleted, and then the store dies.
        return Response("<Error><Code>Dead</Code></Error>", 400) if len(deleted) > 1 else None

    s3.fault = fault
    with pytest.raises(StoreError):
        prune(run, KeepPolicy(last=1), "val_loss")
    s3.fault = None
    assert run.manifest(FIRST) is None and run.store.sizes(FIRST)
    assert prune(run, KeepPolicy(last=5), "val_loss") == [FIRST]
    assert not run.store.sizes(FIRST)


def test_an_upload_that_fails_on_a_disk_reports_why(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/store")

    def blocks() -> Iterator[bytes]:
        yield b"1"
        raise OSError("unreadable https://host/object?signature=secret-word 'quoted'")

    with pytest.raises(StoreError, match="unreadable https://host/object 'quoted'") as failure:
        store.upload("object", blocks())
    assert "secret-word" not in str(failure.value)


def test_only_checkpoints_of_the_present_run_are_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = use_idle_processes(monkeypatch, 0)
    settings = RemoteStorage(f"file://{tmp_path}/store")
    uploads = background.Uploads(tmp_path, settings, "val_loss", "min")

    def launched() -> list[int]:
        return [process.job["went_back_to"] for process in started]

    for name in (FIRST, SECOND):
        (tmp_path / name).mkdir()
    (tmp_path / f"{background.LINK}{SECOND}").symlink_to(SECOND)
    # The run goes back to the first: the second, which was not uploaded yet, would become the newest there. A kill
    # prevented the link of the first.
    uploads.start(10, FIRST)
    assert pending(tmp_path, background.LINK) == [FIRST]
    # The process died before it had marked the second one of an earlier start, which is in the store.
    uploads.note_published(SECOND)
    assert launched() == [10, 10]
    # It died after that: it is started again, and does not supersede the new checkpoint.
    notes.forget_gone_back(tmp_path)
    uploads.note_published(SECOND)
    assert launched() == [10, 10, 20]
    # The run goes back while it trains.
    uploads.roll_back(10)
    assert launched() == [10, 10, 20, 10] and pending(tmp_path, background.LINK) == [FIRST]
    uploads.note_published(SECOND)
    del started[3:]
    # It ended because another run took over: a link would keep the checkpoint forever.
    (tmp_path / background.STATUS).write_text(json.dumps({"is_over": True}))
    uploads.note_published("epoch_0_step_30")
    assert launched() == [10, 10, 20]
    assert pending(tmp_path, background.LINK) == [SECOND, FIRST]


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("s4://bucket/run", "not the URL of a store"),
        ("S3://key:secret-word@bucket/run", r"not the URL of a store[\s\S]*s3://bucket/run"),
        ("s3://key:secret-word@bucket/run", "must not contain credentials"),
        ("s3://bucket/run?token=secret-word", "must not contain credentials"),
        ("file://", r"names no directory[\s\S]*use file:///PATH"),
        ("s3://bucket/../other", "names no directory"),
        ("gs://bucket/run", r"gs:// needs the library gcsfs[\s\S]*automodel_ckpt\[gcs\]"),
    ],
)
def test_urls_that_cannot_be_used_are_errors_without_their_secrets(url: str, what: str) -> None:
    with pytest.raises(RecipeError, match=what) as failure:
        check_library(check_url(url, "checkpoint.remote.url"), "checkpoint.remote.url")
    assert "secret-word" not in str(failure.value)
    assert "checkpoint.remote.url" in str(failure.value)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_other_file_systems_have_the_same_protocol(
    scheme: str, local: Path, tmp_path: Path
) -> None:
    run = RemoteRun(Store(f"{scheme}://{tmp_path}/store"))
    assert run.store.create("once", b"1") and not run.store.create("once", b"2")
    for name in (FIRST, SECOND):
        push_checkpoint(run, local / name, tmp_path / "memory")
        run.point("val_loss", "min")
    is_sound(run, local)
    prune(run, KeepPolicy(last=1), "val_loss")
    assert [str(name) for name in run.names()] == [SECOND]
    (tmp_path / "run").mkdir()
    assert pull_checkpoint(run, SECOND, tmp_path / "run").name == SECOND


def test_the_time_for_uploads_after_a_signal_begins_with_the_signal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="automodel_ckpt")
    remote = RemoteStorage(f"file://{tmp_path}/store", wait_after_signal_seconds=90)
    saver = tiny.checkpointer(tmp_path / "run", remote=remote)
    saver.open()
    made = tiny.recipe()
    saver.load(vars(made))
    saver.save(vars(made), step=10, epoch=0)
    saver.transfers.finish_before_stop(10.0, lambda: False)
    saver.close()
    assert "waiting up to 80 s for the upload of epoch_0_step_10" in caplog.text
