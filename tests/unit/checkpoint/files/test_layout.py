"""Names on disk, in both directions, and the dtypes of files."""

import errno
import os
from pathlib import Path

import pytest

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.layout import CheckpointName
from automodel_ckpt.checkpoint.parts.failures import SAME_COMMAND, as_failure
from automodel_ckpt.errors import ExportFailed, RecipeError, SaveFailed

UNIQUE = "0123456789abcdef" * 2


def test_a_checkpoints_name_is_read_back_and_ordered_by_step() -> None:
    name = CheckpointName(step=20, epoch=1)
    assert str(name) == "epoch_1_step_20" and layout.parse_checkpoint_name(str(name)) == name
    assert CheckpointName(9, 5) < CheckpointName(10, 0) < CheckpointName(10, 1)
    for text in (
        "epoch_1_step_",
        "epoch_1_step_2x",
        "xepoch_1_step_2",
        "LATEST",
        "epoch_-1_step_2",
    ):
        assert layout.parse_checkpoint_name(text) is None


def test_each_kind_of_name_is_told_from_all_others() -> None:
    names = {
        "checkpoint": "epoch_0_step_2",
        "superseded": layout.superseded_name("epoch_0_step_2", 3),
        "staging": layout.staging_name("epoch_0_step_2", UNIQUE),
        "trash": layout.trash_name(UNIQUE),
        "link": layout.link_name(UNIQUE),
        "temporary": f".{layout.LATEST}.{UNIQUE}",
        "temporary text": f".{layout.LATEST}.txt.{UNIQUE}",
        "temporary lock": f"{layout.LOCK_FILE}.{UNIQUE}",
        "temporary pin": f".{layout.PIN}epoch_0_step_2.{UNIQUE}",
        "pin": f"{layout.PIN}epoch_0_step_2",
        "pin of nothing": f"{layout.PIN}mine",
        "mine": f".mine.{UNIQUE}",
        "not unique": f".{layout.LATEST}.{UNIQUE[:-1]}",
    }

    def are(is_kind: object) -> set[str]:
        return {kind for kind, name in names.items() if is_kind(name)}  # type: ignore[operator]

    assert are(layout.is_checkpoint) == {"checkpoint", "superseded"}
    assert are(layout.is_superseded) == {"superseded"}
    assert are(layout.is_staging) == {"staging"}
    assert are(layout.is_trash) == {"trash"}
    assert are(layout.is_link_name) == {"link"}
    assert are(layout.is_pin) == {"pin"}
    assert are(layout.is_temporary) == {
        "temporary",
        "temporary text",
        "temporary lock",
        "temporary pin",
    }
    assert are(layout.is_export_leftover) == set()
    assert layout.name_before(names["superseded"]) == "epoch_0_step_2"
    assert layout.name_before(names["checkpoint"]) is None
    assert layout.staged_name(names["staging"]) == "epoch_0_step_2"
    assert layout.staged_name(names["checkpoint"]) is None
    for kind in ("staging", "previous"):
        assert layout.export_of(f".merged.{kind}-{UNIQUE}") == "merged"
    assert layout.export_of(f".other.staging-{UNIQUE}") is None


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("model/a.safetensors", None),
        ("a", None),
        ("", "not a plain relative path"),
        ("/a", "not a plain relative path"),
        ("a\\b", "a character"),
        ("a/../b", "plain relative"),
        ("a//b", "plain relative"),
        ("a/", "plain relative"),
        ("./a", "plain relative"),
        ("a\0", "a character"),
        ("\ud800", "a character"),
        ("a\udfff", "a character"),
        ("\ue000\ud7ff", None),
    ],
)
def test_paths_in_a_checkpoint_stay_inside_it(path: str, why: str | None) -> None:
    found = layout.unsafe_path(path)
    assert (found is None) if why is None else (found is not None and why in found)


def test_an_error_of_the_system_becomes_one_with_the_place_and_what_to_do(tmp_path: Path) -> None:
    def message(kind: type[SaveFailed | RecipeError | ExportFailed], error: Exception) -> str:
        failure = as_failure(error, "saving x", tmp_path / "x", kind)
        assert type(failure) is kind
        return str(failure)

    def full(path: str | None = None) -> OSError:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    assert str(tmp_path / "x") in message(SaveFailed, full())
    named = message(SaveFailed, full("/elsewhere"))
    assert "/elsewhere" in named and str(tmp_path) not in named
    assert "resume from the previous checkpoint" in named
    assert "checkpoint.checkpoint_dir" in message(RecipeError, full())
    assert "ckpt consolidate" in message(ExportFailed, full())
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    assert "permissions" in message(SaveFailed, denied)
    hinted = str(as_failure(denied, "copying", tmp_path, hint="repair the cache"))
    assert "permissions" in hinted and "repair the cache" in hinted
    again = str(as_failure(denied, "writing", tmp_path, restart=SAME_COMMAND))
    assert "read-only, then run the same command" in again and "disk space" not in again
    unexpected = message(SaveFailed, ZeroDivisionError("oops"))
    assert "oops" in unexpected and "defect" in unexpected
    known = SaveFailed("what", where="where", value="value", hint="hint")
    assert as_failure(known, "doing", tmp_path, RecipeError) is known
