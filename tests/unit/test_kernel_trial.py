"""A kernel is used if its trial succeeds; the reason for a failure is logged."""

from __future__ import annotations

import pytest

from automodel_ckpt.base.kernel_trial import succeeds


def test_a_trial_without_an_exception_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    with caplog.at_level("DEBUG", logger="automodel_ckpt"):
        assert succeeds(lambda: calls.append("here"), "it is computed")
    assert calls == ["here"] and not caplog.records


def test_a_failure_is_logged_with_its_first_line(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise OSError("no compiler\nand more")

    with caplog.at_level("INFO", logger="automodel_ckpt"):
        assert not succeeds(fails, "it is computed")
    (record,) = caplog.records
    expected = "it is computed without Triton, whose kernel fails here: OSError: no compiler"
    assert record.getMessage() == expected


def test_a_failure_without_a_message_is_logged_by_its_class(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> None:
        raise NotImplementedError

    with caplog.at_level("INFO", logger="automodel_ckpt"):
        assert not succeeds(fails, "it is computed")
    assert "fails here: NotImplementedError" in caplog.text
