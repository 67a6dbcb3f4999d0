"""What the README shows is true: its recipe trains, its commands run, its links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers.command_server import CommandServer

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent
RECIPE = README.partition("```yaml\n")[2].partition("```")[0]
COMMANDS = [
    line.partition("#")[0].strip()
    for line in README.splitlines()
    if line.startswith("    ckpt-train ")
]


def run(*command: str | Path, cwd: Path) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def make_model(directory: Path) -> None:
    """A small Llama with its tokenizer, as files of Hugging Face."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from automodel_ckpt.examples.data.python_docs import train_tokenizer

    tokenizer = train_tokenizer(vocab_size=512)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_samples(file: Path) -> None:
    """Eighty questions with their answers."""
    samples = [{"prompt": f"What is {n} + 1? ", "completion": f"It is {n + 1}."} for n in range(80)]
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, commands: CommandServer) -> Path:
    """A directory where the README's recipe has run, on a small model and 80 samples."""
    directory = tmp_path_factory.mktemp("readme")
    make_model(directory / "my-llama")
    write_samples(directory / "train.jsonl")
    assert "/models/my-llama" in RECIPE
    (directory / "recipe.yaml").write_text(RECIPE.replace("/models/my-llama", "my-llama"))
    done = commands.run("ckpt-train", "recipe.yaml", cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory


def test_the_recipe_trains_and_its_export_is_loaded_by_transformers(trained: Path) -> None:
    from transformers import AutoModelForCausalLM

    steps = [
        json.loads(line)
        for line in (trained / "checkpoints" / "training.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in steps if "event" not in line] == [1, 2, 3, 4]
    export = trained / "checkpoints" / "LATEST" / "model" / "consolidated"
    _, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(info.values())


def test_the_tree_names_what_a_run_writes(trained: Path) -> None:
    tree = README.partition("checkpoints/\n├──")[2].partition("```")[0]
    names = set(re.findall(r"[\w.-]+\.(?:json|jsonl|yaml|pt|sh|safetensors)\b|[\w.]+(?=/)", tree))
    assert {"MANIFEST.json", "losses.json", "dataloader", ".hf_metadata", "consolidated"} <= names
    written = {path.name for path in (trained / "checkpoints").rglob("*")}
    # One rank wrote here and four steps were made; the README shows two ranks at step 40, and a validation set.
    not_here = {
        "epoch_0_step_40",
        "shard-00002-model-00001-of-00001.safetensors",
        "validation.jsonl",
    }
    assert names - written == not_here


@pytest.mark.parametrize("command", COMMANDS)
def test_each_training_command_is_accepted(command: str, trained: Path) -> None:
    words = shlex.split(command.replace("RECIPE.yaml", "recipe.yaml"))
    assert run(BIN / words[0], *words[1:], "--print-config", cwd=trained)


def test_the_commands_on_checkpoints_run(trained: Path) -> None:
    commands = re.findall(r"`(ckpt \w+ checkpoints\S*)`", README)
    assert len(commands) == 5
    for command in commands:
        program, *arguments = command.split()
        assert run(BIN / program, *arguments, cwd=trained)
    script = trained / "checkpoints" / "LATEST" / "model" / "consolidate.sh"
    shutil.rmtree(script.parent / "consolidated")
    run("env", "NUM_THREADS=1", "bash", script, cwd=trained)
    assert (script.parent / "consolidated" / "config.json").is_file()


def test_the_example_and_the_make_targets_that_it_names_exist() -> None:
    for path in re.findall(r"examples/[\w/]+\.yaml", README):
        assert (ROOT / path).is_file()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"^    make (\w+)", README, flags=re.MULTILINE)) <= targets
