"""Reading the processor of a vision-language model, with the settings that a recipe overrides."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from automodel_ckpt.base.hub_access import explained
from automodel_ckpt.config.callables.trust import trusts_remote_code
from automodel_ckpt.config.keys.data import PROCESSOR_SETTINGS
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.media.media import AUDIO, media_of, takes_audio_with_text
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.error_texts import first_line
from automodel_ckpt.models.inspect.repository import (
    RepositoryOptions,
    asks_for_code,
    code_not_trusted,
    damaged_config,
    require_local,
)
from automodel_ckpt.models.processor import read_processor, unknown_settings

AUTO_PROCESSOR = "transformers.AutoProcessor.from_pretrained"


@dataclass(frozen=True)
class ProcessorSource:
    """Where a processor is read from: *name* is a directory or Hub name, given by the key *where*."""

    name: str
    where: str
    repository: RepositoryOptions
    settings: Mapping[str, Any]
    """Settings of the processor that the recipe overrides."""


def processor_of_target(section: Target) -> ProcessorSource:
    """Return the source in a call of :data:`AUTO_PROCESSOR`. Raises :class:`RecipeError` for a missing path."""
    settings = dict(section.kwargs)
    where = "processor.pretrained_model_name_or_path"
    name = str(settings.pop("pretrained_model_name_or_path", ""))
    require_local(name, where)
    repository = RepositoryOptions(
        settings.pop("revision", None),
        requests_code=settings.pop("trust_remote_code", False) is True,
        trusts_code=trusts_remote_code(),
    )
    return ProcessorSource(name, where, repository, settings)


def read_from(source: ProcessorSource) -> Any:
    """Read a processor. Raises :class:`RecipeError` if that fails, and for settings that it does not have."""
    name, settings = source.name, source.settings
    try:
        processor = read_processor(os.path.expanduser(name), source.repository, settings)
    except Exception as error:  # damaged files make transformers raise anything
        if asks_for_code(error):
            raise code_not_trusted("processor", name, source.where, source.repository) from error
        revision = source.repository.revision
        known = explained(error, name, source.where)
        if known := known or damaged_config(name, source.where, revision):
            raise known from error
        raise RecipeError(
            "the processor cannot be read",
            where=source.where,
            value=f"{name} ({first_line(error, 3)})",
            hint="name a directory with processor files, and install the libraries that its processor asks for "
            "(pip install 'automodel_ckpt[vision]', and torchvision where it is named)",
        ) from error
    names = set(settings) & PROCESSOR_SETTINGS
    unknown = unknown_settings(check_processor(processor, source.where), names)
    if unknown:
        raise RecipeError(
            "this processor does not have these settings",
            where="processor",
            value=f"{', '.join(unknown)}; {type(processor).__name__}",
            hint="remove them, or use the names in its preprocessor_config.json",
        )
    return processor


def check_processor(processor: Any, where: str) -> Any:
    """Return *processor*, which the key *where* gives. Raises :class:`RecipeError` unless it takes text and media."""
    media = media_of(processor)
    if media == {AUDIO} and not takes_audio_with_text(processor):
        raise RecipeError(
            "this processor does not take text and audio in one call",
            where=where,
            value=type(processor).__name__,
            hint="give a function in processor._target_ that returns a subclass with __call__(text, audio, ...)",
        )
    if media and hasattr(processor, "tokenizer"):
        return processor
    raise RecipeError(
        "this processor does not take both text and images or audio",
        where=where,
        value=type(processor).__name__,
        hint="name the processor of a model of images or audio; a language model is trained by recipe: llm_finetune",
    )
