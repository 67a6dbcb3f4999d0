"""Parts of ``ckpt``: which arguments are paths, and how text is put on a terminal."""

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.base.terminal import colored
from automodel_ckpt.cli.ckpt import main, parser
from automodel_ckpt.cli.commands import verify as verify_module
from automodel_ckpt.cli.common.arguments import PATHS
from automodel_ckpt.cli.common.output import table
from automodel_ckpt.errors import Problem, printable
from tests.support.models.shards import checkpoint_in

Capture = pytest.CaptureFixture[str]


def test_every_argument_that_is_a_path_is_known_as_one() -> None:
    """So that ``~/`` is expanded in it."""
    paths = {
        "PATH",
        "RUN",
        "DIR",
        "FILE",
        "OUT",
        "BASE",
        "SOURCE",
        "YAML",
        "A",
        "B",
        "FILE.tar.zst",
    }
    (commands,) = [action for action in parser()._actions if action.dest == "command"]
    assert isinstance(commands.choices, dict)
    for name, command in commands.choices.items():
        for action in command._actions:
            if action.metavar in paths:
                assert action.dest in PATHS, f"ckpt {name}: {action.dest}"


def test_a_checkpoint_that_its_run_removes_during_a_verification_is_not_damaged(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = verify_module.verify

    def removing(checkpoint: Path, *rest: Any, **options: Any) -> list[Problem]:
        if checkpoint.name == "epoch_0_step_1":
            checkpoint.rename(tmp_path / "trash")
        return verify(checkpoint, *rest, **options)

    monkeypatch.setattr(verify_module, "verify", removing)
    run = tmp_path / "run"
    for as_json in (True, False):
        for step in (1, 2):
            checkpoint_in(run, step)
        code = main(["verify", str(run), "--deep", *["--json"] * as_json])
        output = capsys.readouterr().out
        assert code == 0, output
        shutil.rmtree(tmp_path / "trash")
        if as_json:
            assert [each["path"] for each in json.loads(output)] == [f"{run}/epoch_0_step_2"]
        else:
            assert "epoch_0_step_1: not verified, since its run" in output
            assert "epoch_0_step_2: ok" in output
            assert "damaged" not in output
    checkpoint_in(run, 1)
    assert main(["verify", str(run / "epoch_0_step_1")]) == 3
    output = capsys.readouterr().out
    assert "epoch_0_step_1: removed\n  the checkpoint was removed while it was verified" in output


def test_numbers_stand_to_the_right_and_wide_characters_count_double() -> None:
    lines = table([("name", "n", ""), ("漢字", "10", "x"), ("a\u0301", "2", "y")], right=(1,))
    assert lines == ["name   n", "漢字  10  x", "a\u0301      2  y"]
    assert printable("a\udcffb\tc") == "a\\udcffb\\tc"


def test_color_follows_the_terminal_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colored("a", "red", sys.__stdout__) == "a" or sys.__stdout__.isatty()
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert colored("a", "red", sys.__stdout__) == "\x1b[31ma\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert colored("a", "red", sys.__stdout__) == "a"


@pytest.mark.parametrize("no_color", ["", "1"])
def test_errors_on_a_terminal_have_colors_and_break_between_words(no_color: str) -> None:
    environment = {**os.environ, "COLUMNS": "40", "TERM": "xterm", "NO_COLOR": no_color}
    terminal, other_end = pty.openpty()
    command = [str(Path(sys.executable).with_name("ckpt")), "show", "nowhere"]
    subprocess.run(command, stderr=other_end, env=environment, check=False)
    os.close(other_end)
    lines = os.read(terminal, 4096).decode().splitlines()
    os.close(terminal)
    error, hint = ("error", "hint") if no_color else ("\x1b[31merror\x1b[0m", "\x1b[32mhint\x1b[0m")
    assert lines[0] == f"{error}: checkpoint not found"
    assert lines[3] == f"  {hint}:   specify a run directory, a"
    assert lines[4].startswith(" " * 10)
    assert all(len(line) < 40 for line in lines[4:])
