"""A Ctrl-C while the installed commands start: it ends them quietly, whatever they are importing."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.history import write_run

EXAMPLES = Path(__file__).parents[3] / "examples"
START = """
import importlib.abc, os, signal, sys


class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == AT:
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Interrupt())
from automodel_ckpt.cli import entry

sys.argv = [NAME, *WORDS]
sys.exit(getattr(entry, NAME)())
"""


def start(
    name: str, at: str, prelude: str = "", words: Sequence[str] = ("--version",)
) -> subprocess.CompletedProcess[str]:
    """Run the command *name* in a new process that gets a SIGINT when it first imports the module *at*."""
    values = f"NAME, AT, WORDS = {name!r}, {at!r}, {list(words)!r}\n"
    return subprocess.run(
        [sys.executable, "-c", values + prelude + START], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("name", "at"),
    [("ckpt", "automodel_ckpt.errors"), ("ckpt_train", "automodel_ckpt.config.load")],
)
def test_an_interrupt_during_the_imports_prints_nothing(name: str, at: str) -> None:
    ended = start(name, at)
    assert ended.returncode == -signal.SIGINT
    assert ended.stdout + ended.stderr == ""


@pytest.mark.parametrize(
    ("words", "at"), [(["generate", "RUN", "-p", "a"], "torch"), (["chat", "RUN"], "torch")]
)
def test_an_interrupt_during_the_import_of_a_large_library_prints_nothing(
    tmp_path: Path, words: list[str], at: str
) -> None:
    run = str(write_run(tmp_path / "run", num_steps=2))
    ended = start("ckpt", at, words=[word.replace("RUN", run) for word in words])
    assert ended.returncode == -signal.SIGINT
    assert ended.stdout + ended.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    ignore = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    ended = start("ckpt", "automodel_ckpt.errors", ignore)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("automodel_ckpt ")


def test_a_request_to_save_during_the_imports_is_ignored() -> None:
    save = "import os, signal\nkill = os.kill\nos.kill = lambda pid, _: kill(pid, signal.SIGUSR2)\n"
    ended = start("ckpt_train", "automodel_ckpt.config.load", save)
    assert ended.returncode == 0, ended.stderr


def test_an_interrupt_before_the_command_can_report_it_is_one_word() -> None:
    # parse() runs before the part of main() that reports errors.
    interrupt = (
        "import automodel_ckpt.config.overrides as overrides, os, signal\n"
        "overrides.parse = lambda words: os.kill(os.getpid(), signal.SIGINT)\n"
    )
    ended = start("ckpt_train", "none", interrupt)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_a_terminal_shows_what_is_imported_before_the_large_libraries_are(tmp_path: Path) -> None:
    recipe = EXAMPLES / "llm_finetune" / "tiny_llama_lora.yaml"
    reader, terminal = os.openpty()
    line = [str(recipe), "--checkpoint.checkpoint_dir", str(tmp_path / "run")]
    words = f"NAME, AT, WORDS = 'ckpt_train', 'torch', {line!r}\n"
    ended = subprocess.run([sys.executable, "-c", words + START], stderr=terminal, timeout=60)
    os.close(terminal)
    shown = os.read(reader, 1000).decode()
    os.close(reader)
    assert shown.splitlines()[0].endswith(" importing torch and transformers")
    assert ended.returncode == 75
