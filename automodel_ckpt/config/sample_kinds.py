"""Which data sets the recipes of this package train on, by the kind of their samples.

Samples of the wrong kind fail in the first batch, after the model was read, or train the model on the wrong thing: a
language model would learn rejected completions. The kinds are therefore compared before torch is imported. A recipe or
a builder of the user can have samples of any kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from automodel_ckpt.config.registry import own_name
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.yaml_tree import Node
from automodel_ckpt.errors import Problem

_PACKAGE = "automodel_ckpt."
MIXTURE = f"{_PACKAGE}data.mixture.mixture"
"""The builder that takes its samples from its sources."""


@dataclass(frozen=True)
class SampleKind:
    """The samples of *builders* (names below ``automodel_ckpt``), which *recipes* train on.

    The first of both are the ones that messages suggest. *needs* is the argument of the builders that only these
    recipes supply; None: there is none.
    """

    samples: str
    recipes: tuple[str, ...]
    builders: tuple[str, ...]
    needs: str | None = None


SAMPLE_KINDS: tuple[SampleKind, ...] = (
    SampleKind(
        "texts",
        ("llm_finetune", "pretrain", "distill"),
        (
            "data.text.text",
            "data.text.prompt_completion",
            "data.chat.messages",
            "data.function_calls.xlam",
            "data.token_files.megatron",
            "data.token_files.nanogpt",
            "examples.data.mock.random_tokens",
            "data.squad.squad",
            "data.hellaswag.hellaswag",
            "examples.data.python_docs.language_modeling",
            "examples.data.python_docs.docstring_pairs",
            "examples.data.python_docs.documents",
        ),
    ),
    SampleKind(
        "conversations with images or audio",
        ("vlm_finetune", "vlm_distill"),
        (
            "data.vlm.conversations",
            "data.vlm.image_answers",
            "data.vlm.transcripts",
            "examples.data.mock_images.mock_images",
            "examples.data.digits.scans",
        ),
        "processor",
    ),
    SampleKind(
        "pairs of a preferred and a rejected answer",
        ("dpo", "orpo", "reward_model"),
        ("data.preference.pairs", "examples.data.python_docs.preferences"),
    ),
    SampleKind(
        "completions that are judged as desirable or undesirable",
        ("kto",),
        (
            "data.kto.judged_completions",
            "data.kto.split_pairs",
            "examples.data.python_docs.judged_docstrings",
        ),
    ),
    SampleKind(
        "pairs of a query and its document",
        ("embedding", "reranker"),
        (
            "data.text_pairs.text_pairs",
            "data.retrieval.retrieval",
            "examples.data.python_docs.description_pairs",
        ),
    ),
    SampleKind(
        "pairs of a source and a target text",
        ("seq2seq",),
        ("data.seq2seq.source_target", "examples.data.python_docs.summaries"),
    ),
    SampleKind(
        "texts with the names of their labels",
        ("sequence_classification",),
        ("data.classification.texts", "examples.data.library_topics.library_topics"),
        "labels",
    ),
)

_OF_BUILDER = {f"{_PACKAGE}{name}": kind for kind in SAMPLE_KINDS for name in kind.builders}
_OF_RECIPE = {recipe: kind for kind in SAMPLE_KINDS for recipe in kind.recipes}
_DATA_SETS = re.compile(
    r"(dataset|validation_dataset|validation_datasets\.[^.]+)(\.sources\.[^.]+)*"
)
"""The keys of data sets, and of the sources of mixtures."""


def recipes_of_builder(name: str) -> tuple[str, ...]:
    """The recipes that train on the samples of a builder; empty for a mixture and for what is no builder of data."""
    kind = _OF_BUILDER.get(name)
    return kind.recipes if kind is not None else ()


def sample_problems(root: Node) -> list[Problem]:
    """List the data sets of a recipe's tree with samples that its recipe does not train on."""
    node = root.at("recipe")
    recipe = own_name(RecipeConfig.recipe if node is None else str(node.value))
    expected = _OF_RECIPE.get(recipe) if recipe else None
    if recipe is None or expected is None:
        return []
    collates = root.at("dataloader.collate_fn")
    has_collate_fn = collates is not None and not collates.is_null
    problems = []
    for place, target in root.walk():
        key, _, name = place.rpartition(".")
        if name != "_target_" or not _DATA_SETS.fullmatch(key):
            continue
        mixture = root.at(f"{key.rpartition('.sources.')[0]}._target_")
        if mixture is not None and mixture.value != MIXTURE:
            continue
        kind = _OF_BUILDER.get(str(target.value))
        # A function of the user may collate samples of any kind, if the recipe can build them.
        if kind is None or kind is expected or (has_collate_fn and kind.needs is None):
            continue
        problems.append(
            Problem(
                f"the recipe {recipe} trains on {expected.samples}, and {key} has {kind.samples}",
                target.origin,
                target.value,
                f"use a builder such as {_PACKAGE}{expected.builders[0]}, or set recipe: {' or '.join(kind.recipes)}",
            )
        )
    return problems
