"""Models with a classification head: new where the files have none, the same for any ranks, trained also with LoRA."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from automodel_ckpt.errors import RecipeError
from tests.support import ranks
from tests.support.models.heads import LABELS, Heads, outputs
from tests.support.models.sizes import model_sizes
from tests.support.models.whole_state import whole_state
from tests.support.runs.training import RECIPE, build, steps_of, train, write_recipe

SETTINGS: dict[str, Any] = {
    **model_sizes(hidden=32, inner=48, layers=2, heads=4, positions=32, vocab=300),
    "pad_token_id": 0,
}
RANKS: dict[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ()),
    "fsdp2": (2, ()),
    "ddp": (2, ("--distributed.strategy=ddp",)),
    "tp": (2, ("--distributed.tp_size=2", "--distributed.sequence_parallel")),
}
GROUPS = [
    pytest.param("llama", False, ("fsdp2", "tp"), marks=pytest.mark.further),
    pytest.param("llama", True, ("fsdp2",), marks=pytest.mark.further),
    ("bert", True, ("ddp",)),
]
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12], [9, 8, 7, 6, 5, 0, 0, 0]])


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder and an encoder as language models: neither has a classification head."""
    directory = tmp_path_factory.mktemp("bases")
    torch.manual_seed(0)
    decoder = LlamaConfig(num_key_value_heads=2, **SETTINGS)
    LlamaForCausalLM(decoder).save_pretrained(directory / "llama")
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = BertConfig(**SETTINGS, **no_dropout)
    BertForMaskedLM(encoder).save_pretrained(directory / "bert")
    return directory


def recipe_of(directory: Path, base: Path) -> Path:
    section = f"model:\n  from_pretrained: {base}\n"
    return write_recipe(directory, re.sub(r"model:\n  from_config:\n(    .*\n)+", section, RECIPE))


def trained(recipe_file: Path, name: str, *overrides: str) -> tuple[Any, ...]:
    """Train for four steps; the head before the first step, and the trained model's outputs on rank 0."""
    run = recipe_file.parent / name
    options = (
        f"--checkpoint.checkpoint_dir={run}",
        "--step_scheduler.max_steps=4",
        "--step_scheduler.ckpt_every_steps=2",
        "--lr_scheduler=null",
    )
    recipe = build(recipe_file, *options, *overrides, recipe_class=Heads)
    try:
        recipe.setup()
        head = {
            name: tensor
            for name, tensor in whole_state(recipe.model).items()
            if re.search(r"score|classifier|pooler", name)
        }
        recipe.run()
        logits = outputs(recipe.model, TOKENS)
        return head, getattr(logits, "full_tensor", lambda: logits)()
    finally:
        recipe.close()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
@pytest.mark.parametrize(("kind", "adapters", "others"), GROUPS)
def test_a_new_head_is_the_same_for_any_ranks_and_is_trained_and_exported(
    bases: Path, tmp_path: Path, kind: str, adapters: bool, others: tuple[str, ...]
) -> None:
    recipe = recipe_of(tmp_path, bases / kind)
    more = "--peft.r=4" if adapters else "--checkpoint.save_consolidated=final"
    found = {}
    for name in ("single", *others):
        num_ranks, options = RANKS[name]
        found[name] = ranks.run(trained, num_ranks, recipe, name, *options, more, init=False)[0]
    head, logits = found["single"]
    for name in others:
        other_head, other_logits = found[name]
        assert other_head.keys() == head.keys()
        for fqn, tensor in head.items():
            assert torch.equal(other_head[fqn], tensor), (name, fqn)
        assert losses_of(tmp_path / name) == pytest.approx(losses_of(tmp_path / "single"), rel=1e-5)
        torch.testing.assert_close(other_logits, logits, rtol=1e-4, atol=1e-4)
    saved = tmp_path / "single" / "epoch_0_step_4" / "model"
    exported = loaded(saved, bases / kind) if adapters else loaded(saved / "consolidated")
    assert exported.config.id2label == dict(enumerate(LABELS))
    torch.testing.assert_close(outputs(exported, TOKENS), logits)


def losses_of(run: Path) -> list[float]:
    return [float.fromhex(line["loss"]) for line in steps_of(run)]


def loaded(directory: Path, base: Path | None = None) -> Any:
    """The exported model, or the adapters in *directory* on their *base*, as transformers and peft load them."""
    if base is None:
        return AutoModelForSequenceClassification.from_pretrained(directory)
    config = AutoConfig.from_pretrained(directory / "model_config.json")
    model = AutoModelForSequenceClassification.from_pretrained(base, config=config)
    return PeftModel.from_pretrained(model, directory)


def test_only_the_head_may_be_missing(bases: Path, tmp_path: Path) -> None:
    tensors = load_file(bases / "llama" / "model.safetensors")
    changes = {
        "a layer": {"model.layers.1.mlp.up_proj.weight": None},
        "a further layer": {"model.layers.2.mlp.up_proj.weight": torch.zeros(48, 32)},
        "other labels": {"score.weight": torch.zeros(2, 32)},
    }
    for name, changed in changes.items():
        base = tmp_path / name
        shutil.copytree(bases / "llama", base)
        kept = {fqn: tensor for fqn, tensor in (tensors | changed).items() if tensor is not None}
        save_file(kept, base / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(RecipeError, match="do not match this model") as caught:
            build_model(recipe_of(tmp_path, base))
        (fqn,) = changed
        assert fqn in str(caught.value)


def build_model(recipe_file: Path, *overrides: str) -> None:
    """Start a run in this process."""
    train(recipe_file, "--checkpoint.enabled=false", *overrides, recipe_class=Heads)
