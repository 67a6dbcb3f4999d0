"""The JSON schema for editors accepts the recipes that the program accepts, and finds ordinary mistakes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from automodel_ckpt import load_recipe
from automodel_ckpt.cli.train import main
from automodel_ckpt.errors import EXIT_DONE
from tests.support.runs.printed import output

jsonschema: Any = pytest.importorskip("jsonschema")
ROOT = Path(__file__).parents[3]
FILE_NAME = "recipe.schema.json"
RECIPE = """\
model: {from_pretrained: some/model}
dataset:
  _target_: automodel_ckpt.data.chat.messages
  path: train.jsonl
"""


class Loader(yaml.SafeLoader):
    """Reads numbers as YAML 1.2, as editors do: PyYAML reads 1e-5 as text."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads(output("--schema"))
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def mistakes(validator: Any, text: str) -> list[str]:
    content = yaml.load(text, Loader)
    return [str(error.message) for error in validator.iter_errors(content)]


EXAMPLES = [
    path
    for path in sorted((ROOT / "examples").rglob("*.yaml"))
    if path.parent.name not in ("kubernetes", "skypilot")
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_valid_and_names_the_schema(validator: Any, path: Path) -> None:
    text = path.read_text()
    assert text.startswith(f"# yaml-language-server: $schema={FILE_NAME}\n")
    assert mistakes(validator, text) == []
    # With every default, in canonical YAML.
    assert mistakes(validator, load_recipe(path).to_yaml()) == []


@pytest.mark.parametrize(
    "text",
    [
        "seed: ${oc.env:SEED}\n",
        "extends: base.yaml\n",
        "extends: [a.yaml, b.yaml]\n",
        "peft: none\n",
        "clip_grad_norm: None\n",
        "optimizer: {_target_: torch.optim.SGD, lr: 1e-3, momentum: 0.9}\n",
        "optimizer: {lr: 1, groups: [{params: ['*'], lr: 2}]}\n",
        "checkpoint:\n",
        "recipe: mine.py:Mine\nmy_section: {x: 1}\n",
        "validation_dataset: ${dataset}\n",
        "model: {from_config: {model_type: llama}, freeze: ['*.x']}\n",
    ],
)
def test_what_the_program_accepts_is_valid(validator: Any, text: str) -> None:
    assert mistakes(validator, RECIPE + text if "model:" not in text else text) == []


@pytest.mark.parametrize(
    "text",
    [
        "optimizer: {lrr: 1}\n",
        "learning_rate: 1e-4\n",
        "seed: many\n",
        "distributed: {strategy: fsdp3}\n",
        "checkpoint: {keep_last: [1]}\n",
        "peft: {r: 8, dropout: high}\n",
        "dataset: {path: x}\n",
    ],
)
def test_ordinary_mistakes_are_found(validator: Any, text: str) -> None:
    assert mistakes(validator, "model: {from_pretrained: x}\n" + text)


def test_every_key_has_a_description(validator: Any) -> None:
    schema = validator.schema
    for section in [schema, *schema["definitions"].values()]:
        for name, property_ in section.get("properties", {}).items():
            assert property_.get("description") or "$ref" in str(property_), name


def test_the_schema_is_printed_and_copied_with_an_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--schema"]) == EXIT_DONE
    printed = capsys.readouterr().out
    assert main(["--copy", "tiny_llama_lora", str(tmp_path)]) == EXIT_DONE
    assert (tmp_path / FILE_NAME).read_text() == printed
    assert json.loads(printed)["title"]
