"""Runs that an older version stopped continue in this one, with the losses of an uninterrupted run."""

from __future__ import annotations

import json
import tarfile
from functools import partial
from pathlib import Path

import pytest

from automodel_ckpt.cli.ckpt import main
from tests.golden.make_runs import KEPT_STEP, RUNS
from tests.support import ranks
from tests.support.runs.training import train

HERE = Path(__file__).parent / "runs"
OVERRIDES = {name: overrides for name, (_, _, overrides) in RUNS.items()}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_an_older_version_continues_with_the_losses_that_it_would_have_had(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = HERE / f"{name}.tar.xz"
    assert archive.stat().st_size < 100_000
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "run"]) == 0, capsys.readouterr().out

    options = (
        "--checkpoint.checkpoint_dir=run",
        "--checkpoint.save_consolidated=false",
        *OVERRIDES[name],
    )
    ranks.run(partial(train, Path("recipe.yaml"), *options), RUNS[name][0], init=False)

    lines = [json.loads(line) for line in Path("run/training.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in lines if "event" not in record}
    expected = {
        int(step): loss for step, loss in json.loads(Path("expected.json").read_text()).items()
    }
    assert losses == pytest.approx(expected, rel=1e-6)
    assert Path("run/LATEST").resolve().name == "epoch_1_step_6"
    assert (Path("run") / KEPT_STEP / "MANIFEST.json").is_file()


def test_every_archive_has_an_entry() -> None:
    assert {path.name.removesuffix(".tar.xz") for path in HERE.iterdir()} == set(RUNS)
