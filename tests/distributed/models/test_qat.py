"""Quantization-aware training: runs, and the outputs of the export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from automodel_ckpt.cli.ckpt import main
from tests.distributed.kinds.test_training import lines_of_steps, run
from tests.support.runs.training import RECIPE, VALIDATION

TEXT = (RECIPE + VALIDATION).replace("attention_dropout: 0.2", "attention_dropout: 0.0")
SHORT = ("--step_scheduler.max_steps=4", "--step_scheduler.ckpt_every_steps=2")


@pytest.mark.further
def test_a_run_is_the_same_on_more_ranks_resumes_exactly_and_begins_to_round_when_asked(
    tmp_path: Path,
) -> None:
    qat = "--qat={scheme: W4A16, group_size: 16}"
    run(tmp_path, *SHORT, name="plain", text=TEXT)
    run(tmp_path, *SHORT, qat, name="one", text=TEXT)
    whole = run(tmp_path, *SHORT, qat, name="two", text=TEXT, num_ranks=2)
    back = f"--checkpoint.restore_from={tmp_path / 'two' / 'epoch_0_step_2'}"
    assert run(tmp_path, *SHORT, qat, back, name="resumed", text=TEXT, num_ranks=2) == whole
    late = "--qat={scheme: W4A16, group_size: 16, start_step: 2}"
    run(tmp_path, *SHORT, late, name="late", text=TEXT)
    losses = {}
    for name in ("plain", "one", "two", "late"):
        steps = lines_of_steps(tmp_path / name / "training.jsonl")
        losses[name] = [step["loss"] for step in steps]
    assert losses["two"][:2] == pytest.approx(losses["one"][:2], rel=1e-5)
    # A sum in another order moves some weights over the border between two codes.
    assert losses["two"] == pytest.approx(losses["one"], rel=2e-3)
    assert losses["one"][0] != pytest.approx(losses["plain"][0], rel=1e-4)
    assert losses["late"][:2] == losses["plain"][:2]
    assert losses["late"][2] != pytest.approx(losses["plain"][2], rel=1e-4)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """W8A8: 256 levels between -128 and 127 scales of each row, as compressed-tensors defines them."""
    scales = values.detach().abs().amax(-1, keepdim=True) * 2 / 255
    return (values / scales).round().clamp(-128, 127) * scales


def test_the_validation_loss_is_that_of_the_quantized_export(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    options = ("--checkpoint.save_consolidated=final", "--qat.scheme=W8A8")
    run(tmp_path, *SHORT, *options, text=TEXT)
    checkpoint = tmp_path / "run/epoch_0_step_4"
    words = f"{checkpoint} --to compressed-tensors --scheme W8A8 -o {tmp_path / 'W8A8'}"
    assert main(["export", *words.split()]) == 0
    plain: Any = AutoModelForCausalLM.from_pretrained(checkpoint / "model/consolidated")
    for layer in plain.model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = rounded(layer.weight.data)
            layer.register_forward_pre_hook(lambda _, inputs: rounded(inputs[0]))
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "W8A8")
    tokens = torch.arange(2, 40).unsqueeze(0)
    with torch.no_grad():
        expected = plain(input_ids=tokens[:, :32]).logits
        found = exported(input_ids=tokens[:, :32]).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    settings = json.loads((tmp_path / "W8A8/config.json").read_text())
    assert settings["quantization_config"]["format"] == "int-quantized"
