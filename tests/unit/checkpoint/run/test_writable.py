"""A run directory that cannot be written is reported before anything is built."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from automodel_ckpt.checkpoint.run.directory import RunDirectory, check_writable
from automodel_ckpt.checkpoint.run.resume import KeepPolicy
from automodel_ckpt.errors import RecipeError


def hold(directory: Path) -> None:
    run = RunDirectory(directory, KeepPolicy(), "val_loss")
    try:
        run.hold()
    finally:
        run.release()


@pytest.mark.parametrize("check", [check_writable, hold])
@pytest.mark.parametrize("below", ["", "run"])
def test_a_link_to_nothing_is_reported_with_its_target(
    tmp_path: Path, check: Callable[[Path], None], below: str
) -> None:
    link = tmp_path / "link"
    link.symlink_to("gone/place")
    with pytest.raises(RecipeError) as raised:
        check(link / below)
    (problem,) = raised.value.problems
    target = tmp_path / "gone" / "place"
    assert problem.where == str(link / below)
    assert problem.value == f"{link} is a link to {target}, which does not exist"
    assert not target.exists()


@pytest.mark.parametrize("check", [check_writable, hold])
@pytest.mark.parametrize("path", ["LATEST", "epoch_0_step_20", "epoch_0_step_20/model/new"])
def test_a_run_directory_inside_of_a_checkpoint_is_an_error(
    tmp_path: Path, check: Callable[[Path], None], path: str
) -> None:
    checkpoint = tmp_path / "epoch_0_step_20"
    (checkpoint / "model").mkdir(parents=True)
    (tmp_path / "LATEST").symlink_to("epoch_0_step_20")
    check(tmp_path / path)  # a directory without a manifest is no checkpoint
    (checkpoint / "MANIFEST.json").write_text("{}")
    before = sorted(checkpoint.rglob("*"))
    with pytest.raises(RecipeError, match="cannot be a checkpoint") as raised:
        check(tmp_path / path)
    assert str(checkpoint) in raised.value.problems[0].value
    assert sorted(checkpoint.rglob("*")) == before


def test_a_read_only_file_system_and_missing_permissions_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "new" / "run"
    check_writable(run)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path != tmp_path)
        with pytest.raises(RecipeError, match=rf"{tmp_path}\n  value:  EACCES"):
            check_writable(run)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(RecipeError, match=rf"{tmp_path}\n  value:  EROFS[\s\S]*mounted read-only"):
        check_writable(run)
    assert not run.parent.exists()
