"""tools/mutants makes the changes that it names, and tells a change that a test notices from one that none does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tools.mutants import __main__ as mutants
from tools.mutants import trial
from tools.mutants.__main__ import NO_DIFFERENCE, ROOT, reviewed
from tools.mutants.operators import mutations
from tools.mutants.recording import record, without_removed_tests

SOURCE = b'''\
def first(values, limit=1 < 2):
    """Return the first value below the limit."""
    log.info("looking")
    for value in values:
        if value < limit and not value == 0:
            note(value)
            return value + 1
    raise LookupError(f"none below {limit - 1}")
'''


def test_bodies_are_changed_and_messages_annotations_and_defaults_are_not() -> None:
    found = {
        mutation.description: mutation.apply(SOURCE).decode() for mutation in mutations(SOURCE)
    }
    assert set(found) == {
        "value < limit becomes value <= limit",
        "swap and / or in value < limit and (not value == 0)",
        "remove 'not' from not value == 0",
        "value == 0 becomes value != 0",
        "remove the call note(...)",
        "value + 1 becomes value - 1",
        "remove the raise",
    }
    assert (
        "if (value <= limit) and not value == 0:" in found["value < limit becomes value <= limit"]
    )
    assert "            pass\n            return" in found["remove the call note(...)"]
    for changed in found.values():
        compile(changed, "changed", "exec")


@pytest.mark.parametrize(
    ("statement", "descriptions"),
    [
        ("return zip(a, b, strict=True), zip(a, b, strict=False)", ["False becomes True"]),
        ("raise NotImplementedError", []),
        ("raise LookupError", ["remove the raise"]),
        ("return time.monotonic() > a", []),
        ("return time.monotonic() - a > b", ["time.monotonic() - a becomes time.monotonic() + a"]),
    ],
)
def test_changes_that_cannot_make_a_difference_are_not_made(
    statement: str, descriptions: list[str]
) -> None:
    found = mutations(f"def work(a, b):\n    {statement}\n".encode())
    assert sorted(mutation.description for mutation in found) == sorted(descriptions)


def test_a_noticed_change_is_killed_and_an_unnoticed_one_survives(tmp_path: Path) -> None:
    (tmp_path / "doubling.py").write_bytes(
        b"def double(x):\n    return x + x\n\n\ndef odd(x):\n    return x + 1\n"
    )
    (tmp_path / "test_code.py").write_text(
        "from doubling import double\n\n\ndef test_it():\n    assert double(2) == 4\n"
    )
    in_double, in_odd = mutations((tmp_path / "doubling.py").read_bytes())
    for mutation, tests, expected in (
        (in_double, ["test_code.py"], trial.Result("killed", "test_code.py::test_it")),
        (in_odd, ["test_code.py"], trial.Result("survived")),
        (in_odd, [], trial.Result("not reached")),
    ):
        assert (
            trial.run(tmp_path, trial.Trial("doubling.py", mutation, tests), timeout_seconds=60)
            == expected
        )
    assert b"x + x" in (tmp_path / "doubling.py").read_bytes(), "the original is unchanged"


def test_a_change_is_undecided_if_the_test_that_fails_does_so_with_unchanged_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "code.py").write_bytes(b"def one():\n    return 1 + 0\n")
    (tmp_path / "test_it.py").write_text(
        "def test_fails():\n    assert False\n\n\ndef test_passes():\n    pass\n"
    )
    (change,) = mutations((tmp_path / "code.py").read_bytes())
    results = [
        trial.Result("killed", "test_it.py::test_fails"),
        trial.Result("killed", "test_it.py::test_passes"),
        trial.Result("killed"),
        trial.Result("survived"),
    ]
    trials = [trial.Trial("code.py", change, [])] * len(results)
    outcomes = mutants._checked(trials, results, 60)
    assert outcomes == ["undecided", "killed", "killed", "survived"]


def test_the_copy_lacks_the_caches_of_the_repository_and_no_test_data(tmp_path: Path) -> None:
    for directory in ("runs", "tests/golden/runs"):
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / "data").touch()
    (tmp_path / "code.py").write_bytes(b"def one():\n    return 1 + 0\n")
    (tmp_path / "test_it.py").write_text(
        "from pathlib import Path\n\n\ndef test_it():\n"
        "    assert Path('tests/golden/runs/data').exists() and not Path('runs').exists()\n"
    )
    (change,) = mutations((tmp_path / "code.py").read_bytes())
    tried = trial.Trial("code.py", change, ["test_it.py::test_it"])
    assert trial.run(tmp_path, tried, timeout_seconds=60).outcome == "survived"


def test_a_change_that_makes_the_tests_hang_is_reported_as_timed_out(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_bytes(b"def seconds():\n    return 1 - 1\n")
    (tmp_path / "test_it.py").write_text(
        "import time\n\nimport waits\n\n\ndef test_it():\n    time.sleep(100 * waits.seconds())\n"
    )
    (change,) = mutations((tmp_path / "waits.py").read_bytes())
    tried = trial.Trial("waits.py", change, ["test_it.py::test_it"])
    assert trial.run(tmp_path, tried, timeout_seconds=3).outcome == "timed out"


def test_a_recorded_test_that_no_longer_exists_kills_no_change(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    (tmp_path / "changed.py").write_bytes(b"def one():\n    return 1 + 0\n")
    recorded = ["test_gone.py::test_it", "test_it.py::test_it", "test_it.py::test_renamed"]
    reached, removed = without_removed_tests(tmp_path, {"changed.py": {2: recorded}})
    assert reached == {"changed.py": {2: ["test_it.py::test_it"]}}
    assert removed == {"test_gone.py::test_it", "test_it.py::test_renamed"}
    (change,) = mutations((tmp_path / "changed.py").read_bytes())
    with pytest.raises(LookupError, match="test_renamed"):
        trial.run(tmp_path, trial.Trial("changed.py", change, recorded[1:]), timeout_seconds=60)


def test_a_recording_without_coverage_fails_before_any_test_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "a test ran"
    (tmp_path / "test_it.py").write_text(
        f"open({str(marker)!r}, 'w')\n\n\ndef test_it():\n    pass\n"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="is not installed"):
        record(tmp_path, [tmp_path], ["test_it.py"])
    assert not marker.exists()


def test_each_reviewed_change_is_one_that_the_tool_makes() -> None:
    for path, description in reviewed(NO_DIFFERENCE):
        descriptions = [mutation.description for mutation in mutations((ROOT / path).read_bytes())]
        assert description in descriptions, path
