"""The parameters of builders, read from their source, are those that the import shows."""

import importlib
import typing

import pytest

from automodel_ckpt.config.callables.plugins import signature_of
from automodel_ckpt.config.help.plugin_help import signature

NAMES = [
    "automodel_ckpt.data.text.prompt_completion",
    "automodel_ckpt.data.chat.messages",
    "automodel_ckpt.data.squad.squad",
    "automodel_ckpt.data.vlm.conversations",
    "automodel_ckpt.examples.data.python_docs.language_modeling",
    "automodel_ckpt.data.collate.PadCollator",
    "automodel_ckpt.optim.adam8bit.AdamW8bit",
]


@pytest.mark.parametrize("name", NAMES)
def test_parameters_read_from_the_source_are_those_of_the_imported_callable(name: str) -> None:
    found = signature(name)
    assert found is not None
    module, _, attribute = name.rpartition(".")
    function = getattr(importlib.import_module(module), attribute)
    real = signature_of(function)
    assert {key: each.default is None for key, each in found.items()} == real.required
    hints = real.types
    plain = {
        key: each.annotation for key, each in found.items() if "Tensor" not in str(each.annotation)
    }
    assert {
        key: hint for key, hint in plain.items() if hint is not typing.Any and hint != hints[key]
    } == {}
    assert not name.startswith("automodel_ckpt.data.text") or plain["path"] == str | list[str]
