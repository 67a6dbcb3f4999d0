"""A kernel is used if its trial succeeds; the reason for a failure is logged."""

import pytest

from automodel_ckpt.base.kernel_trial import succeeds


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, None),
        (OSError("no compiler\nand more"), "OSError: no compiler"),
        (NotImplementedError(), "NotImplementedError"),
    ],
)
def test_the_reason_for_a_failure_is_logged_in_a_line(
    caplog: pytest.LogCaptureFixture, error: Exception | None, reason: str | None
) -> None:
    def trial() -> None:
        if error is not None:
            raise error

    with caplog.at_level("INFO", logger="automodel_ckpt"):
        assert succeeds(trial, "it is computed") == (error is None)
    text = f"it is computed without Triton, whose kernel fails here: {reason}"
    assert [text in record.getMessage() for record in caplog.records] == [True] * bool(error)
    assert "and more" not in caplog.text
