"""Exports in a store: each that a run makes is uploaded with its checkpoint, whenever it is complete."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.checkpoint.export.export_manifest import export_problems
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.remote import uploader
from automodel_ckpt.checkpoint.remote.background import LINK
from automodel_ckpt.checkpoint.remote.child_process import UploadingProcess
from automodel_ckpt.checkpoint.remote.uploader import Job, Uploader
from automodel_ckpt.checkpoint.run.links import link, pending
from tests.support import ranks
from tests.support.runs.training import RECIPE, train, write_recipe

NAMES = ["epoch_0_step_5", "epoch_1_step_10", "epoch_1_step_12"]
EXPORT = f"model/{layout.CONSOLIDATED}"


def run_with(place: Path, *, is_async: bool) -> Path:
    """Train with a store to which nothing is uploaded, and write the exported checkpoints to the file ``exported``."""
    text = f"{RECIPE}checkpoint: {{checkpoint_dir: {place}/run, save_consolidated: every, "
    text += f"is_async: {str(is_async).lower()}, remote: {{url: 'file://{place}/store'}}}}\n"

    request, run = UploadingProcess.request, place / "run"

    def note(self: UploadingProcess, name: str) -> None:
        if not (run / name / EXPORT).is_dir():
            request(self, name)
            return
        assert not export_problems(run / name / EXPORT)
        # As if its checkpoint was uploaded already.
        os.unlink(run / f"{LINK}{name}")
        request(self, name)
        assert name in pending(run, LINK)
        with open(place / "exported", "a") as file:
            file.write(f"{name}\n")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UploadingProcess, "start", lambda self, step=0: None)
        patch.setattr(UploadingProcess, "request", note)
        ranks.run(partial(train, write_recipe(place, text)), 1, init=False)
    return place / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_with(tmp_path_factory.mktemp("exports"), is_async=False)


def test_the_upload_of_each_export_is_requested_when_it_is_complete(
    run: Path, tmp_path: Path
) -> None:
    assert (run.parent / "exported").read_text().split() == NAMES
    run_with(tmp_path, is_async=True)
    assert (tmp_path / "exported").read_text().split() == NAMES


def test_an_export_that_is_made_during_the_upload_of_its_checkpoint_is_uploaded(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, _, last = NAMES
    push_exports = uploader.push_exports

    def exporting_meanwhile(*arguments: Any, **options: Any) -> int:
        nbytes = push_exports(*arguments, **options)
        if (run / first / "later").exists():
            (run / first / "later").rename(run / first / EXPORT)
        return nbytes

    monkeypatch.setattr(uploader, "push_exports", exporting_meanwhile)
    (run / first / EXPORT).rename(run / first / "later")
    for name in pending(run, LINK):
        os.unlink(run / f"{LINK}{name}")
    store = tmp_path / "store"
    uploading = Uploader(run, Job(f"file://{store}", {}, "token", "val_loss"))
    link(run, LINK, last)
    uploading.catch_up()
    link(run, LINK, first)
    uploading.catch_up()
    assert pending(run, LINK) == []
    for name in (first, last):
        assert not export_problems(store / name / EXPORT)
