"""Training in FP8 through torchao, emulated on a CPU: checkpoints as without it, exact resumes, adapters."""

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.distributed.kinds.test_training import lines_of_steps, run
from tests.support.runs.training import EXPORT, RECIPE, VALIDATION

TEXT = (RECIPE + VALIDATION).replace("attention_dropout: 0.2", "attention_dropout: 0.0")
SHORT = ("--step_scheduler.max_steps=4", "--step_scheduler.ckpt_every_steps=2")
FP8 = "--fp8={recipe: tensorwise, emulate: true, exclude: ['*.0.mlp.down_proj']}"
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


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
