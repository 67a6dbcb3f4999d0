"""Credentials appear in no file, no output and no command line, and a recipe file sends nothing of the environment."""

import os
from pathlib import Path
from typing import Any

import pytest
import s3fs
from werkzeug.wrappers import Request, Response

from automodel_ckpt.cli.ckpt import main as ckpt
from automodel_ckpt.cli.train import main as train
from tests.support.models.stand_ins import LLAMA_CHAT, write_model
from tests.support.servers.hub_server import hub_server, using
from tests.support.servers.object_store import object_store

SECRETS = ("Key-In-The-Environment", "secret-in-the-environment", "token-in-the-environment")
WORD = "secret-word"
RECIPE = """\
model:
  from_config: {model_type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
    intermediate_size: 16, vocab_size: 64}
dataset: {_target_: automodel_ckpt.examples.data.mock.random_tokens, vocab_size: 64, seq_length: 8, num_samples: 16}
step_scheduler: {global_batch_size: 4, local_batch_size: 4, max_steps: 2, ckpt_every_steps: 1}
logging: {trackers: {tensorboard: {}}}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize(
    "words",
    [
        f"--checkpoint.checkpoint_dir=s3://user:{WORD}@bucket/run",
        f"--checkpoint.checkpoint_dir=S3://{WORD}@bucket/run --checkpoint.nonsense=1",
        f"--checkpoint.remote.url=s3://bucket/run?X-Amz-Signature={WORD}",
        f"--checkpoint.remote.url=s3://[{WORD}",
        f"--checkpoint.remote.url=https://user:{WORD}@host/run",
        f"--checkpoint.restore_from=az://a:{WORD}@c/epoch_0_step_1",
        f"--init_from.path=gs://{WORD}@bucket/run",
        "--checkpoint.checkpoint_dir=${oc.env:URL_WITH_A_SECRET}",
        f"--checkpoint.remote={{url: 's3://b/r', options: {{secret: {WORD}}}}}",
        f"--checkpoint.remote={{url: 's3://b/r', options: {{client_kwargs: {{aws_secret: {WORD}}}}}}}",
        f"--checkpoint.remote={{url: 's3://b/r', options: {{endpoint_url: 'http://u:{WORD}@h'}}}}",
        "--checkpoint.remote={url: 's3://b/r', options: {key: '${oc.env:A_SECRET}'}}",
    ],
)
def test_a_recipe_with_a_secret_is_an_error_that_does_not_show_it(
    words: str, recipe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("URL_WITH_A_SECRET", f"s3://user:{WORD}@bucket/run")
    monkeypatch.setenv("A_SECRET", WORD)
    for mode in ([], ["--print-config"], ["--dry-run"]):
        assert train([str(recipe), *_words(words), *mode]) == 2
        shown = capfd.readouterr()
        assert WORD not in shown.out + shown.err
        assert "error: " in shown.err and "Traceback" not in shown.err


def _words(text: str) -> list[str]:
    first, *others = text.split(" --")
    return [first, *(f"--{other}" for other in others)]


def test_the_urls_of_commands_are_shown_without_secrets(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = f"s3://user:{WORD}@bucket/run"
    for words in (["ls", url], ["show", url], ["diff", url, url], ["verify", url], ["export", url]):
        assert ckpt(words) == 2
    assert ckpt(["pull", url, str(tmp_path / "run")]) == 2
    shown = capfd.readouterr()
    assert WORD not in shown.out + shown.err and "s3://bucket/run" in shown.err


def test_a_run_leaves_no_trace_of_the_credentials_in_its_environment(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: set[str] = set()
    with object_store() as store:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", SECRETS[0])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[1])
        monkeypatch.setenv("AWS_SESSION_TOKEN", SECRETS[2])

        def fault(request: Request) -> Response | None:
            commands.update(_command_lines())
            # The first upload of a file fails once, so that there is a message about it.
            if request.method == "PUT" and request.path.endswith("losses.json") and not failed:
                failed.append(request.path)
                return Response("<Error><Code>AccessDenied</Code></Error>", 403)
            return None

        failed: list[str] = []
        store.fault = fault
        words = [
            str(recipe),
            "--checkpoint.checkpoint_dir=s3://bucket/run",
            f"--checkpoint.scratch_dir={tmp_path / 'scratch'}",
        ]
        assert train(words) == 0
        assert train([*words, "--dry-run"]) == 0
        assert failed
        store.fault = None
        disk = s3fs.S3FileSystem()
        stored = {name: disk.cat_file(name) for name in disk.find("bucket/run")}
        assert stored["bucket/run/LATEST"].startswith(b"epoch_0_step_2\n")
        content = b"".join(stored.values())
    shown = capfd.readouterr()
    texts = {"output": (shown.out + shown.err).encode(), "store": content}
    for path in tmp_path.rglob("*"):
        if path.is_file():
            texts[str(path)] = path.read_bytes()
    for where, text in texts.items():
        for secret in SECRETS:
            assert secret.encode() not in text, where
    assert any("remote.uploader" in command for command in commands)
    assert not any(secret in command for command in commands for secret in SECRETS)
    config = next((tmp_path / "scratch").rglob("config.yaml")).read_text()
    assert "checkpoint_dir: s3://bucket/run" in config


# ---------------------------------------------------------------- what a recipe file may send, and where to

MODEL, _, REST = RECIPE.partition("dataset:")
NO_MODEL = "dataset:" + REST
SENT = {
    "data": "dataset: {_target_: datasets.load_dataset, path: json, data_files: 'http://HOST/${oc.env:VALUE}'}",
    "list": "dataset: {_target_: datasets.load_dataset, path: json, data_files: {train: [a, 'x/${oc.env:VALUE}']}}",
    "revision": "dataset: {_target_: automodel_ckpt.data.text.text, path: org/x, revision: '/${oc.env:VALUE}'}",
    "key": "hub: {repo: org/x, license: '${oc.env:VALUE}'}\n"
    "dataset: {_target_: datasets.load_dataset, path: 'org/${hub.license}'}",
    "model": "model: {from_pretrained: 'org/${oc.env:VALUE}'}",
    "stored": "model: {from_config: {model_type: llama, note: '/${oc.env:VALUE}'}}",
    "store": "checkpoint: {remote: {url: 's3://bucket/${oc.env:VALUE}'}}",
    "bucket": "checkpoint: {checkpoint_dir: 's3://${oc.env:VALUE}/run'}",
    "option": "checkpoint: {remote: {url: 's3://bucket/run', options: {project: '${oc.env:VALUE}'}}}",
    "tracker": "logging: {trackers: {wandb: {notes: '${oc.env:VALUE}'}}}",
    "hub": "hub: {repo: 'org/${oc.env:VALUE}'}",
}
HOSTS = {
    "endpoint": "checkpoint: {remote: {url: 's3://bucket/run', options: {endpoint_url: 'http://HOST'}}}",
    "account": "checkpoint: {remote: {url: 'az://b/run', options: {account_name: 'HOST/'}}}",
    "mlflow": "logging: {trackers: {mlflow: {tracking_uri: 'http://HOST'}}}",
    "wandb": "logging: {trackers: {wandb: {settings: {base_url: 'http://HOST'}}}}",
    "trackio": "logging: {trackers: {trackio: {space_id: org/space}}}",
    "like the Hub": "dataset: {_target_: datasets.load_dataset, path: json, "
    "data_files: 'https://huggingface.co.HOST/a'}",
}


def _recipe_with(recipe: Path, line: str, host: str = "127.0.0.1:9") -> Path:
    """Write the recipe with other lines in the place of those with their keys."""
    keys = [each.partition(":")[0] for each in line.splitlines()]
    text = RECIPE if "model" not in keys else NO_MODEL
    kept = [each for each in text.splitlines() if each.partition(":")[0] not in keys]
    recipe.write_text("\n".join([*kept, line.replace("HOST", host), ""]))
    return recipe


def _refused(recipe: Path, capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """The message with which every use of a recipe ends before it sends anything."""
    message = ""
    for mode in ([], ["--dry-run"], ["--write-launcher", "slurm"]):
        assert train([str(recipe), *words, *mode]) == 2 or mode == ["--write-launcher", "slurm"]
        shown = capfd.readouterr()
        assert WORD not in shown.out + shown.err and "Traceback" not in shown.err
        message = message or shown.err
    return message


@pytest.mark.parametrize("kind", SENT)
@pytest.mark.parametrize("name", ["PLAIN", "AWS_SECRET_ACCESS_KEY"])
def test_a_recipe_file_sends_no_variable_without_permission(
    kind: str,
    name: str,
    recipe: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, WORD)
    line = SENT[kind].replace("VALUE", name)
    message = _refused(_recipe_with(recipe, line), capfd)
    if name == "PLAIN":
        assert f"--trust env:{name}" in message
    else:
        assert "by its name it is a secret" in _refused(recipe, capfd, f"--trust=env:{name}")
    base = recipe.rename(recipe.with_name("base.yaml"))
    recipe.write_text("extends: base.yaml\n")
    assert "base.yaml:" in _refused(recipe, capfd)
    base.rename(recipe)
    # A name below the recipe's directory does not make the directory the user's.
    assert name in _refused(recipe, capfd, "--run-name=x")


@pytest.mark.parametrize(
    "text", ["${oc.env:NOT_SET,\\${oc.env:PLAIN}}", "${oc.env:${oc.env:NAME_OF_IT}}"]
)
def test_no_spelling_of_a_reference_is_missed(
    text: str, recipe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIN", WORD)
    monkeypatch.setenv("NAME_OF_IT", "PLAIN")
    line = SENT["data"].replace("${oc.env:VALUE}", text)
    assert "interpolation" in _refused(_recipe_with(recipe, line), capfd)


@pytest.mark.parametrize("kind", HOSTS)
def test_a_recipe_file_names_no_host_for_credentials(
    kind: str, recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    message = _refused(_recipe_with(recipe, HOSTS[kind], host="evil.example"), capfd)
    assert "may not name a host" in message or "may set only" in message


def test_permission_comes_from_outside_of_the_recipe(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIN", "runs-of-team")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[1])
    with object_store() as store:
        monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
        store.requests.clear()
        port = store.endpoint.rpartition(":")[2]
        line = (
            f"checkpoint: {{checkpoint_dir: {tmp_path / 'run'}, remote: {{url: 's3://bucket/${{oc.env:PLAIN}}', "
            f"required: true, options: {{endpoint_url: '{store.endpoint}'}}}}}}"
        )
        _recipe_with(recipe, line)
        for words in ([], ["--trust=env:PLAIN"], ["--trust=host:127.0.0.1"]):
            _refused(recipe, capfd, *words)
        assert "evil" not in _refused(
            recipe, capfd, "--trust=env:PLAIN", "--trust=host:127.0.0.1:1"
        )
        allowed = [str(recipe), "--trust=env:PLAIN", f"--trust=host:127.0.0.1:{port}"]
        assert train([*allowed, "--dry-run"]) == 0
        # Not even of a host that is allowed.
        assert not store.requests
        shown = capfd.readouterr()
        assert "s3://bucket/${oc.env:PLAIN}" in shown.out
        assert "runs-of-team" not in shown.out + shown.err
        monkeypatch.setenv("AUTOMODEL_CKPT_TRUST", f"env:PLAIN host:127.0.0.1:{port}")
        assert train([str(recipe)]) == 0
        assert any(path.startswith("/bucket/runs-of-team/") for _, path in store.requests)
        monkeypatch.delenv("AUTOMODEL_CKPT_TRUST")
        given = ["--checkpoint.remote.url=s3://bucket/${oc.env:PLAIN}"]
        given.append(f"--checkpoint.remote.options.endpoint_url={store.endpoint}")
        assert train([str(recipe), *given, "--dry-run"]) == 0


def test_a_dry_run_sends_no_token_to_the_hub(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model", {"model_type": "llama"}, LLAMA_CHAT)
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    _recipe_with(recipe, "model: {from_pretrained: org/public}")
    steps = "{global_batch_size: 4, local_batch_size: 4, max_steps: 1}"
    words = [str(recipe), "--logging={}", f"--step_scheduler={steps}"]
    words.append("--checkpoint.enabled=false")
    sent: list[str | None] = []
    with hub_server() as server, using(server, str(tmp_path / "home"), monkeypatch):
        server.add("org/public", files)
        server.add("org/hidden", files, private=True)

        def note(request: Any) -> None:
            sent.append(request.headers.get("authorization"))

        server.fault = note
        assert train([*words, "--dry-run"]) == 0
        assert sent and not any(sent)
        hidden = [*words, "--model.from_pretrained=org/hidden"]
        assert train([*hidden, "--dry-run"]) == 2
        assert not any(sent)
        message = capfd.readouterr().err
        assert "a dry run sends it no token" in message and "hf download org/hidden" in message
        assert train(hidden) == 0
        assert any(sent)
        sent.clear()
        # The cache has it now.
        assert train([*hidden, "--dry-run"]) == 0
        assert not any(sent)


def test_local_paths_and_numbers_may_come_from_the_environment(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch-space"))
    monkeypatch.setenv("USER", "someone-here")
    monkeypatch.setenv("RATE", "1.0e-3")
    Path("data-someone-here.txt").write_text("a text\n" * 20)
    lines = (
        "checkpoint: {checkpoint_dir: '${oc.env:SCRATCH}/runs/${oc.env:USER}'}\n"
        "optimizer: {lr: '${oc.env:RATE}'}\n"
        "validation_dataset: {_target_: automodel_ckpt.examples.data.mock.random_tokens, vocab_size: 64, "
        "seq_length: 8, num_samples: '${oc.env:NOT_SET,4}'}"
    )
    _recipe_with(recipe, lines)
    assert train([str(recipe), "--dry-run"]) == 0
    shown = capfd.readouterr()
    assert "${oc.env:SCRATCH}" in shown.out
    assert "scratch-space" not in shown.out + shown.err
    assert "someone-here" not in shown.out + shown.err
    assert train([str(recipe)]) == 0
    assert (tmp_path / "scratch-space/runs/someone-here/LATEST").exists()


@pytest.mark.parametrize(
    ("tracker", "setting"),
    [
        ("tensorboard", "log_dir: ../elsewhere"),
        ("tensorboard", "log_dir: /tmp/elsewhere"),
        ("tensorboard", "log_dir: checkpoints/link"),
        ("tensorboard", ""),
        ("wandb", "dir: ."),
        ("mlflow", "tracking_uri: 'sqlite:///elsewhere.db'"),
        ("mlflow", "tracking_uri: 'file:///tmp/elsewhere'"),
    ],
)
def test_trackers_write_into_the_run_directory(
    tracker: str, setting: str, recipe: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "checkpoints"
    run.mkdir()
    (run / "link").symlink_to(tmp_path)
    (run / "tensorboard").symlink_to(tmp_path)
    _recipe_with(recipe, f"logging: {{trackers: {{{tracker}: {{{setting}}}}}}}")
    message = _refused(recipe, capfd)
    assert "outside of the run directory" in message or "out of the run directory" in message
    if tracker == "tensorboard" and setting:
        key, _, value = setting.partition(": ")
        assert (
            train([str(recipe), f"--logging.trackers.tensorboard.{key}={value}", "--dry-run"]) == 0
        )


def _command_lines() -> set[str]:
    found = set()
    for process in os.listdir("/proc"):
        if process.isdigit():
            try:
                found.add(Path("/proc", process, "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return found
