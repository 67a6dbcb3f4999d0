"""Registered names for the key ``recipe``."""

from __future__ import annotations

from importlib.metadata import entry_points

GROUP = "automodel_ckpt.recipes"
# Known without the package's metadata too, as when it is run from a source tree.
_OWN = {
    "sequence_classification": "automodel_ckpt.recipes.sequence_classification:SequenceClassification",
    "distill": "automodel_ckpt.recipes.distill:Distill",
    "embedding": "automodel_ckpt.recipes.embedding:EmbeddingFinetune",
    "llm_finetune": "automodel_ckpt.recipes.llm_finetune:LLMFinetune",
    "kto": "automodel_ckpt.recipes.kto:KTOFinetune",
    "reranker": "automodel_ckpt.recipes.reranker:Reranker",
    "reward_model": "automodel_ckpt.recipes.reward_model:RewardModel",
    "seq2seq": "automodel_ckpt.recipes.seq2seq:Seq2Seq",
    "pretrain": "automodel_ckpt.recipes.pretrain:Pretrain",
    "dpo": "automodel_ckpt.recipes.dpo:DPOFinetune",
    "orpo": "automodel_ckpt.recipes.orpo:ORPOFinetune",
    "vlm_distill": "automodel_ckpt.recipes.vlm_distill:VLMDistill",
    "vlm_finetune": "automodel_ckpt.recipes.vlm_finetune:VLMFinetune",
}


def registered() -> dict[str, str]:
    """Map recipe names to ``module:Class`` without importing them."""
    # Names of this package take precedence: an installed package must not replace its recipes.
    return {entry.name: entry.value for entry in entry_points(group=GROUP)} | _OWN


def target_of(name: str) -> str | None:
    """``module:Class`` of a registered name; None for other names.

    The metadata of the installed packages is read only for a name that is not of this package.
    """
    return _OWN.get(name) or registered().get(name)


def own_classes() -> list[str]:
    """List the dotted names of the classes of this package's recipes."""
    return [target.replace(":", ".") for target in _OWN.values()]


def own_name(recipe: str) -> str | None:
    """The registered name of a recipe of this package, given by this name or by its class; None for other recipes."""
    for name, target in _OWN.items():
        if recipe in (name, target.replace(":", ".")):
            return name
    return None


def is_own(recipe: str) -> bool:
    """Whether *recipe* is the registered name of a recipe of this package."""
    return recipe in _OWN


def is_name(recipe: str) -> bool:
    """Whether *recipe* is a registered name rather than a module path or a file."""
    return recipe.replace("-", "_").isidentifier()
