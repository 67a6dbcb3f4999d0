"""An imported optimizer keeps its class and its peak rate."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from automodel_ckpt.cli.ckpt import main
from tests.support.checkpoints import manifest_of

TRAINER = Path(__file__).parents[3] / "fixtures" / "trainer" / "checkpoint-5"


def lightning_file(
    directory: Path, parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> Path:
    content = {
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {name: parameter.detach() for name, parameter in parameters.items()},
        "optimizer_states": [optimizer.state_dict()],
        "global_step": 1,
        "epoch": 0,
    }
    torch.save(content, directory / "state.ckpt")
    return directory / "state.ckpt"


@pytest.mark.parametrize(
    ("kind", "has", "has_not"),
    [
        (torch.optim.NAdam, {"mu_product", "momentum_decay"}, {"amsgrad"}),
        (torch.optim.RAdam, {"decoupled_weight_decay"}, {"amsgrad", "fused"}),
        (torch.optim.AdamW, {"amsgrad", "fused"}, {"mu_product"}),
    ],
)
def test_the_options_and_numbers_of_other_adams_are_kept(
    tmp_path: Path, kind: Any, has: set[str], has_not: set[str]
) -> None:
    weights = load_file(TRAINER / "model.safetensors")
    parameters = {f"net.{name}": torch.nn.Parameter(weight) for name, weight in weights.items()}
    optimizer = kind(parameters.items(), lr=0.1)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    # It adds options to the groups that no other schedule has.
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=3)
    optimizer.step()
    source = lightning_file(tmp_path, parameters, optimizer)
    command = ["import", str(source), str(tmp_path / "run"), "--training-state"]
    assert main([*command, "--config", str(TRAINER)]) == 0
    (checkpoint,) = (tmp_path / "run").glob("epoch_*")
    tree = manifest_of(checkpoint)["trees"]["optimizer"]
    entries = {name.rpartition(".")[2] for name in (*tree["tensors"], *tree["objects"])}
    assert has <= entries and not (has_not | {"max_lr", "min_lr", "base_momentum"}) & entries


def test_an_optimizer_without_moments_is_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(TRAINER / "model.safetensors")
    parameters = {f"net.{name}": torch.nn.Parameter(weight) for name, weight in weights.items()}
    optimizer = torch.optim.SGD(parameters.items(), lr=0.1)
    source = lightning_file(tmp_path, parameters, optimizer)
    command = ["import", str(source), str(tmp_path / "run"), "--training-state", "--dry-run"]
    assert main([*command, "--config", str(TRAINER)]) == 0
    assert "training state  optimizer (without moments), step 1" in capsys.readouterr().out


def test_a_damaged_optimizer_is_an_error_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(TRAINER / "model.safetensors")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(weight) for weight in weights.values()])
    group, moments = optimizer.state_dict()["param_groups"][0], torch.zeros(2, 2)
    for damaged in (
        {},
        {"state": {}, "param_groups": [{**group, "params": [True]}]},
        {"state": {}, "param_groups": [{**group, "params": group["params"] * 2}]},
        {"state": {}, "param_groups": [{**group, "params": group["params"][::-1][1:]}]},
        {"state": {99: {}}, "param_groups": [group]},
        {"state": {0: {"exp_avg": moments}}, "param_groups": [group]},
        {"state": {0: {"exp.avg": moments}}, "param_groups": [group]},
        {"state": {0: {"step": torch.ones(5)}}, "param_groups": [group]},
    ):
        content = {"pytorch-lightning_version": "2.6.0", "state_dict": weights, "global_step": 1}
        torch.save({**content, "optimizer_states": [damaged]}, tmp_path / "state.ckpt")
        command = ["import", str(tmp_path / "state.ckpt"), str(tmp_path / "run")]
        assert main([*command, "--training-state", "--config", str(TRAINER)]) == 3, damaged
        assert "optimizer" in capsys.readouterr().err
