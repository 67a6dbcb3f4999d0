"""Compare stored tensors with the tensors of the model that a config.json describes, by name: no weights are read."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from transformers import CONFIG_MAPPING

from automodel_ckpt.checkpoint.files.type_aliases import Shape, Strings, Texts, Values
from automodel_ckpt.models.config_reading import decoded_floats
from automodel_ckpt.models.hf_names import Conversion, read_conversion
from automodel_ckpt.models.inspect.signature import model_of
from automodel_ckpt.models.weight_matching import Names, Verdict, compare, ignored_by

log = logging.getLogger(__name__)

_MAX_LAYERS = 4096
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}


ListedDifferences = tuple[str, Strings, Strings, Mapping[str, Shape], int | None]
"""The name of the model's class, the stored names that no tensor of the model has, the tensors of the model that are
not stored, the shapes of the model's parameters by the stored name (without tensors that transformers computes from
others), and the size of the vocabulary."""


def list_differences(content: Values, stored: Collection[str]) -> ListedDifferences | None:
    """Compare the names *stored* with the names of the model that a config.json with this *content* describes.

    Names may be the ones in memory or in Hugging Face files, with or without the prefix of the backbone. Names of tied
    tensors may be missing. Returns None when the names of the model are unknown: its class is not part of transformers,
    it cannot be built from this config, or transformers computes its tensors from the tensors in files.
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
    here = _shapes_here(model, conversion)
    ties: Texts = model.all_tied_weights_keys
    ties_in_files = {
        conversion.names.get(alias, alias): conversion.names.get(name, name)
        for alias, name in ties.items()
    }
    there = Names(dict.fromkeys({*stored, *map(present_name, stored)}, ()))
    # The names of both are rarely mixed: the list that fits better is the one that the program used.
    verdicts: list[Verdict] = []
    for names, tied in (
        (set(model.state_dict(keep_vars=True)), dict(ties)),
        (conversion.in_files, ties_in_files),
    ):
        verdict = compare(
            Names(dict.fromkeys(names, ()), tied), there, prefix=model.base_model_prefix
        )
        missing = tuple(name for name in verdict.missing if name not in tied)
        verdicts.append(replace(verdict, missing=missing))
    unexpected = set(verdicts[0].unexpected) & set(verdicts[1].unexpected)
    unknown = [name for name in stored if {name, present_name(name)} <= unexpected]
    ignored = set(ignored_by(model, unknown))
    missing = min((verdict.missing for verdict in verdicts), key=len)
    may_lack = model._keys_to_ignore_on_load_missing or ()
    return (
        type(model).__name__,
        tuple(name for name in unknown if name not in ignored),
        tuple(name for name in missing if not any(re.search(each, name) for each in may_lack)),
        _shapes_there(stored, here, verdicts),
        getattr(config.get_text_config(), "vocab_size", None),
    )


def _shapes_here(model: Any, conversion: Conversion) -> dict[str, set[Shape | None]]:
    """The shapes of the parameters by their names in memory and in files. None: transformers computes the tensor."""
    found: dict[str, set[Shape | None]] = {name: {None} for name in conversion.combined}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for each in (name, conversion.names.get(name, name)):
            found.setdefault(each, set()).add(tuple(parameter.shape))
        for file_name, (_, part) in conversion.parts.get(name, {}).items():
            found.setdefault(file_name, set()).add(tuple(each.stop - each.start for each in part))
    return found


def _shapes_there(
    stored: Iterable[str], here: Mapping[str, set[Shape | None]], verdicts: Iterable[Verdict]
) -> dict[str, Shape]:
    """The shapes that the tensors *stored* have in the model, where they are unambiguous."""
    possible: dict[str, set[Shape | None]] = {}
    for verdict in verdicts:
        for name, source in verdict.matches.items():
            possible.setdefault(source, set()).update(here.get(name, {None}))
    shapes: dict[str, Shape] = {}
    for name in stored:
        (first, *others) = possible.get(name) or possible.get(present_name(name)) or {None}
        if first is not None and not others:
            shapes[name] = first
    return shapes


def present_name(name: str) -> str:
    """Return the name under which transformers loads a tensor of the first versions of BERT."""
    layer, _, own_name = name.rpartition(".")
    return f"{layer}.{_OLD_NAMES[own_name]}" if own_name in _OLD_NAMES else name
