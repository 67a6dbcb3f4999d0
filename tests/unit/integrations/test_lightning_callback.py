"""CheckpointCallback continues runs of Lightning's Trainer exactly; `make trainers` has Lightning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from automodel_ckpt.errors import RecipeError

lightning = pytest.importorskip("lightning", exc_type=ImportError)

STEPS_PER_EPOCH = 3
LOSSES = (1, 3, 0, 2, 5, 4, 4, 3, 9, 9, 9, 9)
"""Of the validations, by number."""


class Killed(Exception):
    """Stands for the end of the process."""


class Batches:
    """Batches of random numbers, with the position as state."""

    def __init__(self) -> None:
        self.given = 0

    def __len__(self) -> int:
        return STEPS_PER_EPOCH

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.given % STEPS_PER_EPOCH, STEPS_PER_EPOCH):
            self.given += 1
            yield torch.randn(2, 4, generator=torch.Generator().manual_seed(self.given))

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.given = state["given"]


def run(
    directory: Path, last: int | None = None, *, interval: str = "epoch", **settings: Any
) -> tuple[list[int], torch.Tensor]:
    """Train until *last*; the steps that were made, and the weights."""
    from lightning.pytorch.callbacks import EarlyStopping

    from automodel_ckpt.integrations.lightning import CheckpointCallback

    made: list[int] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, rows: torch.Tensor, number: int) -> Any:
            if self.global_step == last:
                raise Killed
            made.append(self.global_step)
            return self.layer(rows).square().mean()

        def validation_step(self, rows: torch.Tensor, number: int) -> None:
            self.log("loss", float(LOSSES[self.global_step // 2]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            config = {"scheduler": schedule, "monitor": "loss", "interval": interval}
            return {"optimizer": optimizer, "lr_scheduler": config}

    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=[
            CheckpointCallback(directory, every_n_steps=1),
            EarlyStopping("loss", patience=3),
        ],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        num_sanity_val_steps=0,
        **settings,
    )
    module = Module()
    try:
        trainer.fit(module, Batches(), Batches())
    except Killed:
        assert last is not None
    return made, module.layer.weight.detach()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [{"max_epochs": 9}, {"max_epochs": 9, "val_check_interval": 2}, {"max_steps": 8}],
    ids=["epochs", "validations within epochs", "steps"],
)
def test_a_resumed_run_stops_where_the_whole_one_does(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    whole, weights = run(tmp_path / "whole", **settings)
    assert whole == list(range(whole[-1] + 1))
    for last in (3, 4, 5, 8):
        before, _ = run(tmp_path / str(last), last, **settings)
        after, resumed = run(tmp_path / str(last), **settings)
        assert before + after == whole
        assert torch.equal(weights, resumed)
    assert run(tmp_path / "whole", **settings)[0] == []


def test_a_schedule_that_lightning_steps_after_a_save_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="interval='epoch'"):
        run(tmp_path / "run", interval="step", max_steps=2)
