"""What a program passes to the checkpointer by mistake is refused before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from automodel_ckpt import Checkpointer, CheckpointOptions
from automodel_ckpt.errors import RecipeError

MODEL = torch.nn.Linear(2, 2)
FINE: dict[str, Any] = {"state": {"model": MODEL}, "step": 1, "epoch": 0}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"state": MODEL}, r"must be a mapping[\s\S]*Linear[\s\S]*\"model\": model"),
        ({"state": [MODEL]}, "must be a mapping"),
        ({"state": {}}, r"must be a mapping"),
        (
            {"state": {"model": MODEL.state_dict()}},
            r"'model'[\s\S]*itself[\s\S]*not its state_dict",
        ),
        ({"state": MODEL.state_dict()}, r"'weight'[\s\S]*itself[\s\S]*not its state_dict"),
        ({"state": {"model": MODEL, "x": 3}}, r"no state_dict\(\)[\s\S]*'x'\n  value:  int"),
        ({"step": 1.5}, r"step must be a count[\s\S]*1\.5"),
        ({"step": -1}, "step must be a count"),
        ({"epoch": None}, "epoch must be a count"),
        ({"losses": {"val_loss": torch.ones(2)}}, r"losses\['val_loss'\]"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    checkpointer = Checkpointer(tmp_path / "run")
    with pytest.raises(RecipeError, match=said):
        checkpointer.save(**FINE | change)
    assert not list(tmp_path.glob("run/*"))
    if "state" in change:
        with pytest.raises(RecipeError, match=r"Checkpointer\.load"):
            checkpointer.load(change["state"])


def test_numbers_of_torch_and_numpy_are_saved_as_numbers(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "run")
    checkpointer.save(
        {"model": MODEL},
        step=np.int64(3),
        epoch=torch.tensor(0),
        losses={"val_loss": torch.tensor(0.5)},
        progress={"tokens": np.int64(7)},
        validated=True,
    )
    checkpointer.close()
    assert '"val_loss": 0.5' in (tmp_path / "run/epoch_0_step_3/losses.json").read_text()


@pytest.mark.parametrize(
    "option",
    [
        {"keep_last": 0},
        {"keep_last": "3"},
        {"keep_best": -1},
        {"verify": "all"},
        {"best_mode": "lowest"},
        {"model_save_format": "pickle"},
    ],
)
def test_options_have_the_values_of_a_recipe(tmp_path: Path, option: Any) -> None:
    with pytest.raises(RecipeError, match=rf"option {next(iter(option))} has no such value"):
        Checkpointer(tmp_path / "run", options=CheckpointOptions(**option))
