"""tools/mutants makes the changes that it names, and tells a change that a test notices from one that none does."""

import pytest

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
