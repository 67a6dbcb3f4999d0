"""What --dry-run foretells is what then happens."""

import json
import os
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from automodel_ckpt.cli.ckpt import main as ckpt
from automodel_ckpt.cli.train import main
from tests.support.models.sizes import model_sizes
from tests.support.runs.forecast_cases import CASES, write_recipe
from tests.support.servers.command_server import CommandServer

RECIPE = """
model:
  from_config:
    {model_type: llama, hidden_size: 384, intermediate_size: 1024, num_hidden_layers: 4, num_attention_heads: 6,
     num_key_value_heads: 2, max_position_embeddings: 256, tie_word_embeddings: false, vocab_size: 4096}
dataset: {_target_: automodel_ckpt.examples.data.mock.random_tokens, seq_length: 256, vocab_size: 4096, num_samples: 64}
step_scheduler: {global_batch_size: 8, local_batch_size: 4, max_steps: 2}
"""
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def command(commands: CommandServer, *words: str) -> str:
    done = commands.run("ckpt-train", *words, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def foretold(pattern: str, report: str) -> float:
    found = re.search(pattern.replace("SIZE", r"([\d.]+) (\w+)"), report)
    assert found, report
    return float(found[1]) * UNITS[found[2]]


def test_memory_and_size_are_what_training_then_takes(
    recipe: Path, commands: CommandServer, capsys: pytest.CaptureFixture[str]
) -> None:
    report = command(commands, "--dry-run", "recipe.yaml")
    assert not Path("checkpoints").exists()
    command(commands, "recipe.yaml", "--checkpoint.save_consolidated", "false")
    lines = [
        json.loads(line) for line in Path("checkpoints/training.jsonl").read_text().splitlines()
    ]
    measured = max(line["mem"] for line in lines if "mem" in line)
    assert foretold("about SIZE per rank", report) == pytest.approx(measured, rel=0.25)
    assert foretold("checkpoints: +SIZE each", report) == pytest.approx(lines[-1]["bytes"], rel=0.1)
    assert "steps:       2\n" in report
    assert (
        main(["--dry-run", "recipe.yaml", "--clip_grad_norm", "0.5", "--nproc-per-node", "2"]) == 0
    )
    again = capsys.readouterr().out
    assert "resume:      from epoch_0_step_2, the newest usable" in again
    assert "changed:     ranks: 1 -> 2" in again
    assert re.search(r"clip_grad_norm: \S+ -> 0\.5", again)
    assert (
        main(["--dry-run", "recipe.yaml", "--nproc-per-node", "2", "--distributed.cp_size", "2"])
        == 0
    )
    of_half_rows, of_rows = (
        foretold("activations SIZE", text) for text in (capsys.readouterr().out, again)
    )
    assert of_half_rows == pytest.approx(of_rows / 2, rel=0.2)
    taller = [
        "--init_from.path=checkpoints",
        "--model.from_config.num_hidden_layers=5",
        "--checkpoint.enabled=false",
    ]
    assert main(["--dry-run", "recipe.yaml", *taller]) == 2
    assert "the weights do not match this model" in capsys.readouterr().err
    assert (
        main(
            ["--dry-run", "recipe.yaml", *taller, "--init_from.allow_missing=['model.layers.4.*']"]
        )
        == 0
    )
    there = Path("checkpoints/epoch_0_step_2").absolute()
    wanted = rf"init_from: +{there}: 39 of 48 tensors match.*\n +\+ model.layers.4.input_layernorm.weight: not there"
    assert re.search(wanted, capsys.readouterr().out)
    (manifest,) = Path("checkpoints").glob("epoch_*/MANIFEST.json")
    manifest.write_text("{")
    assert main(["--dry-run", "recipe.yaml"]) == 0
    damaged = capsys.readouterr().out
    assert re.search(r"skip: +epoch_0_step_2: ", damaged)
    assert "resume:      no: this is a new run" in damaged


def test_what_cannot_train_is_an_error_of_the_dry_run(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dry-run", "recipe.yaml", "--dataset.seq_length", "1024"]) == 2
    assert "longer than the model's context" in capsys.readouterr().err
    assert main(["--dry-run", "recipe.yaml", "--init_from.path", str(recipe.parent)]) == 3
    assert "there are no shards here" in capsys.readouterr().err
    data = "{_target_: automodel_ckpt.examples.data.mock.random_tokens, vocab_size: 4096}"
    metric = ("--validation_dataset", data, "--checkpoint.best_metric_key", "val_acc")
    assert main(["--dry-run", "recipe.yaml", *metric]) == 2
    assert "this run measures train_loss, val_loss, val_accuracy" in capsys.readouterr().err
    Path("link").symlink_to("gone")
    assert main(["--dry-run", "recipe.yaml", "--checkpoint.checkpoint_dir", "link/run"]) == 2
    assert re.search(r"link is a link to \S+gone, which does not exist", capsys.readouterr().err)


def test_a_base_that_does_not_exist_yet_is_not_created(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = "--peft={base_dir: base, target_modules: [q_proj]}"
    assert main(["--dry-run", "recipe.yaml", adapters]) == 0
    assert [path.name for path in recipe.parent.iterdir()] == ["recipe.yaml"]
    assert "trained" in capsys.readouterr().out


BIG = """
model:
  from_config:
    {model_type: llama, hidden_size: 1024, intermediate_size: 4096, num_hidden_layers: 1, num_attention_heads: 8,
     num_key_value_heads: 4, max_position_embeddings: 1024, vocab_size: 32000, tie_word_embeddings: false}
tokenizer: null
dataset: {_target_: automodel_ckpt.examples.data.mock.random_tokens,
    seq_length: 1024, vocab_size: 32000, num_samples: 64}
lr_scheduler: {name: cosine}
step_scheduler: {global_batch_size: 16, local_batch_size: 4, max_steps: 2}
checkpoint: {enabled: false}
"""


def test_a_dry_run_for_a_gpu_proposes_settings_that_fit_into_its_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "big.yaml"
    recipe.write_text(BIG)

    def forecast(memory: str, *words: str) -> str:
        assert main(["--dry-run", str(recipe), "--device-memory", memory, *words]) == 0
        return capsys.readouterr().out

    roomy = forecast("80GiB")
    assert "device:      GPU of 85.9 GB: fits, " in roomy
    total = foretold("about SIZE per rank", roomy)
    memory = f"{int(0.68 * total / 1e6)}MB"
    report = forecast(memory)
    assert "NOT ENOUGH" in report
    proposals = re.findall(r"fits: +(--.*) \(about ([\d.]+) (\w+) per rank", report)
    assert any(re.search("local_batch_size|cpu_offload", words) for words, _, _ in proposals), (
        report
    )
    for overrides, number, unit in proposals:
        again = forecast(memory, *overrides.split())
        assert "too little" not in again
        assert foretold("about SIZE per rank", again) == pytest.approx(
            float(number) * UNITS[unit], rel=0.02
        )
    assert "fits:        no smaller local batch" in forecast("100MB")
    offloaded = forecast("1500MB", "--distributed={strategy: fsdp2, cpu_offload: true}")
    assert "fits:        --step_scheduler.local_batch_size=2 (" in offloaded


MIDDLE = """
model:
  from_config:
    {model_type: llama, hidden_size: 1024, intermediate_size: 4096, num_hidden_layers: 8, num_attention_heads: 16,
     num_key_value_heads: 8, max_position_embeddings: 8192, vocab_size: 128256, tie_word_embeddings: true}
tokenizer: null
dataset: {_target_: automodel_ckpt.examples.data.mock.random_tokens,
    seq_length: 1024, vocab_size: 128256, num_samples: 8}
step_scheduler: {global_batch_size: 8, local_batch_size: 8, max_steps: 2}
checkpoint: {enabled: false}
"""
# The peaks of torch's allocator for CUDA (torch 2.11), on a device that computes nothing.
PEAKS = {
    "": 7.58e9,
    "--step_scheduler.local_batch_size=2": 5.72e9,
    "--model.activation_checkpointing=true": 5.16e9,
    # Most gradients exist when most activations are freed.
    "--model.from_config.num_hidden_layers=24 --model.from_config.vocab_size=1024 --dataset.vocab_size=1024"
    " --step_scheduler.global_batch_size=4 --step_scheduler.local_batch_size=4": 8.93e9,
}


@pytest.mark.parametrize(
    "setting",
    [pytest.param(setting, marks=pytest.mark.further if setting else ()) for setting in PEAKS],
    ids=["one batch", "accumulation", "checkpointing", "many layers"],
)
def test_the_memory_on_a_gpu_is_that_of_the_largest_phase_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    # Before the first backward pass of a step there are no gradients.
    recipe = tmp_path / "middle.yaml"
    recipe.write_text(MIDDLE)
    assert main(["--dry-run", str(recipe), "--device-memory", "80GiB", *setting.split()]) == 0
    report = capsys.readouterr().out
    total = foretold("about SIZE per rank", report)
    in_tensors = total - foretold("process SIZE", report)
    assert in_tensors == pytest.approx(PEAKS[setting], rel=0.08)


# The peaks of the recipes in forecast_cases.py, with the workspace of matrix products.
PEAKS_OF_KINDS = {
    "dpo": 9.06e9,
    "tp lora": 3.15e9,
    # Few labels: the output layer keeps the gradients of logits, one for each loss before a backward pass.
    "row by row gpipe": 4.53e9,
}


@pytest.mark.parametrize("kind", PEAKS_OF_KINDS)
def test_the_memory_on_a_gpu_is_that_of_the_kind_of_training_and_the_rank_with_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    recipe = write_recipe(CASES[kind], tmp_path)
    ranks = f"--nproc-per-node={CASES[kind].num_ranks}"
    assert main(["--dry-run", str(recipe), "--device-memory", "80GiB", ranks]) == 0
    report = capsys.readouterr().out
    in_tensors = foretold("about SIZE per rank", report) - foretold("process SIZE", report)
    assert in_tensors == pytest.approx(PEAKS_OF_KINDS[kind], rel=0.08)
    if kind == "dpo":
        assert "for:         16 rows of 512 tokens, the largest micro-batch" in report


def test_the_memory_of_a_device_has_a_unit_and_needs_a_dry_run(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for size in ("much", "24"):
        assert main(["--dry-run", "recipe.yaml", "--device-memory", size]) == 2
        assert "such as 80GiB or 24GB" in capsys.readouterr().err
    assert main(["recipe.yaml", "--device-memory", "80GiB"]) == 2
    assert "--device-memory requires --dry-run" in capsys.readouterr().err


def test_a_directory_with_imported_weights_only_is_an_error_of_the_dry_run(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "--model.from_config={model_type: llama, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, "
    small += "num_attention_heads: 2, vocab_size: 4096}"
    LlamaForCausalLM(
        LlamaConfig(**model_sizes(hidden=32, inner=32, layers=1, heads=2, vocab=4096))
    ).save_pretrained("weights")
    assert ckpt(["import", "weights", "checkpoints"]) == 0
    expected = "weights only: there is no training to resume"
    hint = f"--init_from.path {Path('checkpoints/epoch_0_step_0').absolute()}"
    assert main(["--dry-run", "recipe.yaml", small]) == 3
    text = capsys.readouterr().err
    assert expected in text and hint in text
    names = "[dataloader, optimizer, rng, step_scheduler]"
    assert main(["--dry-run", "recipe.yaml", small, "--checkpoint.allow_missing_state", names]) == 0
