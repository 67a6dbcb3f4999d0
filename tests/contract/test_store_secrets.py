"""Credentials of a store appear in no file, no output and no command line, however they were given."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest
from werkzeug.wrappers import Request, Response

from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.remote.store import Store, StoreError
from automodel_ckpt.cli.ckpt import main as ckpt
from automodel_ckpt.cli.train import main as train
from tests.support.object_store import object_store

SECRETS = ("Key-In-The-Environment", "secret-in-the-environment", "token-in-the-environment")
WORD = "secret-word"
RECIPE = """\
model:
  from_config: {model_type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
    intermediate_size: 16, vocab_size: 64}
dataset: {_target_: automodel_ckpt.data.mock.random_tokens, vocab_size: 64, seq_length: 8, num_samples: 16}
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
    words: str,
    recipe: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
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


def test_errors_of_the_library_are_shown_without_what_a_url_has_of_secrets() -> None:
    store = Store("memory://run")
    cause = OSError(5, f"http://user:{WORD}@host/a?signature={WORD} failed")
    error = RuntimeError(f"no answer from https://{WORD}@host/b")
    error.__cause__ = cause
    with pytest.raises(StoreError, match="https://host/b") as failure, store.reporting("read", "a"):
        raise error
    # The traceback of a program that uses the library.
    assert failure.value.__cause__ is not None
    assert WORD not in "".join(traceback.format_exception(failure.value))


def test_a_run_leaves_no_trace_of_the_credentials_in_its_environment(
    recipe: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
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
        run = RemoteRun(Store("s3://bucket/run"))
        content = b"".join(run.store.read(name) for name in run.store.sizes())
        assert run.pointed("LATEST") == "epoch_0_step_2"
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


def _command_lines() -> set[str]:
    found = set()
    for process in os.listdir("/proc"):
        if process.isdigit():
            try:
                found.add(Path("/proc", process, "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return found
