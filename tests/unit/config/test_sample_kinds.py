"""Data sets whose samples a recipe does not train on are reported before torch is imported."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.config.callables.allowlist import ALLOWED
from automodel_ckpt.config.load import load_recipe
from automodel_ckpt.config.registry import own_classes, own_name
from automodel_ckpt.config.sample_kinds import MIXTURE, SAMPLE_KINDS, sample_problems
from automodel_ckpt.config.tree.yaml_tree import node_of
from automodel_ckpt.errors import Problem, RecipeError

DATA = "automodel_ckpt.data"


def problems(recipe: str, builder: str, **sections: Any) -> list[Problem]:
    return sample_problems(
        node_of(
            {"recipe": recipe, "dataset": {"_target_": f"automodel_ckpt.{builder}"}, **sections}
        )
    )


def test_every_recipe_and_every_builder_has_one_kind_of_samples() -> None:
    recipes = [recipe for kind in SAMPLE_KINDS for recipe in kind.recipes]
    assert sorted(recipes) == sorted(str(own_name(name)) for name in own_classes())
    builders = [f"automodel_ckpt.{name}" for kind in SAMPLE_KINDS for name in kind.builders]
    listed = [str(getattr(e, "name", "")) for e in ALLOWED["dataset"]]
    own = {name for name in listed if name.startswith("automodel_ckpt.")}
    assert sorted(builders) == sorted(own - {MIXTURE})


def test_a_recipe_accepts_the_builders_of_its_samples_only() -> None:
    for kind, other in itertools.product(SAMPLE_KINDS, SAMPLE_KINDS):
        for recipe, builder in itertools.product(kind.recipes, other.builders):
            found = problems(recipe, builder)
            assert bool(found) == (kind is not other), (recipe, builder)


def test_a_wrong_data_set_is_reported_with_its_line_and_what_to_do(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "recipe: vlm_finetune\nmodel:\n  from_pretrained: some/model\ndataset:\n"
        "  _target_: automodel_ckpt.data.chat.messages\n  path: chat.jsonl\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, [])
    (problem,) = caught.value.problems
    assert (
        problem.what
        == "the recipe vlm_finetune trains on conversations with images or audio, and dataset "
        "has texts"
    )
    assert problem.where == f"{recipe}:5"
    assert problem.value == f"{DATA}.chat.messages"
    assert f"{DATA}.vlm.conversations" in problem.hint
    assert "llm_finetune" in problem.hint


def test_sources_of_mixtures_and_validation_sets_are_compared_too() -> None:
    pairs = {"_target_": f"{DATA}.preference.pairs"}
    mixture = {"_target_": MIXTURE, "sources": {"a": {"_target_": f"{DATA}.text.text"}, "b": pairs}}
    found = problems(
        "llm_finetune", "data.text.text", validation_datasets={"x": mixture, "y": pairs}
    )
    found += problems("llm_finetune", "data.text.text", validation_dataset=pairs)
    names = [problem.what.rsplit(", and ")[1].split()[0] for problem in found]
    assert names == [
        "validation_datasets.x.sources.b",
        "validation_datasets.y",
        "validation_dataset",
    ]


def test_a_collate_function_may_use_other_samples_if_the_recipe_can_build_them() -> None:
    collate = {"dataloader": {"collate_fn": {"_target_": "mine.collate"}}}
    assert problems("vlm_finetune", "data.chat.messages", **collate) == []
    assert problems("llm_finetune", "data.vlm.conversations", **collate) != []
    # Null is the collate function of the recipe.
    assert problems("vlm_finetune", "data.chat.messages", dataloader={"collate_fn": None}) != []
