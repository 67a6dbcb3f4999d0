"""The section ``ema``: plain PyTorch's average on any ranks, which is saved, resumed and exported exactly."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.distributed.parallel.test_expert_parallel import model_section
from tests.support import ranks
from tests.support.models.whole_state import whole_state
from tests.support.runs.training import (
    RECIPE,
    VALIDATION,
    Recipe,
    build,
    train,
    with_loop,
    write_recipe,
)

EMA = "ema: {decay: 0.9}\n"
SHORT = ("--step_scheduler.max_steps=4", "--step_scheduler.ckpt_every_steps=2")


def stored(module: Any) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint stores of a module: each tied one once, and of adapters only them."""
    found = {
        name: tensor
        for name, tensor in whole_state(module).items()
        if name != "lm_head.weight" and ("lora" in name or not hasattr(module, "peft_config"))
    }
    return {name.replace(".default", ""): tensor for name, tensor in found.items()}


class Compared(LLMFinetune.loop_class):
    """Keeps an average of PyTorch's beside that of the section."""

    reference: AveragedModel

    def step(self, batch: Any, control: Any) -> Any:
        if self.step_scheduler.step == 0:
            rule = get_ema_multi_avg_fn(0.9)
            self.reference = AveragedModel(self.model, multi_avg_fn=rule)
        due = super().step(batch, control)
        self.reference.update_parameters(self.model)
        return due


@pytest.mark.parametrize("kind", ["frozen embedding", "adapters"])
def test_ten_steps_and_the_export_are_bit_equal_to_plain_pytorch(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model.freeze=['*embed_tokens*']", "--checkpoint.export_ema"]
    if kind == "adapters":
        words = ["--peft={r: 2, dropout: 0.1}", f"--peft.base_dir={tmp_path / 'base'}"]
    run = tmp_path / "run"
    recipe = build(
        write_recipe(tmp_path, RECIPE + VALIDATION + EMA),
        f"--checkpoint.checkpoint_dir={run}",
        "--step_scheduler.max_steps=10",
        "--ema.validate",
        *words,
        recipe_class=with_loop(Recipe, Compared),
    )
    try:
        recipe.setup()
        recipe.run()
        loop: Any = recipe.loop
        expected = stored(loop.reference.module)
        assert recipe.weight_average is not None
        with recipe.weight_average.in_model():
            assert stored(recipe.model).keys() == expected.keys()
            for name, tensor in stored(recipe.model).items():
                assert torch.equal(tensor, expected[name]), name
            validation = recipe.loop.validate()
        losses = recipe.loop.losses(validation)
    finally:
        recipe.close()
    assert validation is not None
    line = (run / "validation.jsonl").read_text().splitlines()[-1]
    assert f'"val_loss": {losses["val_loss"]!r},' in line
    if kind == "adapters":
        found = load_file(run / "LATEST/ema/adapter_model.safetensors")
        assert (run / "LATEST/ema/adapter_config.json").is_file()
    else:
        assert main(["export", str(run), "--ema", "-o", str(tmp_path / "export")]) == 0
        found = load_file(tmp_path / "export/model-00001-of-00001.safetensors")
        by_the_run = run / "LATEST/ema/consolidated/model-00001-of-00001.safetensors"
        assert same_files(by_the_run.parent, tmp_path / "export")
        # Only what trains is stored a second time.
        assert main(["show", str(run)]) == 0
        assert "ema (safetensors): 19 tensors" in capsys.readouterr().out
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def same_files(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.glob("*.safetensors"))
    contents = [(one / name).read_bytes() == (other / name).read_bytes() for name in names]
    return bool(names) and all(contents)


HYBRID = {"hybrid": ["--distributed.strategy=fsdp2", "--distributed.dp_replicate_size=2"]}
LAYOUTS = {
    "ddp": ["--distributed.strategy=ddp"],
    "tensor parallel": ["--distributed.tp_size=2"],
    "pipeline": ["--distributed.pp_size=2", "--model.freeze=['*layers.1.*']"],
    "experts": ["--distributed.ep_size=2", model_section("mixtral")],
    "complete files": ["--checkpoint.model_layout=hf", "--model.freeze=['*norm*']"],
    "torch_save": ["--checkpoint.model_save_format=torch_save"],
}


@pytest.mark.further
def test_it_is_divided_and_named_as_the_model_is(tmp_path: Path) -> None:
    # With decay 0, the average is the weights.
    recipe = write_recipe(tmp_path, RECIPE + "ema: {decay: 0.0}\n")
    short = (
        "--step_scheduler.max_steps=1",
        "--checkpoint.save_consolidated=false",
        "--step_scheduler.local_batch_size=2",
    )
    for num_ranks, layouts in ((4, HYBRID), (2, LAYOUTS)):
        trainings = []
        for layout, options in layouts.items():
            words = (f"--checkpoint.checkpoint_dir={tmp_path / layout}", *short, *options)
            trainings.append(partial(train, recipe, *words))
        ranks.run_each(trainings, num_ranks)
    for layout in (*HYBRID, *LAYOUTS):
        exports = [tmp_path / f"{layout} {name}" for name in ("model", "ema")]
        for more, export in zip(([], ["--ema"]), exports, strict=True):
            assert main(["export", str(tmp_path / layout), *more, "-o", str(export)]) == 0
        assert same_files(*exports), layout


def test_it_starts_at_a_step_and_changes_every_few_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(
        write_recipe(tmp_path),
        f"--checkpoint.checkpoint_dir={run}",
        "--ema={decay: 0.75, start_step: 2, update_every_steps: 2}",
        "--step_scheduler={global_batch_size: 8, max_steps: 4, ckpt_every_steps: 1}",
    )

    def tensors(step: int, name: str) -> dict[str, torch.Tensor]:
        [file] = (run / f"epoch_0_step_{step}" / name).glob("shard-*.safetensors")
        return load_file(file)

    at_step_2 = tensors(2, "model")
    for step in (2, 3):
        for name, average in tensors(step, "ema").items():
            assert torch.equal(average, at_step_2[name])
    newest = tensors(4, "model")
    for name, average in tensors(4, "ema").items():
        assert torch.equal(average, at_step_2[name].lerp(newest[name], 0.25))


def test_a_checkpoint_without_it_needs_a_permission_and_other_runs_start_from_its_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path)
    run = f"--checkpoint.checkpoint_dir={tmp_path / 'run'}"
    train(recipe, run, "--step_scheduler.max_steps=2")
    assert main(["export", str(tmp_path / "run"), "--ema"]) == 3
    message = capsys.readouterr().err
    assert "this checkpoint has no average of the weights" in message
    with_it = (run, "--ema={decay: 0.5, start_step: 0}", "--step_scheduler.max_steps=3")
    with pytest.raises(CheckpointUnusable, match=r"--checkpoint.allow_missing_state '\[ema\]'"):
        train(recipe, *with_it)
    shard = "shard-00001-model-00001-of-00001.safetensors"
    before = load_file(tmp_path / "run/LATEST/model" / shard)
    with caplog.at_level("INFO", logger="automodel_ckpt"):
        train(recipe, *with_it, "--checkpoint.allow_missing_state=[ema]")
    assert "ema: the average begins with the weights of epoch_0_step_2" in caplog.text
    after, average = ({}, {})
    for name, found in (("model", after), ("ema", average)):
        found |= load_file(tmp_path / "run/LATEST" / name / shard)
    for name, tensor in average.items():
        assert torch.equal(tensor, before[name].lerp(after[name], 0.5))
    # Not an unexpected module of the source.
    for path in ("run", "run/LATEST/ema"):
        other = (f"--checkpoint.checkpoint_dir={tmp_path / 'other'}", "--checkpoint.enabled=false")
        train(recipe, *other, f"--init_from.path={tmp_path / path}", *SHORT)
