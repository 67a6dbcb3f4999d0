"""NeMo AutoModel: what its Checkpointer saves is read and continued here, and it reads the shards that we save."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from tools.interop.environments import TORCH, Environment
from tools.interop.losses import losses_check, tensors_check
from tools.interop.program import Check, Program, Workplace

_ROOT = Path(__file__).resolve().parents[2]
_FIXTURES = _ROOT / "tests" / "fixtures" / "automodel"
_SCRIPT = Path(__file__).with_name("scripts") / "ask_automodel.py"
_RECIPE = _ROOT / "examples" / "llm_finetune" / "tiny_llama_python_docs.yaml"


def checks(workplace: Workplace) -> Iterator[Check]:
    """Yield the checks of both directions."""
    made = workplace.directory / "made"
    workplace.run_script(_FIXTURES / "train.py", made, "--all")
    source = made / "epoch_0_step_4"
    yield tensors_check(source, "its checkpoint", recorded=made)
    config = source / "model" / ".hf_metadata"
    for num_ranks in (1, 2):
        yield losses_check(
            workplace, source, "its run", num_ranks=num_ranks, recorded=made, config=config
        )
    yield from _exported(workplace)
    yield from _read_there(workplace)


def _exported(workplace: Workplace) -> Iterator[Check]:
    """Export its checkpoints of both formats here."""
    made = workplace.directory / "formats"
    made.mkdir()
    workplace.run_script(_FIXTURES / "make_fixture.py", made)
    expected = load_file(made / "expected.safetensors")
    for form in ("safetensors", "torch_save"):
        output = workplace.directory / f"exported-{form}"
        workplace.ckpt("export", made / form / "epoch_0_step_1", "-o", output)
        found: dict[str, torch.Tensor] = {}
        for file in output.glob("*.safetensors"):
            found |= load_file(file)
        equal = [name for name in expected if name in found and found[name].equal(expected[name])]
        text = f"{len(equal)} of {len(expected)} tensors equal"
        yield Check(f"its checkpoint ({form}) is exported", text, len(equal) == len(expected))


def _read_there(workplace: Workplace) -> Iterator[Check]:
    """Train a step on two ranks here; its reader and its consolidation take the shards."""
    run = workplace.directory / "ours"
    options = ("--step_scheduler.max_steps=1", f"--checkpoint.checkpoint_dir={run}")
    train = (sys.executable, "-m", "automodel_ckpt.cli.train", "--nproc-per-node=2", _RECIPE)
    with open(workplace.log, "a") as log:
        subprocess.run([*train, *options], check=True, cwd=_ROOT, stdout=log, stderr=log)
    model = run / "LATEST" / "model"
    (expected,) = (model / "consolidated").glob("*.safetensors")
    result = workplace.directory / "read.json"
    workplace.run_script(_SCRIPT, model, expected, result)
    for what, num_different in json.loads(result.read_text()).items():
        text = f"{num_different} tensors differ"
        yield Check(f"its {what} takes our shards", text, num_different == 0)


PROGRAM = Program(
    name="NeMo AutoModel",
    environment=Environment(
        "automodel",
        [TORCH],
        ["nemo-automodel==0.7.0"],
        ["transformers==5.18.0", "datasets>=4", "pyyaml", "torchdata", "tiktoken"],
    ),
    packages=("nemo-automodel", "torch"),
    checks=checks,
)
