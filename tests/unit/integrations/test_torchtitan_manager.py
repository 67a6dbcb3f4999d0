"""torchtitan resumes with our checkpoint manager. Where it is not installed, a stand-in has its interface."""

import importlib.util
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from automodel_ckpt.errors import RecipeError


class StandIn:
    """``BaseCheckpointManager`` of torchtitan 0.3: the methods of which the trainer calls those without underscore."""

    save_future = None
    enable = False

    @dataclass(kw_only=True)
    class Config:
        enable: bool = False
        folder: str = "checkpoint"
        interval: int = 500
        keep_latest_k: int = 10
        initial_load_path: str | None = None
        initial_load_in_hf: bool = False
        last_save_in_hf: bool = False
        exclude_from_loading: list[str] = field(default_factory=list)
        enable_first_step_checkpoint: bool = False
        create_seed_checkpoint: bool = False
        load_only: bool = False

    def load(self, step: int = -1) -> bool:
        return self.enable and self._load(step)  # type: ignore[attr-defined, no-any-return]

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        return self.enable and self._save(curr_step, last_step)  # type: ignore[attr-defined, no-any-return]

    def maybe_wait_for_staging(self) -> None:
        self._maybe_wait_for_staging()  # type: ignore[attr-defined]

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    if importlib.util.find_spec("torchtitan") is None:
        for name in ("torchtitan", "torchtitan.components", "torchtitan.components.checkpointer"):
            module: Any = types.ModuleType(name)
            module.BaseCheckpointManager = StandIn
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "automodel_ckpt.integrations.torchtitan", raising=False)
    return importlib.import_module("automodel_ckpt.integrations.torchtitan").CheckpointManager


class Data:
    """Batches of random numbers, with the position as state."""

    def __init__(self) -> None:
        self.given = 0

    def next(self) -> torch.Tensor:
        self.given += 1
        return torch.randn(4, 4, generator=torch.Generator().manual_seed(self.given))

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def train(manager: Any, folder: Path, last: int, **options: Any) -> dict[str, torch.Tensor]:
    """Train to step 7, and stop without a save after step *last*. The weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data, progress = Data(), Data()
    config = manager.Config(enable=True, folder=str(folder), interval=2, keep_latest_k=2, **options)
    made = manager(
        config,
        dataloader=data,
        model_parts=[model],
        optimizers=[optimizer],
        lr_schedulers=[schedule],
        states={"train_state": progress},
        sd_adapter=None,
    )
    made.load()
    for step in range(progress.given + 1, last + 1):
        model(data.next()).square().mean().backward()
        made.maybe_wait_for_staging()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        progress.given = step
        made.save(step, last_step=step == 7)
    made.close()
    return dict(model.state_dict())


def test_a_run_of_torchtitan_is_resumed_exactly(tmp_path: Path, manager: Any) -> None:
    whole = train(manager, tmp_path / "whole", 7)
    train(manager, tmp_path / "run", 5)
    resumed = train(manager, tmp_path / "run", 7)
    for name, expected in whole.items():
        assert torch.equal(expected, resumed[name]), name
    steps = sorted(path.name for path in (tmp_path / "run").glob("epoch_*"))
    assert steps == ["epoch_0_step_6", "epoch_0_step_7"]


@pytest.mark.parametrize(
    ("name", "value"), [("exclude_from_loading", ["dataloader"]), ("last_save_in_hf", True)]
)
def test_what_it_does_not_do_is_an_error(
    tmp_path: Path, manager: Any, name: str, value: Any
) -> None:
    with pytest.raises(RecipeError, match=rf"checkpoint\.{name}"):
        train(manager, tmp_path / "run", 1, **{name: value})
