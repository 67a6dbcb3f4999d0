"""The benches of saving, loading and consolidating: how figures are made and shown, and that a small one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.command_server import CommandServer
from tools import bench_loss_head, bench_report
from tools.bench_rounds import ROOT, Group, Memory, Row, as_json, llama_shapes, parse_size, rounds


def group() -> Group:
    base, mine = Row("cp", print, seconds=[1.0, 2.0, 4.0]), Row("ours", print, True, seconds=[2.0, 2.0, 4.0])
    wide, rare = Row("wide", print, nbytes=200, seconds=[1.0, 2.0, 4.0]), Row("rare", print, seconds=[5.0])
    return Group("consolidating", 100, [base, mine, wide, rare])


def results() -> dict[str, Any]:
    return as_json([group()] * 8, [Memory("ours", 12.3)], 10**9)


def test_a_ratio_is_the_median_over_rounds_of_times_per_byte() -> None:
    measured = group()
    assert [measured.ratio(row) for row in measured.rows] == [1.0, 1.0, 0.5, 5.0]


def test_every_row_runs_once_a_round_and_slow_ones_twice(tmp_path: Path) -> None:
    order: list[str] = []
    measured = Group("g", 1, [Row("a", lambda _: None), Row("b", lambda _: None, slow=True)])
    rounds(measured, 3, tmp_path, lambda: order.append("prepared"), lambda row, _: float(order.append(row.name) or 1))
    assert [name for name in order if name != "prepared"] == ["a", "b", "a", "b", "a"]
    assert order[::2] == ["prepared"] * 5


def test_sizes_are_read_and_made_into_layers() -> None:
    assert [parse_size(text) for text in ("64M", "1G", "1.5gb", "1000")] == [64 * 10**6, 10**9, 15 * 10**8, 1000]
    for nbytes in (10**6, 64 * 10**6, 10**9):
        shapes, num_layers = llama_shapes(nbytes, 2)
        total = num_layers * 2 * sum(a * b for a, b in shapes.values())
        assert 0.8 * nbytes < total < 1.2 * nbytes and num_layers >= 8


def test_the_tables_go_between_the_markers_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(bench_report.PAGE.read_text())
    for _ in range(2):
        bench_report.write_page(results(), page)
    text = page.read_text()
    assert text.count("| **ours** | 1.00 | 2.00 |") == 8 and "| ours | 12 |" in text
    assert text.startswith("# Performance") and text.count("<!-- bench: end -->") == 1
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="lacks the lines"):
        bench_report.write_page(results(), page)


def test_the_plot_is_a_small_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench_report.write_plot(results(), tmp_path / "plot.png")
    data = (tmp_path / "plot.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) < 100_000


def test_the_loss_heads_ratios_are_medians_over_rounds_beside_full_logits_of_the_same_labels() -> None:
    full, ours = bench_loss_head.measure("full", 0.5, 64, 8, 16), {"seconds": 1.0, "megabytes": 2.0}
    assert full.keys() == ours.keys() and full["seconds"] > 0
    twice = {name: 2 * value for name, value in ours.items()}
    found = {
        (way, part): [ours, twice if way == "full" else ours, ours] for part in (1.0, 0.2) for way in ("full", "chunks")
    }
    found["chunks", 0.2] = [{"seconds": 0.25, "megabytes": 0.5}] * 3
    table = bench_loss_head.as_markdown(found, 128_000, 512, 2048).splitlines()[-4:]
    assert table[1:4:2] == [
        "| **ours** | 100% | 1.00 | 1.00 | 2 | 1.00 |",
        "| **ours** | 20% | 0.25 | 0.25 | 0 | 0.25 |",
    ]


@pytest.mark.slow
def test_consolidation_is_measured_beside_cp(tmp_path: Path, commands: CommandServer) -> None:
    words = ["tools.bench_consolidate", "--size", "1M", "--runs", "1", "--directory", str(tmp_path)]
    done = commands.run("python", "-m", *words, cwd=ROOT, timeout=170)
    assert done.returncode == 0, done.stderr
    for line in ("consolidating, cold, beside cp and fsync", "ours: F32 cast to BF16", "torch: 2 shards, 4 files"):
        assert line in done.stdout
    assert list(tmp_path.iterdir()) == []
