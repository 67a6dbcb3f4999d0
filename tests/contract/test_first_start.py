"""The first start: a run without a recipe file, and mistakes that are found before the data are read."""

import json
from pathlib import Path

import pytest
import yaml

from automodel_ckpt.cli.train import main
from automodel_ckpt.errors import EXIT_DONE, EXIT_USAGE
from tests.support.models.stand_ins import LLAMA_CHAT, write_model
from tests.support.servers.command_server import CommandServer

RECIPE = "chat-talks-lora.yaml"
ONE_LINE = ("--model", "models/chat", "--data", "talks.jsonl", "--lora", "--dataset.seq_length=128")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("first")
    write_model(path / "models" / "chat", {"model_type": "llama"}, LLAMA_CHAT)
    talk = [("user", "What is 1 plus 1?"), ("assistant", "It is 2.")]
    row = {"messages": [{"role": role, "content": text} for role, text in talk]}
    (path / "talks.jsonl").write_text(f"{json.dumps(row)}\n" * 20)
    return path


def test_one_line_writes_a_recipe_trains_it_and_resumes(
    directory: Path, commands: CommandServer
) -> None:
    for words, said in (
        (("--dry-run",), ""),
        (("--nproc-per-node=2", "--step_scheduler.max_steps=2"), f"wrote {RECIPE}"),
        (("--step_scheduler.max_steps=3",), f"using {RECIPE}"),
    ):
        assert (directory / RECIPE).exists() == said.startswith("using")
        done = commands.run("ckpt-train", *ONE_LINE, *words, cwd=directory)
        assert done.returncode == EXIT_DONE, done.stderr
        assert said in done.stderr
    assert "epoch_0_step_2" in done.stderr
    written = yaml.safe_load((directory / RECIPE).read_text())
    assert written["peft"] == {"r": 16, "target_modules": "all-linear"}
    assert (directory / written["checkpoint"]["checkpoint_dir"] / "LATEST").exists()
    (directory / RECIPE).write_text("seed: 1\n")
    for _ in range(2):
        done = commands.run("ckpt-train", *ONE_LINE, cwd=directory)
        assert done.returncode == EXIT_USAGE
        assert done.stderr.startswith("error: a recipe with other content exists")
        if (directory / RECIPE).is_file():
            assert (directory / RECIPE).read_text() == "seed: 1\n"
            (directory / RECIPE).unlink()
            (directory / RECIPE).mkdir()


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("conversations", "chat.messages"),
        ("prompt completion", "text.prompt_completion"),
        ("instruction input output", "prompt_field"),
        ("instruction output", "prompt_field: instruction"),
        ("text label", "text.text"),
        ("question answer", "question, answer"),
    ],
)
def test_the_columns_of_the_data_determine_the_builder(
    columns: str,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps(dict.fromkeys(columns.split(), "x")))
    code = main(["--model", "org/name", "--data", "rows.jsonl", "--print-config"])
    output = capsys.readouterr()
    assert code == (EXIT_USAGE if "question" in columns else EXIT_DONE)
    assert expected in output.out + output.err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model a", "needs --model and --data"),
        ("--lora", "needs --model and --data"),
        ("recipe.yaml --lora", "--lora is for runs without a recipe file"),
    ],
)
def test_an_incomplete_line_is_an_error(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == EXIT_USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "--peft.target_modules=[q_prj]",
        "--peft.quantize_base=int8 --distributed.backend=gloo",
        "--fp8={} --distributed.backend=gloo",
        "--model.attn_implementation=flex_attention --distributed.backend=gloo",
        "--model.freeze=[nothing]",
    ],
)
def test_keys_that_cannot_be_used_are_found_before_the_data_are_read(
    words: str, directory: Path, commands: CommandServer
) -> None:
    (directory / "damaged.jsonl").write_text("{\n")
    (directory / "damaged.yaml").write_text(
        "model: {from_pretrained: models/chat}\ncheckpoint: {enabled: false}\n"
        "dataset: {_target_: automodel_ckpt.data.text.text, path: damaged.jsonl}\n"
    )
    done = commands.run("ckpt-train", "damaged.yaml", *words.split(), cwd=directory)
    assert done.returncode == EXIT_USAGE
    assert words[2:].partition("=")[0] in done.stderr
    assert "damaged.jsonl" not in done.stderr
