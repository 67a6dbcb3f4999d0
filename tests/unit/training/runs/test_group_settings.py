"""Groups with their own optimizer: the settings that they take from the section, as the log states them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.cli.train import main
from tests.support.runs import training


class Plain(torch.optim.SGD):
    """An optimizer of a user, with a required rate and an option of another class."""

    def __init__(self, params: Any, lr: float, betas: Any = None, momentum: float = 0.0) -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        for group in self.param_groups:
            group["weight_decay"] = 0.0 if betas is None else betas[0]


@pytest.mark.parametrize(
    ("section", "group", "logged"),
    [
        ("lr: 0.5, weight_decay: 0.25", "_target_: torch.optim.Muon, lr: 2", "Muon lr 2 0.25"),
        ("lr: 0.5", "_target_: torch.optim.Muon, weight_decay: 0.125", "Muon lr 0.5 0.125"),
        pytest.param(
            "lr: 0.5, eps: 1e-4",
            "_target_: torch.optim.Adafactor",
            "Adafactor lr 0.5 0.01",
            marks=pytest.mark.further,
        ),
        (
            "_target_: torch.optim.SGD, lr: 0.5, weight_decay: 0.25, nesterov: false",
            "_target_: torch.optim.AdamW",
            "AdamW lr 0.5 0.25",
        ),
        (
            "lr: 0.5, betas: [0.75, 0.5]",
            "_target_: tests.unit.training.runs.test_group_settings.Plain",
            "Plain lr 0.5 0.75",
        ),
    ],
)
def test_a_group_with_its_own_optimizer_has_the_settings_of_the_section(
    tmp_path: Path, section: str, group: str, logged: str
) -> None:
    recipe = training.write_recipe(tmp_path)
    given = f"--optimizer={{{section}, groups: [{{params: [hidden_matrices], {group}}}]}}"
    run = f"--checkpoint.checkpoint_dir={tmp_path / 'run'}"
    trust = ("--trust", "tests.unit.training.runs.test_group_settings")
    short = ("--step_scheduler.max_steps=1", "--checkpoint.save_consolidated=false")
    assert main([str(recipe), given, run, *trust, *short]) == 0
    name, _, rate, *_, decay = logged.split()
    line = re.compile(rf" {name}, .* \(hidden_matrices\): .*, lr {rate}, weight decay {decay}\n")
    assert line.search((tmp_path / "run" / "log.txt").read_text())
