"""The head of a classification or reward model: the modules outside of the pretrained backbone, and their labels.

transformers' sequence classification models are a backbone, as in the language model of the same type, and a head that
computes one logit per label. Files of a pretrained language model have another head, or none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig

from automodel_ckpt.checkpoint.files.type_aliases import Strings
from automodel_ckpt.errors import RecipeError

log = logging.getLogger("automodel_ckpt")

SEQUENCE_CLASSIFICATION = "SEQ_CLS"
"""peft's name of the task of models with such a head."""
_POOLER = "pooler"
"""The module of some encoders between their last layer and the head. Files of a masked language model often lack it."""


class HeadDifferences(NamedTuple):
    """The tensors in which files of a pretrained model differ from a model with another head."""

    drawn: Strings
    """Tensors of the model's head that the files lack; they get random values."""
    ignored: Strings
    """Tensors of another head in the files."""

    def log(self, name: str) -> None:
        """Log the differences; *name* is the directory or Hub name of the files."""
        if self.drawn:
            log.info("the head is new: %s lacks %s", name, ", ".join(self.drawn))
        if self.ignored:
            log.info("not used, because the base has another head: %s", ", ".join(self.ignored))


def head_modules(model: Any) -> Strings:
    """List the names of the modules with parameters outside of the backbone of *model*, and the backbone's pooler.

    Empty for a model with an unknown backbone (``base_model_prefix`` of transformers).
    """
    prefix = getattr(model, "base_model_prefix", "")
    backbone = getattr(model, prefix, None) if prefix else None
    if not isinstance(backbone, nn.Module):
        return ()
    pooler = getattr(backbone, _POOLER, None)
    has_pooler = isinstance(pooler, nn.Module) and _has_parameters(pooler)
    names = [f"{prefix}.{_POOLER}"] if has_pooler else []
    for name, module in model.named_children():
        if module is not backbone and _has_parameters(module):
            names.append(name)
    return tuple(names)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def head_differences(
    model: Any, *, missing: Iterable[str], unexpected: Iterable[str]
) -> HeadDifferences:
    """Select the differences between files and *model* that another head explains.

    *missing* are tensors of the model that the files lack, *unexpected* those that only the files have. The backbone
    has to be the same: its tensors are not selected.
    """
    heads = tuple(f"{name}." for name in head_modules(model))
    if not heads:
        return HeadDifferences((), ())
    drawn = [name for name in missing if name.startswith(heads)]
    ignored = [name for name in unexpected if not is_of_backbone(model, name)]
    return HeadDifferences(tuple(sorted(drawn)), tuple(sorted(ignored)))


def expected_differences(model: Any, in_files: Iterable[str]) -> Strings:
    """List the names in which *model* and files of its backbone differ: the names of both heads, and other spellings.

    Files of a backbone alone have its names without the prefix that they have in *model*.
    """
    there, here = set(in_files), set(model.state_dict(keep_vars=True))
    heads = head_differences(model, missing=here - there, unexpected=there - here)
    found = [*heads.drawn, *heads.ignored]
    for name in sorted(there - here):
        with_prefix = f"{model.base_model_prefix}.{name}"
        if with_prefix in here:
            found += [name, with_prefix]
    return tuple(found)


def is_of_backbone(model: Any, name: str) -> bool:
    """Whether a tensor in files belongs to the backbone; files of a backbone alone have names without its prefix."""
    prefix = model.base_model_prefix
    inner = name.removeprefix(f"{prefix}.")
    first = inner.partition(".")[0]
    if first == _POOLER:
        return False
    return inner != name or hasattr(getattr(model, prefix), first)


def set_labels(config: PreTrainedConfig, names: Sequence[str], problem: str) -> None:
    """Give *config* the *names* of the labels, one per logit, and the kind of problem; it is changed.

    *problem* is ``single_label``, ``multi_label`` or ``regression``.
    """
    types = {
        "single_label": "single_label_classification",
        "multi_label": "multi_label_classification",
        "regression": "regression",
    }
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
    config.problem_type = types[problem]  # type: ignore[assignment]


def set_padding(config: PreTrainedConfig, pad_token_id: int) -> None:
    """Give *config* the id of the token that rows are padded with; it is changed.

    Decoders compute the logits of a row at its last token with another id.
    """
    for section in (config, config.get_text_config()):
        section.pad_token_id = pad_token_id


def pretrained_labels(config: PreTrainedConfig) -> Strings:
    """List the labels of a pretrained classifier; empty for the configuration of another kind of model."""
    architectures = getattr(config, "architectures", None) or ()
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        return ()
    names: dict[Any, str] = dict(config.id2label or {})
    return tuple(names[index] for index in sorted(names))


def padding_of(config: PreTrainedConfig, tokenizer: Any) -> int:
    """Choose the id of the token that rows are padded with: the tokenizer's, else the config's, else an end token.

    A tokenizer without a padding token gets the end token for it, so that its exports pad as the model expects. Raises
    :class:`RecipeError` if there is none.
    """
    given = getattr(tokenizer, "pad_token_id", None)
    if isinstance(given, int):
        return given
    of_model = getattr(config.get_text_config(), "pad_token_id", None)
    end = getattr(tokenizer, "eos_token_id", None)
    chosen = of_model if isinstance(of_model, int) else end
    if not isinstance(chosen, int):
        raise RecipeError(
            "there is no token for padding, with which decoders find the end of a text",
            where="tokenizer",
            value="neither the tokenizer nor the model's config has a pad_token_id or an eos_token",
            hint="set model.config_overrides.pad_token_id",
        )
    if tokenizer is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(chosen)
        log.debug(
            "rows are padded with %s, because the tokenizer has no pad token", tokenizer.pad_token
        )
    return chosen


def set_one_score(config: PreTrainedConfig, tokenizer: Any) -> None:
    """Give *config* one label, so that pipelines of transformers return its score unchanged, and the padding token."""
    names = pretrained_labels(config)
    # A head with several labels does not fit, which is reported when the weights are read.
    set_labels(config, [names[0] if len(names) == 1 else "LABEL_0"], "regression")
    set_padding(config, padding_of(config, tokenizer))
