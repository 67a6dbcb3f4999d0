"""The recipe for models of audio from end to end: families and strategies on ranks, and the losses of transformers."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM

from tests.support import ranks
from tests.support.models.audio import (
    FAMILIES,
    ONE_AUDIO,
    make_base,
    read_wave,
    write_conversations,
)
from tests.support.runs import training
from tests.support.runs.training import steps_of, write_recipe

RECIPE = """
recipe: vlm_finetune
seed: 5
model:
  from_pretrained: {base}
  freeze_if_present: ['*visual*', '*.audio_bos_eos_token.*', '*.embed_positions.*',
    '*.image_embed.*', '*_for_vision_speech.*']
dataset:
  _target_: automodel_ckpt.data.vlm.conversations
  path: {data}
  media: [audio]
  seq_length: 100
optimizer:
  lr: 1e-2
step_scheduler:
  global_batch_size: 4
  local_batch_size: 1
  max_steps: 3
  ckpt_every_steps: 1
  ckpt_every_epochs: null
logging:
  sample_ids: true
"""
ALL = bool(os.environ.get("AUTOMODEL_CKPT_ALL_TREES"))
"""Families and strategies beyond the suite's."""
ADAPTED = ["qwen3_asr"]
BATCHES_MATTER = ("granite_speech", "granite_speech_plus", "phi4_multimodal", "fun_asr_nano")
"""Families in which a loss depends on the other samples of its micro-batch: batch normalization, and encoders that see
some of the padding of shorter audio."""
RUNS: list[Any] = [
    ("qwen2_audio", "fsdp2"),
    pytest.param("qwen2_5_omni", "ddp", marks=pytest.mark.further),
]
if ALL:
    # The gradients of Gemma 4's fresh audio tower are zero, also in transformers.
    families = [family for family in FAMILIES if family != "gemma4"]
    ADAPTED = [*FAMILIES]
    RUNS = [(family, strategy) for family in families for strategy in ("fsdp2", "ddp")]


def prepare(directory: Path, family: str) -> Path:
    """A base, data and recipe in *directory*; the recipe's file."""
    base = make_base(directory / "base", family)
    data = write_conversations(directory, has_text=family not in ONE_AUDIO)
    return write_recipe(directory, RECIPE.format(base=base, data=data))


def train(recipe_file: Path, name: str, *overrides: str, dies_after: int = 0) -> dict[str, str]:
    """Run in this process, in the directory of that name; the digests of the state at the end."""
    directory = f"--checkpoint.checkpoint_dir={recipe_file.parent / name}"
    return training.train(recipe_file, directory, *overrides, dies_after=dies_after)


def processor_of(recipe_file: Path) -> Any:
    """The processor that a run of the recipe reads."""
    recipe: Any = training.build(recipe_file, "--checkpoint.enabled=false")
    try:
        recipe.setup()
        return recipe.processor
    finally:
        recipe.close()


def own_batches(directory: Path, processor: Any, numbers: list[int]) -> list[tuple[Any, int]]:
    """The inputs of transformers for conversations, by its processor alone, and where the answer begins."""
    rows = (directory / "conversations.jsonl").read_text().splitlines()
    template = (directory / "base/chat_template.jinja").read_text()
    found = []
    for number in numbers:
        turns = json.loads(rows[number])["messages"]
        audio = []
        for part in turns[0]["content"]:
            if part["type"] == "audio":
                audio.append(read_wave(directory / part.pop("audio")))
        # Phi4MultimodalProcessor does not read its template from files.
        reader = processor if processor.chat_template else processor.tokenizer
        reader.chat_template = reader.chat_template or template
        text = reader.apply_chat_template(turns, tokenize=False)
        # Settings of the text must not pad the audio.
        of_text = {"padding": True, "return_tensors": "pt"}
        batch = processor(text=[text], audio=audio or None, text_kwargs=of_text)
        answer = processor.tokenizer(turns[1]["content"][0]["text"] + "</s>").input_ids
        found.append((batch, batch["input_ids"].shape[1] - len(answer)))
    return found


def own_loss(model: Any, directory: Path, processor: Any, numbers: list[int]) -> float:
    """The mean loss of the answers' tokens, by transformers' forward pass alone."""
    total, count = 0.0, 0
    for batch, start in own_batches(directory, processor, numbers):
        labels = batch["input_ids"].clone()
        labels[:, :start] = -100
        with torch.no_grad():
            logits = model(**batch).logits[:, :-1].double()
        wanted = labels[:, 1:]
        total += float(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), wanted.flatten(), reduction="sum"
            )
        )
        count += int((wanted != -100).sum())
    return total / count


@pytest.mark.further
@pytest.mark.parametrize(("family", "strategy"), RUNS)
def test_a_killed_run_goes_on_exactly_with_the_losses_of_transformers(
    family: str, strategy: str, tmp_path: Path
) -> None:
    recipe = prepare(tmp_path, family)
    options = (f"--distributed.strategy={strategy}", "--checkpoint.save_consolidated=final")
    dying = partial(train, recipe, "killed", *options, dies_after=2)
    ended = ranks.outcomes(dying, 2, init=False)
    assert -9 in [outcome.exitcode for outcome in ended]
    runs = [partial(train, recipe, name, *options) for name in ("killed", "whole")]
    again, whole = ranks.run_each(runs, 2)
    assert again == whole
    steps = steps_of(tmp_path / "whole")
    assert steps_of(tmp_path / "killed") == steps
    # One rank has the losses of two. Micro-batches without audio are those of single samples.
    size = 1 if family in BATCHES_MATTER else 4
    train(recipe, "single", f"--step_scheduler.local_batch_size={size}")
    base = AutoModelForMultimodalLM.from_pretrained(tmp_path / "base")
    base.train(family.startswith("granite_speech"))
    processor = processor_of(recipe)
    expected = own_loss(base, tmp_path, processor, steps[0]["samples"])
    [first, *later] = [float.fromhex(step["loss"]) for step in steps]
    assert first == pytest.approx(expected, abs=1e-6)
    [own_first, *own_later] = [
        float.fromhex(step["loss"]) for step in steps_of(tmp_path / "single")
    ]
    assert own_first == pytest.approx(first, abs=1e-6)
    # Optimizer steps amplify the rounding of the first gradients.
    assert own_later == pytest.approx(later, rel=1e-5)
    export = tmp_path / "whole/LATEST/model/consolidated"
    model, info = AutoModelForMultimodalLM.from_pretrained(export, output_loading_info=True)
    assert not any(info.values()), info
    trained = own_loss(model.eval(), tmp_path, processor, [0, 1, 4])
    assert trained < own_loss(base, tmp_path, processor, [0, 1, 4])
    before, after = tensors(tmp_path / "base"), tensors(export)
    assert before.keys() == after.keys()
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    frozen = (
        "visual",
        "audio_bos_eos_token",
        "embed_positions",
        "image_embed",
        "_for_vision_speech",
        "encoder_embedding.global_",
    )
    trained = {name for name in unchanged if not any(part in name for part in frozen)}
    assert not trained


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of the model files in a directory."""
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.further
@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # peft's call, transformers' warning
def test_adapters_on_the_language_model_of_whole_omni_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = prepare(tmp_path, "qwen2_5_omni")
    base = tmp_path / "base"
    # Published files also have a model that speaks.
    config = json.loads((base / "config.json").read_text())
    whole = {"model_type": "qwen2_5_omni", "thinker_config": config}
    (base / "config.json").write_text(json.dumps(whole))
    weights = {f"thinker.{name}": value for name, value in tensors(base).items()}
    weights["talker.model.norm.weight"] = torch.zeros(3)
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    options = (
        "--model.freeze_if_present=[]",
        "--peft={r: 4, target_modules: all-linear, exclude_modules: ['*audio_tower*', '*visual*']}",
        "--step_scheduler.max_steps=2",
    )
    sharded = partial(train, recipe, "run", *options, "--distributed.strategy=fsdp2")
    ranks.run(sharded, 2, init=False)
    assert "builds the complete model" not in capfd.readouterr().err, (
        "each rank reads its part of the base"
    )
    train(recipe, "single", *options)
    losses = [
        [float.fromhex(step["loss"]) for step in steps_of(tmp_path / name)]
        for name in ("run", "single")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    adapters = load_file(tmp_path / "run/LATEST/model/adapter_model.safetensors")
    assert adapters and not any("audio_tower" in name or "visual" in name for name in adapters)
    thinker = AutoModelForMultimodalLM.from_pretrained(
        base, config=AutoConfig.from_pretrained(base).thinker_config
    )
    processor = processor_of(recipe)
    before = own_loss(thinker.eval(), tmp_path, processor, [0, 1, 4])
    adapted = PeftModel.from_pretrained(thinker, tmp_path / "run/LATEST/model")
    assert own_loss(adapted.eval(), tmp_path, processor, [0, 1, 4]) < before


def test_blank_audio_does_not_enter_the_loss_of_routers(tmp_path: Path) -> None:
    """One conversation of the global batch has no audio; alone in a micro-batch, it gets a row with a blank one."""
    recipe = prepare(tmp_path, "qwen3_omni")
    config = json.loads((tmp_path / "base/config.json").read_text())
    config["text_config"] |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    options = ("--dataset.max_samples=5", "--step_scheduler.global_batch_size=5")
    logged = []
    for size in (1, 5):
        local = f"--step_scheduler.local_batch_size={size}"
        train(recipe, f"run{size}", local, *options, "--step_scheduler.max_steps=1")
        [step] = steps_of(tmp_path / f"run{size}")
        logged.append([float.fromhex(step[name]) for name in ("aux_loss", "grad_norm")])
        logged[-1].append(step["tokens"])
    assert logged[0] == pytest.approx(logged[1], rel=1e-4)
