"""Runs that Lightning started continue here with the losses they would have had there."""

import json
from functools import partial
from pathlib import Path

import pytest

from automodel_ckpt.cli.ckpt import main
from tests.support import ranks
from tests.support.json_rows import recipe
from tests.support.runs.continued import losses_of
from tests.support.runs.training import train, write_recipe

FIXTURES = Path(__file__).parents[2] / "fixtures"
LIGHTNING = FIXTURES / "lightning"


def continued(source: Path, config: Path, directory: Path, num_ranks: int, *overrides: str) -> None:
    """Import *source* into ``directory/run``, and train to step 10 with the rows in *config*."""
    run = directory / "run"
    command = ["import", str(source), str(run), "--training-state", "--config", str(config)]
    assert main([*command, "--json"]) == 0
    path = write_recipe(directory, recipe(config, run))
    never = "--step_scheduler.ckpt_every_steps=null"
    no_clipping = "--clip_grad_norm=null"
    ranks.run(partial(train, path, never, no_clipping, *overrides), num_ranks, init=False)


def assert_losses(run: Path, expected: list[float]) -> None:
    found = losses_of(run)
    assert list(found) == [6, 7, 8, 9, 10]
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step - 1], rel=1e-5), step


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.further), 2])
@pytest.mark.parametrize(
    ("name", "losses"), [("epoch=0-step=5.ckpt", "single"), ("distributed", "distributed")]
)
def test_a_run_of_lightning_continues_with_the_same_losses(
    tmp_path: Path, name: str, losses: str, num_ranks: int
) -> None:
    expected = json.loads((LIGHTNING / "losses.json").read_text())[losses]
    # One group of parameters, all with weight decay, as AdamW(model.parameters()) has it.
    continued(LIGHTNING / name, LIGHTNING, tmp_path, num_ranks, "--optimizer.weight_decay=0.01")
    assert_losses(tmp_path / "run", expected)
