"""Adapters of a base at a revision of the Hub: trained, imported and merged with that revision's weights."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from automodel_ckpt.checkpoint import Manifest
from automodel_ckpt.cli.ckpt import main
from tests.support import ranks
from tests.support.runs.training import train, write_recipe
from tests.support.servers.hub_cache import write_repository

NAME = "org/twice"
ADAPTER = Path(__file__).parents[2] / "fixtures" / "trainer" / "adapter"
RECIPE = f"""\
model: {{from_pretrained: {NAME}, revision: v2}}
tokenizer: null
peft: {{r: 2, target_modules: ['*_proj']}}
dataset: {{_target_: tests.fixtures.tiny_training.Rows, num_samples: 4}}
optimizer: {{lr: 0.1}}
step_scheduler: {{global_batch_size: 4, local_batch_size: 4, max_steps: 1, ckpt_every_epochs: null}}
checkpoint: {{checkpoint_dir: RUN}}
"""


def write_revisions(cache: Path, second: Path) -> dict[str, Path]:
    """Write a repository whose branch v2 is the model *second*, and whose main branch has other weights."""
    first = shutil.copytree(second, cache / "first")
    weights = load_file(first / "model.safetensors")
    changed = {name: weight + 8 for name, weight in weights.items()}
    save_file(changed, first / "model.safetensors", metadata={"format": "pt"})
    return write_repository(cache, NAME, {"main": first, "v2": second})


def largest_change(merged: Path, base: Path) -> float:
    """Return the largest absolute difference between the weights of two models."""
    before = load_file(base / "model.safetensors")
    (file,) = merged.glob("*.safetensors")
    after = load_file(file)
    assert before.keys() == after.keys()
    differences = [(after[name] - before[name]).abs().max() for name in before]
    return float(torch.stack(differences).max())


@pytest.fixture
def bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The two branches of a repository in the Hub's cache: the base of the adapter is v2."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return write_revisions(tmp_path, ADAPTER / "base")


def test_an_adapter_is_merged_into_the_revision_that_the_recipe_names(
    tmp_path: Path, bases: dict[str, Path]
) -> None:
    recipe = write_recipe(tmp_path, RECIPE.replace("RUN", str(tmp_path / "run")))
    ranks.run(partial(train, recipe), 1, init=False)
    words = ["export", "--merge", str(tmp_path / "run" / "LATEST"), "-o", str(tmp_path / "merged")]
    assert main(words) == 0
    # Weights of the main branch differ by 8.
    assert 0 < largest_change(tmp_path / "merged", bases["v2"]) < 2


def test_a_resumed_run_continues_with_the_commit_of_the_base_that_it_started_with(
    tmp_path: Path, bases: dict[str, Path]
) -> None:
    run = tmp_path / "run"
    text = RECIPE.replace("RUN", str(run)).replace(", revision: v2", "")
    recipe = write_recipe(tmp_path, text)
    ranks.run(partial(train, recipe), 1, init=False)
    commit = bases["main"].name
    environment = Manifest.read(run / "LATEST").environment
    assert environment["base_commit"] == f"{NAME}@{commit}"
    adapter = json.loads((run / "LATEST/model/adapter_config.json").read_text())
    assert adapter["revision"] == commit

    # The branch gets other weights: a run with them would be refused, since their digest differs.
    reference = bases["main"].parents[1] / "refs/main"
    reference.write_text(bases["v2"].name)
    ranks.run(partial(train, recipe, "--step_scheduler.max_steps=2"), 1, init=False)
    assert Manifest.read(run / "LATEST").step == 2
    # Another revision is another base.
    other = ("--model.revision=v2", "--step_scheduler.max_steps=3")
    with pytest.raises(Exception, match="on another base model"):
        ranks.run(partial(train, recipe, *other), 1, init=False)
