"""Values of recipes where a run uses them: durations, paths, and references in later errors."""

from pathlib import Path

import pytest

from automodel_ckpt import errors, load_recipe
from automodel_ckpt.cli.launch.failures import failure_record
from automodel_ckpt.config.tree.urls import with_local_directory
from automodel_ckpt.errors import RecipeError
from tests.support.runs.recipes import SMALLEST

SECRET = "hunter2-do-not-show"


def test_errors_that_come_up_later_show_the_reference_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_references", {})
    monkeypatch.setenv("CKPT_TEST", SECRET)
    monkeypatch.setenv("CKPT_WORD", "abc")
    (tmp_path / "recipe.yaml").write_text(
        f"{SMALLEST}  x: a/${{oc.env:CKPT_TEST}}\n  y: ${{oc.env:CKPT_WORD}}\nseed: ${{oc.env:CKPT_SEED,7}}\n"
    )
    loaded = load_recipe(tmp_path / "recipe.yaml")
    for error in (
        RecipeError(
            f"no {SECRET}",
            where="here",
            value=Path(loaded.config.dataset.kwargs["x"]),
            hint="abc, not abcd 7",
        ),
        ValueError(f"no {SECRET} {loaded.config.dataset.kwargs['x']!r} abc, not abcd 7"),
    ):
        shown = failure_record(error, 0)
        assert SECRET not in shown.message + shown.details
        assert "no ${oc.env:CKPT_TEST}" in shown.message
        assert "a/${oc.env:CKPT_TEST}" in shown.message
        assert "${oc.env:CKPT_WORD}, not abcd 7" in shown.message


def test_a_tilde_in_paths_is_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a recipe file, no shell expands it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yaml").write_text(SMALLEST)
    text = "extends: ~/base.yaml\ncheckpoint: {restore_from: ~/a, memory: {directory: ~/b, every_steps: 1}}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    found = with_local_directory(load_recipe(tmp_path / "recipe.yaml").config)
    assert found.checkpoint.restore_from == f"{tmp_path}/a"
    assert found.checkpoint.memory is not None
    assert found.checkpoint.memory.directory == f"{tmp_path}/b"
    for given, expected in (("~/runs", f"{tmp_path}/runs"), ("runs~", "runs~")):
        config = load_recipe(tmp_path / "base.yaml", {"checkpoint.checkpoint_dir": given}).config
        assert with_local_directory(config).checkpoint.checkpoint_dir == expected
