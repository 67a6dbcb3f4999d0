"""Rows cut along the sequence train as whole ones do, wherever samples begin and however heads are shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2Config,
    Qwen3VLConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.loss.causal import WHOLE, next_token_loss
from automodel_ckpt.models.meta_init import on_meta
from automodel_ckpt.models.pipeline_stage import keep_stages
from automodel_ckpt.parallel.context_parallel import (
    ContextParallel,
    check_context_heads,
    check_context_parallel,
)
from automodel_ckpt.parallel.gradient_norm import clip_gradients
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.parallelize import Parallelism, parallelize, reshard
from automodel_ckpt.training.model.context_parallel import divide_rows
from tests.distributed.kinds.test_training import failure, lines, lines_of_steps, run, run_each
from tests.support import ranks
from tests.support.runs.parallel import VOCABULARY, config_of, layout_here, model_of
from tests.support.runs.training import RECIPE, VALIDATION

OPTIONS = {"use_cache": False}
GRIDS: dict[str, tuple[Parallelism, dict[str, int], dict[str, Any]]] = {
    "fsdp2, queries in pairs": (Parallelism(), {"cp_size": 2}, {"num_key_value_heads": 1}),
    "hsdp": (Parallelism(), {"cp_size": 2, "dp_replicate_size": 2}, {"num_key_value_heads": 2}),
    "ddp, keys repeated": (Parallelism(strategy="ddp"), {"cp_size": 4}, {"num_key_value_heads": 2}),
    "tp": (Parallelism(), {"cp_size": 2, "tp_size": 2}, {"num_key_value_heads": 2}),
}


def rows() -> dict[str, torch.Tensor]:
    """Two rows of 16 places with samples that end inside slices and at their borders, and places without a label."""
    tokens = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    lengths = [[3, 1, 7, 5], [8, 8]]
    positions = torch.tensor(
        [[place for length in row for place in range(length)] for row in lengths]
    )
    labels = tokens.masked_fill((positions == 0) | (positions == 4), -100)
    return {"input_ids": tokens, "position_ids": positions, "labels": labels}


def steps(model: Any, wrapped: Any, layout: RankLayout, part: slice) -> list[tuple[float, float]]:
    """(summed loss, gradient norm) of two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(2):
        batch = {
            name: tensor.tensor_split(layout.dp_size)[layout.dp_rank]
            for name, tensor in rows().items()
        }
        labels = batch.pop("labels")
        loss = next_token_loss(wrapped(**batch, **OPTIONS).logits, labels, part=part)
        (loss * layout.sizes.token_parts / 20).backward()
        total = (
            loss.detach().double() if layout.reports_loss else torch.zeros((), dtype=torch.float64)
        )
        dist.all_reduce(total)
        found.append((total.item(), clip_gradients(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def as_whole_rows_do() -> list[str]:
    differing = []
    for name, (how, grid, settings) in GRIDS.items():
        alone = model_of(**settings)
        whole = steps(alone, alone, layout_here(tp_size=4), WHOLE)
        model, layout = model_of(**settings), layout_here(**grid)
        shared = parallelize(model, layout, how)
        cut = divide_rows(model, model, layout, OPTIONS)
        reshard(shared)
        found = steps(model, shared, layout, cut.slice_of(16))
        if found != [pytest.approx(step, rel=2e-4) for step in whole]:
            differing.append(f"{name}: {found} instead of {whole}")
    return differing


def test_divided_rows_train_as_complete_ones_on_every_grid() -> None:
    assert ranks.run(as_whole_rows_do, 4, timeout=120) == [[]] * 4


@torch.no_grad()
def difference_of_a_later_stage() -> float:
    """The largest difference between the logits of slices through two stages, and those of complete rows."""
    layout = layout_here(pp_size=2, cp_size=2)
    model: Any = model_of(num_hidden_layers=4, num_key_value_heads=4).eval()
    tokens = torch.arange(16).unsqueeze(0)
    expected = model(input_ids=tokens, use_cache=False).logits
    # Not sharded: the layers keep their classes, by which the first one is found.
    local = keep_stages(model, [layout.pp_rank], 2)
    context = ContextParallel(model, layout)
    context.start()
    if layout.pp_rank == 0:
        hidden = model(input_ids=tokens, use_cache=False).logits
        dist.send(hidden.contiguous(), dist.get_rank() + 2)
        return 0.0
    hidden = torch.empty(1, 8, 32)
    dist.recv(hidden, dist.get_rank() - 2)
    found = model(inputs_embeds=local.receive(hidden, 16), use_cache=False).logits
    assert found.shape == (1, 8, VOCABULARY)
    return float((found - expected[:, context.slice_of(16)]).abs().max())


def test_a_later_stage_of_a_pipeline_gets_slices_and_does_not_divide_them_again() -> None:
    assert max(ranks.run(difference_of_a_later_stage, 4)) < 1e-5


FLAT = (
    "--model.from_config.attention_dropout=0",
    "--step_scheduler.max_steps=4",
    "--checkpoint.save_consolidated=false",
    "--lr_scheduler.decay_steps=4",
    "--step_scheduler.ckpt_every_steps=2",
    "--packed_sequence.size=32",
    "--step_scheduler.global_batch_size=4",
    "--step_scheduler.local_batch_size=2",
)
CUT = ("--distributed.cp_size=2", "--model.activation_checkpointing=true")


def test_a_run_with_divided_rows_logs_what_one_rank_does_and_goes_on_exactly_on_any_ranks(
    tmp_path: Path,
) -> None:
    text = RECIPE + VALIDATION
    run(tmp_path, *FLAT, name="alone", text=text)
    saved = {
        name: f"--checkpoint.restore_from={tmp_path / name / 'epoch_0_step_2'}"
        for name in ("alone", "cut")
    }
    runs = {
        "cut": (*FLAT, *CUT),
        "resumed": (*FLAT, *CUT, saved["cut"]),
        "on two": (*FLAT, *CUT, saved["alone"]),
    }
    whole, resumed, _ = run_each(tmp_path, runs, num_ranks=2, text=text)
    assert resumed == whole
    assert whole[0]["rng"] != whole[1]["rng"]  # dropout has to differ between slices
    run(tmp_path, *FLAT, saved["cut"], name="on one", text=text)
    alone = lines_of_steps(tmp_path / "alone/training.jsonl")
    for name in ("cut", "on one", "on two"):
        steps = lines_of_steps(tmp_path / name / "training.jsonl")
        same = alone[-len(steps) :]
        assert [r["samples"] for r in steps] == [r["samples"] for r in same]
        for field in ("loss", "grad_norm", "label_tokens", "tokens"):
            assert [r[field] for r in steps] == pytest.approx([r[field] for r in same], rel=1e-4), (
                name,
                field,
            )
    assert validations(tmp_path / "cut") == pytest.approx(validations(tmp_path / "alone"), rel=1e-4)


def validations(directory: Path) -> list[float]:
    found = []
    for line in lines(directory / "validation.jsonl"):
        found += [line["val_loss"], line["val_accuracy"]]
    return found


def mixing(model: Any) -> Any:
    """A model whose tokens meet in a layer's norm, which no class tells."""
    model.model.layers[1].input_layernorm.register_forward_hook(
        lambda module, args, output: output.cumsum(1)
    )
    return model


def refused_when_asked() -> list[str]:
    gpt2 = AutoModelForCausalLM.from_config(
        GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=VOCABULARY)
    )
    said = []
    for model in (mixing(model_of()), gpt2):
        with pytest.raises(RecipeError) as caught:
            divide_rows(model, model, layout_here(cp_size=2), OPTIONS)
        said.append(str(caught.value))
    return said


def test_a_model_whose_tokens_meet_elsewhere_is_found_out_by_a_few_of_them() -> None:
    for mixed, gpt2 in ranks.run(refused_when_asked, 2):
        assert "LlamaForCausalLM: slices of rows have other logits than complete rows" in mixed
        assert "GPT2LMHeadModel: RuntimeError: shape" in gpt2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"model_type": "mamba"},
            "MambaForCausalLM: its layers mix tokens outside of attention (Conv1d",
        ),
        (
            {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
            "attention (Conv1d, conv)",
        ),
        ({"model_type": "rwkv"}, "(a state along the sequence)"),
        ({"model_type": "bloom"}, "does not use transformers' attention interface"),
        (
            {"model_type": "llama", "attn_implementation": "eager"},
            "eager attention is each model's own (model.attn_implementation sdpa is not)",
        ),
        (
            {"model_type": "gemma2", "attn_implementation": "eager"},
            "sdpa does not cap attention scores",
        ),
    ],
)
def test_a_model_whose_class_tells_is_refused_without_weights(
    settings: dict[str, Any], said: str
) -> None:
    config = CONFIG_MAPPING[settings.pop("model_type")](num_hidden_layers=2, **settings)
    with pytest.raises(RecipeError) as caught:
        check_context_parallel(on_meta(lambda: AutoModelForCausalLM.from_config(config)))
    assert said in str(caught.value)


def test_a_model_that_images_join_between_the_layers_is_refused() -> None:
    config = Qwen3VLConfig(text_config={"num_hidden_layers": 1}, vision_config={"depth": 1})
    with pytest.raises(RecipeError, match="are inserted between its layers"):
        check_context_parallel(on_meta(lambda: AutoModelForImageTextToText.from_config(config)))


def test_what_is_none_of_transformers_models_is_refused() -> None:
    with pytest.raises(RecipeError, match="Linear: it is not a model of transformers"):
        check_context_parallel(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("sizes", "hint"),
    [((4, 2), "set it to 2"), ((3, 1), "set it to 2"), ((2, 4), "remove cp_size")],
)
def test_heads_that_cannot_be_shared_out_are_refused(sizes: tuple[int, int], hint: str) -> None:
    check_context_heads(config_of(), 2, 2)
    with pytest.raises(RecipeError) as caught:
        check_context_heads(config_of(), *sizes)
    assert "num_attention_heads 4" in str(caught.value) and hint in str(caught.value)


def test_rows_that_cannot_be_divided_evenly_are_refused(tmp_path: Path) -> None:
    collate = (
        "--dataloader.collate_fn={_target_: tests.distributed.parallel.test_strategies.odd_rows}"
    )
    error = failure(
        tmp_path, "--distributed.cp_size=2", collate, "--dataloader.padding_free=false", num_ranks=2
    )
    assert "17 tokens among 2 ranks" in str(error) and "leave cp_size out" in str(error)
