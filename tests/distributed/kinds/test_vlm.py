"""The recipe for vision-language models from end to end: families, formats and strategies, on real ranks."""

import json
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from automodel_ckpt.errors import RecipeError
from tests.support import ranks
from tests.support.models.vision import FAMILIES, make_base, write_conversations
from tests.support.runs.training import build, steps_of, train, write_recipe

RECIPE = """
recipe: vlm_finetune
seed: 5
model:
  from_pretrained: {base}
  freeze: [vision_tower]
dataset:
  _target_: automodel_ckpt.data.vlm.conversations
  path: {data}
  seq_length: 100
validation_dataset:
  _target_: automodel_ckpt.data.vlm.conversations
  path: {data}
  max_samples: 3
optimizer:
  lr: 1e-2
step_scheduler:
  global_batch_size: 4
  local_batch_size: 2
  max_steps: 5
  ckpt_every_steps: 2
  ckpt_every_epochs: null
logging:
  sample_ids: true
"""
NUM_SAMPLES = 20
ALL = bool(os.environ.get("AUTOMODEL_CKPT_ALL_TREES"))
"""Families and runs beyond the suite's."""


def prepare(directory: Path, family: str) -> Path:
    """A base, data and recipe in *directory*; the recipe's file."""
    base = make_base(directory / "base", family)
    data = write_conversations(directory, NUM_SAMPLES)
    return write_recipe(directory, RECIPE.format(base=base, data=data))


def micro_batches(recipe_file: Path, size: int, *overrides: str) -> list[dict[str, torch.Tensor]]:
    """The first samples of the data in micro-batches of *size*, as a run of the recipe gets them."""
    recipe = build(
        recipe_file,
        "--checkpoint.enabled=false",
        "--dataloader.shuffle=false",
        f"--step_scheduler.local_batch_size={size}",
        *overrides,
    )
    try:
        recipe.setup()
        return [dict(each) for each in next(iter(recipe.dataloader)).micro_batches]
    finally:
        recipe.close()


def logits(model: Any, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found = model(**{name: value for name, value in rows.items() if name != "labels"}).logits
    return found.clone()


def accuracy(model: Any, recipe_file: Path) -> float:
    """The fraction of the labels of the first three samples that have the highest logit."""
    num_hits = num_labels = 0
    for rows in micro_batches(recipe_file, 1)[:3]:
        labels = rows["labels"][:, 1:]
        predicted = logits(model, rows).argmax(-1)[:, :-1]
        num_hits += int((predicted == labels).sum())
        num_labels += int((labels != -100).sum())
    return num_hits / num_labels


def with_logits(recipe_file: Path, rows: dict[str, torch.Tensor], *overrides: str) -> torch.Tensor:
    """Train in this process; the logits of *rows* at the end."""
    recipe = build(recipe_file, *overrides)
    try:
        recipe.setup()
        recipe.run()
        return logits(recipe.model, rows)
    finally:
        recipe.close()


def run(
    recipe_file: Path, name: str, rows: dict[str, torch.Tensor], *overrides: str, num_ranks: int
) -> torch.Tensor:
    """Train in the directory *name*; the logits of *rows* at the end, on rank 0."""
    place = f"--checkpoint.checkpoint_dir={recipe_file.parent / name}"
    training = partial(with_logits, recipe_file, rows, place, *overrides)
    found: torch.Tensor = ranks.run(training, num_ranks, init=False)[0]
    return found


def run_each(
    recipe_file: Path, runs: Mapping[str, tuple[str, ...]], num_ranks: int
) -> list[list[Any]]:
    """Train with the overrides of each run, in the directory of its name, in the same processes."""
    trainings = []
    for name, overrides in runs.items():
        arguments = (f"--checkpoint.checkpoint_dir={recipe_file.parent / name}", *overrides)
        trainings.append(partial(train, recipe_file, *arguments))
    return ranks.run_each(trainings, num_ranks)


def tensors(directory: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                found[name] = file.get_tensor(name).numpy().tobytes()
    return found


RUNS: list[Any] = [
    ("llava", "fsdp2", 2, "safetensors"),
    pytest.param("idefics3", "ddp", 2, "torch_save", marks=pytest.mark.further),
    pytest.param("gemma3", "single", 1, "safetensors", marks=pytest.mark.further),
    pytest.param("qwen2_5_vl", "fsdp2", 2, "safetensors", marks=pytest.mark.further),
]
if ALL:
    RUNS += [
        ("smolvlm", "fsdp2", 2, "torch_save"),
        ("qwen2_5_vl", "ddp", 2, "torch_save"),
        ("gemma4", "fsdp2", 2, "safetensors"),
    ]


@pytest.mark.parametrize(("family", "strategy", "num_ranks", "model_format"), RUNS)
def test_the_export_alone_is_the_trained_model_with_the_bases_processor(
    family: str,
    strategy: str,
    num_ranks: int,
    model_format: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    recipe = prepare(tmp_path, family)
    options = (
        f"--distributed.strategy={strategy}",
        f"--checkpoint.model_save_format={model_format}",
        "--checkpoint.save_consolidated=final",
    )
    [rows, *_] = micro_batches(recipe, 2)
    trained = run(recipe, "run", rows, *options, num_ranks=num_ranks)
    assert "builds the complete model" not in capfd.readouterr().err, (
        "each rank reads its part of the base"
    )
    base, export = tmp_path / "base", (tmp_path / "run/LATEST/model/consolidated").resolve()
    export = export.rename(tmp_path / "export")
    model, info = AutoModelForImageTextToText.from_pretrained(export, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits(model, rows), trained)
    last = json.loads((tmp_path / "run/validation.jsonl").read_text().splitlines()[-1])
    assert last["val_accuracy"] == accuracy(model, recipe)
    exported, before = tensors(export), tensors(base)
    assert exported.keys() == before.keys()
    seeing = {name for name in before if "vision" in name or "visual" in name}
    projectors = re.compile(r"projector|merger|\.embed_vision\.")
    frozen = {name for name in seeing if not projectors.search(name)}
    assert frozen
    unchanged = {name for name in before if exported[name] == before[name]}
    # Gemma 4's scalars are buffers.
    assert {name for name in unchanged if not name.endswith(".layer_scalar")} == frozen
    for file in base.iterdir():
        if file.name not in ("model.safetensors", "config.json"):
            assert (export / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("family", [*FAMILIES] if ALL else ["llava"])
def test_a_killed_run_goes_on_exactly(family: str, tmp_path: Path) -> None:
    check_killed_run(prepare(tmp_path, family))


PACKED = ("--packed_sequence.size=180", "--step_scheduler.local_batch_size=1")
"""Two to nine conversations in a pack."""


@pytest.mark.further
@pytest.mark.parametrize(
    ("family", "strategy"),
    [(family, "fsdp2") for family in FAMILIES] + [("qwen2_5_vl", "ddp")]
    if ALL
    else [("gemma3", "fsdp2")],
)
def test_packed_samples_train_as_single_ones_and_a_killed_run_goes_on_exactly(
    family: str, strategy: str, tmp_path: Path
) -> None:
    recipe = prepare(tmp_path, family)
    # The whole data set is one global batch, packed or not.
    epoch = (
        "--step_scheduler.global_batch_size=20",
        "--step_scheduler.max_steps=1",
        f"--distributed.strategy={strategy}",
    )
    runs = {"single": epoch, "packed": (*PACKED, *epoch)}
    run_each(recipe, runs, num_ranks=2)
    single, packed = steps_of(tmp_path / "single"), steps_of(tmp_path / "packed")
    assert len(single) == len(packed) == 1
    for name in ("loss", "grad_norm"):
        of_packed, of_single = (float.fromhex(steps[0][name]) for steps in (packed, single))
        assert of_packed == pytest.approx(of_single, rel=2e-6), name
    assert packed[0]["label_tokens"] == single[0]["label_tokens"]
    options = (
        *PACKED,
        "--step_scheduler.global_batch_size=2",
        f"--distributed.strategy={strategy}",
    )
    check_killed_run(recipe, *options)


def check_killed_run(recipe: Path, *options: str) -> None:
    """Check that a run that is killed after its third step ends as one that is not."""
    directory = recipe.parent / "killed"
    options = ("--step_scheduler.max_steps=4", "--validation_dataset=null", *options)
    arguments = (f"--checkpoint.checkpoint_dir={directory}", *options)
    ended = ranks.outcomes(partial(train, recipe, *arguments, dies_after=3), 2, init=False)
    assert -9 in [outcome.exitcode for outcome in ended]
    again, whole = run_each(recipe, {"killed": options, "whole": options}, num_ranks=2)
    assert again == whole
    assert steps_of(directory) == steps_of(recipe.parent / "whole")


def test_parameters_without_a_part_in_the_output_are_refused_by_name(tmp_path: Path) -> None:
    recipe = prepare(tmp_path, "llava")
    with pytest.raises(RecipeError, match="got no gradient in the first step") as caught:
        train(recipe, "--model.freeze=[]", "--checkpoint.enabled=false")
    assert "model.vision_tower.post_layernorm.bias" in str(caught.value)


AUTO = "_target_: transformers.AutoProcessor.from_pretrained"


@pytest.mark.parametrize("form", ["kwargs", pytest.param("target", marks=pytest.mark.further)])
def test_settings_of_the_processor_are_those_of_the_recipe(form: str, tmp_path: Path) -> None:
    recipe_file = prepare(tmp_path, "qwen2_5_vl")
    base = tmp_path / "base"
    settings = "min_pixels: 256, max_pixels: 1024, padding_side: right"
    given = f"--processor={{kwargs: {{{settings}}}}}"
    if form == "target":
        given = f"--processor={{{AUTO}, pretrained_model_name_or_path: '{base}', {settings}}}"
    short = ("--step_scheduler.max_steps=1", "--checkpoint.save_consolidated=final")
    run_directory = f"--checkpoint.checkpoint_dir={tmp_path / 'run'}"
    recipe = build(recipe_file, given, *short, run_directory)
    try:
        recipe.setup()
        assert recipe.processor.image_processor.size["longest_edge"] == 1024
        recipe.run()
    finally:
        recipe.close()
    export = AutoImageProcessor.from_pretrained(tmp_path / "run/LATEST/model/consolidated")
    assert (export.size["longest_edge"], export.size["shortest_edge"]) == (1024, 256)
    assert AutoImageProcessor.from_pretrained(base).size["longest_edge"] == 256


def test_what_a_vision_language_recipe_cannot_do_is_refused(tmp_path: Path) -> None:
    recipe = prepare(tmp_path, "llava")
    relu = "{_target_: tests.support.runs.training_parts.part, name: relu}"
    cases = {
        "--tokenizer.from_pretrained=/": "part of its processor",
        "--packed_sequence.size=20": "a sample is longer than a pack",
        "--processor.from_pretrained=/nowhere": "no such directory",
        f"--processor={relu}": "text and images",
        "--processor.kwargs={max_pixels: 9}": "does not have these settings",
        f"--processor={{{AUTO}, pretrained_model_name_or_path: /nowhere}}": "no such directory",
    }
    for override, message in cases.items():
        with pytest.raises(RecipeError, match=message):
            train(recipe, "--checkpoint.enabled=false", override)
