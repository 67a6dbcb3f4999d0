"""Multi-token prediction: losses and gradients of plain PyTorch, and files under their usual names."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.distributed.kinds.test_training import failure, lines_of_steps, run
from tests.distributed.models.test_quantized_bases import is_quantized, to_fp8
from tests.distributed.parallel.test_router_loss import ONE_STEP, one_step
from tests.support import ranks
from tests.support.models.mtp import Reference, gradients_of, model_section
from tests.support.runs.training import EXPORT, write_recipe
from tests.support.runs.training_parts import uneven

FACTOR = 0.3
MTP = "--model.mtp={loss_scaling_factor: 0.3}"
ONE = "--model.mtp={loss_scaling_factor: 0.3, num_depths: 1}"
TWO = "--model.mtp={loss_scaling_factor: 0.3, num_depths: 2}"
REPEATED = "--model.mtp={loss_scaling_factor: 0.3, num_depths: 2, repeat_layer: true}"
LOCAL_4 = "--step_scheduler.local_batch_size=4"
LOCAL_2 = "--step_scheduler.local_batch_size=2"
PADDED = ("--step_scheduler.local_batch_size=8", "--dataloader.padding_free=false")
FULL_LOGITS = "--loss_fn={_target_: torch.nn.CrossEntropyLoss}"
FIRST = {"packed", "divided and packed"}
RUNS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "accumulated": ("deepseek_v3", 1, (TWO, LOCAL_2, "--model.activation_checkpointing=true")),
    "packed": ("glm4_moe", 1, (TWO, "--packed_sequence.size=12", LOCAL_2)),
    "sharded": ("deepseek_v3", 2, (TWO, LOCAL_2, "--distributed.strategy=fsdp2")),
    "experts": ("glm4_moe", 2, (REPEATED, LOCAL_2, "--distributed.ep_size=2")),
    "divided": ("glm4_moe", 2, (TWO, LOCAL_4, "--distributed.cp_size=2")),
    "divided and packed": (
        "deepseek_v3",
        2,
        (TWO, LOCAL_2, "--packed_sequence.size=12", "--distributed.cp_size=2", FULL_LOGITS),
    ),
    "replicated": ("qwen3_5_text", 2, (ONE, LOCAL_4, "--distributed.strategy=ddp")),
    "logits": ("nemotron_h", 1, (MTP, *PADDED, FULL_LOGITS)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FIRST else pytest.mark.further) for name in RUNS],
)
def test_losses_and_gradients_are_those_of_plain_pytorch_for_one_sample_after_another(
    name: str, tmp_path: Path
) -> None:
    # Runs with model.mtp.loss_scaling_factor, num_depths and repeat_layer.
    family, num_ranks, overrides = RUNS[name]
    step = partial(
        one_step,
        write_recipe(tmp_path),
        f"--checkpoint.checkpoint_dir={tmp_path / name}",
        *ONE_STEP,
        model_section(family),
        *overrides,
    )
    weights, gradients = ranks.run(step, num_ranks, init=False)[0]
    num_depths = 1
    if TWO in overrides or REPEATED in overrides:
        num_depths = 2
    num_layers = 1 if REPEATED in overrides else num_depths
    reference = Reference(family, weights, num_layers=num_layers)
    samples = uneven(8)
    num_labels = sum(len(sample["labels"]) - 2 for sample in samples)
    sums = reference.losses(samples, num_depths)
    loss = sums[0] / num_labels
    mtp_loss = torch.stack(sums[1:]).mean() / num_labels
    (loss + FACTOR * mtp_loss).backward()
    (line,) = lines_of_steps(tmp_path / name / "training.jsonl")
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert line["mtp_loss"] == pytest.approx(mtp_loss.item(), rel=1e-6)
    expected = gradients_of(reference)
    assert set(expected) == set(gradients)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[parameter], rtol=1e-4, atol=2e-6, msg=f"{name}: {parameter}"
        )


LAYER = "model.layers.2."
COPIES = {
    "model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.2.shared_head.head.weight": "lm_head.weight",
}


def exported(run_directory: Path) -> Path:
    return run_directory / "LATEST" / "model" / "consolidated"


def weights_in(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def base_with_copies(directory: Path, weights: dict[str, torch.Tensor], export: Path) -> Path:
    """A base whose file also has the copies of the embedding and the output layer that DeepSeek-V3's files have."""
    directory.mkdir()
    (directory / "config.json").write_bytes((export / "config.json").read_bytes())
    copies = {name: weights[source].clone() for name, source in COPIES.items()}
    save_file({**weights, **copies}, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step on a fresh model with the layers of one depth."""
    directory = tmp_path_factory.mktemp("mtp")
    run(directory, *ONE_STEP, model_section("deepseek_v3"), MTP, EXPORT, name="first")
    return directory / "first"


def test_files_have_the_layers_under_the_familys_names_and_are_read_again_bit_by_bit(
    first: Path, tmp_path: Path
) -> None:
    export = exported(first)
    weights = weights_in(export)
    of_depth = {name.removeprefix(LAYER) for name in weights if name.startswith(LAYER)}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} < of_depth
    assert {"self_attn.kv_b_proj.weight", "mlp.experts.3.gate_proj.weight"} < of_depth
    assert "mlp.gate.e_score_correction_bias" in of_depth
    assert not any(name.startswith("mtp") for name in weights)
    assert json.loads((export / "config.json").read_text())["num_nextn_predict_layers"] == 1
    plain, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(plain.lm_head.weight, weights["lm_head.weight"])

    base = base_with_copies(tmp_path / "base", weights, export)
    from_base = ("--model.from_config=null", f"--model.from_pretrained={base}", MTP)
    step = partial(
        one_step, write_recipe(tmp_path), f"--checkpoint.checkpoint_dir={tmp_path / 'second'}"
    )
    sharded = ("--distributed.strategy=fsdp2", LOCAL_4, "--checkpoint.model_layout=hf")
    before, _ = ranks.run(step, 2, *ONE_STEP, *from_base, *sharded, init=False)[0]
    norm = before["mtp.depths.0.decoder.norm.weight"]
    assert torch.equal(norm, weights[f"{LAYER}shared_head.norm.weight"])
    experts = before["mtp.depths.0.decoder.layers.0.mlp.experts.down_proj"]
    for number in range(4):
        name = f"{LAYER}mlp.experts.{number}.down_proj.weight"
        assert torch.equal(experts[number], weights[name])
    # With this layout, the checkpoint has the files of an export.
    trained = weights_in(tmp_path / "second" / "LATEST" / "model")
    assert set(trained) == {*weights, *COPIES}
    for copy, source in COPIES.items():
        assert torch.equal(trained[copy], trained[source])
    assert not torch.equal(trained["lm_head.weight"], weights["lm_head.weight"])
    projection = f"{LAYER}eh_proj.weight"
    assert not torch.equal(trained[projection], weights[projection])


def test_a_base_without_the_layers_is_an_error_unless_new_ones_are_wanted(tmp_path: Path) -> None:
    run(tmp_path, *ONE_STEP, model_section("deepseek_v3"), EXPORT, name="first")
    export = exported(tmp_path / "first")
    from_base = (*ONE_STEP, "--model.from_config=null", f"--model.from_pretrained={export}")
    refused = str(failure(tmp_path, *from_base, MTP))
    assert "no weights of the layers for multi-token prediction" in refused
    assert "weights: new" in refused
    run(tmp_path, *from_base, MTP, "--model.mtp.weights=new", EXPORT, name="new")
    trained = weights_in(exported(tmp_path / "new"))
    assert f"{LAYER}eh_proj.weight" in trained
    assert set(weights_in(export)) < set(trained)


def quantized_base(directory: Path, export: Path) -> Path:
    """The model of *export* with layers in FP8, as DeepSeek-V3's files have them."""
    stored: dict[str, torch.Tensor] = {}
    for name, value in weights_in(export).items():
        stored |= to_fp8(name, value) if is_quantized(name, value, "fp8") else {name: value}
    assert f"{LAYER}eh_proj.weight_scale_inv" in stored
    directory.mkdir()
    config = json.loads((export / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.further
def test_adapters_leave_the_layers_frozen_and_quantized_bases_are_dequantized(
    first: Path, tmp_path: Path
) -> None:
    export = exported(first)
    quantized = quantized_base(tmp_path / "base", export)
    runs = {
        "without": (export, "{}", ()),
        "lora": (export, "{}", (MTP,)),
        "fp8": (quantized, "{}", (MTP,)),
    }
    found: dict[str, dict[str, float]] = {}
    for name, (base, section, mtp) in runs.items():
        options = ("--model.from_config=null", f"--model.from_pretrained={base}")
        run(tmp_path, *ONE_STEP, *options, *mtp, f"--peft={section}", name=name)
        (found[name],) = lines_of_steps(tmp_path / name / "training.jsonl")
        names = load_file(tmp_path / name / "LATEST/model/adapter_model.safetensors")
        assert names
        assert not any("mtp" in each or "layers.2." in each for each in names)
    assert "mtp_loss" not in found["without"]
    assert found["without"]["loss"] == pytest.approx(found["lora"]["loss"], rel=1e-6)
    assert found["without"]["grad_norm"] != found["lora"]["grad_norm"]
    assert found["fp8"]["mtp_loss"] == pytest.approx(found["lora"]["mtp_loss"], rel=0.1)
    assert found["fp8"]["mtp_loss"] != found["lora"]["mtp_loss"]
    # DoRA needs complete values of the base: each rank then builds the model first.
    options = ("--model.from_config=null", f"--model.from_pretrained={quantized}", MTP)
    refused = str(failure(tmp_path, *ONE_STEP, *options, "--peft={use_dora: true}"))
    assert "read only from a base with files that can be read in parts" in refused
