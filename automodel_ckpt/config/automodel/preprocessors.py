"""The tokenizer and the processor of NeMo AutoModel's recipes."""

from __future__ import annotations

import re
from dataclasses import replace

from automodel_ckpt.config.automodel.rows import AUTOMODEL_DEFAULT, Section, is_of_automodel
from automodel_ckpt.config.tree.yaml_tree import Node

_NAME = "pretrained_model_name_or_path"


def tokenizer(section: Section) -> None:
    """Translate the section tokenizer. Settings need the tokenizer's class as ``_target_``."""
    if section.node is None or not _is_pretrained(section, "AutoTokenizer"):
        return
    name = _own_name(section)
    settings = [key for key, child in section.node.children() if not child.is_null]
    if not settings:
        if name is not None:
            section.put("from_pretrained", name, was=_NAME)
        return
    name = name or name_of_model(section)
    if name is not None:
        section.put("_target_", Node("transformers.AutoTokenizer.from_pretrained", name.origin))
        section.put(_NAME, name)
        for key in settings:
            section.rename(key)


def processor(section: Section) -> None:
    """Translate the section processor. The data sets have no videos, so their settings have no effect."""
    section.drop("video_processor")
    if section.node is None or not _is_pretrained(section, "AutoProcessor"):
        return
    name = _own_name(section)
    if name is not None:
        section.put("from_pretrained", name, was=_NAME)
    for key, _ in section.node.children():
        if key not in ("from_pretrained", "kwargs"):
            section.rename(key, f"kwargs.{key}")


def _is_pretrained(section: Section, auto_class: str) -> bool:
    """Remove the ``_target_`` of a tokenizer or processor that is read from files.

    AutoModel's own classes, such as its processors for MiniMax M3, Step 3.7 and Inkling, are in transformers. Returns
    False for another ``_target_``, such as the user's own code.
    """
    node = section.peek("_target_")
    target = "" if node is None else str(node.value)
    is_auto = re.fullmatch(rf"[\w.]*\.{auto_class}\.from_pretrained", target) is not None
    if node is not None and not is_auto and not is_of_automodel(target):
        return False
    section.implied("_target_", section.to)
    section.drop("trust_remote_code")
    return True


def _own_name(section: Section) -> Node | None:
    """Remove and return the name of a tokenizer or processor; None if it is the model's.

    The model's own one also follows model.revision and model.trust_remote_code.
    """
    name = section.peek(_NAME)
    model = name_of_model(section)
    if name is not None and model is not None and name.value == model.value:
        section.drop(_NAME)
    return section.take(_NAME)


def name_of_model(section: Section) -> Node | None:
    """Return the name of the model, which its tokenizer and processor have if nothing else is given."""
    model = section.work.result.at("model.from_pretrained")
    return None if model is None else replace(model, origin=AUTOMODEL_DEFAULT)
