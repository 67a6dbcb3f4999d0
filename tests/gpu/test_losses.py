"""Losses of recipes on a GPU against plain torch on the CPU: rows, attention, dtypes, recomputation, architectures.

Each recipe runs as a command, so that it has the GPU's memory and state to itself. A case with ``on_cpu`` runs on the
CPU too.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu import DEVICE, needs_gpu, only_gpu
from tests.support.runs import plain
from tests.support.servers.command_server import CommandServer
from tools.gpu import ours

PACK = 96


@dataclass(frozen=True)
class Case:
    """Changes of the small recipe, and how far its losses may be from those of plain torch in float32."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 2e-5
    on_cpu: bool = False
    is_exact: bool = True
    """Whether everything is computed in float32."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the model beside those of plain.SMALL."""
    only_gpu: bool = False
    """Whether a CPU rejects the recipe."""
    needs: str = ""
    """A package that has to be installed."""


COMPILED = {"compile": {"enabled": True}}
PACKED = {
    "packed_sequence": {"size": PACK},
    "step_scheduler": {"global_batch_size": 1, "local_batch_size": 1},
}
CASES = {
    "padded": Case({"dataloader": {"padding_free": False}}, on_cpu=True),
    "without padding": Case(),
    "packed": Case(PACKED, on_cpu=True),
    "packed, sliding window": Case(PACKED, settings={"model_type": "mistral", "sliding_window": 8}),
    "packed, eager attention": Case({**PACKED, "model": {"attn_implementation": "eager"}}),
    "eager attention": Case({"model": {"attn_implementation": "eager"}}),
    "one sample in each micro-batch": Case({"step_scheduler": {"local_batch_size": 1}}),
    "no accumulation": Case({"step_scheduler": {"local_batch_size": 4}}),
    "rows padded to a multiple": Case({"dataloader": {"pad_to_multiple_of": 16}}),
    "layers of transformers": Case({"model": {"fused_layers": False}}),
    "compiled": Case(COMPILED),
    "compiled, reduce-overhead": Case(
        {"compile": {"enabled": True, "mode": "reduce-overhead"}}, only_gpu=True
    ),
    "compiled, fsdp2": Case({**COMPILED, "distributed": {"strategy": "fsdp2"}}),
    "compiled, padded": Case({**COMPILED, "dataloader": {"padding_free": False}}),
    "compiled, packed": Case({**COMPILED, **PACKED}),
    "full checkpointing": Case({"model": {"activation_checkpointing": "full"}}),
    "selective checkpointing": Case({"model": {"activation_checkpointing": "selective"}}),
    "compiled, full checkpointing": Case(
        {**COMPILED, "model": {"activation_checkpointing": "full"}}
    ),
    "compiled, selective checkpointing": Case(
        {**COMPILED, "model": {"activation_checkpointing": "selective"}}
    ),
    "fsdp2": Case({"distributed": {"strategy": "fsdp2"}}),
    "fsdp2 with parameters on the host": Case(
        {"distributed": {"strategy": "fsdp2", "cpu_offload": True}}, only_gpu=True
    ),
    "reduced per step": Case({"distributed": {"strategy": "fsdp2", "defer_gradient_sync": True}}),
    "ddp": Case({"distributed": {"strategy": "ddp"}}),
    "tied embeddings": Case(settings={"tie_word_embeddings": True}),
    "softcapped logits": Case(
        settings={"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16}
    ),
    "scaled logits": Case(settings={"model_type": "granite", "logits_scaling": 4.0}),
    "experts": Case(settings={"model_type": "mixtral", "num_local_experts": 4}),
    "defaults": Case(tolerance=2e-2, is_exact=False),
    "defaults, packed": Case(PACKED, tolerance=2e-2, is_exact=False),
    "bfloat16 computation": Case(
        {"distributed": {"mixed_precision": "bfloat16"}}, tolerance=2e-2, is_exact=False
    ),
    "fp8": Case(
        {**COMPILED, "fp8": {}}, tolerance=0.1, is_exact=False, only_gpu=True, needs="torchao"
    ),
    "bfloat16 weights": Case({"model": {"dtype": "bfloat16"}}, tolerance=5e-2, is_exact=False),
    "bfloat16 weights, compiled": Case(
        {**COMPILED, "model": {"dtype": "bfloat16"}}, tolerance=5e-2, is_exact=False
    ),
}

_HEADS: dict[str, Any] = {"head_dim": 16}
_WINDOW: dict[str, Any] = {**_HEADS, "sliding_window": 16}
_GEMMA: dict[str, Any] = {**_WINDOW, "query_pre_attn_scalar": 16}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gemma2": _GEMMA,
    "qwen3_moe": {**_EXPERTS, **_HEADS, "num_experts": 4},
    "mistral": {"sliding_window": 16},
    "qwen3": _HEADS,
    "gemma": _HEADS,
    "gemma3_text": _GEMMA,
    "cohere2": {"sliding_window": 16},
    "glm4": _HEADS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""model_type -> settings that differ from the common small ones."""
for model_type in (
    *ARCHITECTURES, "qwen2", "phi", "phi3", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "starcoder2", "cohere",
    "olmo2", "granite", "stablelm", "smollm3",
):  # fmt: skip
    CASES[model_type] = Case(
        settings={"model_type": model_type, **ARCHITECTURES.get(model_type, {})}
    )


def cases() -> list[Any]:
    found = []
    for name, case in CASES.items():
        if case.on_cpu:
            found.append(pytest.param("cpu", name, id=f"cpu-{name}"))
        mark = only_gpu if case.only_gpu else needs_gpu
        found.append(pytest.param(DEVICE, name, id=f"gpu-{name}", marks=mark))
    return found


def train(
    commands: CommandServer, recipe: Mapping[str, Any], directory: Path, device: str
) -> list[float]:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    environment = dict(os.environ)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if "compile" in recipe:
            # inductor needs a C++ compiler on a CPU.
            recipe = ours.merged(recipe, {"compile": {"backend": "aot_eager"}})
            path.write_text(json.dumps(recipe))
    done = commands.run("ckpt-train", str(path), env=environment, timeout=170)
    assert done.returncode == 0, done.stderr
    return plain.logged_losses(directory)


@cache
def base_of(directory: Path, settings: str) -> Path:
    """A small model in the directory of the test session; made once."""
    base = directory / f"base-{abs(hash(settings))}"
    given = {"model_type": "llama", **json.loads(settings)}
    plain.write_small(given.pop("model_type"), given, base)
    return base


def num_tokens(*samples: Mapping[str, Any]) -> int:
    return sum(len(sample["input_ids"]) for sample in samples)


@cache
def reference(base: Path, *, packed: bool) -> list[float]:
    samples = plain.samples()
    if not packed:
        return plain.losses(base, "cpu", plain.batches(samples))
    packs: list[list[Mapping[str, Any]]] = []
    # Each sample, from the longest on, goes into the fullest pack that has room for it.
    for sample in sorted(samples, key=num_tokens, reverse=True):
        fitting = [pack for pack in packs if num_tokens(sample, *pack) <= PACK]
        if not fitting:
            packs.append([])
            fitting = packs[-1:]
        max(fitting, key=lambda pack: num_tokens(*pack)).append(sample)
    return plain.losses(base, "cpu", packs[: plain.NUM_STEPS])


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("device", "name"), cases())
def test_losses_equal_those_of_plain_torch_on_the_cpu(
    bases: Path, tmp_path: Path, commands: CommandServer, device: str, name: str
) -> None:
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    base = base_of(bases, json.dumps(dict(case.settings)))
    recipe = plain.recipe(base, tmp_path / "run")
    if case.is_exact:
        recipe = ours.merged(recipe, plain.exact())
    recipe = ours.merged(recipe, case.changes)
    losses = train(commands, recipe, tmp_path / "run", device)
    expected = reference(base, packed="packed_sequence" in case.changes)
    # A step that did nothing would keep the first loss.
    assert len(set(expected)) == plain.NUM_STEPS
    assert plain.difference(losses, expected) < case.tolerance


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"peft": {"r": 4}},
    "lora on the head": {"peft": {"r": 4, "target_modules": ["q_proj", "lm_head"]}},
    "dora": {"peft": {"r": 4, "use_dora": True}},
    "lora, packed": {"peft": {"r": 4}, **PACKED},
    "lora, compiled": {"peft": {"r": 4}, **COMPILED},
}


@pytest.mark.timeout(300)
@needs_gpu
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_train_on_the_gpu_as_on_the_cpu(
    bases: Path, tmp_path: Path, commands: CommandServer, name: str
) -> None:
    base = base_of(bases, "{}")
    found = {}
    for place, device in (("cpu", "cpu"), ("gpu", DEVICE)):
        directory = tmp_path / place
        recipe = ours.merged(plain.recipe(base, directory), plain.exact())
        recipe = ours.merged(recipe, {**ADAPTERS[name], "optimizer": {"lr": 1e-2}})
        found[place] = train(commands, recipe, directory, device)
    assert plain.difference(found["gpu"], found["cpu"]) < 2e-5


@pytest.mark.timeout(300)
@only_gpu
@pytest.mark.parametrize("bits", ["nf4", "fp4", "int8"])
def test_a_quantized_base_trains_close_to_the_unquantized_one(
    bases: Path, tmp_path: Path, commands: CommandServer, bits: str
) -> None:
    pytest.importorskip("bitsandbytes")
    base = base_of(bases, "{}")
    found = {}
    for name, changes in (("base", {}), (bits, {"quantize_base": bits})):
        recipe = plain.recipe(base, tmp_path / name)
        recipe = ours.merged(recipe, {"peft": {"r": 4, **changes}, "optimizer": {"lr": 1e-2}})
        found[name] = train(commands, recipe, tmp_path / name, "cuda")
    assert plain.difference(found[bits], found["base"]) < 0.1
    assert found[bits] != found["base"]
