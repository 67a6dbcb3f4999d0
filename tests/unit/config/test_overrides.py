"""The command line of ckpt-train: every form of flag and override, in any order."""

from __future__ import annotations

from pathlib import Path

import pytest

from automodel_ckpt.config.bind import Binder
from automodel_ckpt.config.keys.optimizer import OptimizerTarget
from automodel_ckpt.config.load import LoadedRecipe, load_recipe
from automodel_ckpt.config.overrides import parse
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import RecipeError

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


def load(recipe: Path, *words: str) -> LoadedRecipe:
    line = parse(words)
    return load_recipe(recipe, line.overrides, problems=line.problems)


def pairs(*words: str) -> dict[str, object]:
    line = parse(words)
    assert line.problems == []
    return {override.key: override.node.value for override in line.overrides}


def test_a_value_follows_after_a_space_or_an_equals_sign() -> None:
    assert pairs("--a.b", "v", "--c.d=w", "--e.f=x=y") == {"a.b": "v", "c.d": "w", "e.f": "x=y"}


def test_a_negative_number_is_a_value() -> None:
    assert pairs("--optimizer.lr", "-1", "--dataset.x", "-2e-3") == {
        "optimizer.lr": "-1",
        "dataset.x": "-2e-3",
    }


@pytest.mark.parametrize(
    "key",
    [
        "checkpoint.enabled",
        "deterministic",
        "step_scheduler.ckpt_on_best",
        "model.activation_checkpointing",  # true, false or a word
    ],
)
def test_a_bare_boolean_takes_the_next_word_only_if_it_reads_as_a_boolean(key: str) -> None:
    line = parse([f"--{key}", "recipe.yaml"])
    assert (line.words, line.overrides[0].node.value) == (["recipe.yaml"], "true")
    line = parse([f"--{key}", "off", "recipe.yaml"])
    assert (line.words, line.overrides[0].node.value) == (["recipe.yaml"], "off")
    assert pairs(f"--{key}") == {key: "true"}
    assert pairs(f"--{key}", "--seed=1") == {key: "true", "seed": "1"}


def test_a_bare_keyword_of_a_plug_in_is_true_and_takes_the_next_word() -> None:
    line = parse(["--dataset.path", "data.yaml", "recipe.yaml"])
    assert (line.words, line.overrides[0].node.value) == (["recipe.yaml"], "data.yaml")
    assert pairs("--dataset.streaming", "--seed", "1") == {"dataset.streaming": "true", "seed": "1"}


def test_the_order_of_flags_recipe_and_overrides_is_free() -> None:
    parts = [["--nproc-per-node", "2"], ["recipe.yaml"], ["--seed", "1"], ["--checkpoint.enabled"]]
    lines = [parse([word for part in order for word in part]) for order in (parts, parts[::-1])]
    for line in lines:
        assert (line.words, line.flags.nproc_per_node, line.problems) == (["recipe.yaml"], "2", [])
        assert sorted(override.key for override in line.overrides) == ["checkpoint.enabled", "seed"]


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


def test_null_unsets(recipe: Path) -> None:
    assert load(recipe, "--clip_grad_norm", "null").config.clip_grad_norm is None


def test_brackets_are_characters_in_a_text_field(recipe: Path) -> None:
    assert (
        load(recipe, "--model.attn_implementation", "[x]").config.model.attn_implementation == "[x]"
    )


TEMPLATES = [
    "{{ text }}",
    "{% if a %}{{ b }}{% endif %}",
    "[INST] {{ q }} [/INST]",
    "[INST] {x}",
    "{x}: {y",
    "[*.x]",
]


@pytest.mark.parametrize("text", TEMPLATES)
def test_a_template_in_a_plug_in_is_text(recipe: Path, text: str) -> None:
    loaded = load(recipe, "--dataset.field", text, "--dataset.more={a: 1}")
    assert loaded.config.dataset.kwargs["field"] == text
    assert loaded.config.dataset.kwargs["more"] == {"a": 1}
    assert f"'{text}'" in loaded.to_yaml()


@pytest.mark.parametrize("text", [*TEMPLATES, "[INST]", "{text}", "[1, 2]"])
def test_a_text_parameter_takes_brackets_as_characters(recipe: Path, text: str) -> None:
    annotations = ["chat_template", "template_kwargs", "x"]
    loaded = load(recipe, *(f"--dataset.{name}={text}" for name in annotations))
    binder = Binder(RecipeConfig, [])
    nodes = [loaded.tree.at(f"dataset.{name}") for name in annotations]
    assert None not in nodes
    assert binder.value(str | None, nodes[0], "dataset.chat_template") == text  # type: ignore[arg-type]
    assert binder.problems == []
    assert loaded.tree.at("dataset.chat_template").value == text  # type: ignore[union-attr]


def test_overrides_reach_into_plug_ins(recipe: Path) -> None:
    loaded = load(recipe, "--optimizer.lr", "1e-3", "--optimizer._target_=torch.optim.SGD")
    assert loaded.config.optimizer == OptimizerTarget("torch.optim.SGD", {"lr": 1e-3})


def test_the_later_override_wins(recipe: Path) -> None:
    assert load(recipe, "--seed=1", "--seed=2").config.seed == 2


def test_a_value_has_no_keys(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="seed"):
        load(recipe, "--seed=1", "--seed.x=2")


def test_all_launch_flags_are_read() -> None:
    words = (
        "--nnodes 1:2 --node-rank 1 --rdzv-endpoint h:1 --rdzv-id "
        "j --master-addr h --master-port 99 --max-restarts 3"
    )
    flags = parse([*words.split(), "--trust", "a", "--trust=b"]).flags
    assert (flags.nnodes, flags.node_rank, flags.rdzv_endpoint, flags.rdzv_id) == (
        "1:2",
        1,
        "h:1",
        "j",
    )
    assert (flags.master_addr, flags.master_port, flags.max_restarts, flags.trust) == (
        "h",
        99,
        3,
        ["a", "b"],
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc-per-node=0"], "nproc_per_node must be a number from 1, auto, gpu or cpu"),
        (["--nproc-per-node", "two"], "nproc_per_node must be"),
        (["--nnodes=2:1"], "nnodes must be"),
        (["--node-rank=-1"], "node_rank must be 0 or more"),
        (["--master-port=x"], "master_port must be a whole number"),
        (["--master-port=70000"], "master_port must be a port"),
        (["--max-restarts=1.5"], "max_restarts must be a whole number"),
        (["--nproc-per-node"], "--nproc-per-node needs a value"),
        (["--optimizer.lr", "--seed=1"], "--optimizer.lr needs a value"),
        (["--nproc-per-nod=2"], "did you mean --nproc-per-node?"),
        (["--dry-rnu"], "did you mean --dry-run?"),
        (["-x"], "unknown argument -x"),
        (["--"], "unknown argument --"),
        (["--copy", "name"], "--copy takes NAME DIR"),
        (["--list=x"], "--list takes no value"),
    ],
)
def test_wrong_flags_are_named_with_a_hint(words: list[str], message: str) -> None:
    assert message in "\n".join(map(str, parse(words).problems))


@pytest.mark.parametrize("flag", ["-v", "--verbose"])
def test_verbose_is_the_level_debug(flag: str) -> None:
    line = parse([flag, "recipe.yaml"])
    assert line.words == ["recipe.yaml"] and not line.problems
    (override,) = line.overrides
    assert (override.key, override.node.value) == ("logging.level", "debug")
