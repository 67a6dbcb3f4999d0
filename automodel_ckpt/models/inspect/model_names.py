"""Compare stored tensors with those of the model that a config.json describes, by name: no weights are read."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING

from automodel_ckpt.models.config_checks import decoded_floats
from automodel_ckpt.models.hf_names import Conversion, read_conversion
from automodel_ckpt.models.inspect.signature import model_of
from automodel_ckpt.models.weight_matching import former_buffers

log = logging.getLogger(__name__)

_MAX_LAYERS = 4096
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}


class ListedDifferences(NamedTuple):
    """The differences between stored names and those of a model, the name of whose class is *model*.

    *unknown* are stored, and no tensor of the model has them. *missing* are tensors of the model that are not stored.
    *shapes* are those of the model's parameters, by the stored name; without those of tensors that transformers
    computes from others. *vocab_size* is that of the model, or of the model of its text.
    """

    model: str
    unknown: tuple[str, ...]
    missing: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    vocab_size: int | None


def list_differences(
    content: Mapping[str, Any], stored: Collection[str]
) -> ListedDifferences | None:
    """Compare the names *stored* with those of the model whose config.json has this *content*.

    Names may be those in memory or in Hugging Face files, with or without the prefix of the backbone, and those of tied
    tensors may be missing. Returns None if the names of the model are unknown: its class is not part of transformers,
    it cannot be built from this config, or transformers computes its tensors from those in files.
    """
    try:
        config = CONFIG_MAPPING[content["model_type"]].from_dict(decoded_floats(content))
        # A damaged number would build layers for hours.
        if getattr(config.get_text_config(), "num_hidden_layers", 0) > _MAX_LAYERS:
            return None
        model = model_of(config)
    # A class of transformers can raise anything for values that it does not expect.
    except Exception as error:
        log.debug("the names of tensors are not compared: %s: %s", type(error).__name__, error)
        return None
    model.tie_weights()
    conversion = read_conversion(model)
    if conversion is None:
        return None
    names = {*stored, *map(present_name, stored)}
    in_memory = set(model.state_dict(keep_vars=True))
    known: set[str] = set()
    for name in (*in_memory, *conversion.in_files):
        known.update(_spellings(name, model))
    unknown = [name for name in stored if known.isdisjoint((name, present_name(name)))]
    former = set(former_buffers(model, unknown))
    unknown = [name for name in unknown if name not in former]
    # The names of both are rarely mixed: the list that fits better is the one that the program used.
    missing = min(
        (_missing(in_memory, {}, names, model), _missing_in_files(conversion, names, model)),
        key=len,
    )
    return ListedDifferences(
        type(model).__name__,
        tuple(_without(unknown, model._keys_to_ignore_on_load_unexpected)),
        tuple(_without(missing, model._keys_to_ignore_on_load_missing)),
        _shapes(stored, conversion, model),
        getattr(config.get_text_config(), "vocab_size", None),
    )


def _shapes(
    stored: Iterable[str], conversion: Conversion, model: Any
) -> dict[str, tuple[int, ...]]:
    """Return the shapes in the *model* of the tensors with the names *stored*, where they are unambiguous."""
    found: dict[str, set[tuple[int, ...] | None]] = {}

    def note(name: str, shape: tuple[int, ...] | None) -> None:
        for spelling in _spellings(name, model):
            found.setdefault(spelling, set()).add(shape)

    for name, parameter in model.named_parameters(remove_duplicate=False):
        shape = tuple(parameter.shape)
        note(name, shape)
        note(conversion.names.get(name, name), shape)
        for file_name, (_, part) in conversion.parts.get(name, {}).items():
            note(file_name, tuple(each.stop - each.start for each in part))
    for name in conversion.combined:
        note(name, None)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in stored:
        possible = found.get(name) or found.get(present_name(name)) or {None}
        (first, *others) = possible
        if first is not None and not others:
            shapes[name] = first
    return shapes


def present_name(name: str) -> str:
    """Return the name under which transformers loads a tensor of the first versions of BERT."""
    layer, _, own_name = name.rpartition(".")
    return f"{layer}.{_OLD_NAMES[own_name]}" if own_name in _OLD_NAMES else name


def _missing_in_files(conversion: Conversion, names: set[str], model: Any) -> list[str]:
    in_memory = {file_name: name for name, file_name in conversion.names.items()}
    return _missing(conversion.in_files, in_memory, names, model)


def _missing(
    wanted: Iterable[str], in_memory: Mapping[str, str], names: set[str], model: Any
) -> list[str]:
    """List the *wanted* names of the model's tensors that neither they nor their ties have in *names*.

    *in_memory* has the names in memory of those that are wanted under another one.
    """
    in_files = {name: file_name for file_name, name in in_memory.items()}
    missing: list[str] = []
    for name in wanted:
        tied = [in_files.get(each, each) for each in _tied_to(in_memory.get(name, name), model)]
        candidates = [name, *tied]
        spellings = {
            spelling for candidate in candidates for spelling in _spellings(candidate, model)
        }
        if names.isdisjoint(spellings):
            missing.append(name)
    return sorted(missing)


def _tied_to(name: str, model: Any) -> Iterator[str]:
    ties: Mapping[str, str] = model.all_tied_weights_keys
    first = ties.get(name, name)
    yield first
    for alias, target in ties.items():
        if target == first:
            yield alias


def _spellings(name: str, model: Any) -> tuple[str, ...]:
    """Return the spellings of a name that transformers accepts for the same tensor.

    Files of a backbone lack its prefix (base_model_prefix) in a model with a head, and files of that have it in excess
    in the backbone.
    """
    prefix = model.base_model_prefix
    if not prefix:
        return (name,)
    if hasattr(model, prefix):
        return name, name.removeprefix(f"{prefix}.")
    return name, f"{prefix}.{name}"


def _without(names: Iterable[str], patterns: Collection[str] | None) -> list[str]:
    """Remove the names that one of transformers' *patterns* matches."""
    found = [re.compile(pattern) for pattern in patterns or ()]
    return [name for name in names if not any(pattern.search(name) for pattern in found)]
