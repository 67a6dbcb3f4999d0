"""The jsonl logs: each step once, whatever was killed."""

import json
import math
from pathlib import Path

import pytest

from automodel_ckpt.logs.metrics import JsonlLog


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def filled(path: Path, count: int) -> JsonlLog:
    log = JsonlLog(path)
    for step in range(1, count + 1):
        log.append({"step": step, "loss": 1.0 / step})
    return log


def test_a_line_is_with_the_operating_system_before_anything_is_flushed(tmp_path: Path) -> None:
    log = filled(tmp_path / "run" / "training.jsonl", 3)
    assert steps(log.path) == [1, 2, 3]
    log.close()


def test_resuming_drops_later_steps_and_their_events_and_appends(tmp_path: Path) -> None:
    path = tmp_path / "training.jsonl"
    log = filled(path, 2)
    log.append({"event": "save", "step": 2})
    log.append({"step": 3})
    log.append({"event": "save", "step": 3})
    assert log.truncate_after(2) == 3
    log.append({"step": 3})
    log.close()
    assert steps(path) == [1, 2, 2, 3]


@pytest.mark.parametrize("last", [2, math.inf], ids=["resumed", "finished"])
@pytest.mark.parametrize("tail", [b'{"step": 3, "lo', b'{"step": 2}', b"\0\0\0\0", b""])
def test_a_torn_last_line_is_dropped_and_no_other(tmp_path: Path, tail: bytes, last: float) -> None:
    path = tmp_path / "training.jsonl"
    filled(path, 2).close()
    with open(path, "ab") as file:
        file.write(tail)
    assert JsonlLog(path).truncate_after(last) is None
    assert steps(path) == [1, 2]


def test_damaged_and_duplicate_lines_are_removed_and_others_left_all_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "training.jsonl"
    lines = [
        '{"step": 1, "loss": 1.0}',
        '{"step": 2, "loss": 2.0}',
        '{"event": "save", "step": 2}',
        '{"step": 3, "lo\x01ss": 1',
        '{"step": 2, "loss": 2.5}',
        '{"event": "save", "step": 2}',
        '{"note": "mine"}',
        '{"step": "4"}',
        '{"step": 4, "loss": 4.0}',
        '{"step": 5, "loss": 5.0}',
        '{"step": 6, "loss"',
    ]
    path.write_text("\n".join(lines))
    assert JsonlLog(path).truncate_after(4) == 5
    assert path.read_text().splitlines() == [lines[0], lines[4], lines[5], lines[6], lines[8]]
    reports = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert [report.partition(":")[0] for report in reports] == ["2 lines", "2 lines", "1 line"]
    assert JsonlLog(path).truncate_after(4) is None


def test_numbers_unknown_to_json_become_null(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "log.jsonl")
    log.append({"step": 1, "loss": math.nan, "grad_norm": math.inf})
    log.close()
    assert json.loads(log.path.read_text()) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
    }


@pytest.mark.parametrize("tail", [b'{"step": 3, "lo', b'{"step": 2}', b"\0\0\0\0", b"3\n"])
def test_a_torn_last_line_is_dropped(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "training.jsonl"
    filled(path, 2).close()
    with open(path, "ab") as file:
        file.write(tail)
    assert JsonlLog(path).truncate_after(2) is None
    assert steps(path) == [1, 2]


@pytest.mark.parametrize("tail", [b"", b'{"step": 9, "lo', b"\0\0\0\0"])
def test_the_log_of_a_finished_run_loses_its_torn_last_line_and_no_other(
    tmp_path: Path, tail: bytes
) -> None:
    path = tmp_path / "training.jsonl"
    assert JsonlLog(path).truncate_after(math.inf) is None
    filled(path, 2).close()
    whole, inode = path.read_bytes(), path.stat().st_ino
    with open(path, "ab") as file:
        file.write(tail)
    assert JsonlLog(path).truncate_after(math.inf) is None
    assert path.read_bytes() == whole and (path.stat().st_ino == inode) is not bool(tail)
