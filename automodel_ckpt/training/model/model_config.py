"""The transformers configuration of a model: reading it, and comparing it with the tokenizer, the data and the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.models.config_checks import (
    check_context,
    check_layer_drop,
    check_task,
    check_vocabulary,
)
from automodel_ckpt.models.config_reading import load_model_config
from automodel_ckpt.models.config_values import context_length, layer_configs
from automodel_ckpt.models.inspect.error_texts import naming_files
from automodel_ckpt.models.inspect.vocabulary import set_size, wanted_size
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.mesh_sizes import Sizes
from automodel_ckpt.training.model.sections import repository_options


def read_model_config(
    config: RecipeConfig, layout: RankLayout, *, auto_class: Any, preprocessor: Any
) -> PreTrainedConfig | None:
    """Read the transformers configuration of ``config.model``; None for a model by ``_target_``.

    Raises :class:`RecipeError` if it does not fit the tokenizer, the data or the device mesh.
    """
    section = config.model
    if isinstance(section, Target):
        return None
    tokenizer = text_tokenizer(preprocessor)
    found = load_model_config(
        from_pretrained=section.from_pretrained,
        from_config=section.from_config,
        tokenizer=tokenizer,
        processor=preprocessor,
        overrides=section.config_overrides,
        repository=repository_options(section),
        auto_class=auto_class,
    )
    files = f"config.json of {section.from_pretrained or section.from_config}"
    with naming_files("transformers cannot use this configuration of a model", files):
        check_task(found, auto_class)
        check_layer_drop(found)
        size = wanted_size(section.vocab_size, tokenizer)
        if size is not None and section.from_config is not None:
            set_size(found, size)
        check_vocabulary(found, tokenizer, size=size)
        check_all_heads(found, layout.sizes)
    for name, dataset in _data_sets(config).items():
        seq_length = dataset.kwargs.get("seq_length") if dataset is not None else None
        if seq_length is not None:
            check_context(found, int(seq_length), f"{name}.seq_length")
    return found


def _data_sets(config: RecipeConfig) -> Mapping[str, Target | None]:
    """The sections of data sets by their dotted keys."""
    sections = {"dataset": config.dataset, "validation_dataset": config.validation_dataset}
    for name, section in config.validation_datasets.items():
        sections[f"validation_datasets.{name}"] = section
    return sections


def check_all_heads(config: PreTrainedConfig, sizes: Sizes) -> None:
    """Raise :class:`RecipeError` if the attention heads of a layer cannot be divided among the ranks."""
    if sizes.tp == sizes.cp == 1:
        return
    from automodel_ckpt.parallel.context_parallel import check_context_heads
    from automodel_ckpt.parallel.tensor_plan import check_heads

    for layer in layer_configs(config.get_text_config()):
        check_heads(layer, sizes.tp)
        check_context_heads(layer, sizes.cp, sizes.tp)


def with_model_limits(section: Target, model_config: PreTrainedConfig | None) -> Target:
    """Return the section of a data set with values of the model: ``seq_length`` null is replaced by the length of its
    context, and ``vocab_size`` with the word ``model`` by the size of its vocabulary.

    What the model does not state stays as it is, as does everything if *model_config* is None. No limit on the length
    is null then.
    """
    if model_config is None:
        return section
    vocab_size = getattr(model_config.get_text_config(), "vocab_size", None)
    limits = {}
    if section.kwargs.get("seq_length", 0) is None:
        limits["seq_length"] = context_length(model_config)
    if section.kwargs.get("vocab_size") == "model" and vocab_size is not None:
        limits["vocab_size"] = vocab_size
    return replace(section, kwargs=section.kwargs | limits)


def text_tokenizer(preprocessor: Any) -> Any:
    """The tokenizer, also of a processor; None if there is none."""
    return getattr(preprocessor, "tokenizer", preprocessor)
