"""The class of transformers that builds models of images, audio and text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import transformers
from transformers import AutoModelForImageTextToText, PreTrainedConfig

_IMAGES: Any = AutoModelForImageTextToText
# Versions without it have no models of audio alone.
_ALL: Any = getattr(transformers, "AutoModelForMultimodalLM", AutoModelForImageTextToText)


class _Mapping:
    """Configurations and their model classes: those of models of images, and those of further ones."""

    def __contains__(self, config_class: type) -> bool:
        return config_class in _IMAGES._model_mapping or config_class in _ALL._model_mapping

    def __getitem__(self, config_class: type) -> Any:
        if config_class in _IMAGES._model_mapping:
            return _IMAGES._model_mapping[config_class]
        return _ALL._model_mapping[config_class]

    def keys(self) -> Iterator[type]:
        """Return the configurations."""
        yield from _ALL._model_mapping.keys()


class AutoMultimodalModel(AutoModelForImageTextToText):
    """AutoModelForImageTextToText, also for the models of audio that AutoModelForMultimodalLM has."""


_OURS: Any = AutoMultimodalModel
_OURS._model_mapping = _Mapping()
# Repositories with code name their class by it.
AutoMultimodalModel.__name__ = AutoModelForImageTextToText.__name__


def thinker_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of Qwen-Omni's configuration for the model that reads and writes text; other configurations unchanged.

    The files of these models also have a model that speaks, which is not trained. transformers reads the weights of the
    part from them.
    """
    thinker = getattr(config, "thinker_config", None)
    if not isinstance(thinker, PreTrainedConfig):
        return config
    thinker.name_or_path = config.name_or_path
    return thinker


def other_parts_in_files(config: PreTrainedConfig) -> list[str]:
    """Globs for the names of tensors beside the thinker in files of Qwen-Omni; empty for other models.

    transformers ignores them, but not in all versions.
    """
    is_thinker = config.model_type.endswith("_thinker")
    return ["talker.*", "token2wav.*", "code2wav.*"] if is_thinker else []
