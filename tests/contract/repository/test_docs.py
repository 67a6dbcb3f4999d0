"""The guides are true: their files are written, their commands run, in the order of the page; links lead somewhere.

A fence ``yaml file=NAME`` (any language) is written to NAME; ``bash`` is run; ``bash norun=REASON`` is not, and says
why (underscores for spaces); ``bash press=Ctrl-C`` is stopped after a step; ``text`` and ``yaml`` without a file are
only shown. A comment ``uses: my-llama train.jsonl examples hub`` asks for a small model, data, this repository's
examples, a server with the Hub's HTTP API. A small model with the name of one on the Hub is preferred to it.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from automodel_ckpt import load_recipe
from tests.contract.repository.test_readme import (
    BIN,
    ROOT,
    make_chat_model,
    make_model,
    write_samples,
)
from tests.support.servers.command_server import CommandServer
from tests.support.servers.hub_server import HubServer, hub_server
from tools import features, make_reference

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GUIDES = sorted((DOCS / "guides").glob("*.md"))
FOLLOWED = {"library", "operations"}
"""The guides that `make test` follows. `make test-all` follows all: other tests have the commands with other data."""
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RECIPE_FILES = {".yaml", ".sbatch"}
VALIDATION = re.compile(
    r"(_target_: automodel_ckpt\.data\.python_docs\.language_modeling\n(?:  .*\n)*  split: validation\n)"
)
LARGEST = {
    "max_steps": 24,
    "ckpt_every_steps": 12,
    "global_batch_size": 4,
    "local_batch_size": 2,
    "max_samples": 64,
}
SIZES = re.compile(rf"\b({'|'.join(LARGEST)}): (\d+)")
FEWER_EPOCHS = re.compile(r"^(  num_epochs:) \d+$", re.MULTILINE)
"""A guide's own recipe trains for one epoch: how many there are is nothing that its commands show."""
SHOWN_ONLY = {"text", "yaml", "json", "toml"}


@dataclass(frozen=True)
class Block:
    language: str
    options: dict[str, str]
    body: str


def blocks(page: Path) -> list[Block]:
    found = FENCE.findall(page.read_text())
    return [
        Block(language, dict(o.split("=", 1) for o in options.split()), body)
        for language, options, body in found
    ]


MAKERS = {
    "my-llama": make_model,
    "HuggingFaceTB/SmolLM2-135M-Instruct": make_chat_model,
    "train.jsonl": write_samples,
}
HUB_COMMAND = """#!/bin/sh
# `ckpt` of the commands' server, which imported huggingface_hub with other variables.
exec env {variables} PYTHONPATH={root} python {root}/tests/support/servers/hub_command.py ckpt "$@"
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with hub_server() as running:
        yield running


def prepare(page: Path, directory: Path, hub: HubServer) -> None:
    makers = MAKERS | {"examples": copy_examples, "hub": lambda place: write_command(place, hub)}
    uses = re.search(r"<!-- uses: ([^>]*) -->", page.read_text())
    for thing in uses[1].split() if uses else ():
        makers[thing](directory / thing)


def write_command(place: Path, hub: HubServer) -> None:
    """A directory with a command `ckpt` that uses the server."""
    place.mkdir()
    variables = " ".join(f"{k}={v}" for k, v in hub.environment(str(place / "home")).items())
    (place / "ckpt").write_text(HUB_COMMAND.format(variables=variables, root=ROOT))
    (place / "ckpt").chmod(0o755)


def copy_examples(place: Path) -> None:
    """This repository's examples, with fewer and smaller steps, and fewer samples."""
    shutil.copytree(ROOT / "examples", place)
    for recipe in place.rglob("*.yaml"):
        text = VALIDATION.sub(r"\1  max_samples: 32\n", recipe.read_text())
        recipe.write_text(SIZES.sub(_smaller, text))


def _smaller(size: re.Match[str]) -> str:
    return f"{size[1]}: {min(int(size[2]), LARGEST[size[1]])}"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page.stem in FOLLOWED else pytest.mark.further)
        for page in GUIDES
    ],
    ids=lambda page: page.stem,
)
def test_a_guide_can_be_followed(
    page: Path, tmp_path: Path, commands: CommandServer, hub: HubServer
) -> None:
    prepare(page, tmp_path, hub)
    environment = {**os.environ, **commands.on_path(BIN), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{tmp_path / 'hub'}:{environment['PATH']}"
    for block in blocks(page):
        if "file" in block.options:
            file = tmp_path / block.options["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(FEWER_EPOCHS.sub(r"\1 1", block.body))
        elif "press" in block.options:
            assert block.options["press"] == "Ctrl-C"
            stop_after_a_step(block.body, tmp_path)
        elif block.language == "bash" and is_run(block):
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.body],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=170,
                check=False,
            )
            assert done.returncode == 0, f"{block.body}\n{done.stdout}\n{done.stderr}"
        elif block.language == "python":
            compile(textwrap.dedent(block.body), str(page), "exec")
        else:
            assert block.language in SHOWN_ONLY or block.options["norun"]


def is_run(block: Block) -> bool:
    """Whether a block is run: without ``norun``, and for other trainers where they are installed (`make trainers`)."""
    reason = block.options.get("norun")
    if reason in ("needs_trl", "needs_lightning"):
        return importlib.util.find_spec(reason.removeprefix("needs_")) is not None
    return reason is None


def stop_after_a_step(command: str, directory: Path) -> None:
    """Press Ctrl-C as a terminal does, which signals all processes of the command."""
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    words = ["bash", "-euo", "pipefail", "-c", command]
    process = subprocess.Popen(words, cwd=directory, env=environment, start_new_session=True)
    log = directory / "checkpoints/training.jsonl"
    while not (log.exists() and '"loss"' in log.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(120) == 75


def test_the_sections_of_recipes_that_pages_only_show_are_valid(tmp_path: Path) -> None:
    """Each snippet is put into a recipe of the page's kind of training, with validation data."""
    recipe = tmp_path / "recipe.yaml"
    target = {"_target_": "automodel_ckpt.data.text.text", "path": "x"}
    keys = vars(load_recipe({"model": {"from_pretrained": "x"}, "dataset": target}).config).keys()
    for page in PAGES:
        for block in blocks(page):
            shown = yaml.safe_load(block.body) if block.language == "yaml" else None
            is_section = isinstance(shown, dict) and set(shown) <= keys
            if not is_section or "file" in block.options:
                continue
            builder = {"_target_": "automodel_ckpt.data.text.text", "path": "x"}
            model = {"from_pretrained": "some/model"}
            kind = "llm_finetune"
            if page.stem == "pretrain":
                kind, model = "pretrain", {"from_config": {"model_type": "llama"}}
            if page.stem in ("vision-language-models", "audio"):
                kind, builder["_target_"] = "vlm_finetune", "automodel_ckpt.data.vlm.conversations"
            base = {
                "recipe": kind,
                "model": model,
                "dataset": builder,
                "validation_dataset": builder,
                "step_scheduler": {"max_steps": 1, "val_every_steps": 1},
            }
            recipe.write_text(json.dumps(base))
            shown_file = tmp_path / "shown.yaml"
            shown_file.write_text(f"extends: {recipe}\n{block.body}")
            load_recipe(shown_file)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.stem
)
def test_links_between_pages_lead_to_files_and_headings(page: Path) -> None:
    lost = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        file = page.parent / target if target else page
        if "://" in target or target.startswith("mailto:"):
            continue
        if not file.exists() or (anchor and anchor not in anchors(file)):
            lost.append(f"{target}#{anchor}")
    assert lost == []


def anchors(page: Path) -> set[str]:
    """The headings of a page as links to them are written."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_linked_from_the_front_page() -> None:
    front = (DOCS / "README.md").read_text()
    missing = [
        str(p.relative_to(DOCS))
        for p in PAGES
        if p.name != "README.md" and str(p.relative_to(DOCS)) not in front
    ]
    assert missing == []


def test_each_example_is_linked_from_the_front_page() -> None:
    front = (DOCS / "README.md").read_text()
    linked = {(DOCS / path).resolve() for path in re.findall(r"\]\((\.\./examples/[^)]+)\)", front)}
    examples = {path for path in (ROOT / "examples").rglob("*") if path.suffix in RECIPE_FILES}
    assert sorted(examples - linked) == []


def test_the_reference_is_what_the_code_says() -> None:
    old = [
        name
        for name, text in make_reference.pages().items()
        if (make_reference.REFERENCE / name).read_text() != text
    ]
    assert old == [], "run python -m tools.make_reference"


def test_every_test_and_campaign_that_a_guarantee_names_is_there() -> None:
    page = (DOCS / "guarantees.md").read_text()
    table = page[page.index("| event |") : page.index("## How it is measured")]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in lines if not line.startswith("| event ")]
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    campaigns = {*re.findall(r'"([\w-]+) --points', (ROOT / "Makefile").read_text())}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert len(rows) >= 20
    for event, *_, shown_by in rows:
        tests = set(re.findall(r"test_\w+\.py", shown_by))
        assert tests <= there, f"{event}: {tests - there}"
        ran = set(re.findall(r"`make (\w+)`", shown_by))
        assert ran <= targets, f"{event}: {ran - targets}"
        named = set(re.findall(r"`([a-z-]+)`", shown_by)) & campaigns
        assert tests or ran or named, event


def test_what_troubleshooting_quotes_is_what_the_program_says() -> None:
    """A symptom's words stand in the code or among the messages; … stands for what varies."""
    page = (DOCS / "troubleshooting.md").read_text()
    code = [*(ROOT / "automodel_ckpt").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
    said = re.sub(r'"\s*f?"|\s+', " ", " ".join(path.read_text() for path in code)).replace(
        "  ", " "
    )
    symptoms = [
        line.split("|")[1]
        for line in page.splitlines()
        if line.startswith("| ") and "symptom" not in line
    ]
    quoted = [
        part.strip(" ?,:")
        for text in symptoms
        for q in re.findall(r"`([^`]+)`", text)
        for part in q.split("…")
    ]
    missing = [part for part in quoted if len(part.split()) > 2 and part not in said]
    assert missing == []


def test_each_module_belongs_to_a_feature_and_the_page_has_its_row() -> None:
    rows = features.rows()
    others = [path for path in features.modules() if features.row_of(rows, path) is None]
    assert others == [], "add a pattern or a row to tools/features.txt"
    page = features.PAGE.read_text()
    assert [row.name for row in rows if f"| {row.name} | " not in page] == []
