"""``ckpt export --merge``: base and adapter as one model, for every kind of adapter, and what cannot be merged."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from automodel_ckpt.checkpoint.export.base_identity import BaseIdentity, identify_base
from automodel_ckpt.checkpoint.files.durable_file import file_record
from automodel_ckpt.checkpoint.saving.adapter_assets import AdapterAssets, peft_document
from automodel_ckpt.checkpoint.state.module_tensors import (
    StoredLayout,
    module_state,
    set_stored_layout,
    tensor_specs,
)
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.models.layers.adapter import add_adapters
from automodel_ckpt.models.layers.lora import Lora
from tests.support.models import tiny
from tests.support.models.shards import cut, write_assets, write_checkpoint
from tests.support.models.sizes import model_sizes

LLAMA = {
    **model_sizes(vocab=64, hidden=16, inner=24, layers=1, heads=2, kv_heads=1),
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
TIED, UNTIED = (LlamaConfig(**LLAMA, tie_word_embeddings=tied) for tied in (True, False))
GPT2 = GPT2Config(
    vocab_size=64,
    n_embd=16,
    n_layer=1,
    n_head=2,
    n_positions=32,
    initializer_range=0.3,
    bos_token_id=None,
    eos_token_id=None,
)
TOKENS = torch.arange(16).reshape(1, 16)
KINDS = {
    "DoRA on GPT-2's transposed layers, with biases": (GPT2, Lora(use_dora=True, bias="all"), True),
    "a head trained as a whole": (UNTIED, Lora(modules_to_save=["lm_head"]), False),
    "DoRA on an embedding, which unties it": (
        TIED,
        Lora(target_modules=["embed_tokens", "q_proj"], use_dora=True, ensure_weight_tying=False),
        False,
    ),
    "a tied embedding trained apart from its head": (
        TIED,
        Lora(modules_to_save=["embed_tokens"], ensure_weight_tying=False),
        False,
    ),
    "rsLoRA on an embedding, which unties it": (
        TIED,
        Lora(target_modules=["embed_tokens"], use_rslora=True, ensure_weight_tying=False),
        False,
    ),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOMODEL_CKPT_CACHE", str(tmp_path / "cache"))


def make(
    root: Path, config: Any, lora: Lora, *, num_rows: int | None = None, dtype: Any = torch.float32
) -> Any:
    """A base of two files in *root*, and a checkpoint of an adapter that has learnt something; the adapted model."""
    torch.manual_seed(1)
    config = copy.deepcopy(config)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(root / "base", max_shard_size="5KB")
    num_base_rows = config.vocab_size
    if num_rows is not None:
        model.resize_token_embeddings(num_rows)
    adapted = add_adapters(model, lora, task_type="CAUSAL_LM", num_base_rows=num_base_rows)
    with torch.no_grad():
        for parameter in adapted.model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1).add_(0.1 * torch.randn_like(parameter))
    identity = identify_base(str(root / "base"), root / "base", run=root)
    specs = tensor_specs(adapted.model)
    checkpoint = root / "epoch_0_step_1"
    assets = AdapterAssets(
        peft_document(adapted.peft_config), adapted.description, tensors=specs, base=identity
    )
    write_assets(assets, checkpoint / "model" / ".hf_metadata")
    state, tied = module_state(adapted.model)
    write_checkpoint(
        checkpoint, state, [p for f, t in state.items() for p in cut(f, t, 2, 0)], tied=tied
    )
    return adapted.model.eval()


def export(root: Path, *more: str) -> int:
    return main(["export", "--merge", str(root / "epoch_0_step_1"), *more])


def load(directory: Path) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def assert_equal(model: Any, adapted: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(
            model(TOKENS).logits, adapted(TOKENS).logits, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_answers_as_base_and_adapter(kind: str, tmp_path: Path) -> None:
    config, lora, stays_tied = KINDS[kind]
    adapted = make(tmp_path, config, lora)
    assert export(tmp_path) == 0
    output = tmp_path / "epoch_0_step_1" / "model" / "merged"
    model = load(output)
    assert_equal(model, adapted)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == stays_tied
    before, after = (index(place) for place in (tmp_path / "base", output))
    assert after | before == after
    assert after.keys() - before.keys() == (
        {"lm_head.weight"} if config is TIED and not stays_tied else set()
    )
    same = (output / "config.json").read_bytes() == (tmp_path / "base" / "config.json").read_bytes()
    assert same == (config is UNTIED or stays_tied)
    assert main(["verify", "--deep", str(tmp_path / "epoch_0_step_1")]) == 0


def test_a_tied_head_and_embedding_that_learned_different_changes_are_untied(
    tmp_path: Path,
) -> None:
    lora = Lora(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=False)
    adapted = make(tmp_path, TIED, lora)
    assert export(tmp_path) == 0
    model = load(tmp_path / "epoch_0_step_1" / "model" / "merged")
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    assert_equal(model, adapted)


def index(directory: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((directory / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    return found


def test_more_tokens_than_the_base_has_are_merged_too_and_all_may_be_cast(tmp_path: Path) -> None:
    adapted = make(tmp_path, UNTIED, Lora(target_modules="q_proj"), num_rows=70)
    assert export(tmp_path) == 0
    model = load(tmp_path / "epoch_0_step_1" / "model" / "merged")
    assert model.config.vocab_size == 70
    assert_equal(model, adapted)
    assert export(tmp_path, "--cast-dtype", "bf16", "-o", str(tmp_path / "half")) == 0
    half = load(tmp_path / "half")
    assert half.dtype == torch.bfloat16
    assert all(
        torch.equal(a.bfloat16(), b)
        for a, b in zip(model.parameters(), half.parameters(), strict=True)
    )


def test_what_has_no_adapter_keeps_the_bases_bytes(tmp_path: Path) -> None:
    make(tmp_path, UNTIED, Lora(target_modules="q_proj"), dtype=torch.bfloat16)
    (tmp_path / "base" / "tokenizer_config.json").write_text("{ }")
    assert export(tmp_path, "-o", str(tmp_path / "out")) == 0
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{ }"
    before, after = (tensors(tmp_path / name) for name in ("base", "out"))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        "model.layers.0.self_attn.q_proj.weight"
    }
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    return found


def test_a_moved_base_is_named_and_another_one_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapted = make(tmp_path, UNTIED, Lora(target_modules="q_proj"))
    moved = (tmp_path / "base").rename(tmp_path / "moved")
    assert export(tmp_path) == 3
    assert "name its place with --base" in capsys.readouterr().err
    assert export(tmp_path, "--base", str(moved), "-o", str(tmp_path / "out")) == 0
    assert_equal(load(tmp_path / "out"), adapted)
    assert export(tmp_path, "--base", "missing/nothing") == 2
    assert "the base model is not on this machine" in capsys.readouterr().err
    config = moved / "config.json"
    config.write_text(config.read_text() + " ")
    assert export(tmp_path, "--base", str(moved)) == 3
    assert "not the base that the adapter was trained on" in capsys.readouterr().err
    assert not (tmp_path / "epoch_0_step_1" / "model" / "merged").exists()


def test_a_damaged_adapter_is_not_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, UNTIED, Lora(target_modules="q_proj"))
    shard = next((tmp_path / "epoch_0_step_1" / "model").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert export(tmp_path) == 3
    assert shard.name in capsys.readouterr().err


def test_a_checkpoint_without_adapter_has_nothing_to_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"weight": torch.ones(2)}
    write_checkpoint(tmp_path / "epoch_0_step_1", state, cut("weight", state["weight"], 1, 0))
    assert export(tmp_path) == 3
    message = capsys.readouterr().err
    assert "holds no adapters" in message and "leave out --merge" in message


def test_options_that_make_no_sense_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, UNTIED, Lora(target_modules="q_proj"))
    assert export(tmp_path, "--nproc", "2") == 2
    assert export(tmp_path, "--to", "gguf") == 2
    assert main(["export", str(tmp_path / "epoch_0_step_1"), "--base", "x"]) == 2
    assert capsys.readouterr().err.count("this option has no effect with") == 3


def test_adapters_of_another_base_or_rank_are_not_loaded(tmp_path: Path) -> None:
    """The shapes of the other base are the same."""
    assets: dict[str, AdapterAssets] = {}
    models: dict[str, Any] = {}
    for name, rank in (("saved", 2), ("other base", 2), ("other rank", 4)):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False))
        base = tmp_path / ("base of " + ("another" if name == "other base" else "all"))
        base.mkdir(exist_ok=True)
        (base / "model.safetensors").write_bytes(base.name.encode())
        adapted = add_adapters(
            model, Lora(r=rank, target_modules="0"), task_type=None, num_base_rows=None
        )
        set_stored_layout(adapted.model, StoredLayout())
        assets[name] = AdapterAssets(
            peft_document(adapted.peft_config),
            adapted.description,
            tensors=tensor_specs(adapted.model),
            base=BaseIdentity(
                str(base), None, {"model.safetensors": file_record(base / "model.safetensors")}
            ),
        )
        models[name] = adapted.model
    made = {name: SimpleNamespace(model=model) for name, model in models.items()}
    run = tmp_path / "run"
    layout = {"model_layout": "adapter"}
    tiny.save(run, made["saved"], 1, assets={"model": assets["saved"]}, **layout)
    assert tiny.load(run, made["saved"], assets={"model": assets["saved"]}, **layout) is not None
    for name, said in (("other base", "another base model"), ("other rank", "r: saved 2, here 4")):
        with pytest.raises(CheckpointUnusable, match=said):
            tiny.load(run, made[name], assets={"model": assets[name]}, **layout)
