"""Models that no rank ever holds whole: the same values on any layout, as transformers reads them, within bounds."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.parallel.parallelize import Parallelism, parallelize
from automodel_ckpt.training.model.deferred_model import build_deferred
from tests.support import ranks
from tests.support.runs.parallel import config_of, layout_here

LAYOUTS: dict[str, tuple[Parallelism, dict[str, int]]] = {
    "single": (Parallelism(strategy="single"), {"tp_size": 4}),
    "ddp": (Parallelism(strategy="ddp"), {}),
    "hsdp": (Parallelism(), {"dp_replicate_size": 2}),
    "fsdp2": (Parallelism(), {}),
    "fsdp2 x tp": (Parallelism(), {"tp_size": 2}),
}


def shared_out(name: str, section: ModelConfig, config: Any, **options: Any) -> nn.Module:
    """A model of the layout *name*; of ``single`` all of it, without any cut."""
    how, sizes = LAYOUTS[name]
    deferred = build_deferred(
        section,
        config,
        base=section.from_pretrained,
        auto_class=AutoModelForCausalLM,
        seed=5,
        group=dist.group.WORLD,
        **options,
    )
    if name == "single":
        if deferred.materialise is not None:
            deferred.materialise(deferred.model, torch.device("cpu"))
        return deferred.model
    model = parallelize(deferred.model, layout_here(**sizes), how, deferred.materialise)
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def whole_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for name, t in named}


def unequal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [
        name
        for name in one
        if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])
    ]


def fresh_weights() -> list[list[str]]:
    config, section = (
        config_of(tie_word_embeddings=True, attention_bias=True),
        ModelConfig(from_config={}),
    )
    tensors = {
        name: whole_tensors(shared_out(name, section, config))
        for name in LAYOUTS
        if name != "fsdp2"
    }
    # The ordinary way draws other numbers; ones, zeros and what is computed are the same.
    usual = AutoModelForCausalLM.from_config(config)
    fixed = [
        n for n, t in whole_tensors(usual).items() if "norm" in n or "bias" in n or "inv_freq" in n
    ]
    expected = {name: whole_tensors(usual)[name] for name in fixed}
    drawn = tensors["single"]["model.layers.1.mlp.up_proj.weight"]
    assert drawn.std().item() == pytest.approx(config.initializer_range, rel=0.1)
    return [unequal(tensors["single"], other) for other in tensors.values()] + [
        unequal(expected, {name: tensors["fsdp2 x tp"][name] for name in fixed})
    ]


def test_fresh_weights_are_the_same_on_any_layout() -> None:
    assert ranks.run(fresh_weights, 4) == [[[]] * 5] * 4


def read_weights(directory: Path, dtype: str) -> list[list[str]]:
    config = AutoConfig.from_pretrained(directory)
    usual = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype if dtype == "auto" else getattr(torch, dtype)
    )
    found = []
    for name in ("single", "fsdp2 x tp"):
        model: Any = shared_out(
            name, ModelConfig(from_pretrained=str(directory), dtype=dtype), config
        )  # type: ignore[arg-type]
        found.append(unequal(whole_tensors(usual), whole_tensors(model)))
        assert model.generation_config.to_dict() == usual.generation_config.to_dict()
        assert model.config.to_dict() == usual.config.to_dict()
        assert (
            model.lm_head.weight is model.model.embed_tokens.weight
        ) == config.tie_word_embeddings
    return found


def test_files_are_read_in_parts_as_transformers_reads_them(tmp_path: Path) -> None:
    for tied in (True, False):
        model = AutoModelForCausalLM.from_config(
            config_of(tie_word_embeddings=tied, dtype=torch.bfloat16)
        )
        model.generation_config.update(top_k=7, do_sample=True)
        model.to(torch.bfloat16).save_pretrained(tmp_path / str(tied), max_shard_size="10KB")
        assert len(list((tmp_path / str(tied)).glob("*.safetensors"))) > 2

    def read_all() -> list[list[str]]:
        return read_weights(tmp_path / "True", "auto") + read_weights(tmp_path / "False", "float32")

    assert ranks.run(read_all, 4) == [[[]] * 4] * 4


def test_files_that_name_other_tensors_are_read_whole_with_the_reason_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file, save_file

    usual = AutoModelForCausalLM.from_config(config_of(tie_word_embeddings=False))
    usual.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    def read() -> list[str]:
        section = ModelConfig(from_pretrained=str(tmp_path), allow_missing=["lm_head.weight"])
        with caplog.at_level(logging.INFO, "automodel_ckpt"):
            model = shared_out("fsdp2 x tp", section, AutoConfig.from_pretrained(tmp_path))
        assert (
            "each rank builds the complete model first: its files name other tensors (+ lm_head.weight"
            in caplog.text
        )
        kept = {
            name: tensor
            for name, tensor in whole_tensors(usual).items()
            if name != "lm_head.weight"
        }
        return unequal(
            kept, {name: tensor for name, tensor in whole_tensors(model).items() if name in kept}
        )

    assert ranks.run(read, 4) == [[]] * 4
