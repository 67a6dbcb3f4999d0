"""``ckpt push``, ``ckpt pull`` and ``ckpt card`` with a local server of the Hub's HTTP API: success, faults, resume."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard

from automodel_ckpt.cli.ckpt import main
from tests.support.checkpoints import is_intact
from tests.support.servers.hub_server import (
    PART_BYTES,
    TOKEN,
    HubServer,
    Reply,
    Request,
    Reset,
    error,
)

# How huggingface_hub calls httpx.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "org/tiny"
TARGET = f"hub:{REPO}"


def listing(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_a_run_is_pushed_with_its_card_and_pulled_again(
    hub: HubServer, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(runs / "full"), TARGET]) == 0
    repository = hub.repository(REPO)
    assert repository.private and list(repository.branches) == ["main"]
    assert repository.messages == ["initial commit", "Upload epoch_1_step_12"]
    export = listing(runs / "full/LATEST/model/consolidated")
    uploaded = repository.files()
    assert uploaded.items() >= export.items()
    assert uploaded.keys() - export.keys() == {".gitattributes", "README.md"}
    assert len(export["model-00001-of-00001.safetensors"]) > PART_BYTES
    assert TOKEN not in capsys.readouterr().err

    # The same again: no commit.
    assert main(["push", str(runs / "full"), TARGET, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["was_there"]
    assert len(repository.commits) == 2

    target = tmp_path / "pulled"
    assert main(["pull", f"{TARGET}@main", str(target), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["has_manifest"] and document["commit"] == repository.branches["main"]
    assert listing(target) == uploaded
    assert is_intact(target)
    # A directory with files is not overwritten.
    assert main(["pull", TARGET, str(target)]) == 2


def test_a_checkpoint_without_an_export_is_exported_and_replaces_the_files_of_another_model(
    hub: HubServer, runs: Path
) -> None:
    assert main(["push", str(runs / "lora"), TARGET, "--base-model", "org/base"]) == 0
    repository = hub.repository(REPO)
    repository.branches["main"] = repository.commit(
        "main", {**repository.files(), "notes.txt": b"mine"}, "by hand"
    )
    repository.branches["step-5"] = repository.branches["main"]
    assert main(["push", str(runs / "full/epoch_0_step_5"), f"{TARGET}@step-5"]) == 0
    assert not list(runs.glob("full/.hub*"))
    files = repository.files("step-5")
    assert "model.safetensors.index.json" in files and "notes.txt" in files
    assert "adapter_model.safetensors" not in files
    # The main branch is as it was.
    assert "adapter_model.safetensors" in repository.files()


def test_an_adapter_has_no_paths_of_this_machine(
    hub: HubServer, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(runs / "lora/LATEST"), TARGET, "--public"]) == 0
    assert "--base-model" in capsys.readouterr().err
    repository = hub.repository(REPO)
    assert not repository.private
    for name, content in repository.files().items():
        assert str(runs).encode() not in content and b"secret-home" not in content, name
    assert main(["push", str(runs / "lora"), TARGET, "--base-model", "org/base", "--public"]) == 0
    config = json.loads(repository.files()["adapter_config.json"])
    assert config["base_model_name_or_path"] == "org/base"
    assert main(["pull", TARGET, str(tmp_path / "adapter")]) == 0
    assert "also by the manifest" in capsys.readouterr().out
    # A public repository is not used by mistake.
    assert main(["push", str(runs / "lora"), TARGET]) == 2
    assert "the repository is public" in capsys.readouterr().err


def test_names_from_files_stay_text_in_the_card(
    hub: HubServer, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    breaks = (
        "\n---\nevil: true\n# evil\u2028evil: true\u2029evil: true\u0085evil: true\r\x1b[2J| a |\n"
    )
    metric = {"name": breaks, "task": breaks, "metric": breaks, "value": 0.5, "stderr": 0.1}
    results = tmp_path / "eval.json"
    results.write_text(json.dumps({"model": breaks, "metrics": [metric]}))
    license_name = json.dumps(breaks)
    base = f"---\nlicense: other\nlicense_name: {license_name}\nlicense_link: LICENSE\n---\n"
    hub.add("org/base", {"README.md": base.encode()})
    given = [str(runs / "lora"), TARGET, "--base-model", "org/base", "--eval", str(results)]
    assert main(["card", *given]) == 0
    text = capsys.readouterr().out
    assert "evil" in text
    assert set(text) - {"\n"} == {letter for letter in text if letter.isprintable()}
    assert not [line for line in text.split("\n") if line.lstrip().startswith(("evil:", "# evil"))]
    assert "evil" not in ModelCard(text).data.to_dict()


def test_the_card_states_what_was_trained_on_what(
    hub: HubServer, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "eval.json"
    metric = {"name": "eval_x_acc", "task": "x", "metric": "acc", "value": 0.5, "stderr": 0.1}
    results.write_text(json.dumps({"model": "m", "metrics": [metric]}))
    base = b"---\nlicense: other\nlicense_name: some-license\nlicense_link: LICENSE\n---\n"
    hub.add("org/base", {"README.md": base})
    given = [str(runs / "lora"), TARGET, "--base-model", "org/base", "--eval", str(results)]
    assert main(["push", *given]) == 0
    files = hub.repository(REPO).files()
    text = files["README.md"].decode()
    data = ModelCard(text).data
    assert (data.base_model, data.library_name, data.pipeline_tag) == (
        "org/base",
        "peft",
        "text-generation",
    )
    assert (data.license, data.license_name) == ("other", "some-license")
    assert data.license_link == "https://huggingface.co/org/base/blob/main/LICENSE"
    values = {each.metric_type: each.metric_value for each in data.eval_results}
    losses = json.loads((runs / "lora/LATEST/losses.json").read_text())
    assert values["val_loss"] == pytest.approx(losses["val_loss"], abs=1e-5)
    assert values["acc"] == 0.5
    for part in (
        'PeftModel.from_pretrained(base, "org/tiny")',
        "\n| `optimizer.lr` | 0.01 |\n",
        "| `peft.r` | 2 |",
        "in 12 steps (epoch 1)",
        "0.5000 ± 0.1000",
        "language_modeling (local)",
    ):
        assert part in text

    # Without a network: the same but for the license, which is not known.
    capsys.readouterr()
    hub.requests.clear()
    assert main(["card", *given, "--license", "mit"]) == 0
    assert "license: mit" in capsys.readouterr().out
    assert main(["card", str(runs / "full/epoch_0_step_5")]) == 0
    first = capsys.readouterr().out
    assert "trained from scratch" in first and "| step | 5 (epoch 0) |" in first
    assert "| 12 |" not in first
    assert not hub.requests


def test_results_and_cards_that_cannot_be_used_are_errors_or_left_out(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def card_with(value: str) -> tuple[int, str, str]:
        results = tmp_path / "eval.json"
        metric = f'{{"task": "x", "metric": "ppl", "value": {value}, "stderr": null}}'
        results.write_text(f'{{"metrics": [{metric}]}}')
        code = main(["card", str(runs / "full"), "--eval", str(results)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    code, _, message = card_with("9" * 400)
    assert code == 2 and "not the output of `ckpt eval --json`" in message
    # `ckpt eval --json` prints null for a perplexity that is infinite.
    code, text, message = card_with("null")
    assert code == 0 and "ppl" not in text and "x ppl is not a finite number" in message
    code, text, _ = card_with("1.5e30")
    assert code == 0 and "| `x` ppl | 1.5e+30 |" in text

    # A file of another program, which the Hub's libraries do not load.
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    assert main(["card", str(tmp_path / "model.pt")]) == 3
    assert "there is no model to upload" in capsys.readouterr().err

    (tmp_path / "own.md").write_bytes(b"caf\xe9")
    assert main(["push", str(runs / "full"), TARGET, "--card", str(tmp_path / "own.md")]) == 2
    assert "not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["push", "."], ["pull"]])
def test_a_name_without_hub_is_answered_with_both_kinds_of_addresses(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "org/name"]) == 2
    message = capsys.readouterr().err
    assert f"ckpt {words[0]}" in message and "hub:ORG/NAME" in message and "s3://" in message


def test_options_without_effect_on_a_repository_are_errors(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = tmp_path / "export"
    export.mkdir()
    (export / "config.json").write_text("{}")
    own = export / "README.md"
    own.write_text("mine\n")
    push = ["push", str(export), TARGET]
    for words, message in (
        ([*push, "--metric", "acc"], "no effect with hub:ORG/NAME"),
        ([*push, "--license", "mit"], f"no effect beside {own}, which is the card"),
        ([*push, "--card", str(own), "--license", "mit"], "no effect with --card"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_an_own_readme_takes_precedence(hub: HubServer, runs: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.md"
    own.write_text("---\nlicense: mit\n---\nmine\n")
    assert main(["push", str(runs / "full"), TARGET, "--card", str(own)]) == 0
    assert hub.repository(REPO).files()["README.md"] == own.read_bytes()
    export = shutil.copytree(runs / "full/LATEST/model/consolidated", tmp_path / "export")
    (export / "README.md").write_text("beside it\n")
    assert main(["push", str(export), TARGET]) == 0
    assert hub.repository(REPO).files()["README.md"] == b"beside it\n"


@pytest.mark.parametrize(
    ("token", "fault", "expected"),
    [
        (None, None, "there is no token"),
        ("hf_other", None, "the Hub rejects the token"),
        (TOKEN, error(403, message="no rights"), "the token does not have this right"),
        (TOKEN, error(429, Retry_After="30"), "try again in 30 s"),
    ],
)
def test_what_the_hub_rejects_is_one_error(
    hub: HubServer,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    token: str | None,
    fault: Reply | None,
    expected: str,
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.fault = lambda request: fault if "preupload" in request.path or fault else None
    assert main(["push", str(runs / "lora"), TARGET]) == 4
    message = capsys.readouterr().err
    assert expected in message and "Traceback" not in message
    assert not any(secret in message for secret in (TOKEN, "hf_other"))


def test_an_interrupted_upload_leaves_the_branch_unchanged_and_is_continued(
    hub: HubServer, runs: Path
) -> None:
    assert main(["push", str(runs / "full/epoch_0_step_5"), TARGET]) == 0
    repository = hub.repository(REPO)
    before = repository.branches["main"]
    stored = len(hub.objects)

    def break_in(place: str) -> None:
        def fault(request: Request) -> Reply | None:
            if place in request.path:
                raise Reset
            return None

        hub.fault = fault

    for place in ("/lfs/", "/commit/"):
        break_in(place)
        assert main(["push", str(runs / "full"), TARGET]) == 4
        assert repository.branches["main"] == before
    # The second attempt transferred the weights, the third only makes the commit.
    assert len(hub.objects) == stored + 1
    hub.fault = None
    hub.requests.clear()
    assert main(["push", str(runs / "full"), TARGET]) == 0
    assert repository.branches["main"] != before
    assert not [each for each in hub.requests if each.startswith("PUT /lfs/")]


def test_a_commit_by_somebody_else_meanwhile_is_an_error(hub: HubServer, runs: Path) -> None:
    assert main(["push", str(runs / "lora"), TARGET]) == 0
    repository = hub.repository(REPO)

    def fault(request: Request) -> Reply | None:
        if "/commit/" in request.path:
            hub.fault = None
            repository.commit("main", {"other.txt": b""}, "meanwhile")
        return None

    hub.fault = fault
    assert main(["push", str(runs / "full"), TARGET]) == 4
    assert repository.files() == {"other.txt": b""}


def test_an_interrupted_download_is_continued_and_damage_is_found(
    hub: HubServer, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(runs / "full"), TARGET]) == 0
    weights = "model-00001-of-00001.safetensors"
    data = hub.repository(REPO).files()[weights]
    target = tmp_path / "model"
    attempts: list[str] = []

    def cut(request: Request) -> Reply | None:
        if request.method == "GET" and weights in request.path:
            attempts.append(request.headers.get("range", ""))
            if len(attempts) == 1:
                length = {"Content-Length": str(len(data))}
                return Reply(200, data, length, cut=len(data) // 2)
            raise Reset
        return None

    hub.fault = cut
    assert main(["pull", TARGET, str(target)]) == 4
    assert not target.exists()
    hub.fault = None
    capsys.readouterr()
    assert main(["pull", TARGET, str(target)]) == 0
    assert (target / weights).read_bytes() == data
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    damaged = bytes([data[0] ^ 1]) + data[1:]
    etag = {"X-Repo-Commit": hub.repository(REPO).branches["main"], "ETag": '"x"'}
    hub.fault = lambda request: Reply(200, damaged, etag) if weights in request.path else None
    assert main(["pull", TARGET, str(tmp_path / "other")]) in (3, 4)
    assert weights in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_a_download_without_space_and_a_changed_file_are_named(
    hub: HubServer,
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["push", str(runs / "full"), TARGET]) == 0
    target = tmp_path / "model"
    with monkeypatch.context() as patch:
        full = SimpleNamespace(total=1 << 30, used=1 << 30, free=0)
        patch.setattr(shutil, "disk_usage", lambda path: full)
        assert main(["pull", TARGET, str(target)]) == 4
    assert f"where:  {tmp_path}\n" in capsys.readouterr().err
    for files in hub.repository(REPO).commits.values():
        if "config.json" in files:
            files["config.json"] = files["config.json"].replace(b"llama", b"LLAMA")
    assert main(["pull", TARGET, str(target)]) == 3
    printed = capsys.readouterr().err
    assert f"where:  config.json in {TARGET}\n" in printed and "ckpt push" in printed
    assert ".model" not in printed and not target.exists()


def test_local_damage_is_found_before_the_upload(
    hub: HubServer, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, place in (("full", "model/consolidated"), ("lora", "model")):
        run = shutil.copytree(runs / name, tmp_path / name, symlinks=True)
        file = next((run / "LATEST" / place).glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        assert main(["push", str(run), TARGET]) == 3
        assert file.name in capsys.readouterr().err
    assert not hub.requests


@pytest.mark.parametrize(
    "target", ["hub:name", "hub:a/b/c", "hub:org/x@..", "hub:org/-x", "hub:org/x@"]
)
def test_a_malformed_address_is_an_error(runs: Path, target: str) -> None:
    code = main(["push", str(runs / "lora"), target])
    assert code == 2
