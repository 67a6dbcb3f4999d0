"""Code that a recipe names: what is trusted, how arguments are checked, and what is built."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import automodel_ckpt
from automodel_ckpt.config.callables.allowlist import defaults
from automodel_ckpt.config.callables.plugins import build, build_function
from automodel_ckpt.config.callables.prepare import check_names, check_targets, prepare
from automodel_ckpt.config.callables.trust import Rejected, Trust, resolve
from automodel_ckpt.config.load import LoadedRecipe, load_recipe
from automodel_ckpt.config.overrides import parse
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.errors import RecipeError

RECIPE = """\
model:
  from_pretrained: some/model
dataset:
  _target_: trusted_pkg.things.Data
  path: data.jsonl
"""
THINGS = """\
from __future__ import annotations
import os
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal, Optional, Union
from torch import Tensor

class Color(Enum):
    RED = "red"
    DEEP_BLUE = 2

class Data:
    def __init__(self, path: Path, tokenizer: object, *, size: int = 1, ratio: float = 0.5, name: str = "",
                 on: Optional[bool] = None, mode: Literal["a", "b"] = "a", pair: tuple[int, float] = (1, 2.0),
                 either: Union[int, str] = 0, parts: list[Any] = [], table: dict[str, float] = {}, free=None):
        self.__dict__.update(locals())

def any_keywords(**keywords):
    return keywords

def make(size: int):
    return size

def weigh(logits, labels, weight: Tensor):
    return logits * weight

def loss(logits, labels, scale: float = 1.0):
    return scale * (logits + labels)

def collate(samples, /, tokenizer):
    return [tokenizer, *samples]

def paint(color: Color, times: int = 1):
    return color.name * times

def nameless(rows, /, size=1): ...

class Caller:
    def __call__(self, size: int): ...

caller = Caller()
paint_twice = partial(paint, times=2)
command = partial(os.system)
"""
CUSTOM = """\
from dataclasses import dataclass, field
from automodel_ckpt.config.schema import RecipeConfig

@dataclass
class Head:
    width: int = 8

@dataclass
class MyConfig(RecipeConfig):
    head: Head = field(default_factory=Head)

class MyRecipe:
    Config = MyConfig
    def __init__(self, config, *, config_yaml): ...
    def setup(self): ...
    def run(self): ...
    def close(self): ...

class NoRecipe: ...
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "trusted_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "things.py").write_text(THINGS)
    (package / "custom.py").write_text(CUSTOM)
    (tmp_path / "untrusted_pkg.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(): ...\n"
    )
    (tmp_path / "own.py").write_text(CUSTOM)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("trusted_pkg", "untrusted_pkg")
    ]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    return tmp_path / "recipe.yaml"


def load(recipe: Path, *words: str) -> LoadedRecipe:
    line = parse(words)
    return load_recipe(recipe, line.overrides, problems=line.problems)


def checked(recipe: Path, *words: str, trust: tuple[str, ...] = ("trusted_pkg",)) -> LoadedRecipe:
    loaded = load(recipe, *words)
    return check_targets(loaded, Trust(trust))


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "builtins.eval",
        "subprocess.run",
        "datasets.load.os.system",
        "transformers.utils.import_utils.importlib.import_module",
        "torch.load",
        "torch.hub.load",
        "torch.nn.modules.module.functools.partial",
        "torch.nn.Module.__init__.__globals__",
        "torch.optim.AdamW.__subclasses__",
        "transformers.dynamic_module_utils.get_class_from_dynamic_module",
        "transformers.testing_utils.run_command",
        "automodel_ckpt.config.callables.prepare.resolve_recipe",
        "automodel_ckpt.config.callables.trust.resolve",
        "automodel_ckpt.config.load.Path.unlink",
        "automodel_ckpt.base.durable_io.replace_file",
        "transformers.exporters.utils.import_dotted_path",
        "transformers.modeling_utils.load_state_dict",
        "transformers.utils.import_utils.direct_transformers_import",
        "transformers.trainer_pt_utils.remove_dummy_checkpoint",
        "transformers.AutoModel.register",
        "transformers.AutoTokenizer",
        "peft.utils.save_and_load.torch_load",
        "peft.PeftModel.from_pretrained",
        "datasets.load.import_main_class",
        "datasets.Dataset.from_generator",
        "datasets.IterableDataset.from_generator",
        "datasets.Dataset.from_sql",
        "torch.optim.lr_scheduler.LambdaLR",
        "torch.optim.lr_scheduler.MultiplicativeLR",
        "torch.nn.Module.register_forward_hook",
        "torch.nn.functional.cross_entropy",
        "torch.nn",
        "AdamW",
        "",
        "..",
        "torch..nn",
        "torch.optim.AdamW()",
        "../evil.py",
    ],
)
@pytest.mark.parametrize(
    "trust", [(), ("os", "builtins", "subprocess", "posix", "functools", "importlib", "pathlib")]
)
def test_what_could_run_anything_never_resolves(name: str, trust: tuple[str, ...]) -> None:
    with pytest.raises(Rejected):
        resolve(name, Trust(trust))


def test_an_untrusted_package_is_not_even_imported(recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"dataset: untrusted_pkg\.f is not trusted") as caught:
        checked(recipe, "--dataset._target_=untrusted_pkg.f")
    assert "--trust untrusted_pkg" in str(caught.value)
    assert not (recipe.parent / "ran").exists()


def test_trust_comes_from_the_flag_or_the_environment_and_covers_what_is_below(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checked(recipe).config.dataset.kwargs["path"] == Path("data.jsonl")
    monkeypatch.setenv("AUTOMODEL_CKPT_TRUST", "other, trusted_pkg")
    checked(recipe, trust=())
    monkeypatch.setenv("AUTOMODEL_CKPT_TRUST", "trusted_pk")
    with pytest.raises(RecipeError, match="not trusted"):
        checked(recipe, trust=("trusted_pkg_2", "trusted_pkg.things.Dat"))


def test_what_a_trusted_package_only_imported_needs_trust_of_its_own(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="is defined in posix"):
        checked(recipe, "--loss_fn._target_=trusted_pkg.things.os.system")


@pytest.mark.parametrize("color", ["DEEP_BLUE", "2"])
def test_a_member_of_an_enumeration_is_given_by_name_or_value(recipe: Path, color: str) -> None:
    loaded = checked(recipe, f"--loss_fn={{_target_: trusted_pkg.things.paint, color: {color}}}")
    assert build(loaded.config.loss_fn) == "DEEP_BLUE"


def test_an_object_that_can_be_called_has_the_types_of_its_call(recipe: Path) -> None:
    loaded = checked(recipe, "--loss_fn={_target_: trusted_pkg.things.caller, size: 017}")
    assert loaded.config.loss_fn.kwargs == {"size": 17}


def test_a_loss_and_a_collator_may_be_functions_instead_of_builders(recipe: Path) -> None:
    loaded = checked(
        recipe,
        "--loss_fn={_target_: trusted_pkg.things.loss, scale: 3}",
        "--dataloader.collate_fn._target_=trusted_pkg.things.collate",
    )
    collate_fn = loaded.config.dataloader.collate_fn
    assert build_function("loss_fn", loaded.config.loss_fn)(1, 2) == 9.0
    assert build_function("dataloader.collate_fn", collate_fn, tokenizer="t")(["a"]) == ["t", "a"]
    with pytest.raises(RecipeError, match=r"loss_fn\.labels is missing"):
        checked(recipe, "--loss_fn={_target_: trusted_pkg.things.loss, logits: 3}")


def test_what_takes_arguments_by_position_only_is_refused(recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"has positional-only parameters \(rows\)"):
        checked(recipe, "--loss_fn._target_=trusted_pkg.things.nameless")


GADGETS = {
    "dataset": "{_target_: datasets.Dataset.from_generator, generator: {_target_: transformers.exporters.utils."
    "import_dotted_path, path: os.system}, gen_kwargs: {command: 'touch PWNED'}}",
    "validation_dataset": "{_target_: peft.utils.save_and_load.torch_load, f: evil.bin, weights_only: false}",
    "tokenizer": "{_target_: transformers.modeling_utils.load_state_dict, checkpoint_file: x, weights_only: false}",
    "processor": "{_target_: transformers.trainer_pt_utils.remove_dummy_checkpoint, output_dir: /, filenames: [x]}",
    "loss_fn": "{_target_: torch.nn.Module.apply, fn: {_target_: automodel_ckpt.config.callables.trust.resolve}}",
    "optimizer": "{_target_: datasets.load.import_main_class, module_path: evil}",
    "model": "{_target_: transformers.utils.import_utils.direct_transformers_import, path: .}",
    "dataloader.collate_fn": "{_target_: automodel_ckpt.base.durable_io.replace_file}",
    "distributed.tp_plan": "{_target_: transformers.AutoModel.from_pretrained, pretrained_model_name_or_path: x}",
    "lr_scheduler.kwargs.num_cycles": "{_target_: torch.optim.AdamW}",
}


@pytest.mark.parametrize("key", GADGETS)
def test_a_function_that_could_run_anything_is_rejected_in_every_section_before_torch_is_imported(
    recipe: Path, key: str
) -> None:
    section = key.partition(".")[0]
    recipe.write_text(
        RECIPE.partition("dataset:")[0] + "dataset: {_target_: datasets.load_dataset, path: x}\n"
    )
    more = ["--distributed.tp_size=2"] if section == "distributed" else []
    loaded = load(recipe, f"--{key}={GADGETS[key]}", *more)
    with pytest.raises(RecipeError) as caught:
        check_names(loaded, Trust())
    text = str(caught.value)
    assert (
        f"{key}: " in text
        and f"--{key}" in text
        and "is not trusted, and not on the allowlist for" in text
    )
    assert "AUTOMODEL_CKPT_TRUST=" in text


def test_the_name_of_a_class_alone_gets_a_hint_with_the_allowed_names(recipe: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"'AdamW' is not a dotted name[\s\S]*such as torch\.optim"
    ):
        check_names(load(recipe, "--optimizer._target_=AdamW"), Trust())


@pytest.mark.parametrize("base", [[], ["--optimizer._target_=torch.optim.SGD"]])
def test_a_group_of_parameters_may_name_an_optimizer_and_nothing_else(
    recipe: Path, base: list[str]
) -> None:
    group = "{params: ['*'], _target_: %s, lr: 1}"
    checked(
        recipe, *base, f"--optimizer.groups=[{group % 'torch.optim.Muon'}]", trust=("trusted_pkg",)
    )
    for target in ("transformers.modeling_utils.load_state_dict", "torch.nn.Linear"):
        with pytest.raises(
            RecipeError, match=r"optimizer\.groups\.0: .* not on the allowlist for optimizer"
        ):
            checked(recipe, *base, f"--optimizer.groups=[{group % target}]")
    remote = "{params: ['*'], _target_: torch.optim.Muon, trust_remote_code: 1}"
    with pytest.raises(
        RecipeError, match=r"optimizer\.groups\.0\.trust_remote_code: this runs code"
    ):
        checked(recipe, *base, f"--optimizer.groups=[{remote}]")


def test_a_class_of_another_kind_than_the_section_takes_is_rejected_after_its_import(
    recipe: Path,
) -> None:
    for key, target in (
        ("loss_fn", "torch.nn.Linear"),
        ("optimizer", "torch.optim.SparseAdamW"),
        ("optimizer", "torch.nn.CrossEntropyLoss"),
        ("tokenizer", "transformers.AutoModel.from_pretrained"),
        ("model", "transformers.AutoModelForCausalLM.register"),
    ):
        with pytest.raises(
            RecipeError,
            match=f"{key}: .*(not on the allowlist for {key}|torch.optim\\S* not found)",
        ):
            checked(recipe, f"--{key}._target_={target}")


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("dataset", "cache_dir", "/outside"),
        ("dataset", "download_config", "{cache_dir: /outside}"),
        ("dataset", "storage_options", "{fo: x}"),
        ("dataset", "download_mode", "force_redownload"),
        ("dataset", "loader", "x"),
        ("dataset", "path", "pandas"),
        ("dataset", "path", "sql"),
        ("dataset", "path", "reference::evil.json"),
        ("dataset", "data_files", "{train: [a.csv, 'github://x:y@z/a.csv']}"),
        ("dataset", "data_dir", "zip://x::https://host/evil.zip"),
        ("tokenizer", "cache_dir", "/outside"),
        ("tokenizer", "gguf_file", "x"),
        ("tokenizer", "use_kernels", "true"),
        ("model", "weights_only", "false"),
        ("model", "pickle_module", "dill"),
        ("model", "use_kernels", "yes"),
        ("model", "quantization_config.quant_method", "awq"),
        ("model", "custom_generate", "evil"),
        ("model", "adapter_kwargs", "{path: x}"),
    ],
)
def test_arguments_that_name_code_or_places_to_write_need_trust(
    recipe: Path, section: str, name: str, value: str
) -> None:
    named = {
        "dataset": "datasets.load_dataset",
        "tokenizer": "transformers.AutoTokenizer.from_pretrained",
        "model": "transformers.AutoModelForCausalLM.from_pretrained",
    }[section]
    model = "{from_config: {model_type: llama}}" if section != "model" else "{}"
    recipe.write_text(f"model: {model}\ndataset: {{_target_: datasets.load_dataset, path: csv}}\n")
    with pytest.raises(RecipeError) as caught:
        checked(recipe, f"--{section}._target_={named}", f"--{section}.{name}={value}")
    refused = (
        f"{section}.{name.partition('.')[0]}: {named} does not allow this argument without trust"
    )
    assert refused in str(caught.value) and f"--trust {named.partition('.')[0]}" in str(
        caught.value
    )


def test_a_nested_plug_in_is_allowed_by_the_parameter_that_takes_it(recipe: Path) -> None:
    auto = "_target_: transformers.AutoModelForCausalLM.from_config"
    recipe.write_text(
        f"model: {{{auto}, config: {{_target_: transformers.GPT2Config, n_layer: 1}}}}\n"
    )
    data = "--dataset={_target_: datasets.load_dataset, path: json"
    checked(recipe, data + "}")
    for nested in (
        "split: {_target_: torch.optim.AdamW}",
        "features: {_target_: transformers.GPT2Config}",
    ):
        with pytest.raises(RecipeError, match="not on the allowlist for an argument"):
            checked(recipe, f"{data}, {nested}}}")
    with pytest.raises(RecipeError, match="not on the allowlist for config"):
        checked(recipe, data + "}", "--model.config._target_=torch.optim.AdamW")
    checked(
        recipe,
        f"{data}, split: {{_target_: trusted_pkg.things.make, size: 1}}}}",
        trust=("trusted_pkg",),
    )


def test_a_target_from_the_environment_follows_the_same_rules(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_TARGET", "transformers.modeling_utils.load_state_dict")
    with pytest.raises(RecipeError, match="the value of the variable is not allowed here"):
        checked(recipe, "--dataset._target_=${oc.env:CKPT_TARGET}")
    monkeypatch.setenv("CKPT_TARGET", "torch.optim.AdamW")
    checked(recipe, "--optimizer._target_=${oc.env:CKPT_TARGET}")


@pytest.mark.parametrize("value", ["true", "yes", "1", "on", "Y"])
def test_remote_code_needs_trust_wherever_it_stands(recipe: Path, value: str) -> None:
    for key in (
        "dataset.trust_remote_code",
        "model.from_config.trust_remote_code",
        "dataset.a.b.trust_remote_code",
    ):
        words = [
            "--model={from_config: {model_type: llama}}",
            "--dataset._target_=trusted_pkg.things.any_keywords",
        ]
        with pytest.raises(RecipeError, match="--trust trust_remote_code") as caught:
            checked(recipe, *words, f"--{key}={value}")
        assert f"{key}: this runs code from a model repository, which is not trusted" in str(
            caught.value
        )
        checked(recipe, *words, f"--{key}={value}", trust=("trusted_pkg", "trust_remote_code"))


@pytest.mark.parametrize(
    "spelling", ["no", "off", "n", "N", "0", "False", '"false"', "'0'", "'no'", "null", "~", ""]
)
def test_every_spelling_of_no_reaches_transformers_as_false_or_null(
    recipe: Path, spelling: str
) -> None:
    named = "_target_: transformers.AutoTokenizer.from_pretrained, pretrained_model_name_or_path: x"
    recipe.write_text(
        f"{RECIPE}  table: {{trust_remote_code: {spelling}}}\n"
        f"tokenizer: {{{named}, trust_remote_code: {spelling}}}\n"
        f"lr_scheduler: {{kwargs: {{trust_remote_code: {spelling}}}}}\n"
    )
    config = checked(recipe).config
    expected = None if spelling in ("null", "~", "") else False
    found = (config.tokenizer.kwargs, config.dataset.kwargs["table"], config.lr_scheduler.kwargs)
    assert [each["trust_remote_code"] for each in found] == [expected] * 3
    assert defaults(config.tokenizer._target_) == {"trust_remote_code": False}


@pytest.mark.parametrize(
    "value", ["sometimes", "2", "[]", "{a: 1}", "'  no'", "''", "falsch", "-0", "0.0"]
)
def test_what_is_neither_true_nor_false_is_rejected_with_and_without_trust(
    recipe: Path, value: str
) -> None:
    recipe.write_text(RECIPE + f"  table: {{trust_remote_code: {value}}}\n")
    with pytest.raises(RecipeError, match=r"table\.trust_remote_code must be true, false or null"):
        checked(recipe, trust=("trusted_pkg", "trust_remote_code"))


def test_an_attention_from_the_hub_is_remote_code(recipe: Path) -> None:
    for words in (
        ["--model.attn_implementation=owner/kernel"],
        [
            "--model={from_config: {model_type: llama, text_config: {_attn_implementation: 'owner/kernel:x'}}}"
        ],
    ):
        with pytest.raises(RecipeError, match="runs code from a model repository"):
            checked(recipe, *words)
        checked(recipe, *words, trust=("trusted_pkg", "trust_remote_code"))
    checked(recipe, "--model.attn_implementation=sdpa")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("size", "017", 17),
        ("ratio", "1e-5", 1e-5),
        ("name", "017", "017"),
        ("name", "[INST] {x}", "[INST] {x}"),
        ("name", "{text}", "{text}"),
        ("on", "on", True),
        ("pair", "[3, 4]", (3, 4.0)),
        ("either", "3", 3),
        ("either", "x", "x"),
        ("table", "{a: 1}", {"a": 1.0}),
        ("free", "017", "017"),
    ],
)
def test_arguments_take_the_types_of_the_parameters(
    recipe: Path, name: str, text: str, expected: object
) -> None:
    value = checked(recipe, f"--dataset.{name}={text}").config.dataset.kwargs[name]
    assert (value, type(value)) == (expected, type(expected))


def test_the_arguments_of_a_plug_in_among_arguments_are_checked_too(recipe: Path) -> None:
    inner = "[{_target_: trusted_pkg.things.make, size: 1.5}]"
    with pytest.raises(RecipeError, match=r"dataset\.parts\.0\.size must be a whole number"):
        checked(recipe, f"--dataset.parts={inner}")
    loaded = checked(recipe, f"--dataset.parts={inner.replace('1.5', '017')}")
    assert build(loaded.config.dataset, tokenizer=None).parts == [17]


def test_no_message_about_a_plug_in_shows_a_resolved_value(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_TEST", "hunter2")
    reference = "${oc.env:CKPT_TEST}"
    for words in (
        [f"--dataset.size={reference}"],
        [f"--dataset.mode={reference}"],
        [f"--dataset.sise={reference}"],
    ):
        with pytest.raises(RecipeError) as caught:
            checked(recipe, *words)
        assert "hunter2" not in str(caught.value)
    for target in (f"{reference}.x", f"torch.nn.{reference}", reference):
        with pytest.raises(RecipeError) as caught:
            checked(recipe, f"--dataset._target_={target}")
        assert "hunter2" not in str(caught.value)
    with pytest.raises(RecipeError) as caught:
        prepare(load(recipe, f"--recipe={reference}.x"), Trust(["trusted_pkg"]))
    assert "hunter2" not in str(caught.value)


# Building


def test_an_argument_that_this_recipe_does_not_supply_is_missing() -> None:
    builder = Target("automodel_ckpt.data.vlm.conversations", {"path": "chat.jsonl"})
    with pytest.raises(RecipeError, match="processor is missing") as caught:
        build(builder, tokenizer=None)
    assert caught.value.problems[0].value == "tokenizer is supplied"


def test_building_never_runs_what_nobody_trusted() -> None:
    with pytest.raises(RecipeError, match="not trusted"):
        build(Target("os.system", {"command": "true"}))


# Recipes


@pytest.mark.parametrize(
    ("name", "trust"),
    [
        ("trusted_pkg.custom.MyRecipe", "trusted_pkg"),
        ("own.py:MyRecipe", "{folder}/own.py"),
        ("own.py:MyRecipe", "{folder}"),
    ],
)
def test_a_custom_recipe_types_its_own_sections(recipe: Path, name: str, trust: str) -> None:
    recipe.write_text(f"recipe: {name}\nhead:\n  width: 017\n" + RECIPE)
    loaded = load_recipe(recipe)
    prepared, cls = prepare(loaded, Trust([trust.format(folder=recipe.parent), "trusted_pkg"]))
    assert cls.__name__ == "MyRecipe"
    assert prepared.config.head.width == 17
    assert "width: 17" in prepared.to_yaml()
    with pytest.raises(RecipeError, match=r"unknown key head\.widht"):
        prepare(
            load(recipe, "--head.widht=1"),
            Trust([trust.format(folder=recipe.parent), "trusted_pkg"]),
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own.py:MyRecipe", "not trusted"),
        ("trusted_pkg.custom.MyRecipe", "not trusted"),
        ("absent.py:MyRecipe", "file absent.py not found"),
        ("os.path", "functions of the standard library"),
    ],
)
def test_a_recipe_outside_needs_trust(recipe: Path, name: str, message: str) -> None:
    loaded = load(
        recipe, f"--recipe={name}", "--dataset={_target_: datasets.load_dataset, path: x}"
    )
    with pytest.raises(RecipeError, match=message):
        prepare(loaded, Trust())


@pytest.mark.parametrize("name", ["own", "trusted_pkg"])
def test_the_name_of_a_package_trusts_no_file(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(recipe.parent)
    # A file with the name of a trusted package, and one in a directory of that name.
    for path in ("sub/own.py", "own/x.py", "trusted_pkg/x.py", "sub/trusted_pkg.py"):
        file = recipe.parent / path
        file.parent.mkdir(exist_ok=True)
        file.write_text("open('ran', 'w')\n")
        loaded = load(
            recipe, f"--recipe={path}:X", "--dataset={_target_: datasets.load_dataset, path: x}"
        )
        with pytest.raises(RecipeError, match=f"{path} is not trusted"):
            prepare(loaded, Trust([name]))
    assert not (recipe.parent / "ran").exists()


def test_a_class_that_is_no_recipe_is_refused(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="is not a recipe"):
        prepare(load(recipe, "--recipe=trusted_pkg.custom.NoRecipe"), Trust(["trusted_pkg"]))
    with pytest.raises(RecipeError, match=r"write custom\.py:CLASS"):
        prepare(load(recipe, "--recipe=custom.py"), Trust(["trusted_pkg", "custom.py"]))


def test_a_partial_is_what_it_calls(recipe: Path) -> None:
    loaded = checked(recipe, "--loss_fn={_target_: trusted_pkg.things.paint_twice, color: red}")
    assert build(loaded.config.loss_fn) == "REDRED"
    with pytest.raises(RecipeError, match="command is defined in posix"):
        checked(recipe, "--loss_fn._target_=trusted_pkg.things.command")


def test_trust_in_a_library_opens_all_of_it(recipe: Path) -> None:
    words = ["--dataset={_target_: datasets.load_dataset, path: json, cache_dir: x}"]
    checked(recipe, *words, trust=("datasets",))
    assert callable(resolve("transformers.modeling_utils.load_state_dict", Trust(["transformers"])))
    with pytest.raises(Rejected):
        resolve("transformers.utils.import_utils.importlib.import_module", Trust(["transformers"]))


def test_what_a_program_gives_is_not_from_the_recipe(recipe: Path) -> None:
    key = "logging.trackers.mlflow.tracking_uri"
    given = automodel_ckpt.load_recipe(recipe, {key: "http://localhost:5000"})
    assert prepare(given, Trust(["trusted_pkg"])).recipe_class.__name__ == "LLMFinetune"
    recipe.write_text(RECIPE + "logging: {trackers: {mlflow: {tracking_uri: 'http://localhost'}}}")
    with pytest.raises(RecipeError, match="--trust host:localhost"):
        prepare(automodel_ckpt.load_recipe(recipe), Trust(["trusted_pkg"]))
