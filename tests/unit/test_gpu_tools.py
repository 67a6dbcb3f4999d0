"""`make gpu` without a GPU: every part runs with tiny models, can be stopped, and its figures become a table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_ckpt.parallel.precision import set_float32_precision
from tests.support.servers.command_server import CommandServer
from tools.bench.report import PAGE
from tools.bench.rounds import ROOT
from tools.gpu import goals, machine, plain, shapes, wheels
from tools.gpu.__main__ import PARTS, _named, share
from tools.gpu.results import RUNNING, Results, read_all
from tools.gpu.session import Figures, PartRun, Session
from tools.gpu.shapes import LLAMA_1B, LLAMA_8B, flops_per_token, num_parameters

H200 = {
    "date": "2026-01-02", "commit": "", "gpu": "NVIDIA H200, 580.1, 143771 MiB", "python": "3.12.3", "torch": "2.11.0",
    "transformers": "5.17.0", "peft": "0.20.0", "kernel": "Linux 6",
}  # fmt: skip


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
gpu.PARTS["held"] = gpu.Part("held", 60)
sys.exit(gpu.main())
"""
"""A script that measures like ``python -m tools.gpu``, with a part that is still running when the test stops it."""


def session_in(directory: Path) -> Session:
    directory.mkdir(exist_ok=True)
    return Session("cpu", True, directory, directory, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        ["ceilings", "head", "numerics", "vlm"],
        ["lora", "packing", "saves"],
        ["full"],
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


def test_every_part_of_the_command_is_in_a_dry_run_above() -> None:
    marks = test_a_dry_run_of_each_part_has_figures_and_leaves_nothing.pytestmark  # type: ignore[attr-defined]
    (of_dry_runs,) = [mark for mark in marks if mark.name == "parametrize"]
    covered = [part for parts in of_dry_runs.args[1] for part in parts]
    assert sorted(covered) == sorted(PARTS)
    # With a minute for the imports.
    assert sum(part.seconds for part in PARTS.values()) <= 29 * 60
    assert max(part.seconds for part in PARTS.values()) <= 8 * 60


def test_the_time_of_a_call_is_divided_among_its_parts() -> None:
    assert share([60, 300, 90], 900) == 900 * 60 / 450
    # What a part did not need goes to the next ones, but no part takes more than eight minutes.
    assert share([300, 90], 390) == 390 * 300 / 390
    assert share([90], 1000) == 480


def test_a_part_can_be_given_another_share_of_the_time() -> None:
    assert _named("vlm") == ("vlm", PARTS["vlm"].seconds)
    assert _named("vlm=12.5") == ("vlm", 12.5)
    for wrong in ("vml", "vlm=", "vlm=-1", "vlm=nan", "=3"):
        with pytest.raises(ValueError, match=r"no such part|a positive number"):
            _named(wrong)


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
        assert (result["ended"], process.returncode) == ("stopped by SIGTERM", 128 + number)
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


def test_a_measurement_that_takes_too_long_is_killed_and_the_next_one_runs(tmp_path: Path) -> None:
    def slow(notes: Path) -> Figures:
        yield "first", {"value": 1}
        child = subprocess.Popen(["sleep", "600"])
        notes.write_text(str(child.pid))
        time.sleep(600)
        yield "never", {}

    def fails() -> Figures:
        yield "before", {"value": float("nan")}
        raise ValueError("for this reason")

    def dies() -> Figures:
        yield "alive", {}
        os._exit(5)

    part = PartRun(session_in(tmp_path), "part", 100)
    notes = tmp_path / "child"
    assert part.measure("slow", slow, notes, limit=4) == {"first": {"value": 1}}
    part.measure("fails", fails)
    part.measure("dies", dies)
    part.results.end("done")
    result = read_all(tmp_path)["part"]
    assert list(result["figures"]) == ["first", "before", "alive"]
    assert result["figures"]["before"] == {"value": None}
    assert result["failed"]["slow"].startswith("stopped after 4 s")
    assert "ValueError: for this reason" in result["failed"]["fails"]
    assert result["failed"]["dies"].startswith("its process ended with 5")
    stat = Path(f"/proc/{notes.read_text()}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_no_measurement_starts_when_the_time_of_its_part_is_over(tmp_path: Path) -> None:
    part = PartRun(session_in(tmp_path), "part", 1)
    assert part.measure("late", lambda: iter([("late", {})])) == {}
    assert part.results.failed == {"late": "not run: the time of the part was over"}


def test_a_call_can_be_limited_to_measurements_whose_name_contains_a_pattern(
    tmp_path: Path,
) -> None:
    session = Session("cpu", True, tmp_path, tmp_path, {}, only="^ours$|bare")
    part = PartRun(session, "part", 60)
    for name in ("base", "ours", "ours, compiled", "bare, eager"):
        part.measure(name, lambda name: iter([(name, {"ran": 1})]), name)
    assert set(part.results.figures) == {"base", "ours", "bare, eager"}
    assert not part.results.failed


def figures_of_a_gpu(directory: Path) -> None:
    """Write what a run on a GPU leaves, with some goals met and some not."""
    lora = Results(directory / "lora.json", "lora", H200, is_dry_run=False)
    lora.add("ours, defaults", {"tokens_per_second": 14_000.0, "forecast_difference": -0.2})
    lora.add("bare", {"tokens_per_second": 14_000.0})
    lora.fail("ours, packed", "stopped after 90 s\nmore")
    lora.end("done")
    head = Results(directory / "head.json", "head", H200, is_dry_run=False)
    for tokens, value in ((4096, 1.1), (8192, 1.5)):
        head.add(f"{tokens} tokens, trained layer, default", {"time_in_products": value})


def test_the_goals_are_computed_from_the_figures(tmp_path: Path) -> None:
    figures_of_a_gpu(tmp_path)
    rows = {row[0]: row[3:] for row in goals.rows_of(read_all(tmp_path))}
    assert rows["LoRA r16, 8B, recipe defaults: tokens/s"] == ("14,000", "yes")
    assert rows["LoRA r16, 8B: ours / bare PEFT loop"] == ("1", "yes")
    assert rows["loss head: time / its three products"] == ("1.5", "**no**")
    assert rows["memory: forecast against the peak, worst case"] == ("0.2", "**no**")
    assert rows["full fine-tuning, 8B: MFU"] == ("not measured", "")


def test_the_page_gets_figures_of_a_gpu_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[str, str] = {}
    monkeypatch.setattr(goals, "write_block", written.__setitem__)
    assert goals.report(tmp_path, docs=True) == 1
    Results(tmp_path / "vlm.json", "vlm", H200, is_dry_run=True).add("ours", {"ratio": 1.0})
    assert goals.report(tmp_path, docs=True) == 1 and written == {}
    figures_of_a_gpu(tmp_path)
    assert goals.report(tmp_path, docs=True) == 0
    assert "torch 2.11.0" in written["gpu"] and "2026-01-02" in written["gpu"]
    assert "| ours, packed | failed: stopped after 90 s |" in written["gpu"]
    assert "The part did not end: running." in written["gpu"] and "vlm" not in written["gpu"]
    assert "<!-- gpu: begin -->" in PAGE.read_text()


def test_a_base_in_several_files_is_read_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "_SHARD_BYTES", 1 << 16)
    (found,) = shapes.write_base(shapes.TINY, tmp_path / "base", "cpu")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) == 3
    read: Any = AutoModelForCausalLM.from_pretrained
    model, problems = read(tmp_path / "base", dtype="auto", output_loading_info=True)
    assert not any(problems.values())
    numbers = [parameter.nbytes for parameter in model.parameters()]
    assert found[1]["bytes"] == sum(numbers)
    assert model.model.norm.weight.eq(1).all()
    assert 0.019 < float(model.lm_head.weight.detach().float().std()) < 0.021


@pytest.mark.parametrize("config", [LLAMA_8B, LLAMA_1B])
def test_parameters_are_counted_as_transformers_builds_them(config: dict[str, Any]) -> None:
    settings = dict(config)
    made = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    total, embedding = num_parameters(config)
    assert total == sum(parameter.numel() for parameter in model.parameters())
    # torchtitan's formula: 6 per parameter that computes, and 12 per layer, hidden unit and position.
    expected = 6 * (total - embedding)
    expected += 12 * config["num_hidden_layers"] * config["hidden_size"] * 4096
    assert flops_per_token(config, 4096, trains_all=True) == expected


def test_a_wheel_keeps_the_library_of_the_machine_only(tmp_path: Path) -> None:
    wheel = tmp_path / "bitsandbytes-1.whl"
    names = ["cuda118", "cuda130", "rocm72", "cpu"]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(f"bitsandbytes/libbitsandbytes_{name}.so", name)
        archive.writestr("bitsandbytes/__init__.py", "")
    wheels.strip(wheel)
    with zipfile.ZipFile(wheel) as archive:
        kept = [Path(name).name for name in archive.namelist()]
    assert kept == ["libbitsandbytes_cuda130.so", "libbitsandbytes_cpu.so", "__init__.py"]


def test_a_machine_without_git_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.describe(tmp_path)["commit"] == ""


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
    set_float32_precision("high", "cuda")
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
