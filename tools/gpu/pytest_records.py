"""A pytest plugin that appends each test's result to the file GPU_TEST_RECORDS, so that a stopped run has results."""

from __future__ import annotations

import json
import os
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    """Record a test when its call ends, or its setup if that failed or skipped it. Called in the first process only."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when != "call" and report.outcome == "passed":
        return
    text = report.longreprtext if report.outcome != "passed" else ""
    record = {"test": report.nodeid, "outcome": report.outcome, "text": text}
    with open(os.environ["GPU_TEST_RECORDS"], "a") as file:
        file.write(json.dumps({**record, "seconds": report.duration}) + "\n")
