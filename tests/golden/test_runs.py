"""Runs that an older version stopped continue in this one, with the losses of an uninterrupted run."""

import json
import os
import tarfile
from functools import partial
from pathlib import Path

import pytest

from automodel_ckpt.cli.ckpt import main
from tests.golden.make_runs import KEPT_STEP, RUNS
from tests.support import ranks
from tests.support.runs.training import train

HERE = Path(__file__).parent / "runs"


def continued(directory: Path, overrides: tuple[str, ...]) -> None:
    os.chdir(directory)
    options = ("--checkpoint.checkpoint_dir=run", "--checkpoint.save_consolidated=false")
    train(Path("recipe.yaml"), *options, *overrides)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_runs_of_an_older_version_continue_with_the_losses_that_they_would_have_had(
    num_ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {name: overrides for name, (number, overrides) in RUNS.items() if number == num_ranks}
    for name in runs:
        archive = HERE / f"{name}.tar.xz"
        assert archive.stat().st_size < 100_000
        with tarfile.open(archive) as opened:
            opened.extractall(tmp_path / name, filter="data")
        assert main(["verify", str(tmp_path / name / "run")]) == 0, capsys.readouterr().out
    trainings = [partial(continued, tmp_path / name, runs[name]) for name in runs]
    ranks.run_each(trainings, num_ranks)

    for name in runs:
        run = tmp_path / name / "run"
        lines = [json.loads(line) for line in (run / "training.jsonl").read_text().splitlines()]
        losses = {record["step"]: record["loss"] for record in lines if "event" not in record}
        expected = json.loads((tmp_path / name / "expected.json").read_text())
        assert losses == pytest.approx({int(at): loss for at, loss in expected.items()}, rel=1e-6)
        assert (run / "LATEST").resolve().name == "epoch_1_step_6"
        assert (run / KEPT_STEP / "MANIFEST.json").is_file()


def test_every_archive_has_an_entry() -> None:
    assert {path.name.removesuffix(".tar.xz") for path in HERE.iterdir()} == set(RUNS)
