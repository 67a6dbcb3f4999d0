"""What a start of a run gets from a store: which checkpoint, and how if the disk lacks the space."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from automodel_ckpt.base.store_url import scratch_directory
from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, discover
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import digest_of
from automodel_ckpt.checkpoint.jobs import jobs
from automodel_ckpt.checkpoint.options import RemoteStorage
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.remote import background, fetch
from automodel_ckpt.checkpoint.remote.child_process import UploadingProcess
from automodel_ckpt.checkpoint.remote.push import push_checkpoint, push_exports
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.run import notes
from automodel_ckpt.checkpoint.run.links import pending
from automodel_ckpt.checkpoint.store.store import Store, StoreError
from automodel_ckpt.cli.ckpt import main as ckpt
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models import tiny
from tests.support.runs.stored_runs import FIRST, SECOND, write_run


@pytest.fixture(autouse=True)
def _no_uploading_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UploadingProcess, "start", lambda self, step=0: None)


def in_store(url: str, root: Path, names: tuple[str, ...] = (FIRST, SECOND)) -> RemoteRun:
    run = RemoteRun(Store(url))
    for name in names:
        push_checkpoint(run, root / name, root / "memory")
    return run


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(total=1 << 30, used=1 << 30, free=0)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: full)


@pytest.mark.parametrize(
    ("options", "has_tables"),
    [
        ({}, True),
        ({"model_layout": "hf"}, False),
        pytest.param({"model_save_format": "torch_save"}, False, marks=pytest.mark.further),
    ],
)
def test_a_disk_without_space_does_not_prevent_loading(
    options: dict[str, Any],
    has_tables: bool,
    tmp_path: Path,
    full_disk: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if has_tables:
        monkeypatch.setattr(jobs, "MIN_TABLE_ROWS", 0)
    saved = write_run(tmp_path / "local", **options)
    url = f"file://{tmp_path}/store"
    run = in_store(url, tmp_path / "local")
    run.store.write(layout.TRAINING_LOG, b"{}\n")
    loaded = tiny.recipe(seed=1)
    resumed = tiny.load(tmp_path / "empty", loaded, remote=RemoteStorage(url))
    assert resumed is not None and resumed.step == 20
    tiny.assert_equal_state(saved, loaded)
    on_disk = {path.name for path in (tmp_path / "empty").iterdir()}
    assert on_disk == {layout.TRAINING_LOG, notes.GONE_BACK}
    assert ckpt(["verify", "--deep", url]) == 0


@pytest.mark.parametrize("kind", ["changed", "shorter", "missing"])
def test_a_changed_object_is_found_before_it_is_used(
    kind: str, tmp_path: Path, full_disk: None
) -> None:
    write_run(tmp_path / "local")
    url = f"file://{tmp_path}/store"
    run = in_store(url, tmp_path / "local")
    (file,) = {
        piece.file
        for tensor in Manifest.read(tmp_path / "local" / SECOND).trees["model"].tensors.values()
        for piece in tensor.slices
    }
    content = bytearray(run.store.read(f"{SECOND}/{file}"))
    content[-1] ^= 1
    if kind == "missing":
        run.store.delete([f"{SECOND}/{file}"])
    else:
        run.store.write(f"{SECOND}/{file}", bytes(content[:-1] if kind == "shorter" else content))
    what = {
        "changed": "its digest differs",
        "shorter": "ended before the range",
        "missing": "is missing",
    }
    with pytest.raises((CheckpointUnusable, StoreError), match=what[kind]) as failure:
        tiny.load(tmp_path / "empty", tiny.recipe(seed=1), remote=RemoteStorage(url))
    assert f"{url}/{SECOND}/{file}" in str(failure.value)
    assert not (tmp_path / "empty" / fetch.DIRECTORY).exists()


def test_a_requeued_command_continues_from_the_store_instead_of_rewinding(tmp_path: Path) -> None:
    root = tmp_path / "local"
    made = write_run(root)
    url = f"file://{tmp_path}/store"
    in_store(url, root, (FIRST,))
    # On another machine, the run continued from the first one, and was requeued on an empty disk.
    tiny.train(made)
    tiny.save(root, made, 30, restore_from=FIRST)
    in_store(url, root, ("epoch_0_step_30",))
    for request in (FIRST, f"{url}/{FIRST}"):
        empty = tmp_path / request.replace("/", "-")
        resumed = tiny.load(
            empty, tiny.recipe(seed=1), restore_from=request, remote=RemoteStorage(url)
        )
        assert resumed is not None and resumed.step == 30


def test_a_run_that_went_back_without_its_store_does_not_fetch_what_it_left(tmp_path: Path) -> None:
    local = tmp_path / "local"
    write_run(local)
    url = f"file://{tmp_path}/store"
    run = in_store(url, local)
    run.take_over()
    root = tmp_path / "run"
    root.mkdir()
    shutil.copytree(local / FIRST, root / FIRST)
    # It goes back to the first checkpoint, and no process could mark the second one in the store.
    uploads = background.Uploads(root, RemoteStorage(url), "val_loss", "min")
    uploads.start(10, FIRST)
    fetcher = fetch.Fetcher(root, RemoteStorage(url))
    assert fetcher.find(None) is None
    # It is started again, later in its timeline: the mark still begins at the first step.
    again = background.Uploads(root, RemoteStorage(url), "val_loss", "min")
    assert notes.note_gone_back(root, 15, again.token) == 10
    # Another machine took over the URL, so that what is there is newer.
    other = RemoteRun(Store(url))
    other.take_over()
    found = fetcher.find(None)
    assert found is not None and found[1] == SECOND


@pytest.mark.parametrize("is_full", [False, True])
def test_a_run_goes_back_to_a_checkpoint_of_its_store_where_its_disk_has_none_as_new(
    is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"file://{tmp_path}/store"
    local, root = tmp_path / "local", tmp_path / "run"
    saved = write_run(local)
    loaded = tiny.recipe(seed=1)
    in_store(url, local)
    root.mkdir()
    shutil.copytree(local / FIRST, root / FIRST)
    fetcher = fetch.Fetcher(root, RemoteStorage(url))
    # It has the first checkpoint, which is the newest up to a step before the second.
    for step in (9, 10, 19):
        assert fetcher.fetch_up_to(step) is None
        assert not (root / SECOND).exists()
    if is_full:
        full = SimpleNamespace(free=0)
        monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: full)
    checkpointer = tiny.checkpointer(root, remote=RemoteStorage(url))
    # A directory of this name without a manifest is no checkpoint.
    (root / "epoch_0_step_15").mkdir()
    resumed = checkpointer.roll_back(discover(loaded), 25)
    checkpointer.close()
    tiny.assert_equal_state(saved, loaded)
    assert resumed is not None and resumed.step == 20
    # What is read from the store without a download is removed.
    assert (root / SECOND).exists() != is_full
    assert not (root / fetch.DIRECTORY).exists()
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("no directory")
    assert fetcher.fetch_up_to(15) is None
    assert "are not used to go back to step 15" in caplog.text


@pytest.mark.parametrize("had_nodes", [True, False])
def test_a_run_with_checkpoints_on_the_disks_of_its_nodes_gets_its_logs(
    tmp_path: Path, had_nodes: bool
) -> None:
    url, root = f"file://{tmp_path}/store", tmp_path / "run"
    Store(url).write(layout.TRAINING_LOG, b"{}\n")
    root.mkdir()
    if had_nodes:
        (root / layout.GENERATION).write_text("{}")
    assert tiny.load(root, tiny.recipe(), remote=RemoteStorage(url)) is None
    assert (root / layout.TRAINING_LOG).exists() == had_nodes


def test_a_damaged_directory_of_this_name_does_not_prevent_a_download(tmp_path: Path) -> None:
    saved = write_run(tmp_path / "local")
    url = f"file://{tmp_path}/store"
    in_store(url, tmp_path / "local")
    root = tmp_path / "run"
    (root / SECOND).mkdir(parents=True)
    loaded = tiny.recipe(seed=1)
    assert tiny.load(root, loaded, remote=RemoteStorage(url)) is not None
    tiny.assert_equal_state(saved, loaded)
    assert (root / f"{SECOND}.superseded-1").is_dir()


def test_a_url_is_a_directory_of_a_checkpointer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/store/run"
    options = CheckpointOptions(scratch_dir=str(tmp_path / "scratch"), keep_last=3)
    checkpointer = Checkpointer(url, options=options)
    local = scratch_directory(url, str(tmp_path / "scratch"))
    assert checkpointer.directory == local and local.parent == tmp_path / "scratch"
    made = tiny.recipe()
    assert checkpointer.load(discover(made)) is None
    assert checkpointer.transfers.uploads is not None
    # The rules are those of the store; the local disk keeps the newest.
    assert checkpointer.transfers.uploads.job["keep"]["last"] == 3
    assert checkpointer._options.keep_last == 1
    checkpointer.save(discover(made), step=10, epoch=0)
    assert pending(local, background.LINK) == [FIRST]
    checkpointer.transfers.uploads = None
    checkpointer.close()


def test_exports_are_uploaded_and_complete_with_their_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny.recipe()
    tiny.train(made)
    root = tmp_path / "run"
    tiny.save(root, made, 10)
    export = root / FIRST / "model" / layout.CONSOLIDATED
    export.mkdir()
    write_export(export, b"{}")
    url = f"file://{tmp_path}/store"
    run = in_store(url, root, (FIRST,))
    run.take_over()
    prefix = f"{FIRST}/model/{layout.CONSOLIDATED}"
    with monkeypatch.context() as patch:
        patch.setattr(run.store, "write", failing)
        with pytest.raises(StoreError):
            push_exports(run, root / FIRST)
    assert layout.EXPORT_MANIFEST not in run.store.sizes(prefix)
    assert push_exports(run, root / FIRST) == 2
    assert push_exports(run, root / FIRST) == 0
    assert set(run.store.sizes(prefix)) == {"config.json", layout.EXPORT_MANIFEST}
    write_export(export, b"[]")
    assert push_exports(run, root / FIRST) == 2
    assert run.store.read(f"{prefix}/config.json") == b"[]"
    write_export(export, b"{}")
    (export / "config.json").write_bytes(b"{]")
    with pytest.raises(CheckpointUnusable):
        push_exports(run, root / FIRST)


def write_export(directory: Path, content: bytes) -> None:
    (directory / "config.json").write_bytes(content)
    entry = {"size": len(content), "digest": digest_of(content)}
    document = {"files": {"config.json": entry}}
    (directory / layout.EXPORT_MANIFEST).write_text(json.dumps(document))


def failing(*arguments: Any) -> None:
    raise StoreError("dead", where="", value="", hint="")
