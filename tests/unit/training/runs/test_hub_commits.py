"""The commits of what a recipe reads from the Hub: found wherever the recipe names something, recorded, used again."""

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.config.callables.prepare import check_targets
from automodel_ckpt.config.callables.trust import Trust
from automodel_ckpt.config.keys.model import InitFromSource
from automodel_ckpt.config.load import load_recipe
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.recipes.dpo import DPOFinetune
from automodel_ckpt.training.model.sections import preprocessor_options
from automodel_ckpt.training.parts import init_from
from automodel_ckpt.training.parts.preprocessors import find_preprocessor
from automodel_ckpt.training.resume import commits_of_run, hub_names, pin_base
from tests.support.models import tiny
from tests.support.servers.hub_server import HubServer, hub_server, using

RECIPE = """
recipe: dpo
model: {from_pretrained: org/base, revision: v1}
tokenizer: {from_pretrained: org/words}
processor: {from_pretrained: org/base}
dpo: {reference: org/reference, reference_revision: v1}
dataset:
  _target_: automodel_ckpt.data.mixture.mixture
  sources:
    first: {_target_: automodel_ckpt.data.preference.pairs, path: org/data, seq_length: 8}
    second: {_target_: datasets.load_dataset, path: org/data, revision: v1}
    local: {_target_: datasets.load_dataset, path: json, data_files: rows.json}
    missing: {_target_: automodel_ckpt.data.preference.pairs, path: rows.jsonl, seq_length: 8}
init_from:
  - {path: org/start}
  - {path: "file:///elsewhere"}
  - {path: PLACE/weights}
"""
MODELS = ("base", "words", "reference", "start")


def read(text: str, place: Path) -> RecipeConfig:
    file = place / "recipe.yaml"
    file.write_text(text.replace("PLACE", str(place)))
    return check_targets(load_recipe(file), Trust(())).config


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with hub_server() as running:
        yield running


@pytest.fixture
def hub(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Repositories with a branch v1, and a cache without any of them."""
    server.reset()
    for kind, names in (("model", MODELS), ("dataset", ("data",))):
        for name in names:
            repository = server.add(f"org/{name}", {"config.json": b"{}", "README.md": b""}, kind)
            repository.commit("v1", {"config.json": b"{}", "README.md": b"v1"}, name)
    with using(server, str(tmp_path / "home"), monkeypatch):
        yield server


def head(hub: HubServer, name: str, branch: str = "main", kind: str = "model") -> str:
    return hub.repository(f"org/{name}", kind).branches[branch]


def move(hub: HubServer, name: str, branch: str = "main", kind: str = "model") -> None:
    hub.repository(f"org/{name}", kind).commit(branch, {"config.json": b"[]"}, f"new {name}")


def revisions(config: Any) -> dict[str, str | None]:
    return {name.where: name.revision for name in hub_names(config)}


def test_all_names_of_a_recipe_get_the_commits_of_the_first_start(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "automodel_ckpt")
    config = read(RECIPE, tmp_path)
    first, second = "dataset.sources.first.path", "dataset.sources.second.path"
    asked = {
        "model.from_pretrained": "v1",
        "tokenizer.from_pretrained": None,
        # The processor is the model's own: it follows model.revision.
        "dpo.reference": "v1",
        "init_from.0.path": None,
        "init_from.2.path": None,
        first: None,
        second: "v1",
    }
    assert revisions(config) == asked
    with closing(tiny.checkpointer(tmp_path / "run")) as checkpointer:
        pinned = revisions(pin_base(config, checkpointer))
        expected = {
            "model.from_pretrained": head(hub, "base", "v1"),
            "tokenizer.from_pretrained": head(hub, "words"),
            "dpo.reference": head(hub, "reference", "v1"),
            "init_from.0.path": head(hub, "start"),
            "init_from.2.path": None,
            first: head(hub, "data", kind="dataset"),
            second: head(hub, "data", "v1", kind="dataset"),
        }
        assert pinned == expected
        words = f"tokenizer.from_pretrained: org/words at commit {head(hub, 'words')[:12]}"
        assert caplog.messages.count(words) == 1
        assert revisions(config) == asked
        assert checkpointer.notes["base_commit"] == f"org/base@{head(hub, 'base', 'v1')}"
        assert checkpointer.notes["base_revision"] == "v1"
        checkpointer.save({"model": nn.Linear(1, 1)}, step=1, epoch=0)
    for name in MODELS:
        for branch in ("main", "v1"):
            move(hub, name, branch)
    move(hub, "data", kind="dataset")
    with closing(tiny.checkpointer(tmp_path / "run")) as checkpointer:
        assert revisions(pin_base(config, checkpointer)) == expected
        assert f"{words} (recorded in the checkpoint)" in caplog.messages
        # Another revision, or another name, is not the one that was recorded.
        other = replace(config, model=replace(config.model, revision="main"))
        assert revisions(pin_base(other, checkpointer))["model.from_pretrained"] == head(
            hub, "base"
        )
        # A checkpoint of this run has the same record, also after a resume.
        assert "org/words@main" in checkpointer.notes["hub_commits"]


def resumed(hub: HubServer, text: str, tmp_path: Path) -> tuple[RecipeConfig, Checkpointer]:
    """A recipe that has saved a checkpoint, and the checkpointer of the next start."""
    config = read(text, tmp_path)
    with closing(tiny.checkpointer(tmp_path / "run")) as checkpointer:
        pin_base(config, checkpointer)
        checkpointer.save({"model": nn.Linear(1, 1)}, step=1, epoch=0)
    return config, tiny.checkpointer(tmp_path / "run")


def test_a_commit_that_is_gone_is_an_error_for_what_the_start_reads(
    hub: HubServer, tmp_path: Path
) -> None:
    text = "model: {from_pretrained: org/base}\ninit_from: {path: org/start}\n"
    text += "tokenizer: {from_pretrained: org/words}\n"
    text += "dataset: {_target_: automodel_ckpt.examples.data.mock.random_tokens}\n"
    config, checkpointer = resumed(hub, text, tmp_path)
    with closing(checkpointer):
        for name in ("start", "words"):
            # As after a removal and a new upload.
            hub.repository(f"org/{name}").commits.clear()
            move(hub, name)
            if name == "start":
                # A resumed run does not read it, and a dry run of it neither.
                pinned = revisions(pin_base(config, checkpointer))
                checkpoint = replace(config.checkpoint, checkpoint_dir=str(tmp_path / "run"))
                recorded = commits_of_run(replace(config, checkpoint=checkpoint))
                assert revisions(pin_base(config, recorded=recorded)) == pinned
        with pytest.raises(RecipeError, match="no longer has the commit") as caught:
            pin_base(config, checkpointer)
    assert "set tokenizer.revision to a commit" in str(caught.value)


def test_names_are_read_at_their_revisions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """tokenizer.revision, processor.revision, init_from.revision, dpo.reference_revision, kto.reference_revision."""
    config = read(RECIPE, tmp_path)
    config.tokenizer.revision = config.processor.revision = "v2"
    for key in ("tokenizer", "processor"):
        name, where = find_preprocessor(config, key)  # type: ignore[arg-type]
        assert name is not None
        assert preprocessor_options(config, name, where).revision == "v2"

    found = []
    monkeypatch.setattr(init_from, "fetched_directory", lambda *given: found.append(given))
    with pytest.raises(RecipeError, match="cannot be fetched"):
        init_from._open(InitFromSource("org/start", "v2"), "init_from.0", None, fetches=True)
    assert found == [("org/start", "v2")]

    recipe = DPOFinetune(config, config_yaml="")
    built: list[RecipeConfig] = []
    recipe.build_trainable = lambda config, is_trained: built.append(config)  # type: ignore[assignment,misc,return-value]
    recipe.build_reference()
    assert (built[0].model.from_pretrained, built[0].model.revision) == ("org/reference", "v1")
