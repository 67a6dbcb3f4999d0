"""Which checkpoint is chosen, and how fast."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.run import links, resume
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models import tiny


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tiny.save(tmp_path_factory.mktemp("run"), tiny.recipe()).path
    return (path / layout.MANIFEST).read_bytes()


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


def test_names_are_ordered_by_step_and_strangers_passed_over(tmp_path: Path) -> None:
    for name in (
        "epoch_0_step_9",
        "epoch_1_step_10",
        "epoch_0_step_10",
        "epoch_0_step_011",
        "epoch_0_step_5x",
        "x",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "epoch_0_step_99").write_text("a file")
    os.symlink("epoch_0_step_9", tmp_path / "epoch_0_step_98")
    names = [str(name) for name in resume.checkpoint_names(tmp_path)]
    assert names == ["epoch_1_step_10", "epoch_0_step_10", "epoch_0_step_9"]


def test_every_link_and_pointer_file_in_the_directory_protects(tmp_path: Path) -> None:
    for step in range(1, 6):
        (tmp_path / f"epoch_0_step_{step}" / "model").mkdir(parents=True)
    (tmp_path / "LATEST").symlink_to("epoch_0_step_1")
    (tmp_path / "deep").symlink_to(tmp_path / "epoch_0_step_2" / "model")
    (tmp_path / "LOWEST_VAL.txt").write_text("epoch_0_step_3\n")
    (tmp_path / "elsewhere").symlink_to("/tmp")
    (tmp_path / "notes.txt").write_text("epoch_0_step_4 is the good one")
    assert links.protected_names(tmp_path) == {"epoch_0_step_1", "epoch_0_step_2", "epoch_0_step_3"}


def test_a_checkpoint_to_restore_is_named_by_pointer_name_or_path(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"epoch_0_step_{step}").mkdir()
    second = tmp_path / "epoch_0_step_2"
    commit.point(tmp_path, layout.LATEST, second.name)
    for name in ("LATEST", second.name, str(second), str(tmp_path / "LATEST")):
        assert resume.named_checkpoint(tmp_path, name) == second
    commit.point(tmp_path, layout.LOWEST_VAL, "epoch_0_step_9")
    for name in ("LOWEST_VAL", "epoch_0_step_9", str(tmp_path / "epoch_0_step_9")):
        with pytest.raises(CheckpointUnusable, match="does not exist") as caught:
            resume.named_checkpoint(tmp_path, name)
        assert "contains epoch_0_step_2, epoch_0_step_1)" in str(caught.value)
    commit.unpoint(tmp_path, layout.LOWEST_VAL)
    with pytest.raises(CheckpointUnusable, match="does not exist"):
        resume.named_checkpoint(tmp_path, "LOWEST_VAL")
    with pytest.raises(CheckpointUnusable, match=rf"run directory[\s\S]*such as {tmp_path}/LATEST"):
        resume.named_checkpoint(tmp_path, str(tmp_path))


def test_a_pointer_that_is_a_text_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "epoch_0_step_2").mkdir()
    (tmp_path / "LATEST.txt").write_text("epoch_0_step_2\n")
    target = tmp_path / "epoch_0_step_2"
    for path in (tmp_path / "LATEST", tmp_path / "LATEST.txt", target):
        assert resume.pointed_path(path) == target
    assert resume.pointed_path(tmp_path / "LOWEST_VAL") is None
    assert resume.named_checkpoint(tmp_path, str(tmp_path / "LATEST.txt")) == target
