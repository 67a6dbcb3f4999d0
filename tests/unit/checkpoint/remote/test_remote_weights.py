"""``init_from`` with URLs: only the model is downloaded, and removed when the run has started."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from automodel_ckpt.checkpoint.jobs import rank_manifest
from automodel_ckpt.checkpoint.remote.push import push_checkpoint
from automodel_ckpt.checkpoint.remote.run import OWNER, RemoteRun
from automodel_ckpt.checkpoint.store.store import Store
from automodel_ckpt.config.keys.checkpoint import CheckpointConfig
from automodel_ckpt.config.keys.model import InitFromConfig, InitFromSource
from automodel_ckpt.convert.open import open_weights
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.training.start.remote_weights import with_local_weights
from tests.support.models import tiny

AUTOMODEL = Path(__file__).parents[3] / "fixtures" / "automodel"
NAME = "epoch_0_step_20"


@pytest.mark.parametrize("below", ["", f"/{NAME}", "/LATEST", f"/{NAME}/model"])
def test_a_url_is_replaced_by_a_copy_of_the_weights(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if below:
        monkeypatch.setattr(rank_manifest, "MIN_TABLE_ROWS", 0)
    made = tiny.recipe()
    tiny.train(made)
    tiny.save(tmp_path / "run", made)
    url = f"file://{tmp_path}/store"
    run = RemoteRun(Store(url))
    push_checkpoint(run, tmp_path / "run" / NAME, tmp_path / "memory")
    run.point("val_loss", "min")
    section = InitFromConfig(url + below, allow_missing=["x"])
    checkpoint = CheckpointConfig(checkpoint_dir=str(tmp_path / "new"))
    with with_local_weights(section, checkpoint, downloads=True, group=None) as local:
        assert isinstance(local, InitFromConfig) and local.allow_missing == ["x"]
        weights = open_weights(local.path)
        weights.verify("digest", 0, 1)
        expected = open_weights(tmp_path / "run" / NAME).modules["model"].tensors
        assert weights.modules["model"].tensors.keys() == expected.keys()
        assert not list(Path(local.path).rglob("optim"))
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    "place", ["torch_save/epoch_0_step_1", "safetensors/epoch_0_step_1", "run"]
)
def test_a_url_may_have_the_checkpoints_of_automodel_which_have_the_same_names(
    place: str, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(AUTOMODEL / place, store / place)
    section = InitFromConfig(f"file://{store}/{place}")
    checkpoint = CheckpointConfig(checkpoint_dir=str(tmp_path / "new"))
    with with_local_weights(section, checkpoint, downloads=True, group=None) as local:
        assert isinstance(local, InitFromConfig)
        found = open_weights(local.path).modules["model"].tensors
        assert found.keys() == open_weights(AUTOMODEL / place).modules["model"].tensors.keys()


def test_an_upload_that_is_not_complete_is_no_checkpoint_of_another_program(tmp_path: Path) -> None:
    shutil.copytree(AUTOMODEL / "safetensors", tmp_path / "store")
    (tmp_path / "store" / OWNER).write_text("{}")
    section = InitFromConfig(f"file://{tmp_path}/store/epoch_0_step_1")
    checkpoint = CheckpointConfig(checkpoint_dir=str(tmp_path / "new"))
    with (
        pytest.raises(CheckpointUnusable, match="no complete checkpoint of this name"),
        with_local_weights(section, checkpoint, downloads=True, group=None),
    ):
        raise AssertionError("not reached")


def test_paths_stay_as_they_are(tmp_path: Path) -> None:
    section = [InitFromSource("a", strip="x"), InitFromSource(f"file://{tmp_path}/none")]
    checkpoint = CheckpointConfig(checkpoint_dir=str(tmp_path / "new"))
    with (
        pytest.raises(CheckpointUnusable, match="nothing at this URL"),
        with_local_weights(section, checkpoint, downloads=True, group=None),
    ):
        raise AssertionError("not reached")
    with with_local_weights(section[:1], checkpoint, downloads=True, group=None) as local:
        assert local == section[:1]
