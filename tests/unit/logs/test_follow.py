import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.logs import follow
from automodel_ckpt.logs.follow import Follower
from automodel_ckpt.logs.trackers import Tracking, require_trackers
from tests.support.history import write_run
from tests.unit.logs.test_track import scalars


class Recorder:
    """A tracker that keeps what it gets; fails at a step where an option says so."""

    is_durable = True
    got: list[tuple[int, dict[str, float]]]
    attempt: int

    def __init__(
        self, run: Path, memory: dict[str, Any], *, fails_at: int = 0, project: str = ""
    ) -> None:
        Recorder.got = []
        Recorder.attempt = memory.get("attempt", 1)
        self.fails_at = fails_at

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise SystemExit("no\nmore")
        if step == -self.fails_at:
            thread = threading.Thread(target=os.listdir, args=["/no/such/directory"])
            thread.start()
            thread.join()
        Recorder.got.append((step, dict(values)))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        Recorder.got.append((0, {}))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(follow, "TRACKERS", {"recorder": Recorder})
    return write_run(tmp_path / "run", num_steps=4, saved=[2, 4])


def steps() -> list[int]:
    return [step for step, _ in Recorder.got]


def test_a_tracker_gets_the_whole_log_once_in_order_of_steps(run: Path) -> None:
    Follower(run, {"recorder": {}}, None).close()
    assert steps() == [1, 2, 2, 2, 3, 4, 4, 4, 0]
    assert Recorder.got[0][1] == {
        "train/loss": pytest.approx(3.4325, abs=1e-3),
        "train/grad_norm": 2.0,
        "train/lr": 0.00025,
        "train/tps": 100.0,
        "train/tokens": 100,
    }
    assert {key for step, values in Recorder.got for key in values if step == 2} >= {
        "save/bytes",
        "val/loss",
    }
    Follower(run, {"recorder": {}}, None).close()
    assert steps() == [0], "it has all of it"


def cut_back(run: Path, step: int) -> list[str]:
    """The log as a resume from *step* leaves it; returns the lines that went."""
    lines = (run / "training.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    (run / "training.jsonl").write_text("".join(kept))
    return lines[len(kept) :]


def test_steps_that_a_resume_makes_again_stand_once(run: Path) -> None:
    Follower(run, {"recorder": {}}, 0).close()
    again = cut_back(run, 2)
    follower = Follower(run, {"recorder": {}}, 2)
    with open(run / "training.jsonl", "a") as log:
        log.writelines(again)
    follower.close()
    assert (steps(), Recorder.attempt) == ([0], 1)


@pytest.mark.parametrize(("after", "went_back"), [(2, True), (0, False)])
def test_a_run_that_went_back_or_began_anew_is_another_run(
    run: Path, after: int, went_back: bool
) -> None:
    Follower(run, {"recorder": {}}, 0).close()
    Follower(run, {"recorder": {}}, after, went_back=went_back).close()
    assert (steps(), Recorder.attempt) == ([1, 2, 2, 2, 3, 4, 4, 4, 0], 2)


@pytest.mark.parametrize("is_durable", [True, False])
def test_a_tracker_that_may_have_lost_something_in_a_kill_gets_all_of_it_as_another_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, is_durable: bool
) -> None:
    monkeypatch.setattr(Recorder, "is_durable", is_durable)
    Follower(run, {"recorder": {}}, 0).feed()
    Follower(run, {"recorder": {}}, 4).close()
    assert (len(steps()), Recorder.attempt) == ((1, 1) if is_durable else (9, 2))
    Follower(run, {"recorder": {}}, 4).close()
    assert len(steps()) == 1


def test_a_run_has_one_process_that_sends_its_log(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        follow.upload_lock(run, wait=False) as first,
        follow.upload_lock(run, wait=False) as second,
    ):
        assert (first, second) == (True, False)
        assert main(["track", str(run), "--to", "tensorboard"]) == 2
    assert "another process is uploading this run's log" in capsys.readouterr().err


def test_a_failing_tracker_is_reported_once_and_gets_nothing_more(run: Path) -> None:
    failures: list[tuple[str, str]] = []

    def warn(*failure: str) -> None:
        failures.append((failure[0], failure[1]))

    Follower(run, {"recorder": {"fails_at": 2}}, None, warn).close()
    assert steps() == [1]
    assert failures == [("recorder", "SystemExit: no")]
    assert "training continues: SystemExit: no" in follow.disabled_text(*failures[0])


def test_the_command_fails_if_the_tracker_does(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(follow.TRACKERS, "wandb", Recorder)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: SimpleNamespace(origin=None))
    track = ["track", str(run), "--to", "wandb"]
    assert main([*track, "--option", "fails_at=2"]) == 4
    message = capsys.readouterr().err
    assert "SystemExit: no" in message and "run this command again" in message
    assert "training" not in message
    assert main(track) == 0
    assert steps()[0] == 2, "it has step 1"
    # An exception in a thread of the tracker.
    assert main([*track, "--again", "--option", "fails_at=-2"]) == 4
    message = capsys.readouterr().err
    assert "/no/such/directory" in message and "Traceback" not in message


def test_training_is_followed_by_a_process_that_ends_with_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = write_run(tmp_path / "run", num_steps=4, saved=[4])
    tracking = Tracking(run, {"tensorboard": {}}, 0)
    with open(run / "training.jsonl", "a") as log:
        log.write(json.dumps({"step": 5, "loss": 1.25}) + "\n")
    tracking.close()
    found = scalars(run)
    assert found[5, "train/loss"] == 1.25
    assert {step for step, tag in found if tag == "train/loss"} == {1, 2, 3, 4, 5}
    assert found[4, "save/bytes"] == 1000


def test_no_tracker_outlives_a_killed_trainer(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=2)
    code = (
        "import sys, time, pathlib; from automodel_ckpt.logs.trackers import Tracking\n"
        "t = Tracking(pathlib.Path(sys.argv[1]), {}, 0); print(t._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE
    ) as trainer:
        assert trainer.stdout is not None
        follower = int(trainer.stdout.readline())
        trainer.send_signal(signal.SIGKILL)
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/{follower}") and time.monotonic() < end:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{follower}")


def test_trackers_that_cannot_work_are_refused_before_training() -> None:
    require_trackers([], has_logs=False)
    with pytest.raises(RecipeError, match="not installed"):
        require_trackers(["no_such_tracker"], has_logs=True)
    with pytest.raises(RecipeError, match="writes none"):
        require_trackers(["tensorboard"], has_logs=False)
