"""Adapters on a base in 4 bits (QLoRA) on 1, 2 and 4 ranks: equal losses, exact resumes, other numbers of ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.support.servers.command_server import CommandServer

# Rows of 60 and 84 values are not whole blocks of 64.
RECIPE = {
    "seed": 3,
    "model": {
        "from_config": {
            "model_type": "llama",
            "vocab_size": 96,
            "hidden_size": 60,
            "intermediate_size": 84,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "attention_bias": True,
        }
    },
    "peft": {"base_dir": "base", "r": 4, "quantize_base": "nf4"},
    "optimizer": {"lr": 1e-2},
    "dataset": {
        "_target_": "automodel_ckpt.examples.data.mock.random_tokens",
        "vocab_size": 96,
        "seq_length": 16,
        "num_samples": 64,
    },
    "step_scheduler": {
        "global_batch_size": 8,
        "local_batch_size": 2,
        "max_steps": 4,
        "ckpt_every_steps": 2,
    },
}
FP4 = "--peft.quantize_base=fp4"
HYBRID = "--distributed.dp_replicate_size=2"
STOPPED = "--step_scheduler.max_steps=2"


class Runs:
    """Runs of one recipe in a directory."""

    def __init__(self, directory: Path, commands: CommandServer) -> None:
        self.directory, self._commands = directory, commands
        (directory / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))

    def train(self, name: str, num_ranks: int, *overrides: str) -> str:
        words = [f"--checkpoint.checkpoint_dir={name}", f"--nproc-per-node={num_ranks}", *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = self._commands.run(
            "ckpt-train", "recipe.yaml", *words, cwd=self.directory, env=environment
        )
        assert done.returncode == 0, done.stderr
        return str(done.stdout + done.stderr)

    def losses(self, name: str) -> list[float]:
        lines = (self.directory / name / "training.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines if '"loss"' in line]

    def adapter(self, name: str) -> bytes:
        found = self.directory / name / "epoch_0_step_4/model/adapter_model.safetensors"
        return found.read_bytes()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, commands: CommandServer) -> Runs:
    made = Runs(tmp_path_factory.mktemp("qlora"), commands)
    log = made.train("one", 1)
    assert "the base has 14 linear layers in 4 bits (nf4)" in log
    assert "a CPU dequantizes the layers slowly" in log
    made.train("two", 2, "--distributed.strategy=fsdp2")
    return made


def test_losses_on_several_ranks_are_those_of_one(runs: Runs) -> None:
    runs.train("four", 4, "--distributed.strategy=fsdp2", HYBRID)
    runs.train("replicas", 2, "--distributed.strategy=ddp")
    expected = runs.losses("one")
    for name in ("two", "four", "replicas"):
        assert runs.losses(name) == pytest.approx(expected, rel=1e-6, abs=0)
    logs = [runs.train("plain", 1, "--peft.quantize_base=null"), runs.train("fp4", 1, FP4)]
    counts = [re.findall(r"with ([\d,]+) parameters", log) for log in logs]
    assert counts[0] == counts[1] != []
    for name in ("plain", "fp4"):
        assert runs.losses(name) == pytest.approx(expected, rel=0.05)
    assert runs.losses("plain") != pytest.approx(expected, rel=1e-6, abs=0)


def test_a_run_resumes_exactly_and_continues_on_other_numbers_of_ranks(runs: Runs) -> None:
    runs.train("resumed", 2, STOPPED)
    runs.train("resumed", 2)
    assert runs.losses("resumed") == runs.losses("two")
    assert runs.adapter("resumed") == runs.adapter("two")
    saved = runs.directory / "two/epoch_0_step_2"
    runs.train("moved", 1, f"--checkpoint.restore_from={saved}", "--step_scheduler.max_steps=3")
    runs.train("moved", 4, HYBRID)
    assert runs.losses("moved") == pytest.approx(runs.losses("one")[2:], rel=1e-6, abs=0)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_the_merged_export_is_what_peft_merges(runs: Runs, commands: CommandServer) -> None:
    words = ("two/epoch_0_step_4", "--merge", "--output=merged")
    done = commands.run("ckpt", "export", *words, cwd=runs.directory)
    assert done.returncode == 0, done.stderr
    base = AutoModelForCausalLM.from_pretrained(runs.directory / "base")
    adapted = PeftModel.from_pretrained(base, str(runs.directory / "two/epoch_0_step_4/model"))
    expected = adapted.merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(runs.directory / "merged").state_dict()
    assert merged.keys() == expected.keys()
    for name, value in merged.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.further
@pytest.mark.timeout(900)
def test_a_rank_needs_its_share_one_layer_and_200_mb(tmp_path: Path) -> None:
    """The base has 134 million values in 8 layers: 268 MB in 16 bits."""
    peaks = []
    for name, width, num_layers in (("small", 64, 1), ("large", 1024, 8)):
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            vocab_size=96,
        )
        LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / name)
        recipe = RECIPE | {
            "model": {"from_pretrained": str(tmp_path / name), "dtype": "bfloat16"},
            "tokenizer": None,
            "peft": {"r": 4, "quantize_base": "nf4"},
            "step_scheduler": {"global_batch_size": 2, "local_batch_size": 1, "max_steps": 1},
            "checkpoint": {"checkpoint_dir": str(tmp_path / f"run_{name}")},
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = str(Path(sys.executable).with_name("ckpt-train"))
        words = (command, "recipe.yaml", "--nproc-per-node=2", "--distributed.strategy=fsdp2")
        subprocess.run(words, check=True, cwd=tmp_path, env=environment)
        lines = (tmp_path / f"run_{name}/training.jsonl").read_text().splitlines()
        peaks.append(max(json.loads(line).get("mem", 0) for line in lines))
    in_16_bits = 2 * 8 * (4 * 1024**2 + 3 * 4 * 1024**2)
    share, layer = in_16_bits * (0.516 / 2) / 2, in_16_bits / 8
    assert peaks[1] - peaks[0] < share + layer + 200e6


def test_what_a_base_in_4_bits_does_not_support_is_an_error(
    runs: Runs, commands: CommandServer
) -> None:
    for override, message in (
        ("--peft.use_dora", "support no use_dora and no init orthogonal"),
        ("--distributed.tp_size=2", "peft.quantize_base and tp_size cannot be combined"),
        ("--peft.quantize_base=int8", "8 bits need a CUDA device"),
    ):
        done = commands.run("ckpt-train", "recipe.yaml", override, cwd=runs.directory)
        assert done.returncode == 2
        assert message in done.stderr
