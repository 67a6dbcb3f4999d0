"""A new run from the weights of another: every form of them, other heads and vocabularies, and what is refused."""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from automodel_ckpt.errors import AutomodelError, CheckpointUnusable
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.distributed.kinds.test_training import run
from tests.support import ranks
from tests.support.runs.training import EXPORT, RECIPE, Recipe, build, steps_of, train, write_recipe
from tests.support.runs.training_parts import WithMore

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of two steps: ``base`` of a model, ``more`` of a model and a value head, on two ranks each."""
    directory = tmp_path_factory.mktemp("base")
    run(directory, "--step_scheduler.max_steps=2", EXPORT, name="base", num_ranks=2)
    run(
        directory,
        "--step_scheduler.max_steps=2",
        "--checkpoint.model_save_format=torch_save",
        name="more",
        recipe_class=WithMore,
    )
    return directory


def pretrained(export: Path, text: str = RECIPE) -> str:
    """The recipe with an export as its model, and the tokenizer that it always has."""
    start, end = text.index("  from_config"), text.index("tokenizer:")
    return text[:start] + f"  from_pretrained: {export}\n" + text[end:]


def weights_of(recipe: LLMFinetune) -> Weights:
    """The whole tensors; a collective."""
    state = recipe.model.state_dict()
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in state.items()
    }


def started(
    recipe_file: Path, *overrides: str, recipe_class: type[LLMFinetune] = Recipe
) -> Weights | str:
    """The weights after ``setup``, or what it was refused with."""
    recipe = build(recipe_file, *overrides, recipe_class=recipe_class)
    try:
        recipe.setup()
        return weights_of(recipe)
    except AutomodelError as error:
        return f"{type(error).__name__} {error}"
    finally:
        recipe.close()


def exported(base: Path) -> Weights:
    """What transformers reads of the base's export."""
    directory = base / "base/epoch_0_step_2/model/consolidated"
    return dict(AutoModelForCausalLM.from_pretrained(directory).state_dict())


@pytest.mark.further
def test_every_form_of_a_checkpoint_gives_the_same_weights(base: Path, tmp_path: Path) -> None:
    checkpoint = base / "base/epoch_0_step_2"
    forms = [checkpoint.parent, checkpoint.parent / "LATEST", checkpoint, checkpoint / "model"]
    forms += [checkpoint / "model/consolidated", base / "more"]
    allowing = "--init_from.allow_unexpected=['value_head.*']"
    recipe = write_recipe(tmp_path)

    def all_forms() -> list[Weights | str]:
        here = ("--checkpoint.enabled=false", allowing)
        return [
            started(recipe, *here, f"--init_from.path={form}", f"--seed={n}")
            for n, form in enumerate(forms)
        ]

    *of_base, of_more = ranks.run(all_forms, 1, init=False)[0]
    expected = exported(base)
    for found in of_base:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert isinstance(of_more, dict), of_more
    assert not torch.equal(of_more["model.norm.weight"], expected["model.norm.weight"])


def test_ranks_read_their_shares_and_a_resumed_run_never_starts_over(
    base: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(base / "base", source, symlinks=True)
    overrides = (f"--init_from.path={source}", "--lr_scheduler.decay_steps=4", "--seed=1")
    recipe = write_recipe(tmp_path)
    places = [f"--checkpoint.checkpoint_dir={tmp_path / name}" for name in ("whole", "run")]
    four, two = (f"--step_scheduler.max_steps={number}" for number in (4, 2))
    each: list[Callable[[], Any]] = [
        partial(started, recipe, *overrides, "--checkpoint.enabled=false"),
        partial(train, recipe, *overrides, places[0], four),
        partial(train, recipe, *overrides, places[1], two),
    ]
    (found, _), whole, _ = ranks.run_each(each, 2)
    assert all(torch.equal(found[name], tensor) for name, tensor in exported(base).items())
    shutil.rmtree(source)
    assert run(tmp_path, *overrides, four, num_ranks=2) == whole
    assert [record["step"] for record in steps_of(tmp_path / "run")] == [1, 2, 3, 4]


def test_missing_and_unexpected_weights_stop_the_run_unless_a_pattern_allows_them(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = f"--init_from.path={base / 'base'}"
    recipe = write_recipe(tmp_path)
    more_layers = "--model.from_config.num_hidden_layers=3"
    fewer = "--model.from_config.num_hidden_layers=1"
    wider = "--model.from_config.intermediate_size=52"
    cases: list[tuple[tuple[str, ...], str]] = [
        ((more_layers,), "+ model.layers.2.mlp.up_proj.weight: not there"),
        ((fewer,), "- model.layers.1.mlp.up_proj.weight: only there"),
        ((wider,), "~ model.layers.0.mlp.up_proj.weight: there [48, 32], here [52, 32]"),
        ((more_layers, "--init_from.allow_missing=['model.layers.2.*']"), ""),
        ((fewer, "--init_from.allow_unexpected=['model.layers.1.*']"), ""),
        ((wider, "--init_from.allow_missing=['*.mlp.*']"), ""),
        (
            ("--model.from_config.vocab_size=310",),
            "~ model.embed_tokens.weight: there [300, 32], here [310, 32]",
        ),
    ]

    def all_cases() -> list[Weights | str]:
        return [
            started(recipe, checkpoint, "--checkpoint.enabled=false", *overrides)
            for overrides, _ in cases
        ]

    results = ranks.run(all_cases, 1, init=False)[0]
    for (overrides, refusal), result in zip(cases, results, strict=True):
        if refusal:
            assert isinstance(result, str), overrides
            assert result.startswith("RecipeError")
            assert refusal in result
        else:
            assert isinstance(result, dict), result
    printed = capfd.readouterr().err
    assert "+ model.layers.2.mlp.up_proj.weight: not there" in printed
    assert "~ model.layers.0.mlp.up_proj.weight: there [48, 32], here [52, 32]" in printed


def test_damaged_weights_are_refused_on_all_ranks(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "base", tmp_path / "source", symlinks=True)
    shard = sorted((tmp_path / "source/epoch_0_step_2/model").glob("shard-*"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    training = partial(
        train,
        write_recipe(tmp_path),
        f"--init_from.path={tmp_path / 'source'}",
        f"--checkpoint.checkpoint_dir={tmp_path / 'run'}",
    )
    for outcome in ranks.outcomes(training, 2, init=False):
        assert isinstance(outcome.error, CheckpointUnusable)
        assert shard.name in str(outcome.error)


@pytest.mark.parametrize("new_tokens", ["mean", pytest.param("init", marks=pytest.mark.further)])
def test_a_larger_tokenizer_gets_room_and_the_export_says_so(
    base: Path, tmp_path: Path, new_tokens: str
) -> None:
    export = base / "base/epoch_0_step_2/model/consolidated"
    text = pretrained(export).replace("vocab_size: 300", "vocab_size: 310")
    frozen = (
        "--optimizer.lr=0",
        "--step_scheduler.max_steps=1",
        f"--model.new_tokens={new_tokens}",
        EXPORT,
    )
    run(tmp_path, *frozen, "--model.vocab_size=tokenizer", text=text, num_ranks=2)
    said = (tmp_path / "run/log.txt").read_text()
    assert (
        "resized model.embed_tokens.weight: [300, 32] -> [310, 32]" in said
        and "the whole model first" not in said
    )
    model_directory = tmp_path / "run/epoch_0_step_1/model"
    grown = AutoModelForCausalLM.from_pretrained(model_directory / "consolidated").state_dict()
    old = exported(base)["model.embed_tokens.weight"]
    assert torch.equal(grown["model.embed_tokens.weight"][:300], old)
    assert torch.equal(grown["lm_head.weight"], grown["model.embed_tokens.weight"])
    mean = old.double().mean(0).float().expand(10, 32)
    assert torch.equal(grown["model.embed_tokens.weight"][300:], mean) == (new_tokens == "mean")


def test_adapters_start_from_those_of_another_run(base: Path, tmp_path: Path) -> None:
    adapted = ("--peft.target_modules=[q_proj]", f"--peft.base_dir={tmp_path / 'frozen'}")
    run(tmp_path, *adapted, "--step_scheduler.max_steps=2", name="adapters")
    checkpoint = tmp_path / "adapters/epoch_0_step_2"
    saved = load_file(checkpoint / "model/adapter_model.safetensors")
    recipe = write_recipe(tmp_path)
    sources = [tmp_path / "adapters", checkpoint / "model", base / "base"]

    def all_sources() -> list[Weights | str]:
        here = ("--checkpoint.enabled=false", "--seed=3")
        found = [
            started(recipe, *here, *adapted, f"--init_from.path={source}") for source in sources
        ]
        return [*found, started(recipe, *here, f"--init_from.path={sources[0]}")]

    *of_adapters, of_whole, whole_of_adapters = ranks.run(all_sources, 1, init=False)[0]
    for found in of_adapters:
        assert isinstance(found, dict), found
        for name, tensor in saved.items():
            inside = re.sub(r"\.lora_(A|B)\.", r".lora_\1.default.", name)
            assert torch.equal(found[inside], tensor)
    assert "give the recipe the section peft of these adapters" in str(of_whole)
    assert "ckpt export --merge" in str(whole_of_adapters)


def assert_rejected(result: Weights | str, *texts: str) -> None:
    assert isinstance(result, str)
    for text in texts:
        assert text in result


def test_a_prefix_of_all_names_is_removed_with_strip_which_the_error_names(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = exported(base)
    policy = {f"policy.model.{name}": value for name, value in expected.items()}
    torch.save(policy | {"value_head.weight": torch.ones(3)}, tmp_path / "policy.pt")
    recipe = write_recipe(tmp_path)
    path = f"path: {tmp_path}/policy.pt"

    def both_cases() -> list[Weights | str]:
        here = ("--checkpoint.enabled=false", "--seed=5")
        sections = (f"{{{path}}}", f"[{{{path}, strip: policy.model}}]")
        return [started(recipe, *here, f"--init_from={section}") for section in sections]

    prefixed, stripped = ranks.run(both_cases, 1, init=False)[0]
    assert_rejected(prefixed, f"remove it with init_from: [{{{path}, strip: policy.model}}]")
    assert isinstance(stripped, dict), stripped
    for name, value in expected.items():
        assert torch.equal(stripped[name], value), name
    printed = capfd.readouterr().err
    assert "without the prefix that is removed are not used:\n    value_head.weight" in printed


def test_several_sources_fill_their_modules_and_a_later_one_replaces_an_earlier_one(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = exported(base)
    layer = {
        name.removeprefix("model.layers.1."): value + 1
        for name, value in expected.items()
        if name.startswith("model.layers.1.")
    }
    others = {"decoder.weight": torch.ones(3)}
    part = {f"encoder.{name}": value for name, value in layer.items()}
    torch.save({"state_dict": part | others}, tmp_path / "part.pt")
    torch.save(layer | others, tmp_path / "plain.pt")
    attention = {name: value for name, value in layer.items() if not name.startswith("mlp.")}
    torch.save(attention, tmp_path / "attention.pt")
    recipe = write_recipe(tmp_path)
    whole = f"{{path: {base / 'base'}}}"
    stripped = f"{{path: {tmp_path}/part.pt, strip: encoder, into: model.layers.1}}"
    plain = f"path: {tmp_path}/plain.pt, into: model.layers.1"
    cases = [
        f"[{whole}, {stripped}]",
        f"[{stripped}]",
        f"[{{{plain}, allow_unexpected: ['decoder.*']}}]",
        f"[{{{plain}}}]",
        f"[{{path: {tmp_path}/attention.pt, into: model.layers.1}}]",
        f"[{{path: {tmp_path}/attention.pt, into: model.layers.1, allow_missing: ['*.mlp.*']}}]",
        f"[{{path: {tmp_path}/part.pt, strip: nothing}}]",
        f"[{whole}, {{path: {tmp_path}/part.pt, into: model.tower}}]",
        "[]",
    ]

    def all_cases() -> list[Weights | str]:
        here = ("--checkpoint.enabled=false", "--seed=5")
        return [started(recipe, *here, f"--init_from={case}") for case in cases]

    results = ranks.run(all_cases, 1, init=False)[0]
    both, only_part, allowed, unexpected, missing, without_mlp, *rest = results
    no_prefix, no_module, initial = rest
    assert isinstance(both, dict), both
    for name, value in expected.items():
        added = 1 if name.startswith("model.layers.1.") else 0
        assert torch.equal(both[name], value + added), name
    # Modules that no source fills keep their values.
    assert isinstance(initial, dict), initial
    for found in (only_part, allowed):
        assert isinstance(found, dict), found
        for name, value in found.items():
            source = both if name.startswith("model.layers.1.") else initial
            assert torch.equal(value, source[name]), name
    assert_rejected(
        unexpected, "- model.layers.1.decoder.weight: only there", "init_from.N.allow_unexpected"
    )
    assert_rejected(missing, "+ model.layers.1.mlp.up_proj.weight: not there")
    assert isinstance(without_mlp, dict), without_mlp
    for name, value in without_mlp.items():
        is_filled = name.startswith("model.layers.1.") and ".mlp." not in name
        assert torch.equal(value, (both if is_filled else initial)[name]), name
    assert_rejected(no_prefix, "begins with this prefix", "init_from.0.strip")
    assert_rejected(no_module, "the model has no such module", "init_from.1.into")
    printed = capfd.readouterr().err
    assert "without the prefix that is removed are not used:\n    decoder.weight" in printed
    assert "replaces 9 tensors of earlier sources" in printed
