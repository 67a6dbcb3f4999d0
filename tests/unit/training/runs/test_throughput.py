"""The report on the speed of a run: which steps and which time it counts, and what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.config.keys.monitoring import ThroughputConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import Stopped
from automodel_ckpt.logs.speed import MeasuredStep, speed_of, speed_text
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.mesh_sizes import Sizes
from automodel_ckpt.training.values.run_log import RunLog
from automodel_ckpt.training.values.throughput import Throughput
from tests.support.runs.steps import launched_step


@contextmanager
def measuring(**settings: Any) -> Iterator[Throughput]:
    """The report of a run on a CPU with *settings* in the section throughput, and its log."""
    layout = RankLayout(0, Sizes(), 0, torch.device("cpu"), None)  # type: ignore[arg-type]
    config = RecipeConfig(throughput=ThroughputConfig(**settings) if settings else None)
    run_log = RunLog(config.logging, layout)
    try:
        yield Throughput(config, layout, run_log)
    finally:
        run_log.close()


def test_the_speed_is_that_of_all_steps_together() -> None:
    steps = [MeasuredStep(4, 1.0, 0.25, 100, 2e12), MeasuredStep(5, 3.0, 0.0, 300, 6e12)]
    speed = speed_of(steps, num_devices=2, device_rate=4e12)
    assert (speed["first_step"], speed["last_step"], speed["num_steps"]) == (4, 5, 2)
    assert speed["seconds_per_step"] == {"mean": 2.0, "median": 2.0, "min": 1.0, "max": 3.0}
    assert (speed["tokens_per_second"], speed["tokens_per_second_per_device"]) == (100.0, 50.0)
    assert (speed["tflops_per_device"], speed["peak_tflops"], speed["mfu"]) == (1.0, 4.0, 0.25)
    assert speed_text(speed, num_devices=2, device_word="gpu") == (
        "2 steps of 2 s (median 2, 1 to 3), 100 tok/s (50/gpu), MFU 25.0% of 4 TFLOP/s, "
        "6.2% of the time waiting for data"
    )


@pytest.mark.parametrize(("flops", "device_rate"), [(0.0, 4e12), (2e12, None)])
def test_without_operations_or_a_rate_there_is_no_mfu(
    flops: float, device_rate: float | None
) -> None:
    speed = speed_of([MeasuredStep(1, 1.0, 0.0, 10, flops)], num_devices=1, device_rate=device_rate)
    assert speed["mfu"] is None
    assert "MFU" not in speed_text(speed, num_devices=1, device_word="rank")


def test_a_stopped_run_reports_and_a_failed_one_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stopped = Stopped("stopped by SIGTERM", where="", value="", hint="")
    for error, is_reported in ((stopped, True), (ValueError("failed"), False)):
        with measuring(warmup_steps=0) as throughput:
            throughput.note(launched_step(1))
            with pytest.raises(type(error)), throughput.reporting():
                raise error
        assert ("throughput: 1 step of" in capsys.readouterr().err) is is_reported


def test_a_run_within_its_warmup_and_a_file_that_cannot_be_written_are_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with measuring(file=str(tmp_path / "file/speed.json")) as throughput:
        with throughput.reporting():
            throughput.note(launched_step(1))
        assert "not measured: 1 step in this start, and throughput.warmup_steps is 10" in (
            capsys.readouterr().err
        )
        with throughput.reporting():
            for number in range(2, 12):
                throughput.note(launched_step(number))
        assert "throughput.file cannot be written" in capsys.readouterr().err
