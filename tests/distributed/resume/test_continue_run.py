"""A run that another program started continues here with the losses that it would have had there."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from automodel_ckpt import load_recipe
from automodel_ckpt.checkpoint import Manifest
from automodel_ckpt.cli.ckpt import main
from tests.support.checkpoints import stored_bytes
from tests.support.runs.continued import CONTINUED, continued_losses, losses_of
from tests.support.runs.training import train, write_recipe

Capture = pytest.CaptureFixture[str]
TRAINER = Path(__file__).parents[2] / "fixtures" / "trainer"
SOURCE = TRAINER / "checkpoint-5"


def expected_losses() -> dict[int, float]:
    return dict(enumerate(json.loads((TRAINER / "losses.json").read_text()), start=1))


@pytest.mark.parametrize(
    ("num_ranks", "strategy"),
    [pytest.param(1, "ddp", marks=pytest.mark.further), (2, "fsdp2")],
    ids=str,
)
def test_a_run_of_the_trainer_continues_with_the_same_losses(
    tmp_path: Path, capsys: Capture, num_ranks: int, strategy: str
) -> None:
    override = f"--distributed.strategy={strategy}"
    losses = continued_losses(SOURCE, tmp_path, override, num_ranks=num_ranks)
    expected = expected_losses()
    assert list(losses) == [6, 7, 8, 9, 10]
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step], rel=1e-5), step


def imported(run: Path, capsys: Capture, *more: str, source: Path = SOURCE) -> Path:
    assert main(["import", str(source), str(run), "--training-state", *more]) == 0
    return Path(capsys.readouterr().out.splitlines()[-1])


def test_moments_are_equal_bit_for_bit_and_torch_reads_them(
    tmp_path: Path, capsys: Capture
) -> None:
    checkpoint = imported(tmp_path / "run", capsys)
    manifest = Manifest.read(checkpoint)
    assert (manifest.step, manifest.epoch) == (5, 1)
    original = torch.load(SOURCE / "optimizer.pt", weights_only=True)
    tree = manifest.trees["optimizer"].tensors
    # Number 0 is the embedding, the last ones are the norms: the Trainer puts them behind all others.
    names = {0: "embed_tokens.weight", 1: "layers.0.self_attn.q_proj.weight", 19: "norm.weight"}
    for number, name in names.items():
        for entry, value in original["state"][number].items():
            stored = f"optimizer.state.model.model.{name}.{entry}"
            found = stored_bytes(checkpoint, "optimizer", stored)
            assert found == value.numpy().tobytes(), stored
    read: dict[str, torch.Tensor] = {}
    for name, tensor in tree.items():
        read[name] = torch.empty(tensor.shape)
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.load(read, checkpoint_id=checkpoint / "optim", no_dist=True)
    for name in tree:
        assert read[name].numpy().tobytes() == stored_bytes(checkpoint, "optimizer", name)
    assert main(["verify", str(checkpoint)]) == 0


def test_what_is_not_transferred_is_reported_on_import_and_on_resume(
    tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    assert main(["import", str(SOURCE), str(run), "--training-state"]) == 0
    text = capsys.readouterr().out
    assert "optimizer (20 parameters: exp_avg, exp_avg_sq)" in text and "step 5, epoch 1" in text
    assert "names of its parameters by number, first the parameters with weight decay" in text
    assert "rng_state.pth, training_args.bin" in text
    recipe = CONTINUED.replace("CONFIG", str(SOURCE)).replace("RUN", str(run))
    # A constant rate, and another number of samples per step than the Trainer had.
    recipe = recipe.replace("lr_scheduler:\n  name: cosine\n  warmup_steps: 2\n", "")
    recipe = recipe.replace("global_batch_size: 8", "global_batch_size: 4")
    with caplog.at_level("INFO"):
        train(write_recipe(tmp_path, recipe), "--step_scheduler.max_steps=6")
    for line in (
        "continuing the run of another program (transformers Trainer) after step 5",
        "random numbers",
        "rng_state.pth",
        "used 40 samples in 5 steps",
        "after sample 18 of epoch 1",
        "schedule is left out: the learning rate of step 6 is the recipe's, 0.01",
    ):
        assert line in caplog.text, line
    assert list(losses_of(run)) == [6]


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_the_recipe_records_the_options_with_which_an_imported_run_continues(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "run"
    imported(run, capsys)
    text = CONTINUED.replace("CONFIG", str(SOURCE)).replace("RUN", str(run))
    right = next(line for line in text.splitlines() if f" {name}:" in line).split()[1]
    recipe = write_recipe(tmp_path, text.replace(f" {name}: {right}", f" {name}: 0.5"))
    train(recipe, "--step_scheduler.max_steps=6")
    saved = load_recipe(run / "LATEST/config.yaml").config.optimizer
    assert getattr(saved, name) == float(right)
    train(recipe, f"--optimizer.{name}={right}", "--step_scheduler.max_steps=7")


def test_another_peak_rate_and_another_schedule_are_reported(
    tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    imported(run, capsys)
    recipe = CONTINUED.replace("CONFIG", str(SOURCE)).replace("RUN", str(run))
    recipe = recipe.replace("lr: 1e-2", "lr: 3e-2").replace("max_steps: 10", "max_steps: 6")
    train(write_recipe(tmp_path, recipe))
    assert (
        "the peak learning rate of parameter group 1 continues as saved, 0.01; the" in caplog.text
    )
    assert "the schedule changed: the learning rate of step 6 is" in caplog.text


def copied(tmp_path: Path) -> Path:
    source = tmp_path / "checkpoint-5"
    shutil.copytree(SOURCE, source)
    return source


def error_of(capsys: Capture, source: Path, *more: str) -> str:
    run = source.parent / "run"
    assert main(["import", str(source), str(run), "--training-state", *more]) == 3
    assert not list(run.glob("epoch_*"))
    return capsys.readouterr().err


def test_contradictions_are_errors_that_name_the_file(tmp_path: Path, capsys: Capture) -> None:
    source = copied(tmp_path)
    assert "--step contradicts" in error_of(capsys, source, "--step", "7")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "intermediate_size": 13}))
    text = error_of(capsys, source)
    assert (
        "does not have the shapes of the parameters" in text
        and "[12, 8], the parameter [13, 8]" in text
    )
    # Weights of the other size, beside the same optimizer.
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        if ".mlp." in name:
            shape = [13 if size == 12 else size for size in weight.shape]
            weights[name] = torch.zeros(shape, dtype=weight.dtype)
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    text = error_of(capsys, source)
    assert "optimizer.pt" in text and "[12, 8], the parameter [13, 8]" in text
    (source / "config.json").unlink()
    assert "config.json" in error_of(capsys, source)


def test_an_export_to_the_trainer_has_the_same_optimizer_bit_for_bit(
    tmp_path: Path, capsys: Capture
) -> None:
    checkpoint = imported(tmp_path / "run", capsys)
    target = tmp_path / "checkpoint-5"
    command = ["export", str(checkpoint), "--to", "trainer", "-o", str(target)]
    assert main([*command, "--callback", "Mine"]) == 0
    output = capsys.readouterr()
    assert output.out.strip() == str(target) and "not transferred: random numbers" in output.err
    original = torch.load(SOURCE / "optimizer.pt", weights_only=True)
    written = torch.load(target / "optimizer.pt", weights_only=True)
    assert written["state"].keys() == original["state"].keys()
    for number, entry in original["state"].items():
        for key, value in entry.items():
            assert torch.equal(written["state"][number][key], value), (number, key)
    assert written["param_groups"] == original["param_groups"]
    schedule = torch.load(target / "scheduler.pt", weights_only=True)
    original_schedule = torch.load(SOURCE / "scheduler.pt", weights_only=True)
    # The functions of a LambdaLR are not state; the Trainer's have none.
    assert schedule.pop("lr_lambdas") == [None, None]
    assert original_schedule.pop("lr_lambdas") == [{}, {}]
    assert schedule.pop("_last_lr") == pytest.approx(original_schedule.pop("_last_lr"))
    assert schedule == original_schedule
    state = json.loads((target / "trainer_state.json").read_text())
    assert state["global_step"] == 5 and state["log_history"][0]["loss"] == pytest.approx(3.5284163)
    # The Trainer's next save fails if the class of a callback with state is missing.
    callbacks = state["stateful_callbacks"]
    assert list(callbacks) == ["EarlyStoppingCallback", "Mine", "TrainerControl"]
    assert callbacks["EarlyStoppingCallback"] == callbacks["Mine"] == []
    assert main(["diff", str(SOURCE), str(target)]) == 0


def test_what_the_trainer_cannot_load_is_rejected(tmp_path: Path, capsys: Capture) -> None:
    assert main(["import", str(SOURCE), str(tmp_path / "weights")]) == 0
    assert main(["export", str(tmp_path / "weights"), "--to", "trainer"]) == 3
    assert "weights only" in capsys.readouterr().err
    run = tmp_path / "run"
    imported(run, capsys)
    recipe = CONTINUED.replace("CONFIG", str(SOURCE)).replace("RUN", str(run))
    recipe = recipe.replace("max_steps: 10", "max_steps: 6").replace(
        "weight_decay: 0.1", "groups: [{params: ['*q_proj*'], lr: 1e-3}]\n  on_resume: recipe"
    )
    train(write_recipe(tmp_path, recipe))
    assert main(["export", str(run), "--to", "trainer", "-o", str(tmp_path / "out")]) == 3
    assert "more groups of options" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
