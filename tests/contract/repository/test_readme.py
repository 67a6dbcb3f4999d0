"""What the README shows is true: its recipe trains, its commands run, its links lead somewhere."""

import json
import re
import shlex
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.models.sizes import model_sizes
from tests.support.servers.command_server import CommandServer
from tools.support import step_lines

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent
RECIPE = README.partition("```yaml\n")[2].partition("```")[0]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COMMANDS = [
    line.partition("#")[0].strip()
    for line in README.splitlines()
    if line.startswith("    ckpt-train ")
]


def make_model(directory: Path) -> None:
    """A small Llama with its tokenizer, as files of Hugging Face."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.support.models.small_tokenizer import small_tokenizer

    tokenizer = small_tokenizer(vocab_size=512)
    config = LlamaConfig(
        **model_sizes(
            vocab=len(tokenizer), hidden=16, inner=32, layers=2, heads=2, kv_heads=2, positions=2048
        ),
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_chat_model(directory: Path) -> None:
    make_model(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def write_samples(file: Path) -> None:
    samples = [{"prompt": f"What is {n} + 1? ", "completion": f"It is {n + 1}."} for n in range(80)]
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def write_chats(file: Path) -> None:
    lines = []
    for n in range(80):
        question = {"role": "user", "content": f"What is {n} + 1?"}
        answer = {"role": "assistant", "content": f"It is {n + 1}."}
        lines.append(json.dumps({"messages": [question, answer]}) + "\n")
    file.write_text("".join(lines))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, commands: CommandServer) -> Path:
    """A directory where the README's recipe has run, on a small model and 80 samples."""
    directory = tmp_path_factory.mktemp("readme")
    make_chat_model(directory / "my-model")
    write_chats(directory / "chats.jsonl")
    assert "Qwen/Qwen3-0.6B" in RECIPE
    (directory / "recipe.yaml").write_text(RECIPE.replace("Qwen/Qwen3-0.6B", "my-model"))
    done = commands.run("ckpt-train", "recipe.yaml", cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory


def test_the_recipe_trains_and_its_merged_export_is_loaded_by_transformers(
    trained: Path, commands: CommandServer
) -> None:
    from transformers import AutoModelForCausalLM

    steps = step_lines(trained / "checkpoints" / "training.jsonl")
    assert [line["step"] for line in steps] == [*range(1, 11)]
    export = ["export", "--merge", "checkpoints/LATEST", "-o", "merged"]
    assert commands.run("ckpt", *export, cwd=trained).returncode == 0
    _, info = AutoModelForCausalLM.from_pretrained(trained / "merged", output_loading_info=True)
    assert not any(info.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_each_training_command_is_accepted(
    command: str, trained: Path, commands: CommandServer
) -> None:
    words = shlex.split(command.replace("RECIPE.yaml", "recipe.yaml"))
    done = commands.run(*words, "--print-config", cwd=trained)
    assert done.returncode == 0, done.stderr


def test_the_commands_on_checkpoints_run(trained: Path, commands: CommandServer) -> None:
    lines = re.findall(r"^\$ ckpt (.*)$", README, flags=re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        output = ["--output", "again"] if line.startswith("export") else []
        done = commands.run("ckpt", *line.split(), *output, cwd=trained)
        assert done.returncode == 0, done.stderr


def test_the_example_and_the_make_targets_that_it_names_exist() -> None:
    for path in re.findall(r"examples/[\w/]+\.yaml", README):
        assert (ROOT / path).is_file()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"^    make (\w+)", README, flags=re.MULTILINE)) <= targets


def test_the_picture_is_a_small_svg_image_with_the_loss_and_the_saves_of_a_run() -> None:
    (name,) = re.findall(r"^!\[[^]]+\]\((.*)\)$", README, flags=re.MULTILINE)
    picture = (ROOT / name).read_text()
    assert len(picture) < 60_000
    assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    assert "<polyline" in picture
    assert 'class="saved' in picture
    assert not re.search(r"<script|href=|url\(", picture)
