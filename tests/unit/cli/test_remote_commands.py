"""The commands of ``ckpt`` with URLs: what they print, and how much of a store they read."""

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from werkzeug.wrappers import Request, Response

from automodel_ckpt.checkpoint.export.export_manifest import export_problems
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import digest_of
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.remote import deep_verification
from automodel_ckpt.checkpoint.remote.push import push_checkpoint
from automodel_ckpt.checkpoint.remote.retention import incomplete
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.store.store import Store, StoreError
from automodel_ckpt.cli.ckpt import main as ckpt
from automodel_ckpt.cli.commands import prune as prune_command
from automodel_ckpt.cli.commands import verify as verify_command
from tests.support.models import tiny
from tests.support.servers.object_store import ObjectStore, object_store

URL = "s3://bucket/run"
FIRST, SECOND = "epoch_0_step_10", "epoch_0_step_20"


class Requests:
    """Counts what is read of a store: requests, bytes of manifests, and bytes of all other objects."""

    def __init__(self, store: ObjectStore, root: Path) -> None:
        self._root = root
        self.clear()
        store.fault = self._note

    def clear(self) -> None:
        self.number = 0
        self.nbytes = 0

    def _note(self, request: Request) -> None:
        self.number += 1
        local = self._root / request.path.removeprefix("/bucket/run/")
        if request.method != "GET" or not local.is_file() or local.name == "MANIFEST.json":
            return
        first, last = 0, local.stat().st_size - 1
        span = request.headers.get("Range", "")
        if span:
            first, last = map(int, span.removeprefix("bytes=").split("-"))
        self.nbytes += last - first + 1


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints of 6 MB, of which one tensor does not change."""
    root = tmp_path_factory.mktemp("commands") / "run"
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 512)
    model.bias.requires_grad_(False)
    made = SimpleNamespace(model=model, optimizer=torch.optim.AdamW([model.weight], lr=0.1))
    for step in (10, 20):
        model(torch.ones(1024)).sum().backward()
        made.optimizer.step()
        tiny.save(root, made, step)
    return root


@pytest.fixture(scope="module")
def stored(local: Path) -> Iterator[Requests]:
    """The run in a bucket. Tests that use another store follow those that use this one."""
    with object_store() as store:
        run = RemoteRun(Store(URL))
        for name in (FIRST, SECOND):
            push_checkpoint(run, local / name, local / "memory")
        run.point("val_loss", "min")
        yield Requests(store, local)


@pytest.fixture
def read(stored: Requests) -> Requests:
    stored.clear()
    return stored


def output(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert ckpt([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_commands_read_headers_and_no_tensors(
    read: Requests, local: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nbytes = Manifest.read(local / SECOND).nbytes
    assert nbytes > 6_000_000
    rows = output(capsys, "ls", URL)
    assert [row["name"] for row in rows] == [FIRST, SECOND]
    assert read.nbytes == 0 and read.number <= 20
    read.clear()
    shown = output(capsys, "show", f"{URL}/LATEST")
    assert shown | {"path": ""} == output(capsys, "show", str(local / SECOND)) | {"path": ""}
    # config.yaml, and the options of the optimizer.
    assert 0 < read.nbytes < 50_000 and read.number <= 12
    read.clear()
    assert output(capsys, "verify", URL)[0]["ok"]
    assert read.nbytes == 0 and read.number <= 20
    read.clear()
    output(capsys, "prune", URL, "--keep-last=1", "--dry-run")
    assert read.nbytes == 0 and read.number <= 21


@pytest.mark.parametrize("is_remote", [(True, True), (True, False), (False, True)])
def test_diff_compares_a_store_by_digests(
    is_remote: tuple[bool, bool], read: Requests, local: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [
        f"{URL}/{name}" if remote else str(local / name)
        for name, remote in zip((FIRST, SECOND), is_remote, strict=True)
    ]
    found = output(capsys, "diff", *names)
    expected = output(capsys, "diff", str(local / FIRST), str(local / SECOND))
    for same in ("general", "recipe", "environment", "not_compared"):
        assert found[same] == expected[same]
    for name, tree in found["trees"].items():
        changed = {change["fqn"] for change in expected["trees"][name]["changed"]}
        assert set(tree["differing"]) == changed != set()
        assert tree["num_equal"] == expected["trees"][name]["num_equal"]
        assert tree["changed"] == [] == tree["undecided"]
    assert read.nbytes < 50_000 and read.number <= 30
    assert ckpt(["diff", *names]) == 0
    assert "values in a store are not read" in capsys.readouterr().out


def test_deep_verification_stores_nothing_and_names_the_tensor(
    read: Requests, local: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Nothing can be written where temporary files go.
        patch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
        assert ckpt(["verify", "--deep", URL]) == 0
        manifest = Manifest.read(local / FIRST)
        assert read.nbytes == manifest.nbytes + Manifest.read(local / SECOND).nbytes
        store = Store(URL)
        piece = manifest.trees["model"].tensors["weight"].slices[0]
        content = bytearray(store.read(f"{FIRST}/{piece.file}"))
        content[piece.start + 5] ^= 1
        store.write(f"{FIRST}/{piece.file}", bytes(content))
        assert ckpt(["verify", "--deep", f"{URL}/{FIRST}"]) == 3
        content[piece.start + 5] ^= 1
        store.write(f"{FIRST}/{piece.file}", bytes(content))
    shown = capsys.readouterr().out
    assert f"{URL}/{FIRST}/{piece.file}" in shown and "damaged: tensor weight" in shown


def test_deep_verification_of_files_that_several_ranks_wrote(
    read: Requests, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Their digest is that of their slices' digests."""
    made = tiny.recipe()
    tiny.train(made)
    tiny.save(tmp_path, made, 30, model_layout="hf")
    name = "epoch_0_step_30"
    manifest = Manifest.read(tmp_path / name)
    (file,) = [file for file in manifest.files if file.endswith(".safetensors")]
    assert manifest.files[file].digest.startswith("xxh3_128_parts:")
    url = f"file://{tmp_path}/store"
    run = RemoteRun(Store(url))
    push_checkpoint(run, tmp_path / name, tmp_path / "memory")
    assert ckpt(["verify", "--deep", url]) == 0
    good = run.store.read(f"{name}/{file}")
    for position, what in ((-1, "damaged: tensor"), (20, "the damage is in no tensor")):
        content = bytearray(good)
        content[position] ^= 1
        run.store.write(f"{name}/{file}", bytes(content))
        assert ckpt(["verify", "--deep", url]) == 3
        assert what in capsys.readouterr().out


def test_a_pull_brings_the_logs_of_a_run(read: Requests, tmp_path: Path) -> None:
    Store(URL).write("training.jsonl", b"1\n")
    target = tmp_path / "run"
    assert ckpt(["pull", f"{URL}/{FIRST}", str(target)]) == 0
    assert (target / "training.jsonl").read_bytes() == b"1\n"
    (target / "training.jsonl").write_bytes(b"own\n")
    # A run inside of a checkpoint would be removed with it.
    assert ckpt(["pull", f"{URL}/{SECOND}", str(target / FIRST)]) == 2
    assert ckpt(["pull", f"{URL}/{SECOND}", str(target)]) == 0
    assert (target / "training.jsonl").read_bytes() == b"own\n"


def test_a_wrong_url_is_an_error_of_prune_and_pull(
    read: Requests,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ckpt(["prune", f"{URL}-misspelled", "--keep-last=1"]) == 3
    assert "no checkpoints found" in capsys.readouterr().err
    assert ckpt(["pull", URL, f"{URL}-copy"]) == 2
    assert "a local directory" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def interrupt(run: RemoteRun, checkpoint: Path, memory: Path) -> None:
    """Send all files of a checkpoint, without the manifest."""

    def stop(*_: object) -> None:
        raise InterruptedError

    with pytest.MonkeyPatch.context() as context:
        context.setattr(RemoteRun, "publish", stop)
        with pytest.raises(InterruptedError):
            push_checkpoint(run, checkpoint, memory)


@pytest.mark.parametrize("in_bucket", [True, False])
def test_prune_removes_uploads_that_were_interrupted_long_ago(
    local: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    in_bucket: bool,
) -> None:
    url = URL if in_bucket else f"file://{tmp_path}/store"
    memory = tmp_path / "memory"
    with object_store() if in_bucket else contextlib.nullcontext():
        run = RemoteRun(Store(url))
        interrupt(run, local / FIRST, memory)
        # Other programs have directories of this name: without a run, nothing is known to be an upload.
        assert incomplete(run) == []
        push_checkpoint(run, local / SECOND, tmp_path / "other")
        run.point("val_loss", "min")
        nbytes = sum(run.store.sizes(FIRST).values())
        prune = ["prune", url, "--incomplete"]
        found = output(capsys, *prune)
        assert found["pruned"] == []
        (kept,) = found["incomplete"]
        assert (kept["name"], kept["nbytes"]) == (FIRST, nbytes)
        assert "may be in progress (--min-hours)" in kept["reason"]
        later = time.time() + 25 * 3600
        monkeypatch.setattr(prune_command.time, "time", lambda: later)
        assert ckpt(["prune", url, "--keep-last=1"]) == 0
        assert "to remove it: --incomplete" in capsys.readouterr().err
        assert output(capsys, *prune, "--min-hours=26")["pruned"] == []
        expected = [{"name": FIRST, "nbytes": nbytes}]
        assert output(capsys, *prune, "--dry-run")["pruned"] == expected
        assert sum(run.store.sizes(FIRST).values()) == nbytes
        assert output(capsys, *prune)["pruned"] == expected
        assert run.store.sizes(FIRST) == {} and run.checkpoint(run.names()[0]) is not None
        # A run with this checkpoint on its disk, which continues, sends it again.
        with pytest.raises(StoreError, match="not in the store as it was sent"):
            push_checkpoint(run, local / FIRST, memory)
        push_checkpoint(run, local / FIRST, memory)
        assert output(capsys, "verify", url, "--deep")[0]["ok"]


def test_push_and_pull_copy_the_exports_of_the_checkpoint(
    local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(local / FIRST, run / FIRST)
    export = run / FIRST / "model" / layout.CONSOLIDATED
    export.mkdir()
    (export / "config.json").write_bytes(b"{}")
    entry = {"size": 2, "digest": digest_of(b"{}")}
    document = {"files": {"config.json": entry}}
    (export / layout.EXPORT_MANIFEST).write_text(json.dumps(document))
    words = ["push", str(run), f"file://{tmp_path}/store/run"]
    sent = output(capsys, *words)["nbytes"]
    assert sent == Manifest.read(run / FIRST).nbytes + 2
    stored = tmp_path / "store/run" / FIRST / "model" / layout.CONSOLIDATED
    assert (stored / "config.json").read_bytes() == b"{}"
    assert output(capsys, *words)["nbytes"] == 0
    url = f"file://{tmp_path}/store/run"
    pulled = output(capsys, "pull", url, str(tmp_path / "pulled"))
    assert pulled["exports"] == [f"model/{layout.CONSOLIDATED}"]
    assert export_problems(tmp_path / "pulled" / FIRST / "model" / layout.CONSOLIDATED) == []
    assert output(capsys, "pull", url, str(tmp_path / "bare"), "--no-exports")["exports"] == []
    assert ckpt(["verify", str(tmp_path / "pulled")]) == 0
    capsys.readouterr()
    (stored / "config.json").write_bytes(b"[]")
    assert ckpt(["pull", url, str(tmp_path / "damaged")]) == 3
    said = capsys.readouterr().err
    assert "a file of the export is damaged" in said and "--no-exports" in said
    assert not (tmp_path / "damaged").exists()
    # Without its manifest, an export is incomplete.
    (stored / layout.EXPORT_MANIFEST).unlink()
    assert output(capsys, "pull", url, str(tmp_path / "damaged"))["exports"] == []


@pytest.mark.parametrize("call", ["remote.remote_problems", "deep_verification.digest_problems"])
def test_a_checkpoint_that_is_removed_from_the_store_during_a_verification_is_not_damaged(
    local: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    url = f"file://{tmp_path}/store"
    for name in (FIRST, SECOND):
        assert ckpt(["push", str(local / name), url]) == 0
    module = verify_command if call.startswith("remote.") else deep_verification
    attribute = call.partition(".")[2]
    original = module.__dict__[attribute]

    def after_removal(run: Any, name: str, *rest: Any, **options: Any) -> Any:
        if name == FIRST:
            shutil.rmtree(tmp_path / "store" / FIRST)
        return original(run, name, *rest, **options)

    monkeypatch.setattr(module, attribute, after_removal)
    capsys.readouterr()
    assert ckpt(["verify", url, "--deep"]) == 0
    printed = capsys.readouterr().out
    assert f"{FIRST}: not verified, since its run" in printed
    assert printed.count(": ok") >= 1 and "damaged" not in printed


def test_an_upload_is_as_recent_as_the_large_file_that_it_sends(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    later = time.time() + 25 * 3600

    def listed(request: Request) -> Response | None:
        """Reply with an upload that began an hour ago; those of moto began in 2010."""
        if request.method != "GET" or "uploads" not in request.args:
            return None
        begun = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(later - 3600))
        return Response(
            f"<ListMultipartUploadsResult><Upload><Key>run/{FIRST}/large</Key><UploadId>1</UploadId>"
            f"<Initiated>{begun}</Initiated></Upload></ListMultipartUploadsResult>"
        )

    with object_store() as server:
        run = RemoteRun(Store(URL))
        interrupt(run, local / FIRST, tmp_path / "memory")
        run.take_over()
        monkeypatch.setattr(prune_command.time, "time", lambda: later)
        assert output(capsys, "prune", URL, "--incomplete", "--dry-run")["pruned"]
        # The object of a large file appears when all parts have arrived.
        server.fault = listed
        assert output(capsys, "prune", URL, "--incomplete")["pruned"] == []


def test_what_does_not_apply_to_a_store_is_an_error(
    local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/store"
    assert ckpt(["push", str(local / FIRST), url, "--public"]) == 2
    assert "without hub:ORG/NAME" in capsys.readouterr().err
    assert ckpt(["consolidate", url]) == 2
    assert f"`ckpt pull {url} DIR`" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
