"""Incremental saves: files of tensors that do not train are shared between checkpoints, and never changed or lost."""

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automodel_ckpt.checkpoint import Manifest, discover
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.errors import RecipeError
from tests.support.checkpoints import is_intact
from tests.support.models import tiny

LAYOUTS: list[dict[str, Any]] = [{}, {"is_async": True}]
IDS = ["sync", "async"]


def save_all(root: Path, made: SimpleNamespace, *steps: int, **options: Any) -> None:
    """Save at each of *steps* by one checkpointer, and train before each."""
    saver = tiny.checkpointer(root, **{"incremental": True, **options})
    try:
        saver.load(discover(made))
        for step in steps:
            tiny.train(made, 1)
            saver.save(discover(made), step=step, epoch=0, losses={"step": step})
            saver.wait_for_save()
    finally:
        saver.close()


def shared(root: Path, one: int, other: int) -> set[str]:
    """The files that two checkpoints share, by their names in the checkpoint."""
    first, second = root / f"epoch_0_step_{one}", root / f"epoch_0_step_{other}"
    found = set()
    for path in first.rglob("*"):
        twin = second / path.relative_to(first)
        if path.is_file() and twin.is_file() and path.samefile(twin):
            found.add(path.relative_to(first).as_posix())
    return found


def assert_complete(root: Path, step: int) -> None:
    assert is_intact(root / f"epoch_0_step_{step}", deep=True)


def assert_loads(root: Path, made: SimpleNamespace, **options: Any) -> None:
    found = tiny.recipe(seed=99)
    options.pop("is_async", None)
    assert tiny.load(root, found, **options) is not None
    tiny.assert_equal_state(found, made)


@pytest.mark.parametrize("options", LAYOUTS, ids=IDS)
def test_a_parameter_that_is_frozen_during_the_run_is_shared_from_the_next_save_on(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    made = tiny.recipe()
    saver = tiny.checkpointer(tmp_path, incremental=True, **options)
    for step in range(1, 5):
        made.model.one_row.requires_grad_(step < 2)
        saver.save(discover(made), step=step, epoch=0)
        saver.wait_for_save()
    saver.close()
    stored = Manifest.read(tmp_path / "epoch_0_step_4").trees["model"].tensors["one_row"]
    assert {piece.file for piece in stored.slices} <= shared(tmp_path, 3, 4)
    assert_loads(tmp_path, made)


@pytest.mark.parametrize("options", LAYOUTS, ids=IDS)
def test_files_that_do_not_change_are_shared_and_each_checkpoint_stands_alone(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    made = tiny.recipe()
    save_all(tmp_path, made, 1, 2, 3, **options)
    both = shared(tmp_path, 1, 2)
    assert both and both == shared(tmp_path, 2, 3)
    names = Manifest.read(tmp_path / "epoch_0_step_3").trees["model"].tensors
    in_shared = {fqn for fqn, tensor in names.items() if {p.file for p in tensor.slices} & both}
    assert in_shared == {"frozen", "empty", "steps", "mask"}
    for removed in (1, 2):
        shutil.rmtree(tmp_path / f"epoch_0_step_{removed}")
        assert_complete(tmp_path, 3)
    assert_loads(tmp_path, made, **options)


def test_a_tensor_that_changed_although_it_does_not_train_is_written(tmp_path: Path) -> None:
    made = tiny.recipe()
    save_all(tmp_path, made, 1)
    # Through `.data`, so that the version counter of the parameter does not change.
    version = made.model.frozen._version
    made.model.frozen.data[0, 0] += 1
    assert made.model.frozen._version == version
    saver = tiny.checkpointer(tmp_path, incremental=True)
    saver.save(discover(made), step=2, epoch=0)
    saver.close()
    assert not any("frozen" in name for name in shared(tmp_path, 1, 2))
    assert_complete(tmp_path, 1)
    assert_complete(tmp_path, 2)
    assert_loads(tmp_path, made)


def large_recipe() -> SimpleNamespace:
    """With enough frozen values and buffers for separate files by default."""
    made = tiny.recipe()
    made.model.frozen = torch.nn.Parameter(torch.ones(4 << 20), requires_grad=False)
    return made


def test_by_default_the_newest_two_checkpoints_share_nothing(tmp_path: Path) -> None:
    save_all(tmp_path, large_recipe(), 1, 2, 3, 4, 5, incremental="auto")
    for step in (1, 2, 3, 4):
        assert shared(tmp_path, step, step + 1) == set()
    assert shared(tmp_path, 1, 3) == shared(tmp_path, 3, 5) != set()
    assert shared(tmp_path, 2, 4) != set()
    # So a start survives damage to a shared file of the newest one.
    (name,) = (n for n in shared(tmp_path, 3, 5) if "frozen" in n)
    path = tmp_path / "epoch_0_step_5" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    resumed = tiny.load(tmp_path, large_recipe())
    assert resumed is not None and resumed.step == 4


def test_after_a_rewind_the_checkpoint_before_stays_independent(tmp_path: Path) -> None:
    save_all(tmp_path, large_recipe(), 1, 2, 3, incremental="auto")
    save_all(tmp_path, large_recipe(), 3, incremental="auto", restore_from="epoch_0_step_2")
    assert (tmp_path / "epoch_0_step_3.superseded-1").is_dir()
    assert shared(tmp_path, 2, 3) == set() and shared(tmp_path, 1, 3) != set()
    assert_complete(tmp_path, 3)


def test_a_file_system_without_hard_links_gets_full_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*arguments: object, **options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    made = tiny.recipe()
    save_all(tmp_path, made, 1, 2)
    assert shared(tmp_path, 1, 2) == set()
    assert_complete(tmp_path, 2)
    assert_loads(tmp_path, made)


def test_an_old_file_is_written_anew_so_that_damage_does_not_last(tmp_path: Path) -> None:
    made = tiny.recipe()
    save_all(tmp_path, made, 1)
    yesterday = time.time() - 90_000
    for path in tmp_path.rglob("*.safetensors"):
        os.utime(path, (yesterday, yesterday))
    save_all(tmp_path, made, 2)
    assert shared(tmp_path, 1, 2) == set()


def test_a_truncated_file_is_not_shared(tmp_path: Path) -> None:
    made = tiny.recipe()
    save_all(tmp_path, made, 1, 2)
    for name in shared(tmp_path, 1, 2):
        with open(tmp_path / "epoch_0_step_2" / name, "r+b") as file:
            file.truncate(10)
    saver = tiny.checkpointer(tmp_path, incremental=True)
    saver.save(discover(made), step=3, epoch=0)
    saver.close()
    assert shared(tmp_path, 2, 3) == set()
    assert_complete(tmp_path, 3)


def test_whole_files_and_shared_ones_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="share nothing"):
        tiny.checkpointer(tmp_path, model_layout="hf", incremental=True)


def test_commands_count_what_is_shared_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    save_all(run, tiny.recipe(), 1, 2, 3)
    shared_bytes = sum((run / "epoch_0_step_1" / name).stat().st_size for name in shared(run, 1, 2))
    assert shared_bytes
    total = sum(Manifest.read(path).nbytes for path in run.glob("epoch*"))
    assert main(["ls", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["nbytes"] == total - 2 * shared_bytes
    # Only the last name of a file frees its bytes.
    assert main(["prune", str(run), "--keep-last", "1", "--json"]) == 0
    pruned = json.loads(capsys.readouterr().out)["pruned"]
    in_files = sum(path.stat().st_size for path in (run / "epoch_0_step_3").rglob("*.safetensors"))
    assert len(pruned) == 2 and in_files
    manifest_bytes = total // 3
    assert all(entry["nbytes"] < manifest_bytes + 20_000 - shared_bytes for entry in pruned)
    assert_complete(run, 3)
