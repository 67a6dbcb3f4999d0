"""`make raises` tells a place that makes an error and is met by a test from one that is not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ("tools/raise_sites.py", "tests/support/raise_recorder/sitecustomize.py", "automodel_ckpt/errors.py")
PARTS = """\
from automodel_ckpt.errors import RecipeError

class Odd(Exception): ...

def raised():
    raise RecipeError("raised", where="", value="", remedy="")

def reworded(error):
    try:
        raise made()
    except Odd:
        raise RecipeError("reworded", where="", value="", remedy="")

def made():
    return Odd("made for another")

def alike(number):
    if number == 1:
        raise ValueError("alike")
    if number == 2:
        raise ValueError("alike")

def swallowed():
    try:
        raise ValueError("swallowed")
    except ValueError:
        return None
"""
TESTS = """\
import pytest
from automodel_ckpt import parts
from automodel_ckpt.errors import RecipeError

def test_some():
    for meet in (parts.raised, lambda: parts.reworded(None)):
        with pytest.raises(RecipeError):
            meet()
    with pytest.raises(ValueError):
        parts.alike(1)
    with pytest.raises(RecipeError):
        raise RecipeError("the test's own", where="", value="", remedy="")
    parts.swallowed()
"""


def test_a_place_that_no_test_meets_is_listed_and_the_exit_code_is_1(tmp_path: Path) -> None:
    for name in CARRIED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "automodel_ckpt/__init__.py").touch()
    parts = tmp_path / "automodel_ckpt/parts.py"
    parts.write_text(PARTS)
    (tmp_path / "tests/test_parts.py").write_text(TESTS)
    code, said = reported(tmp_path, "-n", "0", "-p", "no:cacheprovider", "tests")
    assert code == 1 and "1 passed" in said
    assert said.splitlines()[-3:] == [
        "automodel_ckpt/parts.py:21: alike", "automodel_ckpt/parts.py:25: swallowed",
        "2 of 7 places that make an error are met by no test",
    ]  # fmt: skip
    parts.write_text(PARTS.partition("    if number == 2")[0])
    assert reported(tmp_path, "--report") == (0, "\n0 of 5 places that make an error are met by no test\n")


def reported(root: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, "tools/raise_sites.py", "--notes", "notes", *words]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=100)
    return ended.returncode, ended.stdout + ended.stderr
