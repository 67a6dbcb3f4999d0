"""Recipes from text to types: one rule for file and command line, all mistakes in one report, no values shown."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from automodel_ckpt import load_recipe
from automodel_ckpt.errors import RecipeError
from tests.support.runs import printed

BASE = """\
model:
  from_pretrained: some/model
dataset:
  _target_: automodel_ckpt.data.text.TextDataset
  path: data.jsonl
"""
SECRET = "hunter2-do-not-show"


def load(tmp_path: Path, text: str = "", *words: str) -> Any:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(BASE + text)
    return printed.load(recipe, *words)


def value_at(loaded: Any, key: str) -> Any:
    value: Any = loaded.config
    for part in key.split("."):
        inner = value if isinstance(value, dict) else getattr(value, "kwargs", {})
        value = inner[part] if part in inner else getattr(value, part)
    return value


TYPED = [
    ("optimizer.lr", "1e-5", 1e-5),
    ("optimizer.lr", "017", 17.0),
    ("seed", "017", 17),
    ("model.attn_implementation", "017", "017"),
    ("model.attn_implementation", "on", "on"),
    ("model.attn_implementation", "none", None),
    ("model.attn_implementation", "~", None),
    ("model.attn_implementation", "'none'", "none"),
    ("checkpoint.verify", "none", "none"),
    ("checkpoint.save_consolidated", "none", None),
    ("clip_grad_norm", "null", None),
    ("deterministic", "on", True),
    ("deterministic", "off", False),
    ("checkpoint.save_consolidated", "final", "final"),
    ("checkpoint.save_consolidated", "true", True),
    ("optimizer.betas", "[0.5, 9e-1]", (0.5, 0.9)),
    ("model.freeze", "[a, 017, on]", ["a", "017", "on"]),
    ("step_scheduler.max_time", "01:30:00", "01:30:00"),
    ("lr_scheduler", "null", None),
    # Inside a plug-in nothing is declared: YAML 1.2 with 1e-5 a float; 017 and on are text.
    ("dataset.x", "1e-5", 1e-5),
    ("dataset.x", "017", "017"),
    ("dataset.x", "on", "on"),
    ("dataset.x", "true", True),
    ("dataset.x", "-1.5", -1.5),
    ("dataset.x", "0x10", 16),
    ("dataset.x", "None", None),
    ("dataset.x", "'None'", "None"),
    ("dataset.x", "[none, 'none']", [None, "none"]),
    ("dataset.x", "[1, a, {b: 2}]", [1, "a", {"b": 2}]),
    ("dataset.x", ".inf", float("inf")),
    ("dataset.x", "2024-01-02", "2024-01-02"),
]


@pytest.mark.parametrize(("key", "text", "expected"), TYPED)
def test_a_value_follows_the_type_of_its_field_in_the_file_and_on_the_command_line(
    tmp_path: Path, key: str, text: str, expected: object
) -> None:
    section, _, name = key.rpartition(".")
    there = f"  {name}: {text}\n" if section == "dataset" else f"{section}:\n  {name}: {text}\n"
    there = there if section else f"{key}: {text}\n"
    if section == "model":
        pair = [BASE.replace("model:\n", f"model:\n  {name}: {text}\n"), BASE]
    else:
        pair = [BASE + there, BASE]
    recipe = tmp_path / "recipe.yaml"
    for content, words in zip(pair, ([], [f"--{key}={text}"]), strict=True):
        recipe.write_text(content)
        value = value_at(printed.load(recipe, *words), key)
        assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize("word", ["none", "None", "null", "~"])
@pytest.mark.parametrize(
    "key", ["checkpoint.checkpoint_dir", "logging.level", "checkpoint.keep_steps.0", "seed"]
)
def test_null_where_there_must_be_a_value_is_rejected_and_text_is_written_in_quotes(
    tmp_path: Path, key: str, word: str
) -> None:
    with pytest.raises(RecipeError, match=rf"{key} must be"):
        load(tmp_path, "checkpoint: {keep_steps: [1]}\n", f"--{key}={word}")
    quoted = load(tmp_path, "", f"--checkpoint.checkpoint_dir='{word}'")
    assert quoted.config.checkpoint.checkpoint_dir == word


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "optimizer:\n").config.optimizer == load(tmp_path).config.optimizer


OPTIONAL = (
    "model.mtp init_from tokenizer classification peft qat fp8 distill distributed.tp_plan validation_dataset "
    "dataloader.collate_fn kto reward_model dpo orpo packed_sequence pretrain embedding reranker lr_scheduler loss_fn "
    "step_scheduler.early_stopping step_scheduler.on_spike ema generation evaluation evaluation.harness "
    "checkpoint.remote checkpoint.memory hub profile hangs"
)


@pytest.mark.parametrize("key", OPTIONAL.split())
def test_an_optional_section_without_content_is_rejected_with_its_line(
    tmp_path: Path, key: str
) -> None:
    *parents, name = key.split(".")
    recipe = tmp_path / "recipe.yaml"

    def load_with(line: str) -> Any:
        above = [f"{'  ' * depth}{parent}:\n" for depth, parent in enumerate(parents)]
        added = "".join(above) + "  " * len(parents) + f"{line}\n    # r: 8\n"
        if parents and f"\n{above[0]}" in f"\n{BASE}":
            # The section exists: the line becomes its first key.
            recipe.write_text(BASE.replace(above[0], added))
        else:
            recipe.write_text(f"{BASE}{added}seed: 3\n")
        return load_recipe(recipe)

    with pytest.raises(RecipeError) as caught:
        load_with(f"{name}:")
    assert f"{key} is empty" in str(caught.value)
    (problem,) = caught.value.problems
    line_number = int(str(problem.where).rpartition(":")[2])
    assert recipe.read_text().splitlines()[line_number - 1].strip() == f"{name}:"
    assert "or null to disable it" in str(caught.value)
    assert value_at(load_with(f"{name}: null"), key) is None


def test_an_empty_section_that_the_command_line_fills_is_that_section(tmp_path: Path) -> None:
    peft = load(tmp_path, "peft:\n", "--peft.r=4").config.peft
    assert peft is not None and peft.r == 4


def test_a_union_section_is_a_plug_in_when_it_has_a_target(tmp_path: Path) -> None:
    loaded = load(tmp_path, "optimizer:\n  _target_: torch.optim.SGD\n  lr: 1e-2\n")
    optimizer = loaded.config.optimizer
    assert (optimizer._target_, optimizer.kwargs) == ("torch.optim.SGD", {"lr": 0.01})


def test_plug_ins_may_stand_among_the_arguments_of_plug_ins(tmp_path: Path) -> None:
    loaded = load(tmp_path, "", "--dataset.parts", "[{_target_: a.b, n: 1}]")
    (part,) = loaded.config.dataset.kwargs["parts"]
    assert (part._target_, part.kwargs) == ("a.b", {"n": 1})


# Numbers

NUMBER_KEYS = [
    ("seed", "{}"),
    ("optimizer.lr", "{}"),
    ("optimizer.betas", "[{}, 0]"),
    ("checkpoint.keep_steps", "[{}]"),
    ("step_scheduler.max_time", "{}"),
    ("step_scheduler.ckpt_every_steps", "{}"),
]


@pytest.mark.parametrize("number", ["1_000", "1_0.5", "\uff11\uff12", "\u0661", "1e1_0", "0x1_0"])
@pytest.mark.parametrize(("key", "form"), NUMBER_KEYS)
def test_a_number_has_ascii_digits_and_no_underscores(
    tmp_path: Path, key: str, form: str, number: str
) -> None:
    value = form.format(number)
    section, _, name = key.rpartition(".")
    text = f"{section}:\n  {name}: {value}\n" if section else f"{name}: {value}\n"
    for case in ((text,), ("", f"--{key}={value}")):
        with pytest.raises(RecipeError, match=f"{key}.* must be"):
            load(tmp_path, *case)
    assert load(tmp_path, "", f"--dataset.x={number}").config.dataset.kwargs["x"] == number


# References to the environment


def test_references_are_resolved_in_the_configuration_and_saved_as_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_TEST", SECRET)
    text = "checkpoint:\n  checkpoint_dir: runs/${oc.env:CKPT_TEST}/x\nseed: ${oc.env:CKPT_NOT_SET,7}\n"
    loaded = load(tmp_path, text, "--dataset.token=${oc.env:CKPT_TEST}")
    assert loaded.config.checkpoint.checkpoint_dir == f"runs/{SECRET}/x"
    assert loaded.config.dataset.kwargs["token"] == SECRET
    assert loaded.config.seed == 7
    for shown in (loaded.to_yaml(), loaded.explain()):
        assert SECRET not in shown
        assert "runs/${oc.env:CKPT_TEST}/x" in shown
        assert "${oc.env:CKPT_NOT_SET,7}" in shown


def test_a_resolved_value_is_not_resolved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_TEST", "${oc.env:HOME}")
    assert (
        load(tmp_path, "", "--dataset.x=${oc.env:CKPT_TEST}").config.dataset.kwargs["x"]
        == "${oc.env:HOME}"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--seed=${oc.env:CKPT_TEST}"],
        ["--optimizer.lr=${oc.env:CKPT_TEST}"],
        ["--deterministic=${oc.env:CKPT_TEST}"],
        ["--checkpoint.verify=${oc.env:CKPT_TEST}"],
        ["--checkpoint.verfy=${oc.env:CKPT_TEST}"],
        ["--step_scheduler.max_time=${oc.env:CKPT_TEST}"],
        ["--optimizer.betas=['${oc.env:CKPT_TEST}', 1]"],
        ["--optimizer=${oc.env:CKPT_TEST}"],
        ["--dataset.x=${oc.env:${oc.env:CKPT_TEST}}"],
    ],
)
def test_no_message_shows_a_resolved_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("CKPT_TEST", SECRET)
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, "", *words)
    assert SECRET not in str(caught.value)
    assert words[0].partition("=")[0] in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "${oc.select:seed}",
        "${oc.env:HOME}${now:}",
        "a${",
        "${oc.env:HOME",
        "${oc.create:[1]}",
        "${.x}",
    ],
)
def test_any_other_interpolation_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError, match="interpolation"):
        load(tmp_path, "", f"--dataset.x={text}")


def test_a_missing_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="CKPT_NOT_SET is not set"):
        load(tmp_path, "", "--dataset.x=a/${oc.env:CKPT_NOT_SET}/b")


# What is saved loads again, here and elsewhere


def test_a_saved_recipe_means_the_same_to_every_reader_of_yaml(tmp_path: Path) -> None:
    words = [
        "--optimizer.lr",
        "1e-5",
        "--seed=017",
        "--checkpoint.checkpoint_dir=017",
        "--checkpoint.is_async=on",
        "--model.attn_implementation=off",
        "--checkpoint.keep_steps=[0x10]",
        "--clip_grad_norm=None",
        "--checkpoint.keep_last=2",
        "--dataset.id",
        "017",
        "--dataset.word=None",
        "--dataset.table={on: [no, 1e5]}",
    ]
    loaded = load(tmp_path, "", *words)
    assert loaded.config.dataset.kwargs["word"] is None
    as_printed = yaml.safe_load(loaded.explain())["dataset"]
    assert as_printed == {
        "_target_": "automodel_ckpt.data.text.TextDataset",
        "path": "data.jsonl",
        "id": "017",
        "word": "None",
        "table": {"on": ["no", "1e5"]},
    }
    saved = yaml.safe_load(loaded.to_yaml())
    assert (saved["optimizer"]["lr"], saved["seed"], saved["clip_grad_norm"]) == (1e-5, 17, None)
    assert saved["model"]["attn_implementation"] == "off"
    assert [saved["checkpoint"][key] for key in ("checkpoint_dir", "is_async", "keep_steps")] == [
        "017",
        True,
        [16],
    ]
    (tmp_path / "again.yaml").write_text(loaded.to_yaml())
    assert load_recipe(tmp_path / "again.yaml").config == loaded.config


PLAIN = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(
    text=PLAIN,
    rate=st.floats(0, 1e6),
    items=st.lists(PLAIN.filter(lambda t: t.isprintable()), max_size=3),
)
def test_any_recipe_as_run_loads_to_the_same_configuration(
    tmp_path: Path, text: str, rate: float, items: list[str]
) -> None:
    text = text.replace("${", "")
    quoted = [item.replace("'", "''").replace("${", "") for item in items]
    words = [f"--optimizer.lr={rate}", f"--dataset.x={text}", f"--model.attn_implementation={text}"]
    words.append("--model.freeze=[" + ", ".join(f"'{item}'" for item in quoted) + "]")
    try:
        loaded = load(tmp_path, "", *words)
    except (
        RecipeError
    ) as error:  # YAML inside a plug-in may have a reference or a section's mistake; all else loads
        assert text[:1] in ("[", "{"), error  # noqa: PT017
        return
    again = tmp_path / "again.yaml"
    again.write_text(loaded.to_yaml())
    assert load_recipe(again).config == loaded.config
    assert load_recipe(again).to_yaml() == loaded.to_yaml()


# Files that are no recipes


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="levels deep"):
        load(tmp_path, "  x: " + "[" * 5000 + "]" * 5000 + "\n")


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    rows = ["  a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(RecipeError, match="more than 20000 values"):
        load(tmp_path, "\n".join(rows) + "\n")


def test_an_alias_of_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"levels deep|recursive"):
        load(tmp_path, "  x: &x [*x]\n")


def test_a_huge_file_whose_cut_end_is_half_a_character_is_too_large(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="too large") as caught:
        load(tmp_path, "#" + "é" * 200_000)
    assert "UTF-8" not in str(caught.value)
    with pytest.raises(RecipeError, match="too large"):
        load(tmp_path, "#" + "é" * 200_001 + "#")


# Custom recipes


def test_the_base_sections_of_a_custom_recipe_are_checked_before_it_is_imported(
    tmp_path: Path,
) -> None:
    with pytest.raises(RecipeError, match=r"unknown key optimizer\.lrr"):
        load(tmp_path, "recipe: mine.MyRecipe\n", "--optimizer.lrr=1")
