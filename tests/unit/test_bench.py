"""The benchmarks run at a small size: saving, loading and consolidating, and implementations of the loss."""

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
    words = ["--size", "1M", "--runs", "1", "--directory", str(tmp_path)]
    command = ["python", "-m", "tools.bench.checkpoint", *words]
    done = commands.run(*command, cwd=ROOT, timeout=170)
    assert done.returncode == 0, done.stderr
    _, *groups = done.stdout.split("### ")
    assert [group.splitlines()[0] for group in groups] == [
        "Saving, compared with a write and fsync",
        "Loading, cold",
        "Consolidating, compared with cp and fsync",
    ]
    for group in groups:
        first = group.splitlines()[4]
        assert first.split(" | ")[1] == "1.00"
        assert group.count("| **ours: ") >= 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trains", [True, False])
def test_every_implementation_of_the_loss_is_compared_on_a_device(trains: bool) -> None:
    rows = compare("cpu", 97, 16, 32, trains=trains, rounds=1)
    assert {"matrix products", "full logits", "ours, torch"} <= rows.keys()
    for name in ("full logits", "ours, torch"):
        assert rows[name]["error_hidden"] < 1e-2
        assert ("error_weight" in rows[name]) == trains
        assert rows[name]["time_in_products"] > 0
