"""Faults of a store and of the network: uploads and downloads end with the right bytes, and warnings stay few."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.remote import background, child_process, uploader
from automodel_ckpt.checkpoint.remote.child_process import Status
from automodel_ckpt.checkpoint.remote.pull import pull_checkpoint
from automodel_ckpt.checkpoint.remote.push import push_checkpoint
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.run.links import pending
from automodel_ckpt.checkpoint.store import store as store_module
from automodel_ckpt.checkpoint.store import transfer
from automodel_ckpt.checkpoint.store.store import Store, StoreError
from tests.support.runs.stored_runs import FIRST, SECOND, URL
from tests.support.servers.fault_proxy import Fault, FaultProxy, ProxyRequest, Rule
from tests.support.servers.object_store import faulty_store


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with faulty_store() as (_, found):
        yield found


def first(count: int, fault: Fault, where: Callable[[ProxyRequest], bool]) -> Rule:
    """The first *count* of the requests *where* have the fault."""
    left = [count]

    def rule(request: ProxyRequest) -> Fault | None:
        if not where(request):
            return None
        left[0] -= 1
        return fault if left[0] >= 0 else None

    return rule


def is_write(request: ProxyRequest) -> bool:
    return request.method in ("PUT", "POST") and "epoch" in request.target


def is_read(request: ProxyRequest) -> bool:
    return request.method == "GET" and ".safetensors" in request.target


def is_equal(run: RemoteRun, local: Path, name: str) -> bool:
    files = Manifest.read(local / name).files
    return all(
        run.store.read(f"{name}/{each}") == (local / name / each).read_bytes() for each in files
    )


FAULTS = {
    "throttled": Fault(status=503),
    "too many requests": Fault(status=429),
    "internal errors": Fault(status=500),
    "reset while sending": Fault(reset_request_after=100),
    "reply lost": Fault(reset_reply_after=0),
    "reset while receiving": Fault(reset_reply_after=50),
    "late": Fault(delay=0.1),
}


_QUICK = ("reply lost", "reset while receiving")


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=name, marks=() if name in _QUICK else pytest.mark.further)
        for name, fault in FAULTS.items()
    ],
)
def test_faults_of_uploads_and_downloads_pass(
    proxy: FaultProxy,
    local: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
) -> None:
    monkeypatch.setattr(child_process, "_FIRST_PAUSE_SECONDS", 0.02)
    # Without repetitions by s3fs, the pauses would double eight times.
    monkeypatch.setattr(child_process, "_LONGEST_PAUSE_SECONDS", 0.08)
    monkeypatch.setattr(store_module, "_FIRST_PAUSE_SECONDS", 0.02)
    root = tmp_path / "run"
    root.mkdir()
    (root / FIRST).symlink_to(local / FIRST)
    (root / f"{background.LINK}{FIRST}").symlink_to(FIRST)
    # s3fs repeats some requests five times: more than that fail.
    proxy.rule = first(12, fault, is_write)
    job = uploader.Job(URL, {}, "token", "val_loss", num_threads=2)
    uploading = uploader.Uploader(root, job)
    uploading.finish()
    uploading.run()
    proxy.rule = first(7, fault, is_read)
    run = RemoteRun(Store(URL))
    assert run.pointed(layout.LATEST) == FIRST
    (tmp_path / "pulled").mkdir()
    pulled = pull_checkpoint(run, FIRST, tmp_path / "pulled")
    proxy.rule = None
    assert is_equal(run, local, FIRST) and is_equal(run, pulled.parent, FIRST)
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) <= 4
    assert sum("trying again" in record.message for record in caplog.records) <= 2


def test_a_lost_connection_and_stale_listings_pass(
    proxy: FaultProxy, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_FIRST_PAUSE_SECONDS", 0.05)
    run = RemoteRun(Store(URL))
    push_checkpoint(run, local / FIRST, tmp_path / "memory")
    run.point("val_loss", "min")
    root = tmp_path / "run"
    root.mkdir()
    (root / SECOND).symlink_to(local / SECOND)
    (root / f"{background.LINK}{SECOND}").symlink_to(SECOND)
    # The listing has nothing of the second checkpoint.
    proxy.freeze_lists()
    proxy.is_down = True
    job = uploader.Job(URL, {}, "token", "val_loss", {"last": 1}, went_back_to=10)
    uploading = uploader.Uploader(root, job)
    uploading.finish()
    thread = threading.Thread(target=uploading.run)
    thread.start()
    while not Status.read(root, background.STATUS).failures:
        time.sleep(0.01)
    proxy.is_down = False
    thread.join(60)
    assert not pending(root, background.LINK)
    assert run.pointed(layout.LATEST) == SECOND
    newest = run.newest()
    assert newest is not None and str(newest.name) == SECOND
    proxy.freeze_lists(False)
    assert [str(name) for name in RemoteRun(Store(URL)).names()] == [SECOND]
    assert is_equal(run, local, SECOND)


def test_a_slow_store_and_a_lost_upload_in_parts_pass(
    proxy: FaultProxy, tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PART_BYTES", 5 << 20)
    large = tmp_path / "large" / "epoch_0_step_10"
    large.mkdir(parents=True)
    (large / "data").write_bytes(bytes(12 << 20))
    store = Store(URL)
    memory_file = tmp_path / "memory"
    proxy.rule = lambda request: Fault(status=400) if "partNumber=3" in request.target else None
    proxy.bytes_per_second = 50e6
    send_large(store, large, memory_file, fails=True)
    proxy.rule = None
    assert transfer.abort_uploads(store, "epoch_0_step_10") == 1
    send_large(store, large, memory_file)
    assert store.read("epoch_0_step_10/data") == bytes(12 << 20)
    assert transfer.abort_uploads(store, "epoch_0_step_10") == 0


def send_large(store: Store, checkpoint: Path, memory_file: Path, *, fails: bool = False) -> None:
    """Upload the one file of a checkpoint in parts."""
    from concurrent.futures import ThreadPoolExecutor

    from automodel_ckpt.checkpoint.store.transfer import Throttle, UploadMemory

    memory = UploadMemory.read(memory_file, "digest", str(store))
    name = f"{checkpoint.name}/data"
    with ThreadPoolExecutor(2) as pool:
        upload = (store, name, checkpoint / "data", "xxh3", memory, Throttle(), pool)
        if fails:
            with pytest.raises(StoreError):
                transfer.upload_in_parts(*upload)
        else:
            assert transfer.upload_in_parts(*upload)
