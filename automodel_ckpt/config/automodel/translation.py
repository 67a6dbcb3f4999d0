"""Translate NeMo AutoModel's recipe files to recipes of this program.

:func:`translate` is a pure function from the tree of a file to the tree of a recipe. Nodes keep their origins, so that
every later message points into the user's file. ``rows.py`` has the kinds of rows, and one module per group of sections
has their tables: ``model``, ``adapters``, ``ranks`` (parallelism), ``datasets`` (with ``dataset_steps``), ``batches``,
``training`` and ``others``.

Facts about AutoModel are from its source, revision 36044ad3d (2026-08-22): ``recipes/_typed_config.py`` (sections and
their defaults), ``components/*/config.py`` and ``components/config/loader.py`` (null words, overrides).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from automodel_ckpt.config.automodel import (
    batches,
    datasets,
    model,
    others,
    training,
)
from automodel_ckpt.config.automodel.model import AUTO_CLASS
from automodel_ckpt.config.automodel.rows import (
    AUTOMODEL_DEFAULT,
    GUIDE,
    Notice,
    Section,
    Work,
    is_of_automodel,
    needs_a_value,
    put,
    report_lines,
)
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import annotation_at, closest, is_number, join, names_in
from automodel_ckpt.config.tree.yaml_tree import Node, lines
from automodel_ckpt.errors import Problem

RECIPES = {
    "TrainFinetuneRecipeForNextTokenPrediction": "llm_finetune",
    "FinetuneRecipeForVLM": "vlm_finetune",
    "KnowledgeDistillationRecipeForNextTokenPrediction": "distill",
    "KnowledgeDistillationRecipeForVLM": "vlm_distill",
    "TrainFinetuneRecipeForSequenceClassification": "sequence_classification",
}
"""AutoModel's recipe classes, and the recipes that replace them."""
_PREFIXES = (
    "Train",
    "Finetune",
    "KnowledgeDistillation",
    "Benchmarking",
    "Pretrain",
    "Embedding",
    "Diffusion",
)
"""The beginnings of the names of AutoModel's recipe classes, which all contain the word Recipe."""
_WITH_TARGETS = ("model", "dataset", "distributed")
"""Sections with a ``_target_`` that shows that a file without the key recipe is one of AutoModel."""

_BRACES = re.compile(r"\$\{(?!oc\.env:)([A-Za-z_]\w*)(?=[,}])")
_WHOLE = re.compile(r"^\$([A-Za-z_]\w*)$")

SECTIONS: tuple[tuple[str, Callable[[Section], None] | str], ...] = (
    # Later functions look at what earlier ones have translated: adapters before freezing, data before the steps.
    ("model", model.model),
    ("peft", model.adapters),
    ("freeze_config", model.freeze),
    ("quantization", model.quantization),
    (
        "dist_env",
        "backend -> /distributed.backend @not_nccl\ntimeout_minutes -> /distributed.timeout_minutes",
    ),
    ("distributed", others.distributed),
    ("dataset", datasets.dataset),
    ("validation_dataset", datasets.validation),
    ("dataloader", batches.dataloader),
    ("validation_dataloader", batches.validation_dataloader),
    ("packed_sequence", batches.packing),
    ("tokenizer", batches.tokenizer),
    ("processor", batches.processor),
    ("optimizer", training.optimizer),
    ("lr_scheduler", training.schedule),
    ("step_scheduler", training.steps),
    ("clip_grad_norm", "max_norm -> /clip_grad_norm"),
    ("loss_fn", training.loss),
    ("compile", training.compilation),
    ("teacher_model", model.teacher),
    ("kd_loss_fn", model.divergence),
    ("", model.distillation),
    ("checkpoint", others.checkpoint),
    ("qat", others.qat),
    ("fp8", others.fp8),
    ("", others.seed),
    ("", others.trackers),
    ("neftune", others.neftune),
    ("", others.top_level),
)
"""The functions or tables that translate sections of AutoModel, in their order."""
_ONLY_THEIRS = frozenset(
    [
        *others.WHOLE_SECTIONS,
        "dist_env",
        "distributed.mp_policy",
        "distributed.pipeline",
        "freeze_config",
        "kd_loss_fn",
        "mlflow",
        "neftune",
        "qat.qat_config",
        "quantization",
        "rng",
        "teacher_model",
        "validation_dataloader",
        "wandb",
    ]
)
"""Sections of AutoModel that are no keys of this program."""


def class_name(root: Node) -> str | None:
    """Return the name of AutoModel's recipe class in a file. Returns None when the file is a recipe of this program."""
    node = root.at("recipe._target_") or root.at("recipe")
    if node is None or not isinstance(node.value, str):
        return None
    package, _, name = node.value.rpartition(".")
    is_class = not package and name.startswith(_PREFIXES) and "Recipe" in name
    return name if is_class or is_of_automodel(package) else None


def _rejected_file(root: Node, name: str | None) -> Problem | None:
    """Return the error about a file of AutoModel without a recipe class that has a counterpart; None for others."""
    if name is not None and name not in RECIPES:
        node = root.at("recipe")
        assert node is not None
        return Problem(
            "this recipe of NeMo AutoModel is not translated",
            node.origin,
            name,
            f"the recipes of NeMo AutoModel that run are {', '.join(RECIPES)}; {GUIDE}",
        )
    for section in _WITH_TARGETS if root.at("recipe") is None else ():
        target = root.at(f"{section}._target_")
        if target is not None and is_of_automodel(str(target.value)):
            return Problem(
                "the key recipe is missing, as in recipes of NeMo AutoModel before 0.4",
                target.origin,
                str(target.value),
                "add recipe: with the class that AutoModel's script ran, and use the names of a newer release; the "
                f"classes are {', '.join(RECIPES)}; {GUIDE}",
            )
    return None


def translate(root: Node) -> Work | None:
    """Translate a tree with overrides applied. *root* is not modified.

    Returns None when it is not a recipe of AutoModel.
    """
    name = class_name(root)
    problem = _rejected_file(root, name)
    if problem is not None:
        return Work(root, "", result=root, problems=[problem])
    if name is None:
        return None
    source = root.copy()
    _rename_references(source)
    original = source.copy()
    assert isinstance(source.value, dict)
    node = source.value.pop("recipe")
    recipe = RECIPES[name]
    target = source.at("model._target_")
    found = None if target is None else AUTO_CLASS.fullmatch(str(target.value))
    if recipe == "llm_finetune" and found is not None and found["task"] == "Seq2SeqLM":
        # AutoModel has one recipe class for both kinds of model.
        recipe = "seq2seq"
    work = Work(source, recipe)
    work.section("").put("recipe", Node(recipe, node.origin))
    for path, translate_section in SECTIONS:
        if isinstance(translate_section, str):
            work.section(path).apply(translate_section)
        else:
            translate_section(work.section(path))
    _keep_the_rest(work, source, original, "")
    return work


def _rename_references(node: Node) -> None:
    """Rewrite AutoModel's references to environment variables, ${NAME}, ${NAME,default} and $NAME, as ours."""
    for _, each in node.walk():
        if isinstance(each.value, str) and "$" in each.value and not each.is_flag:
            text = _BRACES.sub(r"${oc.env:\1", each.value)
            each.value = _WHOLE.sub(r"${oc.env:\1}", text)


def _keep_the_rest(work: Work, section: Node, original: Node, key: str) -> None:
    """Add what no row has translated to the recipe, where keys of this program are valid and others are errors.

    A flag replaces what was translated from the file, so that overrides may use the names of both programs.
    """
    for name, node in section.children():
        full = join(key, name)
        found = work.result.at(full)
        before = original.at(name) or node
        if full in _ONLY_THEIRS:
            _reject_the_rest(work, node, full)
            continue
        # Null disables a key that only AutoModel has.
        is_theirs = full in work.known and annotation_at(RecipeConfig, full) is None
        if node.is_null and (needs_a_value(full) or is_theirs):
            continue
        # A section that the translation emptied is left out; one that is empty in the file is not.
        if isinstance(node.value, dict) and not node.value and before.value:
            continue
        if isinstance(node.value, dict) and node.value and isinstance((found or node).value, dict):
            _keep_the_rest(work, node, before, full)
        elif found is None or node.is_flag or found.origin == AUTOMODEL_DEFAULT:
            put(work.result, full, node)
        elif not node.is_null:
            work.problems.append(
                Problem(
                    f"{full} is given twice",
                    node.origin,
                    str(node),
                    f"remove one of them; the other is at {found.origin}",
                )
            )


def _reject_the_rest(work: Work, node: Node, key: str) -> None:
    """Report what no row has translated below *key*, which exists in AutoModel only. Null disables a key."""
    if isinstance(node.value, dict):
        for name, child in node.children():
            _reject_the_rest(work, child, join(key, name))
    elif not node.is_null:
        section, _, name = key.rpartition(".")
        meant = closest(name, names_in(section, work.known))
        hint = f"did you mean {join(section, meant)}?" if meant else f"remove it; {GUIDE}"
        problem = Problem(f"unknown key {key}", node.origin, str(node), hint)
        work.unknown.append(problem)


# ---------------------------------------------------------------- --convert-recipe

_COMMENT_COLUMN = 60


def converted_text(
    path: str,
    source: Node,
    translated: Node,
    bound: Node,
    notices: Sequence[Notice],
    program: str = "NeMo AutoModel",
) -> str:
    """Return the converted recipe as YAML: the keys of *translated*, with the values of the validated tree *bound*.

    A comment next to each renamed key has the *program*'s name, which is at the same line of the *source*. Comments at
    the top list the keys that were dropped or degraded. The text loads to the same configuration as the recipe at
    *path*.
    """
    rows = [f"# Converted from the {program} recipe {path} by ckpt-train --convert-recipe"]
    rows += [f"# {line}" for line in report_lines(notices, program)]
    names: dict[str, list[str]] = {}
    for key, node in source.walk():
        if not (isinstance(node.value, dict) or is_number(key.rpartition(".")[2])):
            names.setdefault(node.origin, []).append(key)
    for text, comment in lines(_commented(translated, bound, names, "")):
        rows.append(f"{text:{_COMMENT_COLUMN}}  # {comment}" if comment else text)
    return "".join(f"{row}\n" for row in rows)


def _commented(node: Node, bound: Node, names: Mapping[str, Sequence[str]], key: str) -> Node:
    """Return *node* with the values that *bound* has at its keys, and with comments as origins.

    *names* has the keys of AutoModel's recipe by their origins.
    """
    if isinstance(node.value, dict) and node.value:
        children = {
            name: _commented(child, bound, names, join(key, name))
            for name, child in node.value.items()
        }
        return Node(children, "")
    value = bound.at(key) or node
    # An empty section is a section with all defaults in the validated tree.
    value = node if isinstance(value.value, dict) else value
    comment = node.origin if node.origin.startswith("default of ") else ""
    given = names.get(node.origin, ())
    if given and key not in given:
        comment = f"was {', '.join(given)}"
    return replace(value, origin=comment)
