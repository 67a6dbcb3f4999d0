"""Training in FP8 through torchao, emulated on a CPU: checkpoints as without it, exact resumes, adapters, errors."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.layers.fp8 import check_device, convert_to_fp8, fp8_layers
from tests.distributed.kinds.test_training import lines_of_steps, run
from tests.support.runs.parallel import model_of
from tests.support.runs.training import EXPORT, RECIPE, VALIDATION

TEXT = (RECIPE + VALIDATION).replace("attention_dropout: 0.2", "attention_dropout: 0.0")
SHORT = ("--step_scheduler.max_steps=4", "--step_scheduler.ckpt_every_steps=2")
FP8 = "--fp8={recipe: tensorwise, emulate: true, exclude: ['*.0.mlp.down_proj']}"
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


def test_layers_of_the_decoder_with_suitable_widths_are_converted() -> None:
    model = model_of(num_hidden_layers=2, intermediate_size=40)
    exclude = ["*.1.self_attn.*"]
    selected, num_odd = fp8_layers(model, exclude)
    assert selected == [f"model.layers.0.self_attn.{name}_proj" for name in ("q", "k", "v", "o")]
    assert num_odd == 6  # gate, up and down of width 40


def test_a_device_without_fp8_is_an_error_unless_it_is_emulated() -> None:
    check_device("cuda", (8, 9), emulate=False)
    check_device("cuda", (9, 0), emulate=False)
    for emulate, device, capability in ((False, "cpu", None), (False, "cuda", (8, 0))):
        with pytest.raises(RecipeError, match=r"fp8\.emulate"):
            check_device(device, capability, emulate=emulate)
        check_device(device, capability, emulate=True)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_without_torchao_the_error_names_the_extra() -> None:
    options = {"recipe": "tensorwise", "exclude": [], "emulate": True}
    with pytest.raises(RecipeError, match=r"automodel_ckpt\[fp8\]"):
        convert_to_fp8(model_of(), device=torch.device("cpu"), **options)


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_converted_model_has_the_same_state_and_about_the_same_logits(recipe: str) -> None:
    model = model_of().eval()
    tokens = torch.arange(16).view(1, 16)
    expected = model(input_ids=tokens).logits
    state = {name: value.data_ptr() for name, value in model.state_dict().items()}
    convert_to_fp8(
        model, recipe=recipe, exclude=["*down_proj"], emulate=True, device=torch.device("cpu")
    )
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == state
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear
    assert type(model.model.layers[0].mlp.up_proj) is not nn.Linear
    logits = model(input_ids=tokens).logits
    error = (logits - expected).norm() / expected.norm()
    assert 1e-4 < error.item() < 0.2


@needs_torchao
def test_a_sharded_run_resumes_exactly_and_its_export_loads(tmp_path: Path) -> None:
    plain = run(tmp_path, *SHORT, name="plain", text=TEXT)
    options = (*SHORT, FP8, "--fp8.recipe=rowwise", "--distributed.strategy=fsdp2")
    whole = run(tmp_path, *options, EXPORT, name="whole", text=TEXT, num_ranks=2)
    back = f"--checkpoint.restore_from={tmp_path / 'whole' / 'epoch_0_step_2'}"
    assert run(tmp_path, *options, back, name="resumed", text=TEXT, num_ranks=2) == whole
    assert whole[0]["weights"] != plain[0]["weights"]
    expected = [line["loss"] for line in lines_of_steps(tmp_path / "plain/training.jsonl")]
    losses = [line["loss"] for line in lines_of_steps(tmp_path / "whole/training.jsonl")]
    assert losses == pytest.approx(expected, rel=0.05)
    names = []
    for name in ("plain", "whole"):
        manifest = tmp_path / name / "epoch_0_step_4/MANIFEST.json"
        trees = json.loads(manifest.read_text())["trees"]
        names.append({key: sorted(tree["tensors"]) for key, tree in trees.items()})
    assert names[0] == names[1]
    # Without torchao's layers, from a checkpoint of a run with them.
    run(tmp_path, *SHORT, back, name="without", text=TEXT)
    export = tmp_path / "whole/epoch_0_step_4/model/consolidated"
    assert AutoModelForCausalLM.from_pretrained(export).num_parameters() > 0


@needs_torchao
def test_adapters_train_around_a_base_in_fp8(tmp_path: Path) -> None:
    base = tmp_path / "base"
    peft = f"--peft={{r: 4, target_modules: [q_proj, up_proj], base_dir: {base}}}"
    plain = run(tmp_path, *SHORT, peft, name="plain", text=TEXT)
    options = (*SHORT, peft, FP8)
    whole = run(tmp_path, *options, name="whole", text=TEXT)
    back = f"--checkpoint.restore_from={tmp_path / 'whole' / 'epoch_0_step_2'}"
    assert run(tmp_path, *options, back, name="resumed", text=TEXT) == whole
    assert whole[0]["weights"] != plain[0]["weights"]
    expected = [line["loss"] for line in lines_of_steps(tmp_path / "plain/training.jsonl")]
    losses = [line["loss"] for line in lines_of_steps(tmp_path / "whole/training.jsonl")]
    assert losses == pytest.approx(expected, rel=0.05)
