"""A model's directory is data: what links, values and missing files in it do, and what exports have of it."""

import contextlib
import errno
import io
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.errors import EXIT_UNUSABLE, EXIT_USAGE
from tests.support import ranks
from tests.support.models.stand_ins import write_model
from tests.support.servers.command_server import CommandServer

SECRET = "-----BEGIN PRIVATE KEY-----"
OWN_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
GIVEN_TEMPLATE = (
    "{% for m in messages %}({{ m.role }}) {{ m.content }}<eot>\n{% endfor %}"
    "{% if add_generation_prompt %}(assistant) {% endif %}"
)
TALK = [{"role": "user", "content": "Name a color."}, {"role": "assistant", "content": "Blue."}]
RECIPE = """\
model: {from_pretrained: base}
dataset: &data {_target_: automodel_ckpt.data.chat.messages, path: d.jsonl, seq_length: 128}
optimizer: {lr: 1e-2}
step_scheduler: {global_batch_size: 4, local_batch_size: 4, max_steps: 1}
"""
ADAPTERS = ("--peft.r", "4", "--peft.target_modules", "*_proj")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base, data and a recipe."""
    directory = tmp_path_factory.mktemp("made")
    write_model(directory / "base", {"model_type": "llama"}, OWN_TEMPLATE)
    (directory / "d.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 4)
    (directory / "r.yaml").write_text(RECIPE)
    (directory / "given.jinja").write_text(GIVEN_TEMPLATE)
    return directory


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, the current directory, with a secret beside it."""
    copy = shutil.copytree(made, tmp_path / "place")
    (tmp_path / "id_rsa").write_text(SECRET)
    monkeypatch.chdir(copy)
    return copy


def train(commands: CommandServer, *words: str) -> subprocess.CompletedProcess[str]:
    return commands.run("ckpt-train", "r.yaml", *words)


def trained(commands: CommandServer, *words: str) -> Path:
    done = train(commands, *words)
    assert done.returncode == 0, done.stderr
    return Path("checkpoints/LATEST/model")


def generated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["generate", *words, "-p", TALK[0]["content"], "--json"]) == 0
    (completion,) = json.loads(capsys.readouterr().out)["completions"]
    return dict(completion)


# ---------------------------------------------------------------- links


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("LICENSE", "../../id_rsa"),
        ("chat_template.jinja", "../../id_rsa"),
        ("generation_config.json", "../../id_rsa"),
        ("modeling_own.py", "../../id_rsa"),
        ("additional_chat_templates", "../.."),
        ("NOTICE", ".git/config"),
    ],
)
def test_a_link_to_a_file_elsewhere_is_followed_nowhere(
    commands: CommandServer, capfd: pytest.CaptureFixture[str], place: Path, name: str, target: str
) -> None:
    (place / "base" / ".git").mkdir()
    (place / "base" / ".git" / "config").write_text(SECRET)
    path = place / "base" / name
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    outcomes = [(train(commands).returncode, EXIT_USAGE)]
    outcomes.append((main(["import", "base", "imported"]), EXIT_UNUSABLE))
    outcomes.append((main(["export", "base", "-o", "exported", "--cast-dtype", "fp32"]), 3))
    if not path.is_dir():  # uploads leave out what is behind a linked directory
        outcomes.append((main(["push", "base", "hub:owner/name"]), EXIT_UNUSABLE))
    assert all(code == expected for code, expected in outcomes), outcomes
    assert "points outside of the directory" in capfd.readouterr().err
    copies = [found for found in place.rglob("*") if found.is_file() and not found.is_symlink()]
    holders = [found for found in copies if SECRET.encode() in found.read_bytes()]
    assert holders == [place / "base" / ".git" / "config"]


def test_links_of_the_cache_and_links_to_weights_are_followed(
    commands: CommandServer, place: Path
) -> None:
    """The Hub's cache, a link to a whole directory, and weights in a shared directory."""
    repository = place / "models--owner--name"
    (place / "base" / "LICENSE").write_text("free")
    shutil.copytree(place / "base", repository / "blobs")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in sorted((repository / "blobs").iterdir()):
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(place / "base" / "model.safetensors")
    (place / "link").symlink_to(snapshot)
    export = trained(commands, "--model.from_pretrained", "link") / "consolidated"
    assert (export / "LICENSE").read_text() == "free"
    (repository / "blobs" / "LICENSE").unlink()
    (repository / "blobs" / "LICENSE").symlink_to("../../../id_rsa")
    assert train(commands, "--model.from_pretrained", "link", "--dry-run").returncode == EXIT_USAGE


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("config.json", "num_hidden_layers", 10**9),
        ("config.json", "vocab_size", 10**12),
        ("config.json", "hidden_act", ""),
        ("config.json", "text_config", 1.5),
        ("config.json", "dtype", "abc"),
        ("generation_config.json", "eos_token_id", "abc"),
        ("generation_config.json", None, "[" * 20000 + "]" * 20000),
        ("config.json", None, "\ufeff{"),
    ],
)
def test_values_of_other_kinds_are_errors_with_a_hint(
    commands: CommandServer,
    capfd: pytest.CaptureFixture[str],
    place: Path,
    file: str,
    key: str | None,
    value: Any,
) -> None:
    path = place / "base" / file
    if key is None:
        path.write_text(value)
    else:
        path.write_text(json.dumps({**json.loads(path.read_bytes()), key: value}))
    validation = "--validation_dataset={_target_: automodel_ckpt.data.chat.messages, path: d.jsonl}"
    generation = ("--generation.prompts", "[a]", "--generation.max_new_tokens", "2")
    done = train(commands, validation, *generation)
    assert done.returncode in (0, EXIT_USAGE, EXIT_UNUSABLE), done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 0 or ("hint:" in done.stderr and "value:" in done.stderr)
    code = main(["generate", "base", "-p", "a", "--max-new-tokens", "2"])
    message = capfd.readouterr().err
    assert code in (0, EXIT_USAGE, EXIT_UNUSABLE) and "Traceback" not in message
    assert code == 0 or "hint:" in message
    assert not (done.returncode == code == 0)


def test_values_that_the_first_use_of_a_tokenizer_reads_are_errors_with_a_hint(
    commands: CommandServer, place: Path
) -> None:
    path = place / "base" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "model_max_length": "abc"}))
    done = train(commands)
    assert done.returncode == EXIT_USAGE and "Traceback" not in done.stderr, done.stderr
    assert path.name in done.stderr and "hint:" in done.stderr


def test_values_of_other_kinds_in_an_adapter_config_are_errors_with_a_hint(
    commands: CommandServer, capfd: pytest.CaptureFixture[str], place: Path
) -> None:
    path = Path(shutil.copytree(trained(commands, *ADAPTERS), "adapter")) / "adapter_config.json"
    intact = json.loads(path.read_bytes())
    for key, value in (
        ("r", "abc"),
        ("r", -1),
        ("r", 10**12),
        ("peft_type", {}),
        ("target_modules", 1.5),
    ):
        path.write_text(json.dumps({**intact, key: value}))
        capfd.readouterr()
        code = main(["generate", "adapter", "-p", "a", "--max-new-tokens", "2"])
        message = capfd.readouterr().err
        assert code in (EXIT_USAGE, EXIT_UNUSABLE) and "Traceback" not in message, message
        assert "hint:" in message


# ---------------------------------------------------------------- missing and unreadable files


@pytest.mark.parametrize("lost", [("tokenizer*", "chat_template*"), ("tokenizer.json",)])
def test_a_directory_without_a_tokenizer_is_reported_as_such(
    commands: CommandServer, capsys: pytest.CaptureFixture[str], place: Path, lost: tuple[str, ...]
) -> None:
    for pattern in lost:
        for file in (place / "base").glob(pattern):
            file.unlink()
    done = train(commands)
    assert done.returncode == EXIT_USAGE and "the directory has no tokenizer" in done.stderr
    assert main(["generate", "base", "-p", "a"]) == EXIT_UNUSABLE
    assert "there is no tokenizer beside the model" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "."])
def test_files_that_may_not_be_read_are_not_called_missing(place: Path, name: str) -> None:
    (place / "base" / name).chmod(0)
    # Imported before the user changes, who may not read them.
    assert main(["generate", "nowhere", "-p", "a"]) != 0

    def as_nobody(*words: str) -> str:
        os.chdir(place)
        if os.geteuid() == 0:
            for parent in (place, *place.parents[:3]):
                parent.chmod(0o755)
            os.seteuid(65534)
        output = io.StringIO()
        with contextlib.redirect_stderr(output):
            code = main(words)
        return f"{code} {output.getvalue()}"

    (said,) = ranks.run(as_nobody, 1, "generate", "base", "-p", "a", init=False)
    assert said[0] in "23" and os.strerror(errno.EACCES) in said and "permissions" in said, said


# ---------------------------------------------------------------- what exports have


@pytest.mark.parametrize("template", [GIVEN_TEMPLATE, None])
def test_exports_stop_where_the_model_was_trained_to_stop(
    commands: CommandServer, capsys: pytest.CaptureFixture[str], place: Path, template: str | None
) -> None:
    """Also with the tokenizer's own template, if the base's generation config lacks the end of its turns."""
    words = ["--step_scheduler.max_steps", "40", "--step_scheduler.ckpt_every_epochs", "null"]
    if template is None:
        (place / "base" / "chat_template.jinja").write_text(GIVEN_TEMPLATE)
    else:
        words += ["--dataset.chat_template", "given.jinja"]
    export = trained(commands, *words) / "consolidated"
    tokenizer = AutoTokenizer.from_pretrained(export)
    end = tokenizer.convert_tokens_to_ids("<eot>")
    before = json.loads(Path("base/generation_config.json").read_bytes())
    after = json.loads((export / "generation_config.json").read_bytes())
    assert after == before | {"eos_token_id": [before["eos_token_id"], end]}
    assert tokenizer.chat_template == GIVEN_TEMPLATE
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (export / name).read_bytes() == Path("base", name).read_bytes()
    completion = generated(capsys, str(export))
    assert completion["finish"] == "stop" and completion["text"] == "Blue."
    assert main(["export", str(export), "--to", "gguf", "-o", "model.gguf"]) == 0
    from gguf import GGUFReader

    field = GGUFReader("model.gguf").get_field("tokenizer.ggml.eot_token_id")
    assert field is not None and field.contents() == end


def test_adapters_have_the_end_of_turns_and_the_template_beside_them(
    commands: CommandServer, capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    model = trained(commands, *ADAPTERS, "--dataset.chat_template", "given.jinja")
    assert main(["export", "checkpoints", "--merge", "-o", "merged"]) == 0
    for directory in (model, Path("merged")):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        ends = json.loads((directory / "generation_config.json").read_bytes())["eos_token_id"]
        assert ends[-1] == tokenizer.convert_tokens_to_ids("<eot>")
        assert tokenizer.chat_template == GIVEN_TEMPLATE
    assert generated(capsys, str(model), "--max-new-tokens", "2")["tokens"] <= 2


def test_all_files_that_the_class_of_the_tokenizer_names_are_exported(
    commands: CommandServer, place: Path
) -> None:
    for file in (place / "base").glob("tokenizer*"):
        file.unlink()
    files = {
        "vocab.txt": "a 3\nb 2\nab 1\n",
        "bpe.codes": "a b</w> 1\n",
        "tokenizer_config.json": '{"tokenizer_class": "PhobertTokenizer"}\n',
    }
    for name, content in files.items():
        (place / "base" / name).write_text(content)
    (place / "d.jsonl").write_text('{"text": "a b ab"}\n' * 4)
    data = "--dataset={_target_: automodel_ckpt.data.text.text, path: d.jsonl, seq_length: 16}"
    export = trained(commands, data) / "consolidated"
    adapters = trained(commands, data, *ADAPTERS, "--checkpoint.checkpoint_dir", "adapters")
    assert adapters == Path("checkpoints/LATEST/model")
    assert main(["export", "adapters", "--merge", "-o", "merged"]) == 0
    for directory in (export, Path("adapters/LATEST/model"), Path("merged")):
        for name, content in files.items():
            assert (directory / name).read_text() == content, (directory, name)
    AutoTokenizer.from_pretrained("merged")


def test_a_template_whose_turns_end_with_no_token_is_warned_of(
    commands: CommandServer, place: Path
) -> None:
    (place / "given.jinja").write_text(GIVEN_TEMPLATE.replace("<eot>", "##"))
    done = train(commands, "--dataset.chat_template", "given.jinja")
    assert done.returncode == 0 and "no special token ends the answers" in done.stderr


def test_tokenizers_that_this_program_saves_have_a_class_of_transformers_4(
    commands: CommandServer, place: Path
) -> None:
    """The base's own files are copied unchanged."""
    assert b"TokenizersBackend" in Path("base/tokenizer_config.json").read_bytes()
    Path("r.yaml").write_text(
        "model: {from_config: {model_type: llama, hidden_size: 16, intermediate_size: 16, "
        "num_hidden_layers: 1, num_attention_heads: 2}}\n"
        "tokenizer: {_target_: automodel_ckpt.examples.data.python_docs.train_tokenizer, vocab_size: 300}\n"
        "dataset: {_target_: automodel_ckpt.examples.data.python_docs.language_modeling, seq_length: 16}\n"
        "step_scheduler: {global_batch_size: 4, local_batch_size: 4, max_steps: 1}\n"
    )
    export = trained(commands) / "consolidated"
    settings = json.loads((export / "tokenizer_config.json").read_bytes())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not isinstance(settings.get("extra_special_tokens"), list)
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert tokenizer.decode(tokenizer("a b")["input_ids"], skip_special_tokens=True) == "a b"
