"""Which checkpoint is chosen, and how fast."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.run import resume
from tests.support.models import tiny


def test_restore_from_applies_again_when_the_newest_checkpoint_was_saved_without_it(
    tmp_path: Path,
) -> None:
    """Only the newest checkpoint tells whether the run has continued from the one named; older ones do not."""
    made = tiny.recipe()
    tiny.save(tmp_path, made, step=10)
    tiny.save(tmp_path, made, step=20, restore_from="epoch_0_step_10")
    going_on = resume.candidates(tmp_path, "epoch_0_step_10")
    assert [path.name for path in going_on.candidates] == ["epoch_0_step_20", "epoch_0_step_10"]
    tiny.save(tmp_path, made, step=30)
    rewinding = resume.candidates(tmp_path, "epoch_0_step_10")
    assert [path.name for path in rewinding.candidates] == ["epoch_0_step_10"] and rewinding.by_name


def note_the_path(checkpoint: Path, path: str) -> None:
    """Have the manifest say what earlier versions noted: the absolute path that ``restore_from`` meant."""
    noted = Manifest.read(checkpoint)
    lineage = {**noted.lineage, "restore_from": path}
    (checkpoint / layout.MANIFEST).write_bytes(replace(noted, lineage=lineage).to_bytes())


@pytest.mark.parametrize("version", ["now", "before"])
def test_a_run_that_was_moved_goes_on_instead_of_rewinding_again(
    tmp_path: Path, version: str
) -> None:
    before, after, made = tmp_path / "before", tmp_path / "after", tiny.recipe()
    tiny.save(before, made, step=10)
    path = tiny.save(before, made, step=20, restore_from="epoch_0_step_10").path
    assert Manifest.read(path).lineage["restore_from"] == "epoch_0_step_10"
    if version == "before":
        note_the_path(path, str(before / "epoch_0_step_10"))
    for request in ("epoch_0_step_10", str(before / "epoch_0_step_10")):
        assert not resume.candidates(before, request).by_name
    before.rename(after)
    for request in (
        "epoch_0_step_10",
        str(after / "epoch_0_step_10"),
        str(before / "epoch_0_step_10"),
    ):
        assert resume.candidates(after, request).candidates[0].name == "epoch_0_step_20"
    shutil.copytree(after, before)
    assert not resume.candidates(after, "epoch_0_step_10").by_name


def test_a_checkpoint_of_another_run_that_has_the_same_name_is_another_request(
    tmp_path: Path,
) -> None:
    run, other, made = tmp_path / "run", tmp_path / "other", tiny.recipe()
    tiny.save(other, made, step=10)
    tiny.train(made, 1)
    tiny.save(run, made, step=10)
    tiny.save(run, made, step=20, restore_from=str(other / "epoch_0_step_10"))
    assert not resume.candidates(run, str(other / "epoch_0_step_10")).by_name
    assert resume.candidates(run, "epoch_0_step_10").by_name
    tiny.save(run, made, step=30, restore_from="epoch_0_step_10")
    assert not resume.candidates(run, str(run / "epoch_0_step_10")).by_name
    assert resume.candidates(run, str(other / "epoch_0_step_10")).by_name
