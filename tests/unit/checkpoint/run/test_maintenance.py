"""ckpt verify, prune, pin, unpin: on real checkpoints, through the command."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from automodel_ckpt.checkpoint import Manifest, discover
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.checkpoints import is_intact
from tests.support.models import tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four checkpoints. No test changes it."""
    root, made = tmp_path_factory.mktemp("saved"), tiny.recipe()
    for step, value in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 2.5)):
        tiny.save(root, made, step=step, losses={"val_loss": value}, validated=True)
        tiny.train(made, 1)
    return root


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run", symlinks=True))


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if path.name.startswith("epoch"))


def test_prune_previews_and_then_removes_the_same(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = names(run)
    assert main(["prune", str(run), "--keep-last", "1", "--dry-run", "--json"]) == 0
    preview = json.loads(capsys.readouterr().out)
    assert names(run) == before
    assert main(["prune", str(run), "--keep-last", "1", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert preview["pruned"] == done["pruned"]
    assert [entry["name"] for entry in done["pruned"]] == ["epoch_0_step_10", "epoch_0_step_30"]
    assert names(run) == ["epoch_0_step_20", "epoch_0_step_40"]
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_prune_of_a_misspelled_directory_does_not_prune_the_run_next_to_it(
    run: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither ``checkpoints/`` of the current directory, nor the run that the misspelled path would be in."""
    work = tmp_path_factory.mktemp("work")
    (work / "checkpoints").symlink_to(run)
    (work / "notes.txt").write_text("")
    monkeypatch.chdir(work)
    before = names(run)
    for path in ("chekpoints", "notes.txt", "checkpoints/epoch_0_step_50", "checkpoints/LATESTT"):
        assert main(["prune", path, "--keep-last", "1"]) == 3
    assert names(run) == before
    # A pointer without a target is still a path inside of the run.
    (run / "LATEST").unlink()
    (run / "LATEST").symlink_to("epoch_0_step_50")
    assert main(["prune", "checkpoints/LATEST", "--keep-last", "1"]) == 0
    assert len(names(run)) < len(before)


def test_the_checkpoint_just_saved_is_not_removed_by_the_save_that_made_it(run: Path) -> None:
    """Not even where its step is not the newest in the directory, as after a copy from another run."""
    assert set(tiny.save(run, tiny.recipe(), step=5, keep_last=1).pruned) == {
        "epoch_0_step_10",
        "epoch_0_step_30",
    }
    assert names(run) == [f"epoch_0_step_{step}" for step in (20, 40, 5)]


def test_a_pinned_checkpoint_stays_until_it_is_unpinned(run: Path) -> None:
    assert main(["pin", str(run / "epoch_0_step_10")]) == 0
    assert main(["prune", str(run), "--keep-last", "1"]) == 0
    assert names(run) == ["epoch_0_step_10", "epoch_0_step_20", "epoch_0_step_40"]
    assert os.readlink(run / "pin-epoch_0_step_10") == "epoch_0_step_10"
    assert main(["unpin", str(run / "epoch_0_step_10")]) == 0
    assert main(["prune", str(run), "--keep-last", "1"]) == 0
    assert names(run) == ["epoch_0_step_20", "epoch_0_step_40"]


def test_dropping_the_optimizer_keeps_weights_that_verify_and_load(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = run / "epoch_0_step_10/model/consolidated"
    export.mkdir()
    (export / "config.json").write_text("{}")
    files = [p for p in (run / "epoch_0_step_10/model").rglob("*") if p.is_file()]
    weights = {p: p.read_bytes() for p in files}
    assert main(["prune", str(run), "--keep-last", "1", "--drop-optimizer"]) == 0
    assert names(run) == [f"epoch_0_step_{step}" for step in (10, 20, 30, 40)]
    slim = run / "epoch_0_step_10"
    assert not (slim / "optim").exists() and (run / "epoch_0_step_20/optim").exists()
    assert {p: p.read_bytes() for p in files} == weights
    shutil.rmtree(export)
    assert main(["verify", str(run), "--deep"]) == 0
    with pytest.raises(CheckpointUnusable, match="not saved: lr_scheduler, optimizer"):
        tiny.load(run, tiny.recipe(), restore_from="epoch_0_step_10")
    allowed = ["optimizer", "lr_scheduler"]
    assert tiny.load(
        run, tiny.recipe(), restore_from="epoch_0_step_10", allow_missing_state=allowed
    )
    for words in (["--dry-run"], []):
        assert main(["prune", str(run), "--keep-last", "1", "--drop-optimizer", *words]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "nothing to remove"


def test_superseded_checkpoints_go_only_when_asked_for(run: Path) -> None:
    (run / "epoch_0_step_40").rename(run / "epoch_0_step_40.superseded-1")
    (run / "mine").symlink_to("epoch_0_step_30")
    # No save has written it.
    (run / "epoch_0_step_5.superseded-1").mkdir()
    assert main(
        ["prune", str(run), "--keep-last", "9"]
    ) == 0 and "epoch_0_step_40.superseded-1" in names(run)
    assert main(["prune", str(run), "--superseded"]) == 0
    expected = [f"epoch_0_step_{step}" for step in (10, 20, 30)]
    assert names(run) == sorted([*expected, "epoch_0_step_5.superseded-1"])


def test_a_live_run_is_left_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saver = tiny.checkpointer(run)
    saver.open()
    assert main(["prune", str(run), "--keep-last", "1"]) == 2
    saver.close()
    message = capsys.readouterr().err
    assert "this process uses this directory already" in message and len(names(run)) == 4
    # Neither a command has a recipe, nor can it be given another directory.
    assert "run this command again" in message and "checkpoint_dir" not in message


def test_the_newest_that_has_all_its_files_stays(run: Path) -> None:
    (run / "epoch_0_step_40" / "optim" / "__0_0.distcp").unlink()
    assert main(["prune", str(run), "--keep-last", "1"]) == 0
    assert names(run) == ["epoch_0_step_20", "epoch_0_step_30", "epoch_0_step_40"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--keep-last=1", "--metric=val_loss"], "no effect without --keep-best"),
        (["--keep-last=1", "--max"], "no effect without --keep-best"),
        (["--superseded", "--keep-best=2"], "no effect without --keep-last"),
        (["--superseded", "--keep-steps", "10"], "no effect without --keep-last"),
        (["--keep-last=1", "--min-hours=2"], "no effect in a run directory"),
        (
            ["--keep-last=1", "--keep-steps", "10", "300", "7"],
            "no complete checkpoint has this step",
        ),
    ],
)
def test_prune_removes_nothing_if_an_option_has_no_effect(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", str(run), *words]) == 2
    printed = capsys.readouterr().err
    assert message in printed and "True" not in printed and len(names(run)) == 4
    if "7" in words:
        assert "7, 300" in printed and "10, 20, 30, 40" in printed
        assert main(["prune", str(run), "--keep-last=1", "--keep-steps", "10", "20"]) == 0
        assert names(run) == ["epoch_0_step_10", "epoch_0_step_20", "epoch_0_step_40"]


def test_a_metric_that_no_checkpoint_has_removes_nothing(
    run: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    best = ["prune", "--keep-last", "1", "--keep-best", "2"]
    assert main([*best, str(run), "--metric", "val_los", "--dry-run"]) == 2
    assert main([*best, str(run), "--metric", "val_los"]) == 2
    assert "there are val_loss" in capsys.readouterr().err and len(names(run)) == 4
    other = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        tiny.save(other, tiny.recipe(), step=step, losses={"train_loss": 1.0, "val_loss": None})
    assert main([*best, str(other), "--metric", "train_loss"]) == 2
    assert "no checkpoint was validated" in capsys.readouterr().err and len(names(other)) == 2
    assert main([*best, str(run)]) == 0
    assert names(run) == ["epoch_0_step_20", "epoch_0_step_30", "epoch_0_step_40"]


def test_ls_tells_when_a_checkpoint_was_verified_until_another_takes_its_place(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed() -> dict[str, dict[str, object]]:
        assert main(["ls", str(run), "--json"]) == 0
        return {row["name"]: row for row in json.loads(capsys.readouterr().out)}

    assert {row["verified"] for row in listed().values()} == {None}
    (run / "epoch_0_step_20" / "optim" / "__0_0.distcp").write_bytes(b"x")
    assert main(["verify", str(run)]) == 3
    capsys.readouterr()
    found = listed()
    assert all(isinstance(row["verified"], float) for row in found.values())
    assert [name for name, row in found.items() if row["damaged"]] == ["epoch_0_step_20"]
    assert main(["ls", str(run)]) == 0
    assert "damaged: run `ckpt verify` for details" in capsys.readouterr().out
    assert not found["epoch_0_step_20"]["complete"]
    assert main(["verify", str(run / "epoch_0_step_10")]) == 0
    capsys.readouterr()
    assert listed()["epoch_0_step_20"]["damaged"]
    shutil.rmtree(run / "epoch_0_step_20")
    shutil.copytree(run / "epoch_0_step_10", run / "epoch_0_step_20")
    assert listed()["epoch_0_step_20"]["verified"] is None
    (run / ".verified.json").write_text(
        '{"epoch_0_step_10": {"time": "x"}, "../x": {}, "epoch_0_step_30": 1}'
    )
    assert {row["verified"] for row in listed().values()} == {None}


@pytest.mark.parametrize("damage", ["foreign", "missing", "longer", "swapped", "fifo", "link"])
def test_verify_finds_every_kind_of_damage(
    run: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "epoch_0_step_30"
    shard = path / "model/shard-00001-model-00001-of-00001.safetensors"
    if damage == "foreign":
        (path / "model/shard-00002-model-00001-of-00001.safetensors").write_bytes(b"x")
    elif damage == "longer":
        with open(shard, "ab") as file:
            file.write(b"\0")
    elif damage == "swapped":
        shutil.copy(run / "epoch_0_step_40" / shard.relative_to(path), shard)
    else:
        shard.unlink()
        if damage == "fifo":
            os.mkfifo(shard)
        elif damage == "link":
            shard.symlink_to(run / "epoch_0_step_40" / shard.relative_to(path))
    assert main(["verify", str(path), "--deep"]) == 3
    assert "shard-0000" in capsys.readouterr().out


def test_dropping_an_optimizer_leaves_directories_with_similar_names(tmp_path: Path) -> None:
    made = tiny.recipe(optim_2=torch.nn.Linear(2, 2))
    for step in (1, 2):
        tiny.save(tmp_path, made, step=step)
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--drop-optimizer"]) == 0
    slim = tmp_path / "epoch_0_step_1"
    assert not (slim / "optim").exists() and (slim / "optim_2").is_dir() and is_intact(slim)
    found = Manifest.read(slim)
    assert found.left_out == {"optimizer", "lr_scheduler"} and "optim_2" in found.saved


def test_the_pin_of_a_checkpoint_that_is_gone_can_be_removed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        (run / f"pin-epoch_0_step_{step}").symlink_to(f"epoch_0_step_{step}")
    monkeypatch.chdir(run)
    assert main(["unpin", "epoch_0_step_1"]) == 0
    assert main(["unpin", str(run / "pin-epoch_0_step_2")]) == 0
    assert [path.name for path in run.glob("pin-*")] == ["pin-epoch_0_step_3"]
    assert main(["unpin", "epoch_0_step_1"]) == 3
    assert main(["pin", "epoch_0_step_1"]) == 3
    assert "unpinned epoch_0_step_1\n" in capsys.readouterr().out


def test_prune_clears_what_a_killed_command_left(run: Path) -> None:
    unique = "0" * 32
    for name in (f".trash-{unique}", f".epoch_0_step_20.staging-{unique}"):
        (run / name / "model").mkdir(parents=True)
    (run / "paper").mkdir()
    for name in (f".pin-epoch_0_step_10.{unique}", f".link-{unique}", f"paper/.link-{unique}"):
        (run / name).symlink_to("epoch_0_step_10")
    assert (
        main(["prune", str(run), "--keep-last", "9", "--dry-run"]) == 0
        and (run / f".trash-{unique}").exists()
    )
    assert main(["prune", str(run), "--keep-last", "9"]) == 0
    hidden = {path.name for path in run.rglob("*") if path.name.startswith(".")}
    assert hidden == {".metadata"}


@pytest.mark.parametrize(("step", "is_lost"), [(30, False), (40, False), (50, True)])
def test_a_start_repairs_latest_and_warns_only_if_it_repeats_steps(
    run: Path, step: int, is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """30: the run was killed between the rename of a checkpoint and the update of LATEST."""
    (run / "LATEST").unlink()
    (run / "LATEST").symlink_to(f"epoch_0_step_{step}")
    assert tiny.load(run, tiny.recipe()) is not None
    assert os.readlink(run / "LATEST") == "epoch_0_step_40"
    assert ("not a complete checkpoint any more" in caplog.text) == is_lost


# ---------------------------------------------------------------- a checkpoint that was moved, with a link in its place


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    """A run of three checkpoints: the newest is on another disk, and the second has a second name."""
    root, made = tmp_path / "run", tiny.recipe()
    for step in (10, 20, 30):
        tiny.save(root, made, step=step, losses={"val_loss": float(step)}, validated=True)
        tiny.train(made, 1)
    (tmp_path / "big").mkdir()
    (root / "epoch_0_step_30").rename(tmp_path / "big" / "epoch_0_step_30")
    (root / "epoch_0_step_30").symlink_to(tmp_path / "big" / "epoch_0_step_30")
    (root / "epoch_0_step_40").symlink_to("epoch_0_step_20")
    return root


def test_a_moved_newest_checkpoint_is_resumed_listed_verified_and_kept(
    moved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    resumed = tiny.load(moved, tiny.recipe())
    assert resumed is not None and resumed.step == 30
    assert os.readlink(moved / "LATEST") == "epoch_0_step_30" and "goes back" not in caplog.text
    assert main(["ls", str(moved)]) == 0 and "moved to" in capsys.readouterr().out
    for path in (moved, moved / "LATEST", moved / "epoch_0_step_30"):
        assert main(["verify", str(path), "--deep"]) == 0
        assert f"{moved}/epoch_0_step_30: ok" in capsys.readouterr().out
        assert main(["show", str(path)]) == 0
    assert main(["pin", str(moved / "LATEST")]) == 0
    assert os.readlink(moved / "pin-epoch_0_step_30") == "epoch_0_step_30"
    assert main(["unpin", str(moved / "epoch_0_step_30")]) == 0
    tiny.save(moved, tiny.recipe(), step=50)
    assert main(["prune", str(moved), "--keep-last", "1"]) == 0
    assert (moved / "epoch_0_step_30" / "MANIFEST.json").is_file()
    assert os.listdir(tmp_path / "big") == ["epoch_0_step_30"]


def test_a_moved_checkpoint_that_is_not_there_is_named_passed_over_and_set_aside(
    moved: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "big").rename(tmp_path / "unmounted")
    made = tiny.recipe()
    saver = tiny.checkpointer(moved)
    resumed = saver.load(discover(made))
    assert resumed is not None and resumed.step == 20
    assert (
        "LATEST pointed to" in caplog.text
        and "epoch_0_step_30: the checkpoint is a link to" in caplog.text
    )
    saver.save(discover(made), step=30, epoch=0)
    saver.save(discover(made), step=40, epoch=0)
    saver.close()
    assert "epoch_0_step_40 has the name of a new checkpoint" in caplog.text
    assert (
        Manifest.read(moved / "epoch_0_step_30").step == 30
        and Manifest.read(moved / "epoch_0_step_40").step == 40
    )
    (tmp_path / "unmounted").rename(tmp_path / "big")
    assert Manifest.read(moved / "epoch_0_step_30.superseded-1").step == 30
    assert os.readlink(moved / "epoch_0_step_40.superseded-1") == "epoch_0_step_20"


def test_a_link_below_the_run_directory_protects_like_one_in_it(run: Path) -> None:
    (run / "paper" / "figures").mkdir(parents=True)
    (run / "paper" / "figures" / "best").symlink_to("../../epoch_0_step_10/model")
    assert main(["prune", str(run), "--keep-last", "1"]) == 0
    assert names(run) == ["epoch_0_step_10", "epoch_0_step_20", "epoch_0_step_40"]


@pytest.mark.parametrize(
    "flag", ["--keep-last=0", "--keep-every-steps=0", "--keep-best=-1", "--keep-steps=-5"]
)
def test_numbers_that_keep_nothing_are_refused(
    run: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", str(run), "--keep-last", "1", flag]) == 2
    assert "is less than" in capsys.readouterr().err and len(names(run)) == 4


def test_prune_takes_a_pointer_or_a_checkpoint_for_its_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for path in (run, run / "LATEST", run / "epoch_0_step_10", run / "epoch_0_step_10" / "model"):
        assert main(["prune", str(path), "--keep-last", "1", "--dry-run"]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 1 and "epoch_0_step_30" in outputs[0]


def test_only_checkpoints_of_a_run_can_be_pinned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = tmp_path / "export"
    export.mkdir()
    (export / "config.json").write_text("{}")
    save_file({"weight": torch.ones(2)}, export / "model.safetensors")
    assert main(["pin", str(export)]) == 3
    assert "not a checkpoint of a run" in capsys.readouterr().err


def test_whatever_has_the_name_of_a_checkpoint_gives_way_and_is_kept(tmp_path: Path) -> None:
    (tmp_path / "epoch_0_step_20").write_text("mine")
    tiny.save(tmp_path, tiny.recipe(), step=20)
    assert (tmp_path / "epoch_0_step_20.superseded-1").read_text() == "mine"
    assert (tmp_path / "epoch_0_step_20").is_dir()


def test_verify_of_a_run_names_the_damaged_checkpoint_file_and_tensor(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(run)]) == 0
    path = run / "epoch_0_step_20"
    piece = Manifest.read(path).trees["model"].tensors["frozen"].slices[0]
    with open(path / piece.file, "r+b") as file:
        file.seek(piece.start + 3)
        byte = file.read(1)[0]
        file.seek(piece.start + 3)
        file.write(bytes([byte ^ 4]))
    capsys.readouterr()
    assert main(["verify", str(run), "--json"]) == 3
    results = {Path(entry["path"]).name: entry for entry in json.loads(capsys.readouterr().out)}
    assert [name for name, entry in results.items() if not entry["ok"]] == ["epoch_0_step_20"]
    (problem,) = results["epoch_0_step_20"]["problems"]
    assert "tensor frozen" in problem["value"] and piece.file in problem["where"]
