"""``ckpt export --to lightning``: a file that Lightning's Trainer continues from."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, get_linear_schedule_with_warmup

from automodel_ckpt.cli.ckpt import main
from tests.support import ranks
from tests.support.external_tensors import training_state_of
from tests.support.json_rows import Rows, recipe
from tests.support.models.llamas import llama_checkpoint
from tests.support.runs.continued import losses_of
from tests.support.runs.training import train, write_recipe

FIXTURES = Path(__file__).parents[3] / "fixtures" / "lightning"
NUM_ROWS, NUM_STEPS, BATCH_SIZE = 20, 10, 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10 steps in two epochs, with a checkpoint after each half."""
    directory = tmp_path_factory.mktemp("lightning")
    run = directory / "run"
    path = write_recipe(directory, recipe(FIXTURES, run))
    options = ("--optimizer.weight_decay=0.1", "--step_scheduler.ckpt_every_steps=5")
    ranks.run(partial(train, path, *options), 1, init=False)
    return run


def exported(checkpoint: Path, target: Path, *options: str) -> dict[str, Any]:
    command = ["export", str(checkpoint), "--to", "lightning", "-o", str(target), *options]
    assert main(command) == 0
    content: dict[str, Any] = torch.load(target, weights_only=True)
    return content


def key_tree(value: Any) -> Any:
    """The keys of nested mappings, without values."""
    if isinstance(value, dict):
        return {key: key_tree(item) for key, item in value.items()}
    return None


def continued(content: dict[str, Any]) -> Iterator[float]:
    """Yield the losses of the steps that follow, as Lightning's Trainer continues: model, optimizer, schedule."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FIXTURES))
    weights = content["state_dict"].items()
    model.load_state_dict({name.removeprefix("model."): value for name, value in weights})
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}])
    schedule = get_linear_schedule_with_warmup(optimizer, 2, NUM_STEPS)
    optimizer.load_state_dict(content["optimizer_states"][0])
    schedule.load_state_dict(content["lr_schedulers"][0])
    rows = torch.tensor(Rows(str(FIXTURES / "rows.json")).rows)
    for step in range(content["global_step"], NUM_STEPS):
        start = step * BATCH_SIZE % NUM_ROWS
        batch = rows[start : start + BATCH_SIZE]
        loss = model(input_ids=batch, labels=batch).loss
        yield loss.item()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def test_the_next_losses_are_those_of_the_run(run: Path, tmp_path: Path) -> None:
    content = exported(run / "epoch_0_step_5", tmp_path / "x.ckpt")
    expected = losses_of(run)
    found = dict(enumerate(continued(content), start=6))
    assert list(found) == list(range(6, NUM_STEPS + 1))
    for number, loss in found.items():
        assert loss == pytest.approx(expected[number], rel=1e-5), number


def test_what_is_exported_has_the_training_state_of_the_run(run: Path, tmp_path: Path) -> None:
    exported(run / "epoch_0_step_5", tmp_path / "x.ckpt")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FIXTURES))
    state = training_state_of(tmp_path / "x.ckpt", model)
    assert (state.step, state.epoch) == (5, 1)
    assert len(state.optimizer.groups) == 2
    assert len(state.optimizer.tensors) == len(list(model.parameters()))


def test_a_prefix_names_the_attribute(run: Path, tmp_path: Path) -> None:
    content = exported(run / "epoch_0_step_5", tmp_path / "x.ckpt", "--prefix", "net.")
    assert all(name.startswith("net.") for name in content["state_dict"])


def test_weights_alone_start_at_step_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama_checkpoint(tmp_path / "c")
    content = exported(tmp_path / "c", tmp_path / "x.ckpt")
    assert "no training state" in capsys.readouterr().err
    assert content["global_step"] == 0
    assert not content.keys() & {"optimizer_states", "lr_schedulers", "loops"}
