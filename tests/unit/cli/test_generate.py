"""`ckpt generate` and `ckpt chat` answer with the model of a checkpoint, an export or an adapter."""

import io
import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_ckpt.cli.ckpt import main
from tests.support.models.stand_ins import LLAMA_CHAT, write_model

Capture = pytest.CaptureFixture[str]
CONFIG = {"model_type": "llama"}
GREEDY = ["--max-new-tokens", "6", "--temperature", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "chat"
    write_model(path, dict(CONFIG), LLAMA_CHAT)
    return path


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "plain"
    write_model(path, dict(CONFIG), None)
    return path


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a checkpoint that has the weights of *model* and no export."""
    path = tmp_path_factory.mktemp("run")
    assert main(["import", str(model), str(path)]) == 0
    return path


def direct(path: Path, prompt: str | list[dict[str, str]], model: Any = None) -> str:
    """The greedy completion of transformers itself."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = model or AutoModelForCausalLM.from_pretrained(path)
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    inputs.pop("token_type_ids", None)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=6)
    text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(text)


def generated(capsys: Capture, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["generate", *words, *GREEDY, "--json"]) == 0, capsys.readouterr().err
    (completion,) = json.loads(capsys.readouterr().out)["completions"]
    return dict(completion)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-p", os.fsdecode(b"caf\xe9")], "not valid UTF-8"),
        (["-p", "-"], "not valid UTF-8"),
        (["-p", "hello", "--seed", "9" * 30], "more than"),
    ],
)
def test_arguments_that_libraries_cannot_read_are_errors(
    capsys: Capture, model: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    assert main(["generate", str(model), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_an_error_that_states_what_to_copy(
    capsys: Capture, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    for file in (*model.glob("*.safetensors"), model / "config.json"):
        shutil.copy(file, tmp_path / "model")
    assert main(["generate", str(tmp_path / "model"), "-p", "hello"]) == 3
    message = capsys.readouterr().err
    assert "there is no tokenizer beside the model" in message and "sentencepiece" not in message


def test_weights_without_a_config_are_imported_with_that_of_the_model(
    capsys: Capture, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    for weights in model.glob("*.safetensors*"):
        shutil.copy(weights, tmp_path / "alone")
    assert main(["generate", str(tmp_path / "alone"), "-p", "hello"]) == 3
    message = capsys.readouterr().err
    command = f"ckpt import {tmp_path}/alone RUN --config DIR"
    assert "have no config.json" in message and command in message
    words = command.replace("RUN", f"{tmp_path}/run").replace("DIR", str(model)).split()
    assert main(words[1:]) == 0
    capsys.readouterr()
    completion = generated(capsys, f"{tmp_path}/run", "-p", "hello")
    assert completion["text"] == generated(capsys, str(model), "-p", "hello")["text"]


def test_a_prompt_is_completed_as_transformers_does_it(capsys: Capture, model: Path) -> None:
    completion = generated(capsys, str(model), "-p", "What is two plus one?")
    expected = direct(model, [{"role": "user", "content": "What is two plus one?"}])
    assert completion["text"] == expected
    assert completion["tokens"] <= 6
    assert completion["finish"] in ("stop", "length")


def test_a_checkpoint_without_an_export_answers_as_its_model(
    capsys: Capture, model: Path, run: Path
) -> None:
    for path in (run, run / "LATEST"):
        completion = generated(capsys, str(path), "-p", "Hello there")
        assert completion["text"] == generated(capsys, str(model), "-p", "Hello there")["text"]
    assert not list(run.glob("*/model/consolidated"))


def test_an_adapter_answers_with_its_base(capsys: Capture, model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(model, base)
    torch.manual_seed(1)
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = direct(base, "Once upon a time", adapted)
    run = tmp_path / "run"
    assert main(["import", str(tmp_path / "adapter"), str(run), "--base", str(base)]) == 0
    words = [str(run), "-p", "Once upon a time", "--raw"]
    capsys.readouterr()
    assert main(["generate", *words]) == 0
    assert "warning" not in capsys.readouterr().err
    config = (base / "config.json").read_text()
    (base / "config.json").write_text(config + "\n")
    assert main(["generate", *words]) == 0
    assert f"{base} is not the base that the adapter was trained on" in capsys.readouterr().err
    words = [str(tmp_path / "adapter"), "-p", "Once upon a time", "--raw"]
    assert generated(capsys, *words)["text"] == expected
    shutil.move(base, tmp_path / "moved")
    assert main(["generate", *words]) == 3
    assert "transformers cannot load this model" in capsys.readouterr().err
    assert generated(capsys, *words, "--base", str(tmp_path / "moved"))["text"] == expected


def test_text_is_printed_while_it_is_generated_and_the_summary_goes_to_standard_error(
    capsys: Capture, plain_model: Path
) -> None:
    assert main(["generate", str(plain_model), "-p", "one", "-p", "two", *GREEDY]) == 0
    printed = capsys.readouterr()
    expected = [direct(plain_model, "one"), direct(plain_model, "two")]
    assert printed.out == f"{expected[0]}\n\n---\n{expected[1]}\n"
    assert printed.err.count("tokens/s") == 2
    assert "Loading weights" not in printed.err


def test_the_seed_determines_what_is_sampled(capsys: Capture, plain_model: Path) -> None:
    texts = []
    for seed in ("3", "3", "4"):
        words = ["generate", str(plain_model), "-p", "x", "--json", "--temperature", "2"]
        assert main([*words, "--seed", seed, "--max-new-tokens", "12"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["completions"][0]["text"])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("words", "pieces"),
    [
        ([], ["required: --prompt"]),
        (["-p", "x", "--temperature", "-1"], ["is not a number of 0 or more"]),
        (["-p", "x", "--temperature", "hot"], ["hot is not a number"]),
        (["-p", ""], ["the prompt has no tokens"]),
        (["-p", "x", "--top-p", "2"], ["is not above 0 and at most 1"]),
        (["-p", "x", "--max-new-tokens", "0"], ["0 is less than 1"]),
        (["-p", "x", "--device", "tpu9"], ["there is no such device"]),
        (["-p", "x", "--image", "none.png"], ["the image cannot be read"]),
        (
            ["-p", "x", "--image", __file__],
            ["the image cannot be read", "the image cannot be read"],
        ),
        (["-p", "x", "--system", "s", "--raw"], ["--system needs a chat template"]),
        (["-p", "-", "-p", "-"], ["standard input can be only one prompt"]),
        (["-p", "x", "--base", "b"], ["it is no adapter"]),
        (["-p", "x", "--system", "s"], ["has no chat template"]),
    ],
)
def test_wrong_arguments_are_reported_with_a_hint(
    capsys: Capture, plain_model: Path, words: list[str], pieces: list[str]
) -> None:
    assert main(["generate", str(plain_model), *words]) == 2
    error = capsys.readouterr().err
    for piece in ["where:", *pieces]:
        assert piece in error


def test_a_model_without_its_output_layer_generates_nothing(
    capsys: Capture, tmp_path: Path
) -> None:
    """transformers draws random values for the output layer, and would generate with them."""
    write_model(tmp_path / "whole", CONFIG | {"tie_word_embeddings": False}, None)
    backbone = tmp_path / "backbone"
    shutil.copytree(tmp_path / "whole", backbone)
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole").model.save_pretrained(backbone)
    assert main(["generate", str(backbone), "-p", "a", *GREEDY]) == 3
    assert "value:  lm_head.weight\n" in capsys.readouterr().err
    (backbone / "modules.json").write_text("[]")
    assert main(["generate", str(backbone), "-p", "a", *GREEDY]) == 2
    assert "use sentence_transformers.SentenceTransformer(" in capsys.readouterr().err


def test_a_damaged_checkpoint_or_export_is_not_used(
    capsys: Capture, model: Path, run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    (shard,) = tmp_path.glob("run/epoch_*/model/*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert main(["generate", str(tmp_path / "run"), "-p", "x"]) == 3
    assert main(["export", str(run), "-o", str(tmp_path / "export")]) == 0
    (weights,) = (tmp_path / "export").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-8])
    assert main(["generate", str(tmp_path / "export"), "-p", "x"]) == 3
    assert main(["generate", str(tmp_path / "nothing"), "-p", "x"]) == 3
    assert "checkpoint not found" in capsys.readouterr().err


# ---------------------------------------------------------------- chat


def test_a_conversation_contains_what_was_said_before(
    capsys: Capture, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("Hello\n\nAgain\n/reset\nHello\n/what\n/exit\nunread\n")
    )
    assert main(["chat", str(model), *GREEDY]) == 0
    printed = capsys.readouterr()
    first = direct(model, [{"role": "user", "content": "Hello"}])
    history = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Again"},
    ]
    second = direct(model, history)
    assert printed.out == f"{first}\n{second}\n{first}\n"
    assert "unknown command /what" in printed.err


def test_chat_needs_a_chat_template(capsys: Capture, plain_model: Path) -> None:
    assert main(["chat", str(plain_model)]) == 2
    assert "ckpt generate" in capsys.readouterr().err
