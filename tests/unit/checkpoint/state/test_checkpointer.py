"""Saving and loading on one process: what is on disk, what comes back, what is refused."""

import json
import logging
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from automodel_ckpt.checkpoint import Manifest, discover
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed
from tests.support.models import tiny

FORMATS = ["safetensors", "torch_save"]
Capture = pytest.CaptureFixture[str]


def best(root: Path) -> str | None:
    """The checkpoint that LOWEST_VAL points to."""
    link = root / "LOWEST_VAL"
    return os.readlink(link) if link.is_symlink() else None


def listed(root: Path, capsys: Capture) -> dict[int, dict[str, Any]]:
    """What ``ckpt ls`` shows of each step."""
    capsys.readouterr()
    assert main(["ls", str(root), "--json"]) == 0
    return {row["step"]: row for row in json.loads(capsys.readouterr().out)}


def tree(root: Path) -> list[str]:
    return sorted(
        p.relative_to(root).as_posix() for p in root.rglob("*") if not p.is_dir() or p.is_symlink()
    )


@pytest.mark.parametrize("model_save_format", FORMATS)
def test_everything_comes_back_bit_for_bit(tmp_path: Path, model_save_format: Any) -> None:
    made = tiny.recipe(seed=1, tracker=tiny.Counter({"best": 1.5, "seen": [1, 2]}))
    tiny.train(made)
    tiny.save(tmp_path, made, model_save_format=model_save_format)
    other = tiny.recipe(seed=2, tracker=tiny.Counter())
    resumed = tiny.load(tmp_path, other)
    assert resumed is not None and (resumed.step, resumed.epoch) == (20, 0)
    assert resumed.path.name == "epoch_0_step_20"
    tiny.assert_equal_state(made, other)
    assert other.tracker.value == {"best": 1.5, "seen": [1, 2]}
    assert other.model.head is other.model.embed
    tiny.train(made), tiny.train(other)
    tiny.assert_equal_state(made, other)


def test_weights_that_lie_transposed_in_memory_come_back_whole(tmp_path: Path) -> None:
    # Enough elements that they are copied in parts.
    made, other = (
        SimpleNamespace(model=torch.nn.ParameterDict({"w": torch.full((400, 300), value).t()}))
        for value in (1.0, 2.0)
    )
    made.model["w"].data.copy_(torch.arange(120_000.0).view(300, 400))
    tiny.save(tmp_path, made)
    tiny.load(tmp_path, other)
    assert not other.model["w"].is_contiguous()
    assert torch.equal(made.model["w"], other.model["w"])


def test_the_tree_is_that_of_the_contract(tmp_path: Path) -> None:
    tiny.save(tmp_path, tiny.recipe(tracker=tiny.Counter()))
    files = (
        "MANIFEST.json config.yaml losses.json model/shard-00001-model-00001-of-00001.safetensors "
        "optim/.metadata optim/__0_0.distcp tracker.pt"
    )
    assert tree(tmp_path) == ["LATEST", *(f"epoch_0_step_20/{name}" for name in files.split())]
    assert os.readlink(tmp_path / "LATEST") == "epoch_0_step_20"
    losses = json.loads((tmp_path / "LATEST/losses.json").read_text())
    assert losses == {"step": 20, "val_loss": None}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorchs_own_readers_read_our_files(tmp_path: Path) -> None:
    made = tiny.recipe(seed=4)
    tiny.train(made)
    path = tiny.save(tmp_path, made).path
    wanted = {k: v for k, v in made.model.state_dict().items() if k != "head"}
    assert (
        load_file(path / "model/shard-00001-model-00001-of-00001.safetensors").keys()
        == wanted.keys()
    )
    read = {name: torch.zeros_like(value) for name, value in wanted.items()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(path / "model")), no_dist=True)
    assert all(torch.equal(read[name], wanted[name]) for name in wanted)
    moments = made.optimizer.state[made.model.embed]["exp_avg"]
    state = {"optimizer.state.model.embed.exp_avg": torch.zeros_like(moments)}
    dcp.load(state, checkpoint_id=path / "optim", no_dist=True)
    assert torch.equal(state["optimizer.state.model.embed.exp_avg"], moments)


def test_a_value_head_under_the_same_optimizer_is_saved_like_the_model(tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        made = tiny.recipe(seed)
        made.value_head = torch.nn.Linear(4, 1)
        made.optimizer.add_param_group({"params": list(made.value_head.parameters()), "lr": 0.5})
        made.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(made.optimizer)
        return made

    made, other = make(1), make(2)
    for _ in range(2):
        (made.model(torch.ones(2, 4)) + made.value_head(torch.ones(4)).sum()).backward()
        made.optimizer.step()
    path = tiny.save(tmp_path, made).path
    assert (path / "value_head/shard-00001-model-00001-of-00001.safetensors").is_file()
    tiny.load(tmp_path, other)
    tiny.assert_equal_state(made, other)
    assert torch.equal(made.value_head.weight, other.value_head.weight)
    assert [group["lr"] for group in other.optimizer.param_groups] == [
        group["lr"] for group in made.optimizer.param_groups
    ]


def test_a_modules_extra_state_is_saved_too(tmp_path: Path) -> None:
    class WithExtra(torch.nn.Linear):
        extra: Any = None

        def get_extra_state(self) -> Any:
            return {"calls": self.extra}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state["calls"]

    for model_save_format in FORMATS:
        made, other = tiny.recipe(), tiny.recipe()
        made.model.part, other.model.part = WithExtra(2, 2), WithExtra(2, 2)
        made.model.part.extra = [1, "two"]
        report = tiny.save(tmp_path / model_save_format, made, model_save_format=model_save_format)
        values = Manifest.read(report.path).trees["model"].objects
        assert [*values] == ["part._extra_state"], "one value, however its content is structured"
        tiny.load(tmp_path / model_save_format, other)
        assert other.model.part.extra == [1, "two"]


def test_a_changed_model_is_refused_with_a_readable_diff(tmp_path: Path) -> None:
    tiny.save(tmp_path, tiny.recipe())
    for name, shape, expected in (
        ("one_row", (2, 3), r"~ one_row: saved as F32 \[1, 3\], here F32 \[2, 3\]"),
        ("one_row", None, "- one_row: saved, but not here"),
        ("more", (2,), r"\+ more: here, but not saved"),
        ("brief", (3, 2), r"~ brief: saved as BF16 \[3, 2\], here F32 \[3, 2\]"),
    ):
        other = tiny.recipe()
        setattr(other.model, name, torch.nn.Parameter(torch.zeros(shape)) if shape else None)
        with pytest.raises(CheckpointUnusable, match=expected):
            tiny.load(tmp_path, other)


def test_one_object_under_two_names_comes_back_under_both(tmp_path: Path) -> None:
    made, other = tiny.recipe(a=tiny.Counter(5)), tiny.recipe(a=tiny.Counter())
    made.b, other.b = made.a, other.a
    path = tiny.save(tmp_path, made).path
    assert (path / "a.pt").exists() and not (path / "b.pt").exists()
    tiny.load(tmp_path, other)
    assert other.b.value == 5


def test_a_pickle_that_runs_code_is_not_loaded(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "hacked"),)

    path = tiny.save(tmp_path / "run", tiny.recipe(tracker=tiny.Counter())).path
    (path / "tracker.pt").write_bytes(pickle.dumps(Attack()))
    unchecked = tiny.checkpointer(tmp_path / "run", verify="none")
    with pytest.raises(CheckpointUnusable, match="not plain data"):
        unchecked.load(discover(tiny.recipe(tracker=tiny.Counter())))
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    "file", ["model/shard-00001-model-00001-of-00001.safetensors", "optim/__0_0.distcp"]
)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_taken(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture, capsys: Capture
) -> None:
    made = tiny.recipe()
    tiny.save(tmp_path, made, step=20)
    tiny.train(made)
    path = tiny.save(tmp_path, made, step=40).path
    tensor = next(
        t
        for tree_ in Manifest.read(path).trees.values()
        for t in tree_.tensors.values()
        if t.slices[0].file == file and t.nbytes
    )
    data = bytearray((path / file).read_bytes())
    data[tensor.slices[0].start] ^= 1
    (path / file).write_bytes(data)
    with caplog.at_level(logging.WARNING):
        resumed = tiny.load(tmp_path, tiny.recipe())
    assert resumed is not None and resumed.step == 20
    assert file in caplog.text and f"tensor {tensor.fqn}" in caplog.text
    assert listed(tmp_path, capsys)[40]["damaged"]


def test_when_none_is_left_or_the_named_one_is_bad_a_table_says_why(tmp_path: Path) -> None:
    tiny.save(tmp_path, tiny.recipe(), step=20)
    path = tiny.save(tmp_path, tiny.recipe(), step=40).path
    (path / "config.yaml").unlink()
    with pytest.raises(CheckpointUnusable, match="to restore from cannot be used") as caught:
        tiny.load(tmp_path, tiny.recipe(), restore_from="LATEST")
    assert "config.yaml" in str(caught.value) and caught.value.exit_code == 3
    (tmp_path / "epoch_0_step_20" / "MANIFEST.json").unlink()
    with pytest.raises(CheckpointUnusable, match="no checkpoint can be used") as caught:
        tiny.load(tmp_path, tiny.recipe())
    *_, head, newer, older = caught.value.problems[0].value.splitlines()
    assert head.split() == ["path", "step", "complete", "compatible", "reason"]
    assert newer.split()[1:4] == ["40", "yes", "yes"] and older.split()[1:4] == ["20", "no", "?"]


def test_a_fresh_directory_is_a_fresh_run(tmp_path: Path) -> None:
    assert tiny.load(tmp_path / "new", tiny.recipe()) is None
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "name", ["LATEST", "LOWEST_VAL", "epoch_0_step_20", "{root}/epoch_0_step_20", "{root}/LATEST"]
)
def test_restore_from_takes_every_form_of_name(tmp_path: Path, name: str) -> None:
    validated(tmp_path, s20=1.0, s40=2.0)
    resumed = tiny.load(tmp_path, tiny.recipe(), restore_from=name.format(root=tmp_path))
    assert resumed is not None and resumed.step == (40 if "LATEST" in name else 20)


def run_from(root: Path, steps: list[int], **options: Any) -> tuple[int | None, list[str]]:
    """Load, then save at *steps*, as one process of a run does; (step resumed from, names in the directory)."""
    made = tiny.recipe()
    saver = tiny.checkpointer(root, **options)
    resumed = saver.load(discover(made))
    for step in steps:
        saver.save(discover(made), step=step, epoch=0)
    saver.close()
    return (resumed.step if resumed else None), sorted(
        p.name for p in root.iterdir() if p.name.startswith("epoch")
    )


def test_a_run_that_goes_back_sets_the_abandoned_checkpoints_aside_and_a_requeue_goes_on(
    tmp_path: Path,
) -> None:
    run_from(tmp_path, [20, 40, 60])
    step, names = run_from(tmp_path, [30, 40], restore_from="epoch_0_step_20")
    assert step == 20
    kept = ("20", "30", "40", "40.superseded-1", "60.superseded-1")
    assert names == [f"epoch_0_step_{name}" for name in kept]
    assert run_from(tmp_path, [50], restore_from="epoch_0_step_20")[0] == 40
    assert run_from(tmp_path, [60])[0] == 50


def test_lowest_val_moves_only_to_a_strictly_better_value(tmp_path: Path) -> None:
    pointed = []
    for step, value in enumerate([3.0, 2.0, 2.0, float("nan"), 5.0], start=1):
        validated(tmp_path, **{f"s{step}": value})
        pointed.append(best(tmp_path))
    tiny.save(tmp_path, tiny.recipe(), step=6)
    pointed.append(best(tmp_path))
    assert pointed == ["epoch_0_step_1"] + ["epoch_0_step_2"] * 5


def test_retention_keeps_what_the_policy_and_every_link_in_the_directory_ask_for(
    tmp_path: Path,
) -> None:
    made = tiny.recipe()
    saver = tiny.checkpointer(tmp_path, keep_last=2, keep_best=1, keep_every_steps=4)
    (tmp_path / "epoch_0_step_0-notes").mkdir()
    pruned: list[str] = []
    for step, value in enumerate([5.0, 1.0, 4.0, 3.0, 9.0, 9.0, 9.0], start=1):
        if step == 4:
            (tmp_path / "mine").symlink_to("epoch_0_step_3/model")
        losses = {"val_loss": value}
        pruned += saver.save(
            discover(made), step=step, epoch=0, losses=losses, validated=True
        ).pruned
    saver.close()
    kept = {f"epoch_0_step_{step}" for step in ("0-notes", 2, 3, 4, 6, 7)}
    assert {p.name for p in tmp_path.iterdir()} == kept | {"LATEST", "LOWEST_VAL", "mine"}
    assert pruned == ["epoch_0_step_1", "epoch_0_step_5"]


@pytest.mark.parametrize("model_save_format", FORMATS)
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad", "Adafactor"])
def test_the_forecast_before_the_first_step_is_within_a_tenth_of_the_truth(
    tmp_path: Path, model_save_format: Any, kind: str
) -> None:
    made = tiny.recipe()
    made.model = torch.nn.Sequential(*(torch.nn.Linear(300, 200) for _ in range(6)))
    made.optimizer = getattr(torch.optim, kind)(made.model.parameters(), lr=0.1)
    made.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(made.optimizer)
    saver = tiny.checkpointer(tmp_path, model_save_format=model_save_format)
    forecast = saver.forecast(discover(made))
    assert not made.optimizer.state or kind == "Adagrad"
    for layer in made.model:
        layer(torch.ones(300)).sum().backward()
    made.optimizer.step()
    saver.save(discover(made), step=1, epoch=0)
    saver.close()
    path = tmp_path / "epoch_0_step_1"
    truth = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    assert abs(forecast.nbytes - truth) < 0.1 * truth


def test_a_disk_too_small_for_one_checkpoint_is_said_before_training_and_before_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=100))
    saver, made = tiny.checkpointer(tmp_path), tiny.recipe()
    with pytest.raises(SaveFailed, match=r"does not fit on the disk[\s\S]*1.0 kB are free"):
        saver.check_disk_space(discover(made))
    with pytest.raises(SaveFailed, match="does not fit on the disk"):
        saver.save(discover(made), step=1, epoch=0)
    saver.close()
    assert tree(tmp_path) == []


def validated(root: Path, **values: float) -> None:
    """Save a checkpoint per ``s<step>=val_loss``."""
    for name, value in values.items():
        tiny.save(
            root, tiny.recipe(), step=int(name[1:]), losses={"val_loss": value}, validated=True
        )


@pytest.mark.parametrize("wrong", ["epoch_0_step_1", "epoch_0_step_9", None])
def test_a_start_mends_lowest_val_whatever_latest_says(tmp_path: Path, wrong: str | None) -> None:
    validated(tmp_path, s1=3.0, s2=1.0, s3=0.5)
    (tmp_path / "LOWEST_VAL").unlink()
    if wrong:
        (tmp_path / "LOWEST_VAL").symlink_to(wrong)
    tiny.load(tmp_path, tiny.recipe())
    assert best(tmp_path) == "epoch_0_step_3"


def test_a_checkpoint_that_is_validated_later_ranks_from_then_on_here_and_in_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, copied = tmp_path / "run", tmp_path / "copied"
    validated(run, s10=2.0)
    tiny.save(run, tiny.recipe(), step=20)
    whole = {path: path.read_bytes() for path in run.glob("epoch*/**/*") if path.is_file()}
    later(run, val_loss=1.0)
    assert best(run) == "epoch_0_step_20"
    assert {path: path.read_bytes() for path in run.glob("epoch*/**/*") if path.is_file()} == whole
    validated(run, s30=1.5)
    shutil.copytree(run, copied, ignore=shutil.ignore_patterns("L*"))
    for root in (run, copied):
        tiny.load(root, tiny.recipe())
        assert best(root) == "epoch_0_step_20"
        losses = {step: row["val_loss"] for step, row in listed(root, capsys).items()}
        assert losses == {10: 2.0, 20: 1.0, 30: 1.5}
        assert main(["show", str(root / "epoch_0_step_20"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["losses"]["val_loss"] == 1.0


def later(run: Path, **losses: float) -> None:
    """The newest checkpoint's validation, made by the start after it."""
    loader, made = tiny.checkpointer(run), tiny.recipe()
    resumed = loader.load(discover(made))
    assert resumed is not None
    resumed.note_validation(loader.run, losses)
    loader.close()


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{" * 9999, '{"epoch_0_step_20": 3}', '{"epoch_0_step_20": {"losses": 0}}'],
)
def test_a_later_validation_counts_only_for_the_very_checkpoint_and_where_it_can_be_read(
    tmp_path: Path, content: str
) -> None:
    validated(tmp_path, s10=2.0)
    tiny.save(tmp_path, tiny.recipe(), step=20)
    later(tmp_path, val_loss=1.0)
    shutil.rmtree(tmp_path / "epoch_0_step_20")
    tiny.save(tmp_path, tiny.recipe(1), step=20)
    assert best(tmp_path) == "epoch_0_step_10", "the name is another checkpoint's now"
    (tmp_path / "late_validations.json").write_text(content)
    tiny.load(tmp_path, tiny.recipe())
    assert best(tmp_path) == "epoch_0_step_10"
    later(tmp_path, val_loss=0.5)
    assert best(tmp_path) == "epoch_0_step_20"


def test_going_back_before_the_best_points_to_the_best_of_what_is_left(tmp_path: Path) -> None:
    validated(tmp_path, s10=2.0, s20=1.0, s30=0.5)
    saver, made = tiny.checkpointer(tmp_path, restore_from="epoch_0_step_20"), tiny.recipe()
    saver.load(discover(made))
    saver.save(discover(made), step=30, epoch=0, losses={"val_loss": 9.0}, validated=True)
    saver.close()
    assert best(tmp_path) == "epoch_0_step_20"


def with_unused(seed: int) -> Any:
    """A recipe whose model has a parameter that takes no part in its output."""
    made = tiny.recipe(seed=seed)
    made.model.unused = torch.nn.Parameter(torch.full((4, 3), float(seed)))
    made.optimizer.add_param_group({"params": [made.model.unused]})
    return made


@pytest.mark.parametrize("num_steps", [2, 0])
def test_a_parameter_that_was_never_updated_has_no_optimizer_state_after_a_resume_either(
    tmp_path: Path, num_steps: int
) -> None:
    made, other = with_unused(1), with_unused(2)
    tiny.train(made, num_steps)
    before = len(made.optimizer.state)
    tiny.save(tmp_path, made)
    assert len(made.optimizer.state) == before == (4 if num_steps else 0)  # looking makes none
    tiny.train(other)
    for _ in range(2):
        tiny.load(tmp_path, other)
        tiny.assert_equal_state(made, other)
    tiny.train(made), tiny.train(other)
    tiny.assert_equal_state(made, other)
    assert made.model.unused not in made.optimizer.state


class Recomputed(tiny.Counter):
    """State that belongs to one number of ranks, and can be recomputed for another."""

    def fits(self, state: Mapping[str, Any]) -> bool:
        return bool(state["value"] == "fits")

    def derive(self, step: int) -> None:
        self.value = f"recomputed at {step}"


def test_state_that_does_not_fit_these_ranks_is_recomputed_and_rank_0_reports_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for value, expected in (("fits", "fits"), ("does not fit", "recomputed at 20")):
        run = tmp_path / value
        tiny.save(run, tiny.recipe(sampler=Recomputed(value)))
        other = tiny.recipe(sampler=Recomputed())
        tiny.load(run, other)
        assert other.sampler.value == expected
    warnings = [r.getMessage() for r in caplog.records if "recomputed" in r.getMessage()]
    assert warnings == [
        "The number of ranks or the data-parallel size changed: sampler is recomputed from the seed and the step"
    ]
