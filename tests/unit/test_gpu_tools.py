"""`make gpu` without a GPU: every part runs with tiny models, can be stopped, and its figures become a table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.runs import plain
from tests.support.servers.command_server import CommandServer
from tools.gpu.session import RUNNING, read_all
from tools.support import ROOT

WARM = """
import sys
from tools.gpu import __main__ as gpu

sys.executable = sys.argv.pop(1)
sys.exit(gpu.main())
"""
"""A script that measures like ``python -m tools.gpu``; the server of commands also starts its processes of pytest."""
HELD_PART = """
import sys, time, types
from tools.gpu import __main__ as gpu

def figures():
    yield "first", {"value": 1}
    time.sleep(600)
    yield "never", {"value": 2}

def run(part):
    part.measure("held", figures)

sys.modules["tools.gpu.parts.held"] = types.SimpleNamespace(run=run, __doc__="A part that does not end.")
gpu.PARTS["held"] = 60
sys.exit(gpu.main())
"""
"""A script that measures like ``python -m tools.gpu``, with a part that is still running when the test stops it."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        ["head", "vlm"],
        pytest.param(["lora", "packing", "saves"], marks=pytest.mark.further),
        pytest.param(["full"], marks=pytest.mark.further),
        ["tests"],
    ],
    ids=" ".join,
)
def test_a_dry_run_of_each_part_has_figures_and_leaves_nothing(
    tmp_path: Path, commands: CommandServer, parts: list[str]
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    script = tmp_path / "warm.py"
    script.write_text(WARM)
    environment = {**os.environ, "GPU_SCRATCH": str(scratch), "PYTHONPATH": str(ROOT)}
    done = commands.run(
        "python", str(script), str(commands.bin / "python"), "--dry-run", "--out", str(tmp_path / "out"), *parts,
        cwd=ROOT, timeout=170, env=environment,
    )  # fmt: skip
    results = read_all(tmp_path / "out")
    assert sorted(results) == sorted(parts)
    assert [result["failed"] for result in results.values()] == [{}] * len(parts)
    assert done.returncode == 0, done.stdout + done.stderr
    for result in results.values():
        assert result["ended"] == "done" and result["is_dry_run"]
        assert result["figures"]
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_stopped_call_leaves_complete_figures_and_no_process(
    tmp_path: Path, commands: CommandServer, number: int
) -> None:
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    environment = {**os.environ, "GPU_SCRATCH": str(scratch)}
    environment["PYTHONPATH"] = str(ROOT)
    script = tmp_path / "held.py"
    script.write_text(HELD_PART)
    process = commands.popen(
        "python", str(script), "--dry-run", "--out", str(out), "held",
        cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    end = time.monotonic() + 100
    while not read_all(out).get("held", {}).get("figures"):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)
    children = _children(_owner(scratch))
    os.kill(_owner(scratch), number)
    process.wait(60)
    result = read_all(out)["held"]
    assert list(result["figures"]) == ["first"]
    if number == signal.SIGTERM:
        assert (result["ended"], process.returncode) == (
            f"stopped, code {128 + number}",
            128 + number,
        )
        assert list(scratch.iterdir()) == []
    else:
        assert result["ended"] == RUNNING
        # The next call removes what this one left.
        commands.run(
            "python", "-m", "tools.gpu", "--dry-run", "--out", str(tmp_path / "other"), "head",
            cwd=ROOT, env=environment,
        )  # fmt: skip
        assert list(scratch.iterdir()) == []
    end = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < end
        time.sleep(0.05)


def _owner(scratch: Path) -> int:
    (path,) = scratch.iterdir()
    return int(path.name.split("-")[2])


def _children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


@pytest.fixture
def precision() -> Iterator[None]:
    """Restore how float32 matrices are multiplied."""
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before)
    torch.backends.cudnn.allow_tf32 = convolutions


@pytest.mark.usefixtures("precision")
def test_losses_to_compare_with_are_exact_after_a_recipe_that_uses_tf32(tmp_path: Path) -> None:
    plain.write_small("llama", {}, tmp_path)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    assert plain.losses(tmp_path, "cpu", []) == []
    # torch raises an error here if two of its interfaces were mixed, and a product of a CPU can use TF32, too.
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


def test_an_unknown_part_and_a_machine_without_a_gpu_are_reported(
    tmp_path: Path, commands: CommandServer
) -> None:
    command = [sys.executable, "-m", "tools.gpu", "lorra"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "no such part: lorra" in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu", "head", "--only", "("],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "--only (: no regular expression: " in done.stderr
    found = commands.run(
        "python", "-m", "tools.gpu", "head", "--out", str(tmp_path),
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert found.returncode == 3 and "no CUDA device" in found.stdout
    assert json.loads(json.dumps(read_all(tmp_path))) == {}
