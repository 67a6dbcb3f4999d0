"""Exceptions of the user's code are reported with their location and message. Ours stay internal errors."""

import contextlib
import io
import os
import re

import pytest

from automodel_ckpt.cli.train import main
from automodel_ckpt.errors import EXIT_INTERNAL, EXIT_USAGE
from tests.support import ranks
from tests.support.runs.training import RECIPE

OWN = """
import sys

import torch

from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.loop import TrainingLoop


def rows(fault: str):
    return first_of(fault)


def first_of(fault):
    if fault == "exit":
        sys.exit("no rows")
    if fault == "library":
        torch.zeros(2) @ torch.zeros(3)
    return {}[fault]


class Broken(torch.nn.Embedding):
    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids.float())


class Silent(torch.nn.Embedding):
    def forward(self, input_ids, attention_mask=None):
        pass


class BuildFails(LLMFinetune):
    def build(self):
        self.rows = self.nothing


class FailingLoop(TrainingLoop):
    def step(self, batch, control):
        assert batch is None, "a batch came"


class StepFails(LLMFinetune):
    loop_class = FailingLoop


class MisledLoop(TrainingLoop):
    def step(self, batch, control):
        return super().step(None, control)


class StepMisled(LLMFinetune):
    loop_class = MisledLoop


class ForgetfulLoop(TrainingLoop):
    def step(self, batch, control):
        super().step(batch, control)


class StepForgets(LLMFinetune):
    loop_class = ForgetfulLoop


class BuildsNothing(LLMFinetune):
    def build(self):
        self.rows = []


class NoOptimizer(LLMFinetune):
    def build_optimizer(self):
        pass


class NoLoop(LLMFinetune):
    loop_class = dict
"""
BUILDER = "--dataset={_target_: own.rows, fault: %s}"
CASES = {
    "a builder": (
        BUILDER % "x",
        EXIT_USAGE,
        r"own.py:\d+ in first_of, called at .*own.py:\d+ in rows\n  value:  KeyError: 'x'",
    ),
    "a builder that ends": (BUILDER % "exit", EXIT_USAGE, r"in first_of[\s\S]*SystemExit: no rows"),
    "what a builder calls": (
        BUILDER % "library",
        EXIT_USAGE,
        r"in first_of[\s\S]*RuntimeError: inconsistent tensor",
    ),
    "a model": (
        "--model={_target_: own.Broken, num_embeddings: 304, embedding_dim: 2}",
        EXIT_INTERNAL,
        r"own.py:\d+ in forward[\s\S]*Expected tensor",
    ),
    "a recipe at its start": (
        "--recipe=own.py:BuildFails",
        EXIT_USAGE,
        r"in build[\s\S]*no attribute 'nothing'",
    ),
    "a recipe in a step": (
        "--recipe=own.py:StepFails",
        EXIT_INTERNAL,
        r"in step[\s\S]*AssertionError: a batch came",
    ),
}


WRONG_PARTS = {
    "no logits": (
        "--model={_target_: own.Silent, num_embeddings: 304, embedding_dim: 2}",
        r"the model returns no logits[\s\S]*NoneType",
    ),
    "no result of a step": (
        "--recipe=own.py:StepForgets",
        r"step\(\) must return[\s\S]*ForgetfulLoop\.step[\s\S]*super\(\)\.step",
    ),
    "no model": ("--recipe=own.py:BuildsNothing", r"created no model[\s\S]*super\(\)\.build\(\)"),
    "no optimizer": (
        "--recipe=own.py:NoOptimizer",
        r"build_optimizer\(\) must return a torch\.optim\.optimizer\.Optimizer[\s\S]*NoneType",
    ),
    "no loop": ("--recipe=own.py:NoLoop", r"loop_class of the recipe must be a subclass of Trai"),
}


def said_of(override: str) -> tuple[int, str]:
    """Exit code and what the user reads of a run in this directory."""
    words = [override, "--step_scheduler.max_steps=1", "--checkpoint.enabled=false"]
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        code = main(["recipe.yaml", *words, "--trust", "own", "--trust", "own.py"])
    # Of the log, what begins with the error.
    lines = re.sub(r"^[\d-]+ [\d:]+ ", "", text.getvalue(), flags=re.MULTILINE)
    begin = re.search(r"^(error: |Traceback)", lines, re.MULTILINE)
    assert begin is not None, lines
    return code, lines[begin.start() :]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    directory = tmp_path_factory.mktemp("own")
    (directory / "recipe.yaml").write_text(RECIPE)
    (directory / "own.py").write_text(OWN)
    (directory / "unreadable.py").write_text("import torch\ntorch.nothing\n")
    misled = {
        **{name: override for name, (override, _) in WRONG_PARTS.items()},
        "ours": "--recipe=own.py:StepMisled",
        "an import": "--dataset={_target_: unreadable.rows}",
    }

    def all_of_them() -> dict[str, tuple[int, str]]:
        os.chdir(directory)
        os.environ["AUTOMODEL_CKPT_TRUST"] = "unreadable"
        overrides = {name: override for name, (override, _, _) in CASES.items()} | misled
        return {name: said_of(override) for name, override in overrides.items()}

    (found,) = ranks.run(all_of_them, 1, init=False)
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_own_code_raises_is_told_with_its_place_and_words(
    name: str, said: dict[str, tuple[int, str]]
) -> None:
    _, code, pattern = CASES[name]
    assert said[name][0] == code
    assert re.match(r"error: user code failed\n  where:  ", said[name][1]), said[name][1]
    assert re.search(pattern, said[name][1]), said[name][1]


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_parts_that_own_code_does_not_supply_are_named(
    name: str, said: dict[str, tuple[int, str]]
) -> None:
    code, text = said[name]
    assert code == EXIT_USAGE and text.startswith("error: "), text
    assert re.search(WRONG_PARTS[name][1], text), text


def test_what_own_code_has_us_raise_is_an_internal_error_with_its_traceback(
    said: dict[str, tuple[int, str]],
) -> None:
    code, text = said["ours"]
    assert code == EXIT_INTERNAL
    assert text.startswith("Traceback") and "\ninternal error: AttributeError" in text


def test_a_module_that_cannot_be_imported_is_told_with_the_line(
    said: dict[str, tuple[int, str]],
) -> None:
    code, text = said["an import"]
    assert code == EXIT_USAGE
    assert re.search(
        r"unreadable cannot be imported: AttributeError: [\s\S]*fix the error at .*unreadable.py:2 in <module>",
        text,
    ), text
