"""The loss head under each strategy, beside full logits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from automodel_ckpt.loss.causal import labelled_positions, next_token_loss
from automodel_ckpt.models.loss.fused_cross_entropy import CHUNK_ELEMENTS
from automodel_ckpt.models.loss.fused_distillation import CapturedHidden
from automodel_ckpt.models.loss.loss_head import LossHead
from automodel_ckpt.models.loss.loss_head_probe import install_loss_head
from automodel_ckpt.models.loss.loss_inputs import TokenHits
from automodel_ckpt.models.loss.position_losses import PositionLosses
from automodel_ckpt.models.loss.z_loss import ZLoss
from automodel_ckpt.parallel.parallelize import Parallelism, parallelize
from tests.distributed.kinds.test_training import lines, lines_of_steps
from tests.support import ranks
from tests.support.runs.parallel import VOCABULARY, layout_here, model_of
from tests.support.runs.training import RECIPE, VALIDATION, train, write_recipe

ENDS = "['*embed_tokens*', 'lm_head*']"
EMBEDDING = "['*embed_tokens*']"
FOUR = (
    "--model.from_config.attention_dropout=0",
    "--step_scheduler.max_steps=4",
    "--checkpoint.save_consolidated=false",
)
FULL = "--loss_fn={_target_: torch.nn.CrossEntropyLoss}"


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (1, [("single", "true", "[]"), ("single", "false", ENDS)]),
        (
            2,
            [
                ("ddp", "false", "[]"),
                ("fsdp2", "true", "[]"),
                ("fsdp2", "false", "[]"),
                ("fsdp2", "true", EMBEDDING),
            ],
        ),
    ],
    ids=["one rank", "two ranks"],
)
def test_it_trains_as_full_logits_do(
    tmp_path: Path, num_ranks: int, cases: list[tuple[str, str, str]]
) -> None:
    recipe = write_recipe(tmp_path, RECIPE + VALIDATION)
    runs = {
        f"{strategy}, tied {tied}, frozen {frozen}": (
            f"--distributed.strategy={strategy}",
            f"--model.from_config.tie_word_embeddings={tied}",
            f"--model.freeze={frozen}",
        )
        for strategy, tied, frozen in cases
    }
    named = {
        (name, kind): (tmp_path / str(number) / kind, ranks.free_port())
        for number, name in enumerate(runs)
        for kind in ("ours", "full")
    }

    def all_cases() -> None:
        for (name, kind), (directory, port) in named.items():
            os.environ["MASTER_PORT"] = str(port)
            train(
                recipe,
                *runs[name],
                *(FULL,) * (kind == "full"),
                *FOUR,
                f"--checkpoint.checkpoint_dir={directory}",
            )

    ranks.run(all_cases, num_ranks, init=False, timeout=150)
    for name in runs:
        ours, full = (named[name, kind][0] for kind in ("ours", "full"))
        mine, theirs = (lines_of_steps(directory / "training.jsonl") for directory in (ours, full))
        for field in ("loss", "grad_norm"):
            assert [r[field] for r in mine] == pytest.approx(
                [r[field] for r in theirs], rel=1e-4
            ), name
        mine, theirs = (lines(directory / "validation.jsonl")[-1] for directory in (ours, full))
        assert mine["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-4), name
        assert mine["val_accuracy"] == theirs["val_accuracy"], name


def test_a_sharded_model_that_caps_its_logits_trains_as_on_full_ones(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, RECIPE + VALIDATION)
    gemma = ("--model.from_config.model_type=gemma2", "--model.from_config.head_dim=8")
    cap = "--model.from_config.final_logit_softcapping=0.5"
    ports = {"ours": ranks.free_port(), "full": ranks.free_port()}

    def both() -> None:
        for kind, port in ports.items():
            os.environ["MASTER_PORT"] = str(port)
            train(
                recipe,
                *gemma,
                cap,
                "--distributed.strategy=fsdp2",
                *(FULL,) * (kind == "full"),
                *FOUR,
                f"--checkpoint.checkpoint_dir={tmp_path / kind}",
            )

    ranks.run(both, 2, init=False, timeout=150)
    ours, full = (lines_of_steps(tmp_path / kind / "training.jsonl") for kind in ports)
    for field in ("loss", "grad_norm"):
        assert [r[field] for r in ours] == pytest.approx([r[field] for r in full], rel=1e-4)


def loss_and_gradients(model: Any, head: LossHead | None) -> tuple[float, dict[str, torch.Tensor]]:
    tokens = torch.randint(0, VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(3))
    labels = tokens.masked_fill(tokens % 3 == 0, -100)
    if head is None:
        loss = next_token_loss(model(input_ids=tokens, use_cache=False).logits, labels)
    else:
        with head.computing_loss(*labelled_positions(labels)) as loss_pass:
            loss = loss_pass.loss_in(model(input_ids=tokens, use_cache=False))
    loss.backward()
    return loss.item(), {
        n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for n, p in model.named_parameters()
        if p.grad is not None
    }


def by_a_vocabulary_in_parts(kind: str, settings: dict[str, Any], frozen: bool) -> None:
    expected_loss, expected = loss_and_gradients(model_of(kind, **settings), None)
    model: Any = model_of(kind, **settings)
    model.lm_head.weight.requires_grad_(not frozen)
    model = parallelize(model, layout_here(tp_size=2), Parallelism(sequence_parallel=True))
    head = install_loss_head(model, {"use_cache": False}, 2)
    assert head is model.lm_head and isinstance(head, LossHead)
    # Without the hidden states of unlabeled positions.
    assert head.all_up_to == 0
    loss, gradients = loss_and_gradients(model, head)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert expected.keys() - gradients.keys() == ({"lm_head.weight"} if frozen else set())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
    check_hits(model, head, model_of(kind, **settings))
    check_z_loss(model, head, model_of(kind, **settings))
    check_position_losses(model, head, model_of(kind, **settings))


def check_position_losses(model: Any, head: LossHead, whole: Any) -> None:
    """The loss of each position, and the gradient of their weighted sum, are those of the logits of *whole*."""
    tokens = torch.randint(0, VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(3))
    positions, targets = labelled_positions(tokens)
    weights = torch.linspace(-1, 2, len(targets))
    model.zero_grad()
    with head.computing_loss(positions, targets, criterion=PositionLosses()) as loss_pass:
        losses = loss_pass.loss_in(model(input_ids=tokens, use_cache=False))
    (losses * weights).sum().backward()
    logits = whole(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
    expected = F.cross_entropy(logits[positions], targets, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    (expected * weights).sum().backward()
    name = "model.layers.0.mlp.down_proj.weight"
    own = model.get_parameter(name).grad
    own = own.full_tensor() if isinstance(own, DTensor) else own
    torch.testing.assert_close(own, whole.get_parameter(name).grad, rtol=1e-4, atol=1e-5)
    captured = CapturedHidden()
    with torch.no_grad(), head.computing_loss(positions, targets, criterion=captured):
        model(input_ids=tokens, use_cache=False)
    assert captured.part is not None and captured.part.most == 19


def check_z_loss(model: Any, head: LossHead, whole: Any) -> None:
    """The z-loss of *head* of *model*, and its gradient of the embedding, are those of the logits of *whole*."""
    tokens = torch.randint(0, VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(3))
    z_loss = ZLoss(0.1, torch.device("cpu"))
    model.zero_grad()
    with head.computing_loss(*labelled_positions(tokens), z_loss=z_loss) as loss_pass:
        loss = loss_pass.loss_in(model(input_ids=tokens, use_cache=False))
    loss.backward()
    logits = whole(input_ids=tokens, use_cache=False).logits
    squares = torch.logsumexp(logits[:, :-1].float(), -1).square().sum()
    (next_token_loss(logits, tokens) + 0.1 * squares).backward()
    torch.testing.assert_close(z_loss.take(), 0.1 * squares.detach(), rtol=1e-4, atol=1e-5)
    name = "model.layers.0.mlp.down_proj.weight"
    own = model.get_parameter(name).grad
    own = own.full_tensor() if isinstance(own, DTensor) else own
    torch.testing.assert_close(own, whole.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


def check_hits(model: Any, head: LossHead, whole: Any) -> None:
    """Labels are what *whole* predicts, and every third one is another token: *head* of *model* counts the others."""
    tokens = torch.randint(0, VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        predicted = whole(input_ids=tokens, use_cache=False).logits.argmax(-1)
    labels = torch.full_like(tokens, -100)
    labels[:, 1:] = predicted[:, :-1]
    labels[:, 3::3] = (labels[:, 3::3] + 1) % VOCABULARY
    hits = TokenHits(torch.device("cpu"))
    with torch.no_grad(), head.computing_loss(*labelled_positions(labels), hits=hits):
        model(input_ids=tokens, use_cache=False)
    assert hits.read() == 3 * 5


def test_tensor_parallel_ranks_compute_it_with_a_part_of_the_vocabulary_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 5 * 19)  # of 37 tokens the ranks have 19 and 18

    def on_two_ranks() -> None:
        by_a_vocabulary_in_parts("llama", {"tie_word_embeddings": True}, frozen=False)
        by_a_vocabulary_in_parts("llama", {"tie_word_embeddings": False}, frozen=True)
        by_a_vocabulary_in_parts("granite", {"logits_scaling": 2.0}, frozen=False)
        # All logits in one chunk: torch's own functions would compute the loss of a complete layer.
        monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 2**25)
        by_a_vocabulary_in_parts("llama", {"tie_word_embeddings": True}, frozen=False)

    ranks.run(on_two_ranks, 2)


def test_an_output_layer_cut_across_the_vocabulary_keeps_full_logits() -> None:
    def head() -> Any:
        plan = {"lm_head": "rowwise_split_input"}
        model = parallelize(
            model_of(tie_word_embeddings=False), layout_here(tp_size=2), Parallelism(tp_plan=plan)
        )
        return install_loss_head(model, {"use_cache": False})

    assert ranks.run(head, 2) == [None, None]
