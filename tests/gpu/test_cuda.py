"""Saves and resumes on a GPU are exact, and the run is where it should be."""

import os
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automodel_ckpt.checkpoint import Manifest, discover
from tests.support.checkpoints import is_intact
from tests.support.gpu import HAS_GPU, needs_gpu, only_gpu
from tests.support.models import tiny
from tools.support import log_lines, step_lines, train_words

RECIPE = Path(__file__).parents[2] / "examples/llm_finetune/tiny_llama_python_docs.yaml"
LORA = ("--peft.r", "4", "--peft.base_dir", "BASE")


def command(directory: Path, *overrides: str) -> list[str]:
    # Both runs of a test train adapters of one base.
    base = str(directory.parent / "base")
    words = [base if word == "BASE" else word for word in overrides]
    keys = ["--step_scheduler.max_steps=30", "--step_scheduler.ckpt_every_steps=10"]
    keys += ["--deterministic=true", "--logging.sample_ids=true", *words]
    return train_words(RECIPE, f"--checkpoint.checkpoint_dir={directory}", *keys)


def train(directory: Path, *overrides: str) -> None:
    done = subprocess.run(
        command(directory, *overrides), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def steps(directory: Path) -> list[tuple[Any, ...]]:
    return [
        (r["step"], float(r["loss"]).hex(), float(r["grad_norm"]).hex(), r["lr"], r["samples"])
        for r in step_lines(directory / "training.jsonl")
    ]


def digests(directory: Path) -> dict[str, str]:
    """Of every tensor and of the generators' state of the last checkpoint."""
    manifest = Manifest.read(directory / "epoch_0_step_30")
    tensors = {
        f"{tree}:{fqn}": tensor.slices[0].digest or ""
        for tree, content in manifest.trees.items()
        for fqn, tensor in content.tensors.items()
    }
    return tensors | {
        name: record.digest for name, record in manifest.files.items() if name.startswith("rng/")
    }


def kill_after(directory: Path, step: int, *overrides: str) -> None:
    process = subprocess.Popen(
        command(directory, *overrides), stderr=subprocess.DEVNULL, start_new_session=True
    )
    log = directory / "training.jsonl"
    end = time.monotonic() + 240
    while time.monotonic() < end and process.poll() is None:
        if log.exists() and any(row[0] >= step for row in steps(directory)):
            break
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@needs_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("--model.dtype", "bfloat16", "--checkpoint.model_save_format", "torch_save"),
        ("--distributed.strategy", "fsdp2"),
        ("--distributed.mixed_precision", "bfloat16", "--checkpoint.is_async", "true"),
        ("--packed_sequence.size", "256", "--step_scheduler.local_batch_size", "1"),
        ("--compile.enabled", "true", "--compile.backend", "inductor" if HAS_GPU else "aot_eager"),
        LORA,
        pytest.param(
            (*LORA, "--peft.quantize_base", "nf4"),
            marks=[
                only_gpu,
                pytest.mark.skipif(
                    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
                ),
            ],
        ),
        pytest.param(
            ("--distributed.strategy", "fsdp2", "--distributed.cpu_offload", "true"), marks=only_gpu
        ),
        pytest.param(
            ("--nproc-per-node", "2", "--distributed.cp_size", "2", "--model.dtype", "bfloat16"),
            marks=pytest.mark.skipif(
                torch.cuda.device_count() < 2, reason="this machine has one GPU"
            ),
        ),
    ],
    ids=[
        "fp32 safetensors single",
        "bf16 torch_save",
        "fsdp2 of one rank",
        "bf16 computation, asynchronous saves",
        "packed",
        "compiled",
        "lora",
        "qlora",
        "fsdp2 with parameters on the host",
        "rows cut among two GPUs",
    ],
)
def test_a_killed_and_resumed_run_equals_an_undisturbed_one_bit_for_bit(
    tmp_path: Path, overrides: Any
) -> None:
    train(tmp_path / "straight", *overrides)
    kill_after(tmp_path / "killed", 13, *overrides)
    kill_after(tmp_path / "killed", 24, *overrides)
    train(tmp_path / "killed", *overrides)
    assert len(steps(tmp_path / "straight")) == 30
    assert steps(tmp_path / "killed") == steps(tmp_path / "straight")
    assert digests(tmp_path / "killed") == digests(tmp_path / "straight")
    path = tmp_path / "killed/epoch_0_step_30"
    assert is_intact(path)


@only_gpu
def test_the_run_is_on_the_gpu_and_its_export_loads(tmp_path: Path) -> None:
    train(tmp_path, "--checkpoint.save_consolidated", "final")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "LATEST/model/consolidated")
    allocated = min(row["mem"] for row in log_lines(tmp_path / "training.jsonl") if "mem" in row)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    # Memory of a CUDA device is counted from zero; a process's resident memory would be hundreds of megabytes.
    assert 3 * weights < allocated < 200e6


def add_optimizer(made: SimpleNamespace, **options: Any) -> None:
    trained = [parameter for parameter in made.model.parameters() if parameter.requires_grad]
    made.optimizer = torch.optim.AdamW(trained, lr=0.1, **options)
    made.lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(made.optimizer, milestones=[1, 3, 3])


@only_gpu
@pytest.mark.parametrize("model_save_format", ["safetensors", "torch_save"])
def test_state_on_the_gpu_comes_back_bit_for_bit_there_and_on_the_cpu(
    tmp_path: Path, model_save_format: Any
) -> None:
    def on(device: str, seed: int) -> SimpleNamespace:
        made = tiny.recipe(seed)
        made.model.to(device)
        add_optimizer(made, fused=True)
        for _ in range(2):
            made.optimizer.zero_grad()
            made.model(torch.ones(2, 4, device=device)).backward()
            made.optimizer.step()
            made.lr_scheduler.step()
        return made

    saved = on("cuda", 1)
    tiny.save(tmp_path, saved, model_save_format=model_save_format)
    for device in ("cuda", "cpu"):
        loaded = on(device, 2)
        assert tiny.load(tmp_path, loaded) is not None
        ours, theirs = tiny.tensors_of(loaded), tiny.tensors_of(saved)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name].cpu(), theirs[name].cpu()) for name in ours), device
        assert next(loaded.model.parameters()).device.type == device


@only_gpu
def test_an_asynchronous_save_holds_the_state_of_its_call_though_the_optimizer_goes_on(
    tmp_path: Path,
) -> None:
    made = tiny.recipe(1)
    made.model.register_parameter("large", torch.nn.Parameter(torch.randn(64 << 20)))
    made.model.cuda()
    add_optimizer(made)
    saver = tiny.checkpointer(tmp_path, is_async=True)
    for step in range(1, 6):
        for parameter in made.optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        saver.await_copies()
        made.optimizer.step()
        made.model.steps.add_(1)
        expected = tiny.tensors_of(made)
        saver.save(discover(made), step=step, epoch=0, config_yaml="", losses={}, progress={})
        made.model.steps.add_(1)  # a forward pass may change buffers, but no parameter
    saver.await_copies()
    for parameter in made.model.parameters():
        parameter.data.zero_()
    assert saver.wait_for_save()
    saver.close()
    other = tiny.recipe(2)
    other.model.register_parameter("large", torch.nn.Parameter(torch.zeros(64 << 20)))
    add_optimizer(other)
    tiny.load(tmp_path, other)
    found = tiny.tensors_of(other)
    assert [
        name for name, value in expected.items() if not torch.equal(found[name].cpu(), value.cpu())
    ] == []
