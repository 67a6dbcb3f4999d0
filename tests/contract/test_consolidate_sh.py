"""consolidate.sh: run or sourced, from anywhere, whatever its path is called; it never touches the caller's shell."""

import functools
import json
import os
import random
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.models.shards import checkpoint_in

ROOT = Path(__file__).resolve().parents[2]
STUB = """
import json, os, sys
print("noise of a tool")
with open(os.environ["STUB_LOG"], "a") as log:
    log.write(json.dumps({"argv": sys.argv[1:], "nproc": os.environ.get("NPROC_PER_NODE")}) + "\\n")
sys.exit(int(os.environ.get("STUB_CODE", "0")))
"""


@functools.cache
def script_text() -> str:
    """The script of a checkpoint."""
    with tempfile.TemporaryDirectory() as run:
        script = checkpoint_in(Path(run), 1, scripted=True) / "model/consolidate.sh"
        text = script.read_text()
    assert shlex.quote(sys.executable) in text
    return text


def model_directory(path: Path, interpreter: str = sys.executable) -> Path:
    """A directory with the script of a checkpoint that the Python at the path *interpreter* wrote."""
    (path / ".hf_metadata").mkdir(parents=True, exist_ok=True)
    text = script_text().replace(shlex.quote(sys.executable), shlex.quote(interpreter))
    (path / "consolidate.sh").write_text(text)
    return path


@pytest.fixture
def stub(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "stub.py").write_text(STUB)
    return {
        **environment(),
        "CONSOLIDATION_TOOL": str(tmp_path / "stub.py"),
        "STUB_LOG": str(tmp_path / "log"),
    }


def environment() -> dict[str, str]:
    dropped = {
        "CONSOLIDATION_TOOL",
        "PYTHON",
        "NPROC_PER_NODE",
        "NUM_THREADS",
        "CAST_DTYPE",
        "SLURM_JOB_ID",
        "BASH_ENV",
    }
    return {key: value for key, value in os.environ.items() if key not in dropped}


def calls(env: dict[str, str]) -> list[dict[str, object]]:
    path = Path(env["STUB_LOG"])
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def bash(
    *arguments: str | Path, env: dict[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *arguments],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=120,
    )


def test_the_tool_gets_the_peers_arguments_and_the_directory_is_all_that_is_printed(
    tmp_path: Path, stub: dict[str, str]
) -> None:
    model = model_directory(tmp_path / "model")
    done = bash(model / "consolidate.sh", env=stub, cwd=Path("/"))
    assert (done.returncode, done.stdout) == (0, f"{model}/consolidated\n"), done.stderr
    assert calls(stub)[0]["argv"] == [
        "--model-name",
        f"{model}/.hf_metadata",
        "--input-dir",
        str(model),
        "--output-dir",
        f"{model}/consolidated",
        "--num-threads",
        str(min(5, len(os.sched_getaffinity(0)))),
        "--backend",
        "gloo",
    ]


def test_the_environment_reaches_the_tool(tmp_path: Path, stub: dict[str, str]) -> None:
    model = model_directory(tmp_path / "model")
    Path(stub["CONSOLIDATION_TOOL"]).write_text(STUB + "\n# reads NPROC_PER_NODE\n")
    done = bash(
        model / "consolidate.sh",
        env={**stub, "NUM_THREADS": "2", "NPROC_PER_NODE": "3", "CAST_DTYPE": "bf16"},
    )
    assert done.returncode == 0, done.stderr
    (call,) = calls(stub)
    assert call["nproc"] == "3"
    assert isinstance(call["argv"], list)
    assert call["argv"][-6:] == ["--num-threads", "2", "--backend", "gloo", "--cast-dtype", "bf16"]


def hostile_names(count: int) -> list[str]:
    chooser = random.Random(7)
    words = ("$(touch PWNED)", "`touch PWNED`", ";touch PWNED;", "[a]", "${HOME}", "{a,b}", "-n")
    alphabet = [*words, *"'\"\\ \n&|*?~#!-é\udcff\t<>x", "%s", "\\n"]
    fixed = ["-", "--", "-rf", " ", "\n", "trailing\n", "a\n\n", "'", '"', "~", "$HOME", "*"]
    return fixed + [
        "".join(chooser.choices(alphabet, k=chooser.randint(1, 6)))
        for _ in range(count - len(fixed))
    ]


def test_a_hundred_hostile_path_names_execute_nothing(tmp_path: Path) -> None:
    # The stub is a shell script here: hundreds of starts of an interpreter would take half a minute.
    tool, log = tmp_path / "python", tmp_path / "log"
    tool.write_text('#!/bin/sh\nprintf "%s\\0" "$@" >>"$STUB_LOG"\n')
    tool.chmod(0o755)
    (tmp_path / "stub.py").write_text("")
    env = {
        **environment(),
        "PYTHON": str(tool),
        "CONSOLIDATION_TOOL": str(tmp_path / "stub.py"),
        "STUB_LOG": str(log),
    }
    names = sorted(set(hostile_names(100)))
    for number, name in enumerate(names):
        base = tmp_path / "h" / str(number)
        model = model_directory(base / name)
        log.unlink(missing_ok=True)
        script = os.path.join(name, "consolidate.sh")
        arguments = ["--", script] if number % 2 else ["-c", '. "$1"', "caller", f"./{script}"]
        done = bash(*arguments, env=env, cwd=base)
        assert done.returncode == 0, (name, done.stderr)
        found = os.fsdecode(log.read_bytes()).split("\0")
        assert found[4] == str(model) and found[6] == f"{model}/consolidated", name
        assert done.stdout == f"{model}/consolidated\n"
    assert not list(tmp_path.rglob("PWNED"))


@pytest.mark.parametrize("name", ["-rf", "a\n\n", "'$HOME `*`\""])
def test_hostile_path_names_work_with_the_real_tool(tmp_path: Path, name: str) -> None:
    checkpoint = checkpoint_in(tmp_path / "run", 20)
    model = tmp_path / "moved" / name
    model.parent.mkdir()
    shutil.copytree(checkpoint / "model", model)
    model_directory(model)
    done = bash("./consolidate.sh", env=environment(), cwd=model)
    assert done.returncode == 0, done.stderr
    assert len(load_file(model / "consolidated" / "model-00001-of-00001.safetensors")) == 2
    assert done.stdout == f"{model}/consolidated\n"


def test_sourced_it_leaves_the_callers_shell_as_it_was(
    tmp_path: Path, stub: dict[str, str]
) -> None:
    model = model_directory(tmp_path / "model")
    code = """
        state() {
          set -o; shopt; declare -F; trap; umask; pwd; echo "$*"
          compgen -v | grep -v '^BASH\\|^_$\\|^PIPESTATUS\\|^FUNCNAME'
        }
        set -u; fail() { echo the callers own; }; tool=mine; set -- one two
        state "$@" >before
        source "$1" ; status=$?; unset status
        state "$@" >after
        cmp before after && fail && echo "$tool"
    """
    for options in ([], ["-e"], ["-f"], ["--posix"]):
        text = code.replace('source "$1"', f'source "{model}/consolidate.sh"')
        done = bash(*options, "-c", text, env=stub, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines() == [f"{model}/consolidated", "the callers own", "mine"], (
            done.stdout
        )


def test_sourced_a_failure_is_a_status_and_the_shell_lives_on(
    tmp_path: Path, stub: dict[str, str]
) -> None:
    model = model_directory(tmp_path / "model")
    done = bash(
        "-c", f'source "{model}/consolidate.sh"; echo "status $?"', env={**stub, "STUB_CODE": "3"}
    )
    assert done.stdout == "status 3\n" and "nothing was exported" in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"CONSOLIDATION_TOOL": "/nowhere/tool.py"},
            "there is no tool at CONSOLIDATION_TOOL: /nowhere/tool.py",
        ),
        ({"PYTHON": "/nowhere/python"}, "cannot run the Python interpreter: /nowhere/python"),
        ({"NPROC_PER_NODE": "two"}, "NPROC_PER_NODE is not a number of processes: two"),
        ({"NUM_THREADS": "0"}, "NUM_THREADS is not a number of threads: 0"),
        ({"NUM_THREADS": "a[$(touch PWNED)]"}, "NUM_THREADS is not a number of threads"),
    ],
)
def test_what_is_wrong_is_said_and_the_status_is_not_zero(
    tmp_path: Path, stub: dict[str, str], change: dict[str, str], message: str
) -> None:
    model = model_directory(tmp_path / "model")
    done = bash(model / "consolidate.sh", env={**stub, **change}, cwd=tmp_path)
    assert done.returncode != 0 and message in done.stderr and done.stdout == ""
    assert calls(stub) == [] and not (tmp_path / "PWNED").exists()


def test_the_interpreter_that_trained_is_used_if_it_is_there(
    tmp_path: Path, stub: dict[str, str]
) -> None:
    ours = tmp_path / "it's $(here)" / "python"
    ours.parent.mkdir()
    ours.write_text(f'#!/bin/sh\ntouch "{tmp_path}/used"\nexec "{sys.executable}" "$@"\n')
    ours.chmod(ours.stat().st_mode | stat.S_IXUSR)
    model = model_directory(tmp_path / "model", str(ours))
    assert bash(model / "consolidate.sh", env=stub).returncode == 0 and (tmp_path / "used").exists()
    shutil.rmtree(ours.parent)
    assert bash(model / "consolidate.sh", env=stub).returncode == 0


@pytest.mark.parametrize("way", ["package", "tool"])
def test_a_moved_checkpoint_is_checked_and_exported(tmp_path: Path, way: str) -> None:
    checkpoint = checkpoint_in(tmp_path / "run", 20, scripted=True)
    os.rename(tmp_path / "run", tmp_path / "elsewhere")
    moved = tmp_path / "elsewhere" / checkpoint.name / "model"
    cwd = ROOT if way == "tool" else tmp_path
    latest = tmp_path / "elsewhere" / "LATEST" / "model" / "consolidate.sh"
    done = bash(
        "-c",
        f'source "{latest}"',
        env={**environment(), "NPROC_PER_NODE": "2", "NUM_THREADS": "1"},
        cwd=cwd,
    )
    assert done.returncode == 0 and done.stdout == f"{moved}/consolidated\n", done.stderr
    assert "digests checked" in done.stderr
    assert torch.equal(
        load_file(moved / "consolidated/model-00001-of-00001.safetensors")["n"], torch.tensor(3)
    )
