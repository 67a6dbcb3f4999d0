from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.cli.ckpt import main
from tests.support.history import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first", num_steps=8, saved=[4, 8], best=4, resumed=[4])


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_the_page_marks_checkpoints_the_best_one_and_resumes(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert main(["plot", str(run), "-o", str(page)]) == 0
    loss, *others = svgs(page.read_text())
    marks = [element.get("class", "").split()[0] for element in loss if element.get("class")]
    assert (marks.count("saved"), marks.count("best"), marks.count("resumed")) == (2, 1, 1)
    assert [other.get("aria-label") for other in others] == [
        "Gradient norm",
        "Learning rate",
        "Throughput, tokens per second",
        "Training waited for saves, seconds",
    ]


def test_memory_and_mfu_are_plotted_if_they_are_logged(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (run / "training.jsonl").read_text().splitlines()
    changed = []
    for line in lines:
        record = json.loads(line)
        if "event" not in record:
            record |= {"mfu": 0.4, "mem": 2_000_000, "tps_per_gpu": 50.0}
        changed.append(json.dumps(record) + "\n")
    (run / "training.jsonl").write_text("".join(changed))
    page = tmp_path / "report.html"
    assert main(["plot", str(run), "-o", str(page)]) == 0
    titles = [chart.get("aria-label") for chart in svgs(page.read_text())]
    assert titles[4:7] == [
        "Throughput of each rank, tokens per second",
        "MFU, percent",
        "Peak memory of rank 0, bytes",
    ]
    assert "<td>40.0%</td>" in page.read_text() and "<td>2.0 MB</td>" in page.read_text()
    assert main(["plot", str(run)]) == 0
    assert re.search(r"MFU % +\S+ +40 \.\. 40", capsys.readouterr().out)


def test_overlaid_runs_begin_with_the_differences_between_their_recipes(
    run: Path, tmp_path: Path
) -> None:
    other = write_run(tmp_path / "other", num_steps=4, saved=[4])
    third = write_run(tmp_path / "third", num_steps=4)
    for directory, rate, betas in ((run, "1e-4", "[0.9, 0.95]"), (other, "<3e-4>", "[0.9, 0.999]")):
        recipe = f"seed: 1\noptimizer:\n  lr: {rate}\n  betas: {betas}\n"
        for checkpoint in directory.glob("epoch_*"):
            (checkpoint / "config.yaml").write_text(recipe)
    page = tmp_path / "report.html"
    assert main(["plot", *map(str, (run, other, third)), "-o", str(page)]) == 0
    table = page.read_text().split("Differences between the recipes")[1].split("</table>")[0]
    assert re.findall(r"<td>(.*?)</td>", table) == [
        *("optimizer.betas", "[0.9, 0.95]", "[0.9, 0.999]", ""),
        *("optimizer.lr", "1e-4", "&lt;3e-4&gt;", ""),
    ]
    assert page.read_text().index("<table") < page.read_text().index("<svg")
    # A link in a checkpoint may lead to any file.
    config = other / "epoch_0_step_4" / "config.yaml"
    config.unlink()
    config.symlink_to("/etc/passwd")
    assert main(["plot", *map(str, (run, other)), "-o", str(page)]) == 0
    assert "Differences between" not in page.read_text()


def test_completions_are_tables_checkpoints_are_collapsed_and_both_have_dates(
    run: Path, tmp_path: Path
) -> None:
    prompts = [{"prompt": "Say <b>", "text": "hello\n  world", "tokens": 3}, {"prompt": 1}, "no"]
    with open(run / "training.jsonl", "a") as log:
        for step in (4, 8, 8):
            record = {"event": "completions", "step": step, "completions": prompts}
            log.write(json.dumps(record) + "\n")
        log.write('{"event": "completions", "step": 9, "completions": {"prompt": "x"}}\n')
    page = tmp_path / "report.html"
    assert main(["plot", str(run), "-o", str(page)]) == 0
    _, completions, checkpoints = page.read_text().split("<table")[1:]
    cells = "<td>Say &lt;b&gt;</td><td>hello\n  world</td>"
    assert completions.count(cells) == 2
    assert completions.index(f"<td>8</td>{cells}") < completions.index(f"<td>4</td>{cells}")
    assert "<details><summary>" in completions and "2 checkpoints of first" in completions
    dates = re.findall(r"<td>(\d{4}-\d\d-\d\d \d\d:\d\d)</td>", checkpoints)
    assert len(dates) == 2 and set(dates) == {time.strftime("%Y-%m-%d %H:%M", time.localtime(1e9))}
    assert f"<td>{dates[0]} to {dates[0]}</td>" in page.read_text()


def test_the_page_asks_nothing_of_anyone_else_and_names_cannot_become_markup(
    run: Path, tmp_path: Path
) -> None:
    evil = run.rename(tmp_path / "<script>alert(1)<")
    page = tmp_path / "report.html"
    assert main(["plot", str(evil), "-o", str(page)]) == 0
    text = page.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|@import|url\(", text)
    assert "<script>alert" not in text
    assert text.count("<script") == 1 + 5, "the page's own, and the data of each panel"


def test_runs_are_overlaid_each_in_its_colour_and_told_apart_by_name(
    run: Path, tmp_path: Path
) -> None:
    other = write_run(tmp_path / "b" / "first", num_steps=300)
    page = tmp_path / "report.html"
    assert main(["plot", str(run), str(other), "-o", str(page)]) == 0
    text = page.read_text()
    lines = [e.get("class", "").split() for e in svgs(text)[0] if e.tag == "polyline"]
    assert [line[-1] for line in lines] == ["c0", "c0", "c1", "c1"]
    assert [line[0] for line in lines] == ["line", "line", "faint", "line"]
    assert "b/first" in text


def test_a_learning_rate_is_never_smoothed_and_lost_losses_are_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=300)
    lines = [json.loads(line) for line in (run / "training.jsonl").read_text().splitlines()]
    for line in lines:
        line["loss"] = None if line["step"] > 250 else line["loss"]
    (run / "training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = tmp_path / "report.html"
    assert main(["plot", str(run), "-o", str(page)]) == 0
    text = page.read_text()
    drawn = {
        e.get("aria-label"): [line.get("class") for line in e if line.tag == "polyline"]
        for e in svgs(text)
    }
    assert drawn["Learning rate"] == ["line c0"]
    assert drawn["Gradient norm"] == ["faint c0", "line c0"]
    assert "<td>300</td>" in text
    assert "at step 250</td>" in text
    assert "<td>50 steps, first 251</td>" in text


def test_a_report_is_an_html_page(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(run), "-o", str(tmp_path / "report.png")]) == 2
    assert ".html page" in capsys.readouterr().err


def test_without_a_file_small_curves_go_to_the_terminal(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(run)]) == 0
    head, loss, *_ = capsys.readouterr().out.splitlines()
    assert head.startswith("first: steps 8, training loss 2.0337, lowest validation loss")
    assert head.endswith("resumed once")
    assert re.fullmatch(r"  loss        [▁-█]{8}  4\.676 \.\. 2\.034", loss)


def test_a_page_is_utf_8_whatever_the_locale_and_the_name(run: Path, tmp_path: Path) -> None:
    odd = run.rename(os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff"))
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [
        sys.executable,
        "-m",
        "automodel_ckpt.cli.ckpt",
        "plot",
        os.fsencode(odd),
        "-o",
        "page.html",
    ]
    subprocess.run(command, check=True, env=env, cwd=tmp_path, capture_output=True)
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "▲ checkpoint" in text and "odd\\udcff" in text


def test_names_in_a_log_cannot_steer_a_terminal_or_a_page(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "val_loss_\x1b]0;owned\x07\u202e\u2028x"
    records = [{"step": n, "epoch": 0, "val_loss": 1.0, hostile: n / 2} for n in range(1, 5)]
    (run / "validation.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    capsys.readouterr()
    for command in ("plot", "ls"):
        assert main([command, str(run)]) == 0
        text = capsys.readouterr()
        assert (text.out + text.err).replace("\n", "").isprintable()
        assert command != "plot" or "\\x1b]0;owned" in text.out
    page = tmp_path / "page.html"
    assert main(["plot", str(run), "-o", str(page)]) == 0
    assert page.read_text("utf-8").replace("\n", "").isprintable()


def test_json_gives_the_numbers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = plotted(run, capsys)
    assert document["series"]["val_loss"]["steps"] == [4, 8]
    assert (document["resumed_at"], document["num_tokens"]) == ([4], 800)
    assert document["checkpoints"] == ["epoch_0_step_4", "epoch_0_step_8"]


def plotted(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plot", str(run), "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)
    return dict(document)


def test_of_two_values_at_a_step_the_last_counts_and_other_lines_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [{"step": 1, "loss": 3.0}, {"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]
    odd = ["{", "[]", '{"step": "4", "loss": 1}', '{"step": true, "loss": 1}', "[" * 100_000]
    odd += ['{"step": 5, "loss": NaN}', '{"step": 6, "loss": true}', '{"step": 9, "lo']
    (tmp_path / "training.jsonl").write_text("\n".join([*map(json.dumps, good), *odd]))
    loss = plotted(tmp_path, capsys)["series"]["loss"]
    assert loss == {"steps": [1], "values": [2.5]}
    assert main(["plot", str(tmp_path)]) == 0
    assert "loss not finite 3 steps, first 2" in capsys.readouterr().out


def test_metrics_of_an_objective_have_charts_with_their_validation_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [{"step": step, "loss": 1.0, "pairs": 8, "margin": 0.5 * step} for step in (1, 2)]
    measured = {"val_loss": 2.0, "val_margin": 1.5, "val_f1": 0.5, "val_f1_micro": 0.25}
    of_set = {"val_loss_few": 3.0, "val_margin_few": 1.0, "val_f1_few": 0.75}
    counts = {"label_tokens": 4, "pairs": 2}
    (tmp_path / "training.jsonl").write_text("\n".join(map(json.dumps, steps)))
    (tmp_path / "validation.jsonl").write_text(
        json.dumps({"step": 2, **measured, **of_set, **counts})
    )
    page = tmp_path / "page.html"
    assert main(["plot", str(tmp_path), "-o", str(page)]) == 0
    text = page.read_text()
    titles = [chart.get("aria-label") for chart in svgs(text)]
    assert titles == ["Loss", "Margin", "F1", "F1 micro"]
    lines = {}
    for title, data in zip(titles, re.findall(r"json\">(.*?)</script>", text), strict=True):
        lines[title] = {line["label"]: line["values"] for line in json.loads(data)}
    name = tmp_path.name
    assert lines["Margin"] == {
        name: [0.5, 1.0],
        f"{name}, validation": [1.5],
        f"{name}, validation, few": [1.0],
    }
    assert lines["F1 micro"] == {f"{name}, validation": [0.25]}
    assert main(["plot", str(tmp_path)]) == 0
    # All curves begin in one column, after the longest title.
    _, *curves = capsys.readouterr().out.splitlines()[1:]
    assert curves[-1].startswith("  val f1 micro  ")
    assert all(line[14:16] == "  " and line[16] in "▁▂▃▄▅▆▇█" for line in curves)


def test_memory_is_short_and_no_share_is_above_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps of a short run end before its last save, so that its saves can take longer than its steps."""
    steps = [
        {"step": 1, "loss": 2.0, "timestamp": 100.0, "mem": 464_100_000},
        {"step": 2, "loss": 1.5, "timestamp": 100.1, "mem": 464_200_000},
        {"event": "save", "step": 2, "stall_seconds": 0.2, "bytes": 10},
    ]
    (tmp_path / "training.jsonl").write_text("\n".join(map(json.dumps, steps)))
    assert main(["plot", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert (
        "464.1M .. 464.2M" in text
        and "waited for saves 0.20 s" in text
        and "of the run" not in text
    )


def test_a_place_without_a_run_is_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(tmp_path)]) == 3
    assert "contains no run" in capsys.readouterr().err


def test_numbers_that_no_run_writes_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", num_steps=4)
    with open(run / "training.jsonl", "a") as log:
        log.write(
            '{"step": 5, "loss": 1e308, "tokens": 1e400}\n{"step": 6, "loss": -1e308}\n{"step": -7, "loss": 1}\n'
        )
        log.write('{"step": ' + "9" * 400 + ', "loss": 1}\n')
    for output in ([], ["-o", str(tmp_path / "page.html")], ["--json"]):
        assert main(["plot", str(run), *output]) == 0
    assert json.loads(capsys.readouterr().out.split("page.html\n")[1])[0]["series"]["loss"][
        "steps"
    ] == [1, 2, 3, 4]
