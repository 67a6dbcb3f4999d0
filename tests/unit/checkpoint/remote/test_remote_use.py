"""Checkpoints in a store, as commands and a program without a recipe use them."""

import shutil
from pathlib import Path

import pytest

from automodel_ckpt.cli.ckpt import main as ckpt
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models import tiny
from tests.support.runs.stored_runs import FIRST, write_run


def test_a_file_that_the_store_changed_is_found(
    local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/store"
    assert ckpt(["push", str(local / FIRST), url]) == 0
    (file,) = (tmp_path / "store" / FIRST).rglob("*.safetensors")
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    root = tmp_path / "pulled"
    root.mkdir()
    assert ckpt(["pull", url, str(root)]) == 3
    assert "digest differs" in capsys.readouterr().err and not list(root.glob("*epoch*"))
    assert ckpt(["verify", url]) == 0
    assert ckpt(["verify", "--deep", url]) == 3
    file.write_bytes(good[:-1])
    assert ckpt(["verify", url]) == 3
    assert "has another size" in capsys.readouterr().out
    # A download removes what a killed one has left.
    file.write_bytes(good)
    (root / f".{FIRST}.staging-{'0' * 32}").mkdir()
    assert ckpt(["pull", url, str(root)]) == 0
    assert [path.name for path in root.iterdir()] == [FIRST]


def test_a_checkpoint_of_another_run_is_loaded_by_its_url(tmp_path: Path) -> None:
    write_run(tmp_path / "local")
    url = f"file://{tmp_path}/store"
    assert ckpt(["push", str(tmp_path / "local" / FIRST), url]) == 0
    wanted = f"{url}/{FIRST}"
    root = tmp_path / "other"
    made = tiny.recipe(seed=1)
    resumed = tiny.load(root, made, restore_from=wanted)
    assert resumed is not None and resumed.step == 10
    # It is no checkpoint of this run.
    assert not list(root.glob("**/epoch*"))
    tiny.save(root, made, 30, restore_from=wanted)
    # The request applies until the run has saved a checkpoint, so the store is not needed any more.
    shutil.rmtree(tmp_path / "store")
    resumed = tiny.load(root, made, restore_from=wanted)
    assert resumed is not None and resumed.step == 30
    with pytest.raises(CheckpointUnusable, match="checkpoint not found"):
        tiny.load(tmp_path / "third", made, restore_from=url)
