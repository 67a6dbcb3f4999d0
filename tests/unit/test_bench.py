"""The benches of saving, loading and consolidating: how figures are made and shown, and that a small one runs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.command_server import CommandServer
from tools.bench import loop as bench_loop
from tools.bench import loss_head as bench_loss_head
from tools.bench import loss_kernels as bench_loss_kernels
from tools.bench import report as bench_report
from tools.bench.loop_ways import WARM_UP, Steps, Turns
from tools.bench.rounds import ROOT, Group, Memory, Row, as_json, llama_shapes, parse_size, rounds


def group() -> Group:
    base, mine = (
        Row("cp", print, seconds=[1.0, 2.0, 4.0]),
        Row("ours", print, True, seconds=[2.0, 2.0, 4.0]),
    )
    wide, rare = (
        Row("wide", print, nbytes=200, seconds=[1.0, 2.0, 4.0]),
        Row("rare", print, seconds=[5.0]),
    )
    return Group("consolidating", 100, [base, mine, wide, rare])


def results() -> dict[str, Any]:
    return as_json([group()] * 8, [Memory("ours", 12.3)], 10**9)


def test_a_ratio_is_the_median_over_rounds_of_times_per_byte() -> None:
    measured = group()
    assert [measured.ratio(row) for row in measured.rows] == [1.0, 1.0, 0.5, 5.0]


def test_every_row_runs_once_a_round_and_slow_ones_twice(tmp_path: Path) -> None:
    order: list[str] = []
    measured = Group("g", 1, [Row("a", lambda _: None), Row("b", lambda _: None, slow=True)])
    rounds(
        measured,
        3,
        tmp_path,
        lambda: order.append("prepared"),
        lambda row, _: float(order.append(row.name) or 1),
    )
    assert [name for name in order if name != "prepared"] == ["a", "b", "a", "b", "a"]
    assert order[::2] == ["prepared"] * 5


def test_sizes_are_read_and_made_into_layers() -> None:
    assert [parse_size(text) for text in ("64M", "1G", "1.5gb", "1000")] == [
        64 * 10**6,
        10**9,
        15 * 10**8,
        1000,
    ]
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


def test_the_loss_heads_ratios_are_medians_over_rounds_beside_full_logits_of_the_same_labels() -> (
    None
):
    full, ours = bench_loss_head.measure("full", 0.5, 64, 8, 16), {"seconds": 1.0, "megabytes": 2.0}
    assert full.keys() == ours.keys() and full["seconds"] > 0
    twice = {name: 2 * value for name, value in ours.items()}
    found = {
        (way, part): [ours, twice if way == "full" else ours, ours]
        for part in (1.0, 0.2)
        for way in ("full", "chunks")
    }
    found["chunks", 0.2] = [{"seconds": 0.25, "megabytes": 0.5}] * 3
    table = bench_loss_head.as_markdown(found, 128_000, 512, 2048).splitlines()[-4:]
    assert table[1:4:2] == [
        "| **ours** | 100% | 1.00 | 1.00 | 2 | 1.00 |",
        "| **ours** | 20% | 0.25 | 0.25 | 0 | 0.25 |",
    ]


def test_loops_of_one_process_take_turns_of_a_block_in_the_same_order() -> None:
    turns, order = Turns(["a", "b"], block=2, blocks=1), []

    def loop(steps: Steps, name: str) -> None:
        is_last = False
        while not is_last:
            order.append(name)
            is_last = steps.note(10)

    turns.run({"b": partial(loop, name="b"), "a": partial(loop, name="a")})
    assert "".join(order) == "aabb" * (WARM_UP + 1)
    assert turns.steps["a"].plain()["tokens"] == [10, 10]


def test_a_loop_that_fails_ends_the_others() -> None:
    turns = Turns(["a", "b"], block=1, blocks=1)

    def fail(steps: Steps) -> None:
        steps.note(1)
        raise SystemExit("no")

    with pytest.raises(SystemExit, match="no"):
        turns.run({"b": lambda steps: [None for _ in iter(lambda: steps.note(1), True)], "a": fail})


def test_loops_are_compared_turn_by_turn_and_by_their_tokens() -> None:
    bare = {"seconds": [1.0, 1.0, 8.0, 8.0], "processor": [1.0] * 4, "tokens": [10] * 4, "block": 2}
    mine = {"seconds": [2.0, 2.0, 9.0, 9.0], "processor": [1.5] * 4, "tokens": [22] * 4, "block": 2}
    base, row = bench_loop.compared([{"bare": bare, "ours": mine}] * 3)
    assert (base["added_ms"], base["speed"], base["useful"]) == (0.0, 1.0, 1.0)
    assert (row["added_ms"], row["added_cpu_ms"]) == (1000.0, 500.0)
    assert row["speed"] == pytest.approx((1 / 2 + 8 / 9) / 2) and row["useful"] == pytest.approx(
        1.8
    )
    results = {
        "machine": {"cores": "2", "processor": "p", "kernel": "k", "date": "d"},
        "tables": {"One process, tiny": [base, row], "Short answers, 5M": [base, row]},
        "also": {"packing": "0.1 %"},
    }
    lines = bench_loop.as_markdown(results).splitlines()
    assert (
        "| **ours** | 5500.00 | +1000.00 | +500.00 | 0.694 |" in lines
        and "| **ours** | 4 | 1.80 |" in lines
    )
    assert lines[-1] == "* packing: 0.1 %"


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
