"""The type that a run computes in is the same under each strategy; what is kept and saved is not touched by it."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from automodel_ckpt.checkpoint import Manifest
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.distributed.kinds.test_training import lines_of_steps
from tests.support import ranks
from tests.support.models.sizes import model_sizes
from tests.support.runs.training import MODEL, RECIPE, train, write_recipe

MIXED = "--distributed.mixed_precision=bfloat16"
LINEAR = ("--lr_scheduler.decay_steps=3", "--step_scheduler.max_steps=3")


class Watched(LLMFinetune):
    """Fails unless each projection computes in bfloat16 while the weights and their moments are float32."""

    def build_trainable(self, config: Any = None, *, is_trained: bool = True) -> Any:
        self.seen: set[torch.dtype] = set()
        trainable = super().build_trainable(config, is_trained=is_trained)
        for name, module in trainable.model.named_modules():
            if name.endswith("q_proj"):
                module.register_forward_hook(self.note)
        return trainable

    def note(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.seen.add(output.dtype)

    def close(self) -> None:
        if self.loop.last_step is not None:
            assert self.seen == {torch.bfloat16}
            kept = [
                *self.model.parameters(),
                *(s["exp_avg"] for s in self.optimizer.state.values()),
            ]
            assert {tensor.dtype for tensor in kept} == {torch.float32}
        super().close()


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        ("single", 1),
        pytest.param("single", 2, marks=pytest.mark.further),
        pytest.param("ddp", 2, marks=pytest.mark.further),
        ("fsdp2", 2),
    ],
)
def test_each_strategy_computes_in_bfloat16_and_keeps_float32(
    tmp_path: Path, strategy: str, num_ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    cut = (
        "--distributed.tp_size=2"
        if (strategy, num_ranks) == ("single", 2)
        else "--distributed.tp_size=1"
    )
    overrides = (
        f"--distributed.strategy={strategy}",
        cut,
        "--model.from_config.attention_dropout=0",
        *LINEAR,
    )
    recipe = write_recipe(tmp_path)
    places = [f"--checkpoint.checkpoint_dir={tmp_path / name}" for name in ("mixed", "plain")]
    both = [
        partial(train, recipe, *overrides, MIXED, places[0], recipe_class=Watched),
        partial(train, recipe, *overrides, places[1]),
    ]
    ranks.run_each(both, num_ranks)
    assert "computed in bfloat16" in capfd.readouterr().err
    manifest = Manifest.read(tmp_path / "mixed" / "epoch_0_step_3")
    assert "computed in bfloat16" in manifest.environment["precision"]
    mixed, plain = (
        lines_of_steps(tmp_path / name / "training.jsonl") for name in ("mixed", "plain")
    )
    assert [r["loss"] for r in mixed] == pytest.approx([r["loss"] for r in plain], rel=0.05)
    assert [r["loss"] for r in mixed] != [r["loss"] for r in plain]


FREEZE = "['*embed_tokens*', '*layers.0.mlp*']"
IN_FLOAT32 = ("--distributed.strategy=single", "--distributed.mixed_precision=none")


class Frozen(LLMFinetune):
    """Writes down the types of the parameters that do not train, by name."""

    types: dict[str, torch.dtype]

    def build_trainable(self, config: Any = None, *, is_trained: bool = True) -> Any:
        trainable = super().build_trainable(config, is_trained=is_trained)
        found = {name: p.dtype for name, p in trainable.model.named_parameters()}
        trained = {name for name, p in trainable.model.named_parameters() if p.requires_grad}
        assert {found[name] for name in trained} == {torch.float32}
        type(self).types = {name: found[name] for name in found.keys() - trained}
        return trainable


def write_base(directory: Path, float32: str) -> Path:
    """A model in bfloat16, of which the file has the tensor *float32* in float32."""
    config = LlamaConfig(
        **model_sizes(vocab=300, hidden=16, inner=32, layers=2, heads=2, positions=16)
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors[float32] = tensors[float32].float() + 2**-20
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_frozen_weights_keep_the_16_bits_of_their_files_and_nothing_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wide = "model.layers.0.mlp.up_proj.weight"
    base = write_base(tmp_path / "base", wide)
    recipe = write_recipe(tmp_path, RECIPE.replace(MODEL, f"model: {{from_pretrained: {base}}}\n"))
    shared = ("--model.freeze", FREEZE, "--checkpoint.save_consolidated=false")

    def runs() -> tuple[Any, ...]:
        def weights(*overrides: str) -> tuple[str, dict[str, torch.dtype]]:
            digest = train(recipe, *shared, *LINEAR, *overrides, recipe_class=Frozen)["weights"]
            return digest, Frozen.types

        mixed = ("--distributed.strategy=fsdp2", MIXED)
        _, narrow = weights(*mixed, f"--checkpoint.checkpoint_dir={tmp_path / 'run'}")
        whole, full = weights(
            *mixed, "--model.dtype=float32", f"--checkpoint.checkpoint_dir={tmp_path / 'float32'}"
        )
        # The same weights in float32, from the checkpoint with some in bfloat16.
        again, _ = weights(*IN_FLOAT32, f"--checkpoint.checkpoint_dir={tmp_path / 'run'}")
        return narrow, set(full.values()), whole == again

    narrow, full, is_same = ranks.run(runs, 1, init=False)[0]
    assert narrow.pop(wide) == torch.float32
    assert set(narrow.values()) == {torch.bfloat16}
    assert len(narrow) == 3
    assert full == {torch.float32}
    assert is_same
    log = capfd.readouterr().err
    assert "3 tensors are not trained: saved as BF16, cast to F32" in log


def test_what_is_frozen_can_change_when_a_run_is_resumed_and_nothing_is_rounded(
    tmp_path: Path,
) -> None:
    base = write_base(tmp_path / "base", "model.norm.weight")
    recipe = write_recipe(tmp_path, RECIPE.replace(MODEL, f"model: {{from_pretrained: {base}}}\n"))
    mixed = ("--distributed.strategy=fsdp2", MIXED, *LINEAR)
    anew = "--checkpoint.allow_missing_state=[optimizer]"

    def runs() -> tuple[list[str], list[dict[str, torch.dtype]]]:
        errors: list[str] = []
        types: list[dict[str, torch.dtype]] = []

        def resume(run: str, number: int, *overrides: str) -> None:
            steps = f"--step_scheduler.max_steps={number}"
            directory = f"--checkpoint.checkpoint_dir={tmp_path / run}"
            try:
                train(recipe, *mixed, steps, directory, *overrides, recipe_class=Frozen)
                types.append(Frozen.types)
            except CheckpointUnusable as error:
                errors.append(str(error))

        resume("trained", 2)
        # These values have more bits than those in the files of the base.
        resume("trained", 3, anew, "--model.freeze", FREEZE)
        resume("trained", 3, anew, "--model.freeze", FREEZE, "--model.dtype=float32")
        resume("frozen", 1, "--model.freeze", FREEZE)
        resume("frozen", 2, anew)
        return errors, types

    (rounded, unfrozen), types = ranks.run(runs, 1, init=False)[0]
    assert re.search(r"saved as F32 \[.*\], here BF16", rounded) and "model.dtype" in rounded
    assert re.search(r"saved as BF16 \[.*\], here F32", unfrozen)
    assert "--init_from.path" in unfrozen
    assert [set(each.values()) for each in types] == [set(), {torch.float32}, {torch.bfloat16}]
