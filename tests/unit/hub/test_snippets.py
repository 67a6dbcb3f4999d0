"""The code of a model card, for each kind of training."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from automodel_ckpt.hub.bundle import Bundle
from automodel_ckpt.hub.card import _PIPELINES
from automodel_ckpt.hub.snippets import snippet


@pytest.mark.parametrize("kind", ["llm_finetune", *_PIPELINES])
def test_it_names_a_class_of_transformers(kind: str) -> None:
    bundle = Bundle(Path("model"), {}, None, is_adapter=False)
    tag = _PIPELINES.get(kind, "text-generation")
    lines = list(snippet(bundle, "org/tiny", None, tag, None))
    [imported] = [line for line in lines if line.startswith("from transformers import ")]
    assert hasattr(transformers, imported.removeprefix("from transformers import "))
