"""The benchmarks run at a small size: saving, loading and consolidating, and implementations of the loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.servers.command_server import CommandServer
from tools.bench.loss_kernels import compare
from tools.support import ROOT


@pytest.mark.slow
@pytest.mark.further
def test_saving_loading_and_consolidating_are_compared_with_system_calls(
    tmp_path: Path, commands: CommandServer
) -> None:
    file = tmp_path / "figures.json"
    (tmp_path / "work").mkdir()
    words = ["--size", "1M", "--runs", "1", "--directory", str(tmp_path / "work")]
    command = ["python", "-m", "tools.bench.checkpoint", *words, "--json", str(file)]
    done = commands.run(*command, cwd=ROOT, timeout=170)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert [group["title"] for group in found["groups"]] == [
        "saving, compared with a write and fsync",
        "loading, cold",
        "consolidating, compared with cp and fsync",
    ]
    for group in found["groups"]:
        assert group["rows"][0]["ratio"] == 1
        assert sum(row["ours"] for row in group["rows"]) >= 3
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize("trains", [True, False])
def test_every_implementation_of_the_loss_is_compared_on_a_device(trains: bool) -> None:
    rows = compare("cpu", 97, 16, 32, trains=trains, rounds=1)
    assert {"matrix products", "full logits", "ours, torch"} <= rows.keys()
    for name in ("full logits", "ours, torch"):
        assert rows[name]["error_hidden"] < 1e-2
        assert ("error_weight" in rows[name]) == trains
        assert rows[name]["time_in_products"] > 0
