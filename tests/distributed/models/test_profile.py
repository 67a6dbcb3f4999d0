"""Traces of training steps: what they contain, that they change no result, and what an interrupted run leaves."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.kinds.test_training import run, stopped
from tests.support.runs.training import steps_of
from tests.support.runs.training_parts import SignalledInStep

SHORT = "--step_scheduler.max_steps=6"
PROFILE = ("--profile.start_step=3", "--profile.num_steps=2", "--profile.warmup_steps=1")


def steps_in(trace: Path) -> set[str]:
    """The names of the training steps in a Chrome trace; all operations must be inside of it."""
    with gzip.open(trace) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    names = {str(event.get("name")) for event in events}
    assert any(name.startswith("aten::") for name in names)
    return {name for name in names if name.startswith("step ")}


@pytest.mark.further
def test_the_selected_steps_are_traced_on_the_selected_ranks_and_nothing_else_changes(
    tmp_path: Path,
) -> None:
    ranks = ("--profile.ranks=[1, 5]", "--profile.record_shapes", "--profile.memory")
    profiled = run(tmp_path, SHORT, *PROFILE, *ranks, name="profiled", num_ranks=2)
    assert run(tmp_path, SHORT, name="plain", num_ranks=2) == profiled
    assert steps_of(tmp_path / "plain") == steps_of(tmp_path / "profiled")
    files = sorted(path.name for path in (tmp_path / "profiled/profile").iterdir())
    assert files == ["step_3_rank_1.json.gz", "step_3_rank_1.txt"]
    assert steps_in(tmp_path / "profiled/profile" / files[0]) == {"step 3", "step 4"}
    assert "aten::" in (tmp_path / "profiled/profile" / files[1]).read_text()
    assert not (tmp_path / "plain/profile").exists()


@pytest.mark.further
def test_a_stopped_run_writes_the_steps_that_it_traced_and_a_failed_write_stops_no_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--profile.start_step=2", "--profile.num_steps=9")
    assert "after step 5" in stopped(tmp_path, *words, recipe_class=SignalledInStep)
    (trace,) = (tmp_path / "run/profile").glob("*.gz")
    assert "step 2" in steps_in(trace)
    capfd.readouterr()
    (tmp_path / "file").write_text("")
    where = f"--profile.directory={tmp_path / 'file'}"
    run(tmp_path, *PROFILE, SHORT, where, name="other")
    assert "the profile of steps 3 to 4 cannot be written" in capfd.readouterr().err
