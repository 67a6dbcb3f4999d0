"""Recipes that consist of several files, refer to their own keys, or use YAML's merge keys."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from automodel_ckpt.cli.train import main
from automodel_ckpt.errors import RecipeError
from tests.support.runs.printed import load, printed
from tests.support.runs.recipes import SMALLEST

BASE = f"""\
{SMALLEST}\
  seq_length: 64
optimizer:
  lr: 1e-4
  weight_decay: 0.1
step_scheduler:
  max_steps: 3
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_recipe_replaces_values_of_the_file_it_extends_and_both_stay_the_origins(
    tmp_path: Path,
) -> None:
    base = write(tmp_path / "base.yaml", BASE)
    recipe = write(
        tmp_path / "recipe.yaml", "extends: base.yaml\noptimizer:\n  lr: 2e-5\nseed: 7\n"
    )
    loaded = load(recipe)
    assert (loaded.config.optimizer.lr, loaded.config.optimizer.weight_decay) == (2e-5, 0.1)
    assert loaded.origins["optimizer.lr"] == f"{recipe}:3"
    assert loaded.origins["optimizer.weight_decay"] == f"{base}:9"
    lines = printed(recipe, "--step_scheduler.max_steps", "9").splitlines()
    assert "max_steps: 9 # --step_scheduler.max_steps" in [" ".join(line.split()) for line in lines]
    assert not any("extends" in line for line in lines)


def test_of_several_files_a_later_one_takes_precedence_and_bases_may_have_bases(
    tmp_path: Path,
) -> None:
    write(tmp_path / "shared/base.yaml", BASE)
    write(
        tmp_path / "shared/lora.yaml", "extends: base.yaml\npeft: {r: 4}\noptimizer: {lr: 1e-3}\n"
    )
    write(tmp_path / "shared/long.yaml", "peft: {alpha: 64}\nstep_scheduler: {max_steps: 500}\n")
    recipe = write(
        tmp_path / "recipe.yaml", "extends: [shared/lora.yaml, shared/long.yaml]\npeft: {r: 2}\n"
    )
    config = load(recipe).config
    assert (config.peft.r, config.peft.alpha, config.optimizer.lr) == (2, 64, 1e-3)
    assert config.step_scheduler.max_steps == 500


def test_null_a_list_and_another_target_replace_what_the_base_has(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", BASE + "peft: {r: 4}\n")
    recipe = write(
        tmp_path / "recipe.yaml",
        "extends: base.yaml\npeft: null\nmodel: {freeze: ['*.a']}\n"
        "dataset:\n  _target_: automodel_ckpt.examples.data.mock.random_tokens\n  num_samples: 8\n",
    )
    config = load(recipe).config
    assert config.peft is None
    assert config.model.from_pretrained == "some/model"
    assert config.model.freeze == ["*.a"]
    # seq_length and path are arguments of the builder that is not used any more.
    assert set(config.dataset.kwargs) == {"num_samples"}
    built = write(
        tmp_path / "built.yaml",
        "extends: base.yaml\npeft: null\nmodel: {_target_: torch.nn.Linear}\n",
    )
    assert "some/model" not in printed(built)


def test_a_recipe_class_in_a_file_beside_the_base_is_found_from_elsewhere(tmp_path: Path) -> None:
    write(tmp_path / "shared/base.yaml", BASE + "recipe: mine.py:Mine\n")
    recipe = write(tmp_path / "recipe.yaml", "extends: shared/base.yaml\n")
    assert load(recipe).config.recipe == "shared/mine.py:Mine"
    write(tmp_path / "shared/base.yaml", BASE + "recipe: /opt/mine.py:Mine\n")
    assert load(recipe).config.recipe == "/opt/mine.py:Mine"


def test_a_recipe_from_standard_input_extends_files_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "base.yaml", BASE)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "pipe", "extends: base.yaml\nseed: 3\n")
    with (tmp_path / "pipe").open("rb") as file:
        saved = os.dup(0)
        os.dup2(file.fileno(), 0)
        try:
            assert load(Path("-")).config.seed == 3
            os.lseek(0, 0, os.SEEK_SET)
            # A file, not a pipe: no file of the recipe can be in /dev.
            assert load(Path("/dev/stdin")).config.seed == 3
        finally:
            os.dup2(saved, 0)
            os.close(saved)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("extends: other.yaml\n", ["the recipe in extends does not exist", "recipe.yaml:1"]),
        ("extends: .\n", ["the recipe in extends does not exist"]),
        ("extends: recipe.yaml\n", ["no file may extend itself"]),
        ("extends: [base.yaml, {a: b}]\n", ["extends must be a path or a list of paths"]),
        ("extends: ''\n", ["extends must be a path or a list of paths"]),
        ("extends: ${oc.env:CKPT_NOT_SET}\n", ["CKPT_NOT_SET is not set", "recipe.yaml:1"]),
        ("extends: loop.yaml\n", ["no file may extend itself"]),
        ("extends: list.yaml\n", ["a recipe must be a mapping of sections", "list.yaml"]),
        ("extends: binary.yaml\n", ["the recipe is not UTF-8 text", "binary.yaml"]),
        ("extends: base.yaml\noptimizer: {lrr: 1}\n", ["did you mean optimizer.lr?"]),
    ],
)
def test_a_mistake_in_extends_is_reported_with_its_file_and_line(
    tmp_path: Path, text: str, pieces: list[str]
) -> None:
    write(tmp_path / "base.yaml", BASE)
    write(tmp_path / "loop.yaml", "extends: recipe.yaml\n")
    write(tmp_path / "list.yaml", "[1, 2]\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xfa")
    recipe = write(tmp_path / "recipe.yaml", text)
    with pytest.raises(RecipeError) as failure:
        load(recipe)
    for piece in pieces:
        assert piece in str(failure.value)
    if "[base.yaml" not in text and "''" not in text:
        assert len(failure.value.problems) == 1


def test_a_chain_of_too_many_files_is_an_error(tmp_path: Path) -> None:
    for number in range(30):
        write(tmp_path / f"{number}.yaml", f"extends: {number + 1}.yaml\n")
    write(tmp_path / "30.yaml", BASE)
    with pytest.raises(RecipeError, match="more than 20 files"):
        load(tmp_path / "0.yaml")


# ---------------------------------------------------------------- references to keys


def referring(tmp_path: Path, text: str, *words: str) -> Any:
    return load(write(tmp_path / "recipe.yaml", BASE + text), *words)


def test_a_reference_has_the_value_of_its_key_with_overrides(tmp_path: Path) -> None:
    text = "checkpoint:\n  checkpoint_dir: runs/${optimizer.lr}-${seed}\n"
    loaded = referring(tmp_path, text)
    assert loaded.config.checkpoint.checkpoint_dir == "runs/1e-4-42"
    assert loaded.origins["checkpoint.checkpoint_dir"] == f"{tmp_path / 'recipe.yaml'}:13"
    shown = printed(tmp_path / "recipe.yaml", "--optimizer.lr", "3e-5")
    assert yaml.safe_load(shown)["checkpoint"]["checkpoint_dir"] == "runs/3e-5-42"


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("clip_grad_norm: ${optimizer.weight_decay}\n", [], ("clip_grad_norm", 0.1)),
        ("clip_grad_norm: ${clip}\n", [], None),
        ("seed: ${step_scheduler.global_batch_size}\n", [], ("seed", 8)),
        ("", ["--seed", "${step_scheduler.max_steps}"], ("seed", 3)),
        ("seed: ${oc.env:CKPT_NOT_SET,${step_scheduler.max_steps}}\n", [], ("seed", 3)),
    ],
)
def test_references_are_converted_to_the_type_of_their_place(
    tmp_path: Path, text: str, words: list[str], expected: tuple[str, Any] | None
) -> None:
    if expected is None:
        with pytest.raises(RecipeError):
            referring(tmp_path, text, *words)
        return
    key, value = expected
    loaded = referring(tmp_path, text, *words)
    assert getattr(loaded.config, key) == value
    # Not the line of the key that it refers to.
    assert words or loaded.origins[key] == f"{tmp_path / 'recipe.yaml'}:12"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("seed: ${sed}\n", ["${sed} refers to a key that does not exist", "${seed}?"]),
        ("seed: ${seed}\n", ["${seed} refers to itself", "recipe.yaml:12"]),
        ("seed: ${clip_grad_norm}\nclip_grad_norm: ${seed}\n", ["refers to itself"]),
        ("compile: {backend: '${compile}'}\n", ["${compile} refers to itself"]),
        ("recipe: x${optimizer}\n", ["is a section or a list, which text cannot contain"]),
    ],
)
def test_a_reference_that_has_no_value_is_reported_once(
    tmp_path: Path, text: str, pieces: list[str]
) -> None:
    with pytest.raises(RecipeError) as failure:
        referring(tmp_path, text)
    message = str(failure.value)
    for piece in pieces:
        assert piece in message
    assert "unsupported interpolation" not in message


def test_an_escaped_reference_is_text(tmp_path: Path) -> None:
    loaded = referring(tmp_path, "checkpoint: {checkpoint_dir: 'a/\\${seed}'}\n")
    assert loaded.config.checkpoint.checkpoint_dir == "a/${seed}"


def test_two_backslashes_before_a_variable_are_one_and_before_a_key_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_VALUE", "v")
    text = "checkpoint: {checkpoint_dir: 'a\\\\${oc.env:CKPT_VALUE}'}\n"
    assert referring(tmp_path, text).config.checkpoint.checkpoint_dir == "a\\v"
    with pytest.raises(RecipeError, match="unsupported interpolation"):
        referring(tmp_path, "checkpoint: {checkpoint_dir: 'a\\\\${seed}'}\n")


def test_references_that_double_a_text_end_in_an_error(tmp_path: Path) -> None:
    keys = [f"k{number}: ${{k{number + 1}}}${{k{number + 1}}}" for number in range(40)]
    text = "dataset:\n  _target_: automodel_ckpt.data.text.text\n  " + "\n  ".join(
        line.replace("${", "${dataset.") for line in keys
    )
    recipe = write(tmp_path / "r.yaml", f"model: {{from_pretrained: x}}\n{text}\n  k40: abcdefgh\n")
    with pytest.raises(RecipeError, match=r"too long|refers to itself"):
        load(recipe)
    long = f"recipe: {'x' * 60_000}\ncheckpoint: {{checkpoint_dir: '${{recipe}}${{recipe}}'}}\n"
    with pytest.raises(RecipeError, match="the text with its references is too long"):
        referring(tmp_path, long)


def test_a_secret_behind_a_reference_stays_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_SECRET", "hunter2-do-not-show")
    text = (
        "tokenizer: {from_pretrained: '${checkpoint.checkpoint_dir}'}\n"
        "checkpoint: {checkpoint_dir: 'a/${oc.env:CKPT_SECRET}'}\n"
    )
    loaded = referring(tmp_path, text)
    assert loaded.config.tokenizer.from_pretrained == "a/hunter2-do-not-show"
    assert "hunter2" not in loaded.to_yaml() + loaded.explain()


@pytest.mark.parametrize(
    "content",
    [
        "root:hunter2:19000:0:99999:7:::\n",
        "[hunter2, hunter2]\n",
        "- *hunter2\n",
        "a: !hunter2 b\n",
        "'hunter2': 1\n'hunter2': 2\nseed: 1\n",
        "example.org:\n  oauth_token: hunter2\n",
        "hunter2: {}\n",
        "logging: hunter2\n",
        "hub: {token: hunter2}\n",
        "seed: [hunter2, hunter2]\n",
        "seed: 1 hunter2\n",
        "clip_grad_norm: '${hunter2}'\n",
    ],
)
def test_no_error_shows_a_file_that_a_recipe_extends(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "shadow", content)
    recipe = write(tmp_path / "recipe.yaml", "extends: shadow\n" + BASE)
    for mode in ("--print-config", "--dry-run"):
        assert main([str(recipe), mode]) == 2
        shown = capsys.readouterr()
        assert "hunter2" not in shown.out + shown.err
        assert "shadow" in shown.err


# ---------------------------------------------------------------- merge keys and run names


def test_merge_keys_mean_what_yaml_defines(tmp_path: Path) -> None:
    text = (
        "lr_scheduler: &s {name: linear, warmup_steps: 5}\n"
        "validation_datasets:\n"
        "  a: &a {_target_: automodel_ckpt.data.text.text, path: a.txt, seq_length: 8}\n"
        "  b: {<<: *a, path: b.txt}\n"
        "  c: {path: c.txt, <<: [{seq_length: 4}, *a]}\n"
    )
    sets = referring(tmp_path, text).config.validation_datasets
    # Keys beside a merge win, and then the first mapping of a list (https://yaml.org/type/merge.html). PyYAML 6.0.4
    # takes the last one.
    assert sets["b"].kwargs == {"path": "b.txt", "seq_length": 8}
    assert sets["c"].kwargs == {"path": "c.txt", "seq_length": 4}
    assert sets["c"]._target_ == sets["a"]._target_


def test_a_merged_mapping_can_be_used_again(tmp_path: Path) -> None:
    text = (
        "validation_datasets:\n"
        "  a: &a {_target_: automodel_ckpt.data.text.text, path: a.txt, seq_length: 8}\n"
        "  b: &b {<<: *a, path: b.txt}\n"
        "  c: *b\n"
    )
    sets = referring(tmp_path, text).config.validation_datasets
    assert sets["c"].kwargs == {"path": "b.txt", "seq_length": 8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a {? [x, y] : 1}\nb: {<<: *a}\n", "keys must be single words"),
        # Nine merges of nine merges of ...: 9^12 keys, if merges were expanded before they are counted.
        (
            "".join(f"<<: [&a{depth} {{" for depth in range(12))
            + "k: v"
            + "".join(f"}}{f', *a{depth}' * 8}]" for depth in reversed(range(12))),
            "more than 20000 values",
        ),
    ],
    ids=["key", "bomb"],
)
def test_merged_keys_are_limited_like_others(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load(write(tmp_path / "r.yaml", BASE + text))


def test_the_name_of_a_run_is_a_directory_in_that_of_the_recipe(tmp_path: Path) -> None:
    assert (
        load(
            write(tmp_path / "r.yaml", BASE), "--run-name", "lr=1e-5"
        ).config.checkpoint.checkpoint_dir
        == "checkpoints/lr=1e-5"
    )
    text = "checkpoint: {checkpoint_dir: 'runs/${seed}'}\n"
    loaded = referring(tmp_path, text, "--run-name=a", "--seed", "3")
    assert loaded.config.checkpoint.checkpoint_dir == "runs/3/a"
    given = referring(tmp_path, text, "--run-name", "a", "--checkpoint.checkpoint_dir=/x/")
    assert given.config.checkpoint.checkpoint_dir == "/x/a"


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".", "..", "x" * 200, "-x", "a b"])
def test_a_run_name_that_is_no_plain_name_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match="run_name must be a name"):
        load(write(tmp_path / "r.yaml", BASE), f"--run-name={name}")
