"""Checkpoints of every format version so far are read by this one: listed, verified, resumed from, exported."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.errors import CheckpointUnusable
from tests.golden.make_golden import golden_state
from tests.support.checkpoints import is_intact
from tests.support.models import tiny

HERE = Path(__file__).parent
GOLDEN = sorted(path.name for path in HERE.glob("v[12]_*"))
OF_SEVERAL_RANKS = HERE / "v3_safetensors"


@pytest.fixture(params=GOLDEN)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shutil.copytree(HERE / request.param, tmp_path / "run")
    return tmp_path / "run"


def test_there_is_a_small_one_for_every_version_and_format() -> None:
    expected = [
        f"v{version}_{name}" for version in (1, 2) for name in ("safetensors", "torch_save")
    ]
    assert expected == GOLDEN
    for name in GOLDEN:
        assert (
            sum(path.stat().st_size for path in (HERE / name).rglob("*") if path.is_file())
            < 100_000
        )


def test_it_is_whole_to_the_last_byte(golden: Path) -> None:
    path = golden / "epoch_0_step_20"
    assert is_intact(path) and is_intact(path, deep=True)


def test_a_run_resumes_from_it(golden: Path) -> None:
    expected, other = golden_state(), tiny.recipe(9, tracker=tiny.Counter())
    resumed = tiny.load(golden, other)
    assert resumed is not None and resumed.step == 20
    # The optimizer's arithmetic may differ in the last bit between versions of torch, what was saved may not.
    for name, value in tiny.tensors_of(expected).items():
        torch.testing.assert_close(tiny.tensors_of(other)[name], value)
    assert other.tracker.value == {"best": 1.5, "seen": [1, 2]}
    assert (
        other.lr_scheduler.state_dict()["milestones"]
        == expected.lr_scheduler.state_dict()["milestones"]
    )


def test_it_is_listed_and_exported(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(golden), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["complete"] and (row["step"], row["val_loss"]) == (20, 0.5)
    assert (
        main(["consolidate", str(golden / "epoch_0_step_20"), "--output", str(golden / "export")])
        == 0
    )
    assert (golden / "export/model.safetensors.index.json").is_file()


def test_one_of_version_3_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(OF_SEVERAL_RANKS, tmp_path / "run")
    with pytest.raises(CheckpointUnusable, match="a format that this version does not support"):
        tiny.load(tmp_path / "run", tiny.recipe(9, tracker=tiny.Counter()))
    assert main(["verify", str(tmp_path / "run/epoch_0_step_20")]) == 3
    assert "version 3" in capsys.readouterr().out
