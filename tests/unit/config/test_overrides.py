"""The command line of ckpt-train: every form of flag and override, in any order."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from automodel_ckpt.cli.train import main
from automodel_ckpt.errors import RecipeError
from tests.support.runs.printed import load

RECIPE = """\
model: {from_pretrained: some/model, freeze: [a, b]}
dataset: {_target_: my.data, columns: [x, y]}
optimizer: {_target_: torch.optim.AdamW, lr: 1e-4}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def arguments(recipe: Path, *words: str) -> Any:
    """The arguments of the data set with overrides."""
    return {**load(recipe, *words).config.dataset.kwargs, "columns": ...}


def test_a_value_follows_after_a_space_or_an_equals_sign(recipe: Path) -> None:
    found = arguments(recipe, "--dataset.a.b", "v", "--dataset.c.d=w", "--dataset.e.f=x=y")
    assert found == {"a": {"b": "v"}, "c": {"d": "w"}, "e": {"f": "x=y"}, "columns": ...}


def test_a_negative_number_is_a_value(recipe: Path) -> None:
    found = arguments(recipe, "--dataset.x", "-2e-3", "--dataset.y", "-1")
    assert found == {"x": -2e-3, "y": -1, "columns": ...}


@pytest.mark.parametrize(
    "key",
    [
        "checkpoint.enabled",
        "deterministic",
        "model.activation_checkpointing",  # true, false or a word
    ],
)
def test_a_bare_boolean_takes_the_next_word_only_if_it_reads_as_a_boolean(
    recipe: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    flag, section, name = f"--{key}", *("." + key).rsplit(".", 1)
    for words, value in (
        ([flag, str(recipe)], True),
        ([flag, "off", str(recipe)], False),
        ([str(recipe), flag], True),
        ([flag, "--seed=1", str(recipe)], True),
    ):
        assert main(["--print-config", *words]) == 0
        shown = yaml.safe_load(capsys.readouterr().out)
        assert (shown[section[1:]] if section else shown)[name] is value


def test_a_bare_keyword_of_a_plug_in_is_true_and_takes_the_next_word(recipe: Path) -> None:
    assert arguments(recipe, "--dataset.path", "data.yaml")["path"] == "data.yaml"
    assert arguments(recipe, "--dataset.streaming", "--seed", "1")["streaming"] is True


def test_the_order_of_flags_recipe_and_overrides_is_free(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [["--nproc-per-node", "2"], [str(recipe)], ["--seed", "1"], ["--checkpoint.enabled"]]
    shown = []
    for order in (parts, parts[::-1]):
        assert main(["--print-config", *(word for part in order for word in part)]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "--checkpoint.enabled" in shown[0]


def test_a_list_is_replaced_or_changed_item_by_item(recipe: Path) -> None:
    assert load(recipe, "--model.freeze", "[c]").config.model.freeze == ["c"]
    assert load(recipe, "--model.freeze.0", "c").config.model.freeze == ["c", "b"]
    assert load(recipe, "--model.freeze.2", "c").config.model.freeze == ["a", "b", "c"]
    assert load(recipe, "--model.freeze=[c, d]", "--model.freeze.1=e").config.model.freeze == [
        "c",
        "e",
    ]
    assert load(recipe, "--dataset.columns.1=z").config.dataset.kwargs["columns"] == ["x", "z"]


def test_an_item_of_a_default_list_can_be_changed(recipe: Path) -> None:
    words = ["--optimizer={lr: 1}", "--optimizer.betas.0=0.5"]
    assert load(recipe, *words).config.optimizer.betas == (0.5, 0.999)
    assert load(
        recipe, "--checkpoint.allow_missing_state.0=x"
    ).config.checkpoint.allow_missing_state == ["x"]


@pytest.mark.parametrize(
    "key", ["model.freeze.7", "model.freeze.x", "checkpoint.allow_missing_state.3"]
)
def test_an_item_beyond_the_list_is_refused(recipe: Path, key: str) -> None:
    with pytest.raises(RecipeError, match=key.rpartition(".")[0]):
        load(recipe, f"--{key}=1")


def test_a_whole_section_may_be_inline_yaml(recipe: Path) -> None:
    loaded = load(
        recipe, "--lr_scheduler", "{name: linear, warmup_steps: 5}", "--lr_scheduler.warmup_steps=6"
    )
    assert (loaded.config.lr_scheduler.name, loaded.config.lr_scheduler.warmup_steps) == (
        "linear",
        6,
    )


def test_a_section_can_be_set_below_null(recipe: Path) -> None:
    loaded = load(recipe, "--lr_scheduler=null", "--lr_scheduler.name=linear")
    assert loaded.config.lr_scheduler.name == "linear"


def test_brackets_are_characters_in_a_text_field(recipe: Path) -> None:
    assert (
        load(recipe, "--model.attn_implementation", "[x]").config.model.attn_implementation == "[x]"
    )


TEMPLATES = [
    "{{ text }}",
    "[INST] {{ q }} [/INST]",
    "[INST] {x}",
    "[*.x]",
]


@pytest.mark.parametrize("text", TEMPLATES)
def test_a_template_in_a_plug_in_is_text(recipe: Path, text: str) -> None:
    loaded = load(recipe, "--dataset.field", text, "--dataset.more={a: 1}")
    assert loaded.config.dataset.kwargs["field"] == text
    assert loaded.config.dataset.kwargs["more"] == {"a": 1}
    assert f"'{text}'" in loaded.to_yaml()


def test_overrides_reach_into_plug_ins(recipe: Path) -> None:
    loaded = load(recipe, "--optimizer.lr", "1e-3", "--optimizer._target_=torch.optim.SGD")
    optimizer = loaded.config.optimizer
    assert (optimizer._target_, optimizer.kwargs) == ("torch.optim.SGD", {"lr": 1e-3})


def test_the_later_override_wins(recipe: Path) -> None:
    assert load(recipe, "--seed=1", "--seed=2").config.seed == 2


def test_a_value_has_no_keys(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="seed"):
        load(recipe, "--seed=1", "--seed.x=2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes=2:1"], "nnodes must be"),
        (["--node-rank=-1"], "node_rank must be 0 or more"),
        (["--master-port=70000"], "master_port must be a port"),
        (["--max-restarts=1.5"], "max_restarts must be a whole number"),
        (["--nproc-per-node"], "--nproc-per-node needs a value"),
        (["--optimizer.lr", "--seed=1"], "--optimizer.lr needs a value"),
        (["--dry-rnu"], "did you mean --dry-run?"),
        (["-x"], "unknown argument -x"),
        (["--copy", "name"], "--copy takes NAME DIR"),
        (["--list=x"], "--list takes no value"),
    ],
)
def test_wrong_flags_are_named_with_a_hint(
    recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([str(recipe), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-v", "--verbose"])
def test_verbose_is_the_level_debug(recipe: Path, flag: str) -> None:
    assert load(recipe, flag).config.logging.level == "debug"
