"""The benches of saving, loading and consolidating: how figures are made and shown, and that a small one runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.servers.command_server import CommandServer
from tools.bench import loss_kernels as bench_loss_kernels
from tools.bench.rounds import ROOT


@pytest.mark.slow
def test_consolidation_is_compared_with_cp(tmp_path: Path, commands: CommandServer) -> None:
    words = ["tools.bench.consolidate", "--size", "1M", "--runs", "1", "--directory", str(tmp_path)]
    done = commands.run("python", "-m", *words, cwd=ROOT, timeout=170)
    assert done.returncode == 0, done.stderr
    for line in (
        "consolidating, cold, compared with cp and fsync",
        "ours: F32 cast to BF16",
        "torch: 2 shards, 4 files",
    ):
        assert line in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_every_implementation_of_the_loss_is_compared_on_a_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    sizes = "--device cpu --vocabulary 97 --hidden 16 --tokens 32 --rounds 1"
    bench_loss_kernels.main([*sizes.split(), "--json", str(file)])
    found = json.loads(file.read_text())
    assert list(found) == ["32 tokens, trained layer", "32 tokens, frozen layer"]
    for trained, rows in zip((True, False), found.values(), strict=True):
        assert {"matrix products", "full logits", "ours, torch"} <= rows.keys()
        for name in ("full logits", "ours, torch"):
            assert rows[name]["error_hidden"] < 1e-2
            assert ("error_weight" in rows[name]) == trained
            assert rows[name]["time_in_products"] > 0
    assert capsys.readouterr().out.count("| ours, torch |") == 2
