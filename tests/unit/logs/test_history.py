from __future__ import annotations

import json
from pathlib import Path

import pytest

from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.logs.charts import charts_of
from automodel_ckpt.logs.follow import values_of
from automodel_ckpt.logs.history import Series, read_history
from automodel_ckpt.logs.page import summary
from automodel_ckpt.logs.sparkline import curve_lines
from tests.support.history import write_run


def test_a_runs_history_holds_its_series_checkpoints_and_resumes(tmp_path: Path) -> None:
    run = read_history(
        write_run(tmp_path / "run", num_steps=6, saved=[2, 4, 6], best=4, resumed=[2])
    )
    assert run.series["loss"].steps == (1, 2, 3, 4, 5, 6)
    assert run.series["val_loss"].steps == run.series["bytes"].steps == (2, 4, 6)
    assert [(c.name, c.pointers) for c in run.checkpoints] == [
        ("epoch_0_step_2", ()),
        ("epoch_0_step_4", ("LOWEST_VAL",)),
        ("epoch_0_step_6", ("LATEST",)),
    ]
    assert (run.resumed_at, run.num_tokens, run.seconds) == ((2,), 600, 5.0)


def test_lines_that_hold_no_numbers_are_passed_over_and_of_two_at_a_step_the_last_counts(
    tmp_path: Path,
) -> None:
    good = [
        {"step": 1, "loss": 3.0},
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": None},
        {"step": 3, "loss": 1.0},
    ]
    odd = [
        "{",
        "[]",
        '{"step": "4", "loss": 1}',
        '{"step": true, "loss": 1}',
        '{"step": 5, "loss": NaN}',
        '{"step": 6, "loss": 1e999}',
        '{"step": 7, "loss": true}',
        "[" * 100_000,
    ]
    huge = '{"step": 8, "loss": 1' + "0" * 400 + "}"
    (tmp_path / "training.jsonl").write_text(
        "\n".join([*map(json.dumps, good), *odd, huge, '{"step": 9, "lo'])
    )
    history = read_history(tmp_path)
    assert history.series["loss"] == Series((1, 3), (2.5, 1.0))
    assert (history.last_step, history.not_finite) == (8, (2, 5, 6, 7, 8))


def test_metrics_of_an_objective_have_charts_with_those_of_its_validation_sets(
    tmp_path: Path,
) -> None:
    steps = [{"step": step, "loss": 1.0, "pairs": 8, "margin": 0.5 * step} for step in (1, 2)]
    measured = {"val_loss": 2.0, "val_margin": 1.5, "val_f1": 0.5, "val_f1_micro": 0.25}
    of_set = {"val_loss_few": 3.0, "val_margin_few": 1.0, "val_f1_few": 0.75}
    (tmp_path / "training.jsonl").write_text("\n".join(map(json.dumps, steps)))
    (tmp_path / "validation.jsonl").write_text(
        json.dumps({"step": 2, **measured, **of_set, "label_tokens": 4, "pairs": 2})
    )
    run = read_history(tmp_path)
    assert (run.measures, run.set_names) == (("margin", "f1", "f1_micro"), ("few",))
    drawn = {}
    for chart in charts_of([run]):
        drawn[chart.title] = [(line.label, line.series.values) for line in chart.lines]
    name = tmp_path.name
    assert list(drawn) == ["Loss", "Margin", "F1", "F1 micro"]
    assert drawn["Margin"] == [
        (name, (0.5, 1.0)),
        (f"{name}, validation", (1.5,)),
        (f"{name}, validation, few", (1.0,)),
    ]
    assert drawn["F1 micro"] == [(f"{name}, validation", (0.25,))]
    # All curves begin in one column, after the longest title.
    starts = [line[:18] for line in curve_lines(run, 20)]
    assert starts[-1].startswith("  val f1 micro  ") and starts[-1][16] in "▁▂▃▄▅▆▇█"
    assert all(line[14:16] == "  " and line[16] in "▁▂▃▄▅▆▇█" for line in starts)
    assert values_of(steps[0]) == {"train/loss": 1.0, "train/pairs": 8, "train/margin": 0.5}


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnusable, match="contains no run"):
        read_history(tmp_path)


def test_the_summary_in_text_has_short_numbers_and_no_share_above_all(tmp_path: Path) -> None:
    """The steps of a short run end before its last save, so that its saves can take longer than its steps."""
    steps = [
        {"step": 1, "loss": 2.0, "timestamp": 100.0, "mem": 464_100_000},
        {"step": 2, "loss": 1.5, "timestamp": 100.1, "mem": 464_200_000},
        {"event": "save", "step": 2, "stall_seconds": 0.2, "bytes": 10},
    ]
    (tmp_path / "training.jsonl").write_text("\n".join(map(json.dumps, steps)))
    run = read_history(tmp_path)
    assert "464.1M .. 464.2M" in list(curve_lines(run, 20))[-1]
    assert dict(summary(run))["waited for saves"] == "0.20 s"
