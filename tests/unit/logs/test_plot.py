from __future__ import annotations

import json
import re
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
