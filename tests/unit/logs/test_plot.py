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
    """Return the charts of a report."""
    body = re.sub(r".*(<main>.*</main>).*", r"\1", page, flags=re.DOTALL)
    return [each for each in ElementTree.fromstring(body).iter() if each.get("class") == "plot"]


@pytest.mark.parametrize("suffix", ["html", "svg"])
def test_a_report_has_both_losses_saves_the_best_one_and_resumes(
    tmp_path: Path, suffix: str
) -> None:
    run = write_run(tmp_path / "run", num_steps=40, saved=[20, 40], best=20, resumed=[20])
    (run / "epoch_0_step_40" / "MANIFEST.json").unlink()
    with open(run / "training.jsonl", "a") as log:
        log.write('{"step": 41, "loss": NaN, "lr": 0.1}\n{"step": 42, "loss": null, "lr": 0.1}\n')
    report = tmp_path / f"report.{suffix}"
    assert main(["plot", str(run), "-o", str(report)]) == 0
    loss, *others = svgs(report.read_text())
    assert {line.get("data-label") for line in lines(loss)} == {
        "training, each step",
        "training, mean of 5 steps",
        "validation",
    }
    assert {title.text for title in loss.iter() if title.tag.endswith("title")} == {
        "run: checkpoint, step 20",
        "run: removed checkpoint, step 40",
        "run: LOWEST_VAL, step 20",
        "run: resumed, step 20",
        "run: loss not finite, step 41 to 42",
    }
    titles = ["Gradient norm", "Learning rate", "Tokens/s", "Waited for saves"]
    assert [other.get("aria-label") for other in others] == (titles if suffix == "html" else [])


def lines(chart: ElementTree.Element) -> list[ElementTree.Element]:
    return [element for element in chart.iter() if element.tag.endswith("polyline")]


def test_overlaid_runs_have_the_differences_between_their_recipes(
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
    text = page.read_text()
    assert re.findall(r"<tr><th>optimizer.<wbr/>(.*)</th>(.*)</tr>", text) == [
        ("betas", "<td>[0.9, 0.95]</td><td>[0.9, 0.999]</td><td></td>"),
        ("lr", "<td>1e-4</td><td>&lt;3e-4&gt;</td><td></td>"),
    ]
    assert text.index("<svg") < text.index("<table")
    for name in ("first", "other", "third"):
        assert text.count(f"</span>&#160;{name}</span>") == 1, "each run is in the legend once"
    # A link in a checkpoint may lead to any file.
    config = other / "epoch_0_step_4" / "config.yaml"
    config.unlink()
    config.symlink_to("/etc/passwd")
    assert main(["plot", *map(str, (run, other)), "-o", str(page)]) == 0
    assert "<wbr/>" not in page.read_text()


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
    assert "<details" in completions and "2 checkpoints" in completions
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
    assert text.count("<script") == 1


def test_a_report_is_an_html_page_or_an_svg_image(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(run), "-o", str(tmp_path / "report.png")]) == 2
    assert ".svg image" in capsys.readouterr().err


def test_without_a_file_small_curves_go_to_the_terminal(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(run)]) == 0
    head, loss, *_ = capsys.readouterr().out.splitlines()
    assert head.startswith("first: steps 8, training loss 2.0337, lowest validation loss")
    assert head.endswith("resumed once")
    assert re.fullmatch(r"  Loss, training    [▁-█]{8}  4\.676 \.\. 2\.034", loss)


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
    found = {
        chart.get("aria-label"): [line.get("data-label") for line in lines(chart)]
        for chart in svgs(page.read_text())
    }
    assert found == {
        "Loss": ["training", "validation", "validation, few"],
        "Margin": ["training", "validation", "validation, few"],
        "F1": ["validation", "validation, few"],
        "F1 micro": ["validation"],
    }
    assert main(["plot", str(tmp_path)]) == 0
    # All curves begin in one column, after the longest title.
    _, *curves = capsys.readouterr().out.splitlines()[1:]
    assert curves[-1].startswith("  F1 micro, validation     ")
    assert all(line[25:27] == "  " and line[27] in "▁▂▃▄▅▆▇█" for line in curves)
