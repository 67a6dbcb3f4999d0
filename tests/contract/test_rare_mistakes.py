"""Mistakes that no other test makes, through the command lines: each message has the place and the value."""

import struct
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from automodel_ckpt.cli.ckpt import main as ckpt
from automodel_ckpt.cli.train import main as train

DOCS = "automodel_ckpt.examples.data.python_docs"
RECIPE = f"""\
model: {{from_config: {{model_type: llama, vocab_size: 300}}}}
tokenizer: {{_target_: {DOCS}.train_tokenizer, vocab_size: 300}}
dataset: {{_target_: {DOCS}.language_modeling}}
step_scheduler: {{global_batch_size: 4, max_steps: 1}}
"""
Capture = pytest.CaptureFixture[str]


def problem(capsys: Capture, *words: str | Path) -> str:
    """What a start that ends with code 2 prints."""
    assert train([str(word) for word in words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        ("raise MemoryError", "out of memory"),
        ("open('x' * 300)", "cannot be imported: OSError"),
        ("class Recipes: ...", "did you mean Recipes"),
        (
            "class Recipe:\n    setup = run = close = print\n    Config = dict",
            "its Config is a RecipeConfig",
        ),
    ],
)
def test_code_of_a_recipe_that_is_none(
    tmp_path: Path, capsys: Capture, code: str, said: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text(code)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"recipe: own.py:Recipe\n{RECIPE}")
    assert said in problem(capsys, "--dry-run", "--trust", file, recipe)


SECTION = """
from dataclasses import dataclass, field

from automodel_ckpt.recipes.llm_finetune import LLMFinetune

@dataclass
class Warmth:
    degrees: int = 20

    def __post_init__(self):
        if self.degrees > 40:
            raise ValueError("no warmer than 40")

@dataclass
class WarmConfig(LLMFinetune.Config):
    warmth: Warmth = field(default_factory=Warmth)

class Mine(LLMFinetune):
    Config = WarmConfig
"""


def test_a_section_of_a_custom_recipe_may_check_itself(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SECTION)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"recipe: mine.py:Mine\nwarmth: {{degrees: 50}}\n{RECIPE}")
    said = problem(capsys, "--dry-run", "--trust", file, recipe)
    assert "warmth: no warmer than 40" in said
    assert f"{recipe}:2" in said


def test_names_that_lead_nowhere(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "lazy_parts.py"
    module.write_text("def __getattr__(name):\n    raise RuntimeError(name)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    for name, said in (
        ("nowhere_at_all.thing", "package nowhere_at_all not found"),
        ("lazy_parts.Thing", "Thing cannot be imported: RuntimeError"),
    ):
        trust = name.partition(".")[0]
        words = ("--dry-run", "--trust", trust, recipe, f"--dataset._target_={name}")
        assert said in problem(capsys, *words)


def test_a_row_whose_text_is_damaged(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "rows.parquet"
    # Parquet's reader does not check that text is UTF-8.
    offsets = pa.py_buffer(struct.pack("<2i", 0, 2))
    damaged = pa.StringArray.from_buffers(1, offsets, pa.py_buffer(b"\xff\xfe"))
    parquet.write_table(pa.table({"text": damaged}), path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    data = f"--dataset={{_target_: automodel_ckpt.data.text.text, path: {path}}}"
    said = problem(capsys, "--show-samples", "1", recipe, data)
    assert "cannot be read" in said
    assert str(path) in said


@pytest.mark.parametrize(
    ("words", "said"),
    [(["pin"], "no checkpoint found"), (["prune", "--keep-last", "1"], "no checkpoints found")],
)
def test_a_directory_without_checkpoints(
    tmp_path: Path, capsys: Capture, words: list[str], said: str
) -> None:
    assert ckpt([*words, str(tmp_path)]) == 3
    assert said in capsys.readouterr().err
