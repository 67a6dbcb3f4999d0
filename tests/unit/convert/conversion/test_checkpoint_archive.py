"""`ckpt archive` and `ckpt unarchive` restore checkpoints bit for bit, or report what is wrong and publish nothing."""

import io
import json
import os
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.checkpoint import discover
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.cli.ckpt import main
from tests.support.models import tiny

pytest.importorskip("zstandard", reason="the extra [archive] is not installed")

Capture = pytest.CaptureFixture[str]
OPTIONS: list[dict[str, Any]] = [
    {"incremental": True},
    {"model_layout": "hf"},
    {"model_save_format": "torch_save"},
]


def run_of(root: Path, **options: Any) -> Path:
    """A run directory with three checkpoints and a log."""
    made = tiny.recipe()
    saver = tiny.checkpointer(root, **options)
    for step in (1, 2, 3):
        tiny.train(made, 1)
        saver.save(
            discover(made),
            step=step,
            epoch=0,
            losses={"step": step, "val_loss": 1.0 / step},
            validated=True,
        )
    saver.close()
    (root / "training.jsonl").write_text('{"step": 1}\n')
    (root / "log.txt").write_text("step 1: loss 1.5\n")
    return root


def contents(checkpoint: Path) -> dict[str, bytes]:
    return {
        path.relative_to(checkpoint).as_posix(): path.read_bytes()
        for path in checkpoint.rglob("*")
        if path.is_file()
    }


def assert_equal_runs(one: Path, other: Path) -> None:
    names = [path.name for path in sorted(one.glob("epoch*"))]
    assert names and names == [path.name for path in sorted(other.glob("epoch*"))]
    for name in names:
        assert contents(one / name) == contents(other / name)
    for pointer in ("LATEST", "LOWEST_VAL"):
        assert os.readlink(one / pointer) == os.readlink(other / pointer)


@pytest.mark.parametrize("options", OPTIONS, ids=["shards", "hf", "dcp"])
def test_a_run_comes_back_bit_for_bit(
    tmp_path: Path, capsys: Capture, options: dict[str, Any]
) -> None:
    run = run_of(tmp_path / "run", **options)
    file = tmp_path / "run.tar.zst"
    assert main(["archive", str(run), "-o", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["checkpoints"]) == 3 and document["archive_bytes"] == file.stat().st_size
    assert main(["unarchive", str(file), "-o", str(tmp_path / "back")]) == 0
    assert_equal_runs(run, tmp_path / "back")
    for name in ("training.jsonl", "log.txt"):
        assert (tmp_path / "back" / name).read_bytes() == (run / name).read_bytes()
    assert main(["verify", "--deep", str(tmp_path / "back")]) == 0
    # Again, over what exists: nothing changes.
    assert main(["unarchive", str(file), "-o", str(tmp_path / "back")]) == 0
    assert_equal_runs(run, tmp_path / "back")


def test_damage_before_or_after_archiving_is_found(tmp_path: Path, capsys: Capture) -> None:
    run = run_of(tmp_path / "run")
    file = tmp_path / "run.tar.zst"
    assert main(["archive", str(run), "-o", str(file)]) == 0
    content = file.read_bytes()
    for position in range(50, len(content), max(1, len(content) // 12)):
        damaged = bytearray(content)
        damaged[position] ^= 4
        (tmp_path / "damaged.tar.zst").write_bytes(damaged)
        back = tmp_path / f"back{position}"
        code = main(["unarchive", str(tmp_path / "damaged.tar.zst"), "-o", str(back)])
        # A bit without an effect on the content is possible, for example in a frame's header.
        if code == 0:
            assert_equal_runs(run, back)
        else:
            assert code == 3 and "Traceback" not in capsys.readouterr().err
            assert not list(back.glob(".*staging*"))
            for path in back.glob("epoch*"):
                assert contents(path) == contents(run / path.name)
        shutil.rmtree(back, ignore_errors=True)
    (tmp_path / "short.tar.zst").write_bytes(content[: len(content) // 2])
    assert main(["unarchive", str(tmp_path / "short.tar.zst"), "-o", str(tmp_path / "b")]) == 3
    shard = next((run / "epoch_0_step_2" / "model").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert main(["archive", str(run), "-o", str(tmp_path / "new.tar.zst")]) == 3
    assert not (tmp_path / "new.tar.zst").exists()


@pytest.mark.parametrize("name", ["x.tar.gz", "x.TGZ", "x.tar", "x.zip"])
def test_an_archive_has_no_name_of_another_format(
    tmp_path: Path, capsys: Capture, name: str
) -> None:
    run = run_of(tmp_path / "run")
    assert main(["archive", str(run), "-o", str(tmp_path / name)]) == 2
    assert ".tar.zst" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_another_checkpoint_of_the_same_name_is_never_replaced(
    tmp_path: Path, capsys: Capture
) -> None:
    run = run_of(tmp_path / "run")
    file = tmp_path / "run.tar.zst"
    assert main(["archive", str(run), "-o", str(file)]) == 0
    other = run_of(tmp_path / "other", save_optimizer=False)
    before = contents(other)
    assert main(["unarchive", str(file), "-o", str(other)]) == 3
    assert "already exists" in capsys.readouterr().err
    after = contents(other)
    assert {name: after[name] for name in before if name != ".run.lock"} == {
        name: content for name, content in before.items() if name != ".run.lock"
    }


def test_an_archive_that_cannot_be_opened_is_named_and_no_run_directory_is_made(
    tmp_path: Path, capsys: Capture
) -> None:
    for archive in (tmp_path / "missing.tar.zst", tmp_path):
        assert main(["unarchive", str(archive), "-o", str(tmp_path / "run")]) == 3
        message = capsys.readouterr().err
        assert "the archive cannot be read" in message
        assert str(archive) in message
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_also_a_directory_is_named(tmp_path: Path, capsys: Capture) -> None:
    import zstandard

    checkpoint = run_of(tmp_path / "run") / "epoch_0_step_1"
    manifest = Manifest.read(checkpoint)
    files = {**manifest.files, "losses.json/x": manifest.files["losses.json"]}
    members = {"MANIFEST.json": replace(manifest, files=files).to_bytes()}
    for name in sorted(files):
        members[name] = (checkpoint / name.removesuffix("/x")).read_bytes()
    with tarfile.open(tmp_path / "plain", "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(f"epoch_0_step_1/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    file = tmp_path / "run.tar.zst"
    file.write_bytes(zstandard.compress((tmp_path / "plain").read_bytes()))
    assert main(["unarchive", str(file), "-o", str(tmp_path / "back")]) == 3
    assert "'epoch_0_step_1/losses.json/x' is in a file" in capsys.readouterr().err
    assert not list((tmp_path / "back").glob("*epoch*"))
