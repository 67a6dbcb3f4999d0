"""The start-up bench runs, and its rows are in the order that their work implies."""

from __future__ import annotations

import pytest

from tests.support.servers.command_server import CommandServer, Starting
from tools.bench import startup as bench_startup


def test_the_bench_measures_the_first_step_of_the_main_example(
    commands: CommandServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_startup, "subprocess", Starting(commands))
    rows = bench_startup.rows(2)
    kept = {name: rows[name] for name in ("python", "first step, 2 processes")}
    monkeypatch.setattr(bench_startup, "rows", lambda num_ranks: kept)
    seconds = {name: runs[0] for name, runs in bench_startup.measure(0, 2).items()}
    assert 0 < seconds["python"] < seconds["first step, 2 processes"] < 60
