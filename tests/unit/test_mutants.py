"""tools/mutants makes the changes that it names, and tells a change that a test notices from one that none does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutants.__main__ import attempt
from tools.mutants.operators import mutations

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


@pytest.mark.further
def test_a_noticed_change_is_killed_an_unnoticed_one_survives_and_one_that_hangs_times_out(
    tmp_path: Path,
) -> None:
    (tmp_path / "doubling.py").write_bytes(
        b"def double(x):\n    return x + x\n\n\ndef odd(x):\n    return x + 1\n\n\n"
        b"def seconds():\n    return 1 - 1\n"
    )
    (tmp_path / "test_code.py").write_text(
        "import time\nfrom pathlib import Path\n\nfrom doubling import double, seconds\n\n\n"
        "def test_it():\n    time.sleep(100 * seconds())\n    assert double(2) == 4\n"
        "    assert not Path('runs').exists()\n"
    )
    (tmp_path / "runs").mkdir()
    found = mutations((tmp_path / "doubling.py").read_bytes())
    tests = ["test_code.py"]
    outcomes = [
        attempt(tmp_path, "doubling.py", mutation, tests, limit)
        for mutation, limit in zip([*found, None], [60, 60, 5, 60], strict=True)
    ]
    assert outcomes == ["killed", "survived", "timed out", "survived"]
    assert b"x + x" in (tmp_path / "doubling.py").read_bytes(), "the original is unchanged"
