"""``ckpt`` finds what it is pointed at, says what is wrong with the rest, and starts at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.cli.terminal import printable
from tests.support.shards import checkpoint_in

Capture = pytest.CaptureFixture[str]


def rows(path: Path, capsys: Capture) -> dict[str, dict[str, object]]:
    assert main(["ls", str(path), "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_ls_lists_complete_torn_foreign_and_unfinished_directories(tmp_path: Path, capsys: Capture) -> None:
    for step in (20, 100):
        checkpoint_in(tmp_path, step)
    (checkpoint_in(tmp_path, 40) / "MANIFEST.json").write_bytes(b"{}")
    (tmp_path / "epoch_0_step_50" / "model").mkdir(parents=True)
    (tmp_path / "checkpoint-7" / "model").mkdir(parents=True)
    (tmp_path / f".epoch_0_step_60.staging-{'0' * 32}").mkdir()
    os.rename(checkpoint_in(tmp_path, 110), tmp_path / "epoch_0_step_110.superseded-1")
    checkpoint_in(tmp_path, 105)
    (tmp_path / "unrelated").mkdir()
    found = rows(tmp_path, capsys)
    assert [name for name in found if name.startswith("epoch")][:5] == [
        f"epoch_0_step_{step}" for step in (20, 40, 50, 100, 105)
    ]
    assert found["epoch_0_step_20"]["train_loss"] == 1.5 and found["epoch_0_step_20"]["val_loss"] == 1.25
    assert found["epoch_0_step_105"]["pointers"] == ["LATEST"]
    complete = {name for name, row in found.items() if row["complete"]}
    assert complete == {"epoch_0_step_20", "epoch_0_step_100", "epoch_0_step_105", "epoch_0_step_110.superseded-1"}
    reasons = {
        "epoch_0_step_40": "damaged",
        "epoch_0_step_50": "no MANIFEST",
        "checkpoint-7": "foreign",
        f".epoch_0_step_60.staging-{'0' * 32}": "unfinished",
        "epoch_0_step_110.superseded-1": "superseded",
    }
    for name, reason in reasons.items():
        assert reason in str(found[name]["reason"])
    assert "unrelated" not in found
    assert main(["ls", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "LATEST" in text and "1.2500" in text and "\x1b" not in text


def test_a_run_a_pointer_a_text_pointer_and_a_checkpoint_all_lead_to_it(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "job" / "checkpoints"
    checkpoint_in(run, 20)
    newest = checkpoint_in(run, 40)
    ways = [tmp_path / "job", run, run / "LATEST", newest]
    for way in ways:
        assert main(["show", str(way), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["path"] == str(newest)
    (run / "LATEST").unlink()
    (run / "LATEST.txt").write_text("epoch_0_step_20\n")
    for way in (run / "LATEST", run / "LATEST.txt"):
        assert main(["show", str(way), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step"] == 20


def test_show_gives_tensors_position_and_environment(tmp_path: Path, capsys: Capture) -> None:
    checkpoint_in(tmp_path, 20)
    assert main(["show", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for part in ("step 20", "F32", "[4, 3]", "2 slices", "consumed_samples  160", "python  3"):
        assert part in text


def test_consolidate_prints_the_directory_it_wrote(tmp_path: Path, capsys: Capture) -> None:
    checkpoint = checkpoint_in(tmp_path, 20)
    assert main(["consolidate", str(tmp_path / "LATEST")]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{checkpoint}/model/consolidated\n" and "digests checked" in captured.err
    arguments = ["consolidate", str(checkpoint / "model"), "--output", str(tmp_path / "out"), "--cast-dtype", "bf16"]
    assert main([*arguments, "--nproc", "1", "--num-threads", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["casts"] == {"F32->BF16": 1} and report["output"] == str(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["ls"], 3), (["show", "LATEST"], 3), (["consolidate", "missing"], 3), (["consolidate", "."], 3)],
)
def test_where_there_is_nothing_it_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, arguments: list[str], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    assert capsys.readouterr().err.count("error:") == 1


def test_a_wrong_dtype_is_wrong_usage(tmp_path: Path, capsys: Capture) -> None:
    checkpoint_in(tmp_path, 20)
    assert main(["consolidate", str(tmp_path), "--cast-dtype", "int4"]) == 2
    assert "bf16, fp16" in capsys.readouterr().err


def test_names_from_a_disk_cannot_steer_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    hostile = "evil\x1b]0;owned\x07\u202egnp\n"
    (tmp_path / hostile / "model").mkdir(parents=True)
    checkpoint_in(tmp_path, 20)
    assert main(["ls", str(tmp_path)]) == 0
    assert main(["show", str(tmp_path / hostile)]) == 3
    assert main(["consolidate", str(tmp_path / hostile)]) == 3
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert not any(bad in text for bad in ("\x1b", "\x07", "\u202e"))
    assert "evil\\x1b]0;owned" in captured.out
    assert printable("a\udcffb\tc") == "a\\udcffb\\tc"


def test_help_and_version_are_instant_and_no_command_imports_torch(tmp_path: Path) -> None:
    checkpoint_in(tmp_path, 20)
    code = "import sys; from automodel_ckpt.cli.ckpt import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    for arguments in (["--help"], ["ls", "--help"], ["--version"], ["ls", "."], ["show", "."], ["consolidate", "."]):
        started = time.monotonic()
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, cwd=tmp_path, capture_output=True)
        assert time.monotonic() - started < 5
