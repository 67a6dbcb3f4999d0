"""The training state in a checkpoint of NeMo AutoModel, which its Checkpointer wrote (tests/fixtures/automodel/run)."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from automodel_ckpt.cli import ckpt
from tests.support.external_tensors import moments, training_state_of, values

RUN = Path(__file__).parents[3] / "fixtures" / "automodel" / "run"
SOURCE = RUN / "epoch_0_step_4"
TRAINED = {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"} | {
    "model.layers.0.input_layernorm.weight"
}


def test_weights_and_moments_are_bit_equal_to_those_of_torch() -> None:
    state = training_state_of(SOURCE)
    assert state.optimizer is not None and state.optimizer.tensors.keys() == TRAINED
    found = {**values(SOURCE), **moments(state.optimizer)}
    expected = load_file(RUN / "expected.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_counters_groups_and_the_peak_rate_of_the_schedule_are_read() -> None:
    state = training_state_of(SOURCE)
    assert (state.step, state.epoch, state.consumed_samples) == (5, 0, None)
    assert state.optimizer is not None and state.scheduler is not None
    (group,) = state.optimizer.groups
    assert set(group.parameters) == TRAINED
    assert group.options["lr"] == pytest.approx(0.005) and group.options["weight_decay"] == 0.1
    assert state.optimizer.values == {name: {"step": 5.0} for name in TRAINED}
    assert state.scheduler["base_lrs"] == [0.01] and state.scheduler["num_steps"] == 5


def test_the_run_is_imported_and_its_parts_are_not_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    (source / "rng").mkdir()
    command = ["import", "--json", str(source), str(tmp_path / "run"), "--training-state"]
    assert ckpt.main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["checkpoint"].endswith("epoch_0_step_5") and document["has_config"]
    assert document["left_out"] == ["rng"]
    assert "learning-rate schedule (after 5 steps)" in document["training_state"]


def test_the_step_is_that_of_the_counters_in_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name counts steps from 0: epoch_0_step_4 has finished 5."""
    assert ckpt.main(["ls", str(RUN), "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [5]
    assert ckpt.main(["show", str(SOURCE), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 5
    for options in ([], ["--training-state"]):
        words = ["import", str(SOURCE), str(tmp_path / "run"), "--dry-run", "--json", *options]
        assert ckpt.main(words) == 0
        assert json.loads(capsys.readouterr().out)["step"] == 5
