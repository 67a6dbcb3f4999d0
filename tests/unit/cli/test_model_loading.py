"""How ``ckpt generate`` and ``ckpt chat`` load models of other kinds, and what a stopped answer leaves."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoModelForCausalLM

from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.cli.models.loading import _model_of
from automodel_ckpt.models.measure import generation
from automodel_ckpt.models.measure.generation import Sampling
from tests.support.models.sizes import model_sizes
from tests.support.models.stand_ins import LLAMA_CHAT, write_model


def test_a_model_that_caps_its_attention_scores_gets_no_sdpa_which_has_no_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in transformers 5.17.
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)
    config = transformers.Gemma2Config(
        **model_sizes(hidden=32, inner=48, layers=1, heads=2, kv_heads=1, vocab=64), head_dim=16
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = _model_of(str(tmp_path), {"dtype": "auto", "trust_remote_code": False}, None)
    assert model.model.layers[0].self_attn.config._attn_implementation == "eager"


def test_a_stopped_answer_stays_in_the_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, {"model_type": "llama"}, LLAMA_CHAT)
    seen: list[Any] = []

    def interrupted(
        model: Any, preprocessor: Any, inputs: Any, sampling: Sampling, on_text: Any
    ) -> Any:
        seen.append(inputs["input_ids"].shape[1])
        on_text("I was say")
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "generate", interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nGo on\n"))
    assert main(["chat", str(tmp_path), "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out == "I was say\nI was say\n\n"
    assert seen[1] > seen[0] + 4
