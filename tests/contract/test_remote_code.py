"""Code from a model's repository runs only if the recipe requests it and the command line trusts it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.remote_code import make_remote_model
from tests.support.servers.command_server import CommandServer

RECIPE = """\
seed: 3
model: {from_pretrained: base, trust_remote_code: true}
dataset:
  _target_: automodel_ckpt.examples.data.python_docs.language_modeling
  seq_length: 16
  max_samples: 8
step_scheduler: {global_batch_size: 4, local_batch_size: 2, max_steps: 2, ckpt_every_epochs: null}
"""
TRUST = ("--trust", "trust_remote_code")
LOAD = """\
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
directory = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
print(type(model).__name__, type(model.config).__name__, type(tokenizer).__name__)
"""


class Folder:
    """A working directory with a recipe and a model, and the commands that run in it."""

    def __init__(self, path: Path, commands: CommandServer, model_type: str = "twin") -> None:
        self.path = path
        self._commands = commands
        make_remote_model(path / "base", model_type=model_type)
        (path / "recipe.yaml").write_text(RECIPE)

    def run(self, *words: str) -> Any:
        environment = {**os.environ, "RAN_LOG": str(self.path / "ran")}
        return self._commands.run(*words, cwd=self.path, env=environment)

    def train(self, *words: str) -> Any:
        return self.run("ckpt-train", "recipe.yaml", *words)

    @property
    def has_run_code(self) -> bool:
        return (self.path / "ran").exists()


@pytest.fixture
def folder(tmp_path: Path, commands: CommandServer) -> Folder:
    return Folder(tmp_path, commands)


@pytest.mark.timeout(180)
def test_the_recipe_alone_runs_no_code_of_a_repository(folder: Folder) -> None:
    for words in ((), ("--dry-run",), ("--model.trust_remote_code=true",)):
        done = folder.train(*words)
        assert done.returncode == 2, done.stdout + done.stderr
        # The tokenizer is read first; both are those of the model.
        assert "code from its repository, which is not trusted" in done.stderr
        assert "--trust trust_remote_code" in done.stderr
    done = folder.train("--model.trust_remote_code=false", *TRUST)
    assert done.returncode == 2
    assert "set model.trust_remote_code: true" in done.stderr
    done = folder.train("--tokenizer=null", "--dry-run")
    assert "model type twin, which transformers does not include" in done.stderr
    assert done.returncode == 2
    assert not folder.has_run_code


@pytest.mark.timeout(180)
def test_a_trusted_model_trains_resumes_and_its_export_carries_its_code(folder: Folder) -> None:
    counted = folder.train("--dry-run", *TRUST)
    assert counted.returncode == 0, counted.stdout + counted.stderr
    assert folder.has_run_code
    done = folder.train("--nproc-per-node=2", *TRUST)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "running code from the repository base" in done.stdout + done.stderr
    untrusted = folder.train("--step_scheduler.max_steps=3")
    assert untrusted.returncode == 2
    resumed = folder.train("--step_scheduler.max_steps=3", *TRUST)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "Loading checkpoint" in resumed.stdout + resumed.stderr
    export = folder.path / "checkpoints" / "LATEST" / "model" / "consolidated"
    assert (export / "modeling_twin.py").is_file()
    (folder.path / "load.py").write_text(LOAD)
    loaded = folder.run("python", "load.py", str(export))
    assert loaded.stdout.split() == ["TwinForCausalLM", "TwinConfig", "TwinTokenizer"]


@pytest.mark.timeout(180)
def test_a_fresh_base_and_its_exports_carry_the_code_too(folder: Folder) -> None:
    (folder.path / "load.py").write_text(LOAD)
    words = ("--model.from_pretrained=null", "--model.from_config=base", *TRUST)
    tokenizer = (
        "--tokenizer._target_=transformers.AutoTokenizer.from_pretrained",
        "--tokenizer.pretrained_model_name_or_path=base",
        "--tokenizer.trust_remote_code=true",
    )
    done = folder.train(*words, *tokenizer)
    assert done.returncode == 0, done.stdout + done.stderr
    export = folder.path / "checkpoints" / "LATEST" / "model" / "consolidated"
    loaded = folder.run("python", "load.py", str(export))
    assert loaded.stdout.split()[0] == "TwinForCausalLM", loaded.stderr
    adapters = ("--peft.r=2", "--peft.base_dir=fresh", "--checkpoint.checkpoint_dir=adapters")
    done = folder.train(*words, *tokenizer, *adapters)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = folder.run("python", "load.py", "fresh")
    assert loaded.stdout.split()[0] == "TwinForCausalLM", loaded.stderr


@pytest.mark.timeout(120)
def test_the_code_of_a_type_that_transformers_includes_is_not_used(
    tmp_path: Path, commands: CommandServer
) -> None:
    folder = Folder(tmp_path, commands, model_type="llama")
    config = json.loads((tmp_path / "base" / "tokenizer_config.json").read_bytes())
    del config["auto_map"]
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(config))
    for words in ((), TRUST):
        done = folder.train("--step_scheduler.max_steps=1", "--checkpoint.enabled=false", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "model.trust_remote_code has no effect" in done.stdout + done.stderr
        assert "LlamaForCausalLM" in done.stdout + done.stderr
    assert not folder.has_run_code
