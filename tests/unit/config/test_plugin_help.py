"""Help on one section, key or builder, read from the source without importing what it describes."""

import subprocess
import sys

import pytest

from automodel_ckpt.cli.train import main
from automodel_ckpt.config.callables.allowlist import ALLOWED
from automodel_ckpt.config.help.listing import topic_text
from automodel_ckpt.config.help.plugin_help import builders_of, signature
from automodel_ckpt.config.other_names import OTHER_NAMES
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import keys_of
from automodel_ckpt.errors import EXIT_DONE, EXIT_USAGE, RecipeError

SECTIONS = [key for key in keys_of(RecipeConfig) if "." not in key]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_has_a_help_text_with_all_of_its_keys(section: str) -> None:
    text = topic_text(section)
    for key in keys_of(RecipeConfig):
        if key.startswith(f"{section}."):
            assert f"  {key}  [" in text
    sentences = [line.strip() for line in text.splitlines() if "[" not in line]
    assert max(len(line) for line in sentences) <= 100
    # The source of a text of several lines is indented.
    assert not [line for line in sentences if "  " in line]


def test_help_fits_on_a_screen_and_help_all_has_every_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == EXIT_DONE
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    # Wide enough for a sentence about each key.
    assert any(line.endswith("  0.0001        Peak learning rate") for line in lines)
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["--help", "all"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert all(f"  {key}  [" in text for key in keys_of(RecipeConfig) if "." in key)
    texts = [line for line in text.splitlines()[2:] if line.startswith("      ")]
    assert max(map(len, texts)) <= 70


def test_every_argument_of_a_data_builder_is_described() -> None:
    builders = list(builders_of("dataset"))
    assert len(builders) > 10
    for builder in builders:
        assert builder.summary, builder.name
        text = topic_text(f"dataset.{builder.short_name}")
        for argument in builder.arguments:
            is_in_text = f"*{argument.name}*" in f"{builder.summary} {builder.text}"
            assert argument.text or is_in_text, (builder.name, argument.name)
            assert f"  dataset.{argument.name}  [{argument.kind}; " in text


def test_a_builder_shows_defaults_as_they_are_written_in_a_recipe() -> None:
    text = topic_text("dataset.messages")
    assert "dataset.path  [text or a list; required]" in text
    assert "dataset.learn  [all or last; default all]" in text
    assert "dataset.mask_reasoning  [true or false; default false]" in text
    assert "dataset.shuffle_block  [a whole number; default 1000]" in text
    assert "tokenizer  [" not in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--help", "optimizer.lr"], "optimizer.lr  [a number; default 0.0001]"),
        (["--help=seed"], "seed  [a whole number; default 42]"),
        (["recipe.yaml", "--help"], "usage: ckpt-train"),
        (["--help", "recipe.yaml"], "usage: ckpt-train"),
        (["--help", "--seed", "3"], "usage: ckpt-train"),
    ],
)
def test_help_takes_a_topic_and_no_recipe(
    capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert main(words) == EXIT_DONE
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("topic", "meant"),
    [
        ("chekpoint", "checkpoint"),
        ("optimizer.lrr", "optimizer.lr"),
        ("dataset.message", "messages"),
    ],
)
def test_an_unknown_topic_is_an_error_that_names_a_similar_one(
    capsys: pytest.CaptureFixture[str], topic: str, meant: str
) -> None:
    assert main(["--help", topic]) == EXIT_USAGE
    assert meant in capsys.readouterr().err
    with pytest.raises(RecipeError, match="there is no help on this topic"):
        topic_text(topic)


def test_help_on_a_builder_imports_neither_torch_nor_the_builder() -> None:
    code = (
        "import sys; from automodel_ckpt.cli.train import main; main(['--help', 'dataset.messages']); "
        "sys.exit('torch' in sys.modules or 'automodel_ckpt.data.chat' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0


def arguments_of_data_builders() -> set[str]:
    names: set[str] = set()
    for entry in ALLOWED["dataset"]:
        names |= set(signature(getattr(entry, "name", "")) or ())
    return names


def test_every_counterpart_is_a_key_or_an_argument_of_a_data_builder() -> None:
    known = set(keys_of(RecipeConfig))
    known |= {f"dataset.{name}" for name in arguments_of_data_builders()}
    for name, counterpart in OTHER_NAMES.items():
        assert set(counterpart.keys) <= known, name
        assert counterpart.keys or counterpart.note, name
