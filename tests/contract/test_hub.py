"""The Hugging Face Hub as users of the commands see it: real processes, and a local server with the Hub's HTTP API."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.command_server import CommandServer
from tests.support.servers.hub_server import TOKEN, HubServer, hub_server

ROOT = Path(__file__).parents[2]

GATED = """
model: {from_pretrained: org/gated}
tokenizer: null
dataset: {_target_: automodel_ckpt.examples.data.mock.random_tokens}
step_scheduler: {max_steps: 1}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with hub_server() as running:
        yield running


TRAIN = ("python", "-m", "tests.support.servers.hub_command", "ckpt-train")


def variables(of_hub: dict[str, str]) -> dict[str, str]:
    """The environment of a command that uses the server."""
    return {**os.environ, **of_hub, "PYTHONPATH": str(ROOT)}


def test_a_gated_model_ends_the_run_after_one_request(
    server: HubServer, commands: CommandServer, tmp_path: Path
) -> None:
    server.reset()
    server.add("org/gated", {"config.json": b"{}"}, gated="manual")
    (tmp_path / "recipe.yaml").write_text(GATED)
    here = variables(server.environment(str(tmp_path / "home"), token=None))
    done = commands.run(*TRAIN, "recipe.yaml", cwd=tmp_path, env=here)
    assert done.returncode == 2
    # One problem, and nothing before it.
    assert len(done.stderr.splitlines()) == 4
    assert f"request access at {server.endpoint}/org/gated, then `hf auth login`" in done.stderr
    assert "Retrying" not in done.stderr
    requests = [each for each in server.requests if "/org/gated" in each]
    assert requests == ["HEAD /org/gated/resolve/main/config.json"]


BASE = ROOT / "tests/fixtures/trainer/adapter/base"
TRAINED = """
model: {from_pretrained: org/base, revision: v1}
tokenizer: null
dataset: &data {_target_: automodel_ckpt.examples.data.mock.random_tokens,
    vocab_size: 32, seq_length: 8, num_samples: 8}
validation_dataset: *data
optimizer: {lr: 0.01}
"""
FULL = (
    TRAINED
    + """
step_scheduler: {global_batch_size: 4, local_batch_size: 2, max_steps: 2, ckpt_every_steps: 1}
checkpoint: {checkpoint_dir: full}
hub: {repo: org/full, push: every, required: true}
"""
)
LORA = (
    TRAINED
    + """
step_scheduler: {global_batch_size: 4, local_batch_size: 2, max_steps: 2}
peft: {r: 2, target_modules: ['*_proj']}
checkpoint: {checkpoint_dir: lora}
hub: {repo: org/lora, private: false}
"""
)
LOADED = """
import sys
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

tokens = torch.arange(8)[None]
full = AutoModelForCausalLM.from_pretrained("org/full")
step = AutoModelForCausalLM.from_pretrained("org/full", revision="step-1")
local = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert torch.equal(full(tokens).logits, local(tokens).logits)
assert not torch.equal(full(tokens).logits, step(tokens).logits)
adapted = AutoPeftModelForCausalLM.from_pretrained("org/lora")
base = AutoModelForCausalLM.from_pretrained("org/base", revision="v1")
assert not torch.equal(adapted(tokens).logits, base(tokens).logits)
"""


@pytest.mark.slow
@pytest.mark.further
def test_models_are_uploaded_while_they_train_and_loaded_by_their_name(
    server: HubServer, commands: CommandServer, tmp_path: Path
) -> None:
    server.reset()
    base = {path.name: path.read_bytes() for path in BASE.iterdir()}
    base["README.md"] = b"---\nlicense: apache-2.0\n---\n"
    repository = server.add("org/base", {"config.json": b"{}"})
    repository.commit("v1", base, "weights")
    environment = server.environment(str(tmp_path / "home"))
    here = variables(environment)
    commit = repository.branches["v1"]
    for name, text in (("full", FULL), ("lora", LORA)):
        (tmp_path / f"{name}.yaml").write_text(text)
        done = commands.run(*TRAIN, f"{name}.yaml", "-v", cwd=tmp_path, env=here)
        assert done.returncode == 0, done.stderr
        assert f"base model: org/base at commit {commit[:12]}" in done.stderr + done.stdout
        assert TOKEN not in done.stderr + done.stdout
    full, lora = server.repository("org/full"), server.repository("org/lora")
    assert full.branches.keys() == {"main", "step-1", "step-2"}
    assert full.private and not lora.private
    card = full.files()["README.md"].decode()
    assert "license: apache-2.0" in card and "base_model: org/base" in card
    assert str(tmp_path) not in card + lora.files()["README.md"].decode()
    settings = json.loads(lora.files()["adapter_config.json"])
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("org/base", commit)
    assert TOKEN not in (tmp_path / "full/LATEST/config.yaml").read_text()

    (tmp_path / "loaded.py").write_text(LOADED)
    export = tmp_path / "full/LATEST/model/consolidated"
    # A new process, which reads the variables of the Hub as those of users do.
    command = [sys.executable, "loaded.py", str(export)]
    done = subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
