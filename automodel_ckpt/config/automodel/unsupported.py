"""What NeMo AutoModel trains and this program does not, and files of its tools that are no recipes.

Each file of one of these kinds gives one error, which says what it is for, and what to do instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from automodel_ckpt.config.automodel.rows import GUIDE, is_of_automodel
from automodel_ckpt.config.tree.yaml_tree import Node
from automodel_ckpt.errors import Problem

DIFFUSION = "TrainDiffusionRecipe"


@dataclass(frozen=True)
class _Kind:
    """Recipe classes with one purpose: a pattern of their names, the error, and what to do instead."""

    classes: str
    what: str
    hint: str


_KINDS = (
    _Kind(
        "BenchmarkingRecipeForNextTokenPrediction",
        "the recipe that measures the speed is not translated",
        "set recipe: TrainFinetuneRecipeForNextTokenPrediction, and a section throughput in the place of benchmark",
    ),
    _Kind(
        r"Train(Eagle\d*|PEagle|DFlash\d*|DSpark|Domino|JetSpec|Vispec(Stage\d)?)Recipe",
        "drafters for speculative decoding cannot be trained here",
        "train the model here, and its drafter in NeMo AutoModel: it reads the directory consolidated/ of a checkpoint",
    ),
    _Kind(
        r"Diffusion(LM|Gemma)SFTRecipe",
        "language models that generate by diffusion cannot be trained here",
        "use a model that predicts the next token (llm_finetune)",
    ),
    _Kind(
        DIFFUSION,
        "diffusion models cannot be trained here",
        "use NeMo AutoModel, or a library for diffusion models",
    ),
    _Kind(
        r"(Finetune|Pretrain)RecipeForMultimodal",
        "models that generate images and text (BAGEL) cannot be trained here",
        "use vlm_finetune for models that read images",
    ),
    _Kind(
        r"TrainBiEncoderRecipe",
        "recipes for embeddings are not translated",
        "write a recipe with recipe: embedding, as docs/guides/embedding.md describes",
    ),
    _Kind(
        r"TrainCrossEncoderRecipe",
        "recipes for rerankers are not translated",
        "write a recipe with recipe: reranker, as docs/guides/embedding.md describes",
    ),
    _Kind(
        r"EmbeddingDistillRecipe",
        "embeddings cannot be distilled here",
        "train them on pairs of texts with recipe: embedding",
    ),
)
_TOOLS = (
    ("datasets", "the data sets of a benchmark of drafters"),
    ("mining", "the settings of mine_hard_negatives.py"),
    ("recipe_args", "the settings of a script that prepares data for a drafter"),
    ("inference", "the settings of a script that generates images or videos"),
)
"""Sections that only the files of AutoModel's scripts have, and what these files are."""


def problem_of_class(name: str, origin: str, supported: Sequence[str]) -> Problem:
    """Return the error about a recipe class that has no counterpart here. *supported* are the classes that have one."""
    for kind in _KINDS:
        if re.fullmatch(kind.classes, name):
            return Problem(kind.what, origin, name, f"{kind.hint}; {GUIDE}")
    hint = "no recipe here does this; the recipes of NeMo AutoModel that run are "
    return Problem("unknown recipe", origin, name, f"{hint}{', '.join(supported)}; {GUIDE}")


def problem_of_release(root: Node, supported: Sequence[str]) -> Problem | None:
    """Return the error about a file of a release before 0.4, which had no key ``recipe``; None for other files."""
    for section in ("model", "dataset", "distributed"):
        target = root.at(f"{section}._target_")
        if root.at("recipe") is None and target is not None and is_of_automodel(str(target.value)):
            what = "the key recipe is missing, as in recipes of NeMo AutoModel before 0.4"
            hint = "add recipe: with the class that AutoModel's script ran, and use the names of a newer release; "
            hint += f"the classes are {', '.join(supported)}; {GUIDE}"
            return Problem(what, target.origin, str(target.value), hint)
    return None


def diffusion_section(root: Node) -> Node | None:
    """The node that shows that a file without ``recipe`` trains a diffusion model; None if it does not."""
    section = root.at("flow_matching")
    if section is not None:
        return section
    target = root.at("data.dataloader._target_")
    name = "" if target is None else str(target.value)
    return target if is_of_automodel(name) and ".diffusion." in name else None


def problem_of_tool(root: Node) -> Problem | None:
    """Return the error about a file that is not a recipe, but has the settings of one of AutoModel's scripts."""
    names = {name for name, _ in root.children()}
    if names & {"recipe", "dataset", "step_scheduler"}:
        return None
    for name, what in _TOOLS:
        section = root.at(name)
        is_whole_file = names == {name}
        if section is not None and (is_whole_file or isinstance(section.value, dict)):
            hint = "run it with NeMo AutoModel, or give the file of a recipe"
            return Problem(f"this file is no recipe: it has {what}", section.origin, name, hint)
    return None
