"""The loss head gives the loss and gradients of full logits, and stays a plain layer for everything else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from automodel_ckpt.models import loss_head
from automodel_ckpt.models.adapter import Lora, add_adapters
from automodel_ckpt.models.loss_head import (
    ComputesLoss,
    LossHead,
    install_loss_head,
    linear_cross_entropy,
)
from automodel_ckpt.training.loss import labelled_positions, next_token_loss
from tests.unit.models.test_packing_probe import build

OPTIONS = {"use_cache": False}


@pytest.fixture(params=[1, 3, 1000], ids=lambda rows: f"chunks of {rows}")
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_head, "CHUNK_ELEMENTS", 53 * request.param)


def inputs(
    dtype: torch.dtype, num: int = 8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((num, 16), (53, 16), (53,))
    )
    targets = torch.randint(0, 53, (num,), generator=generator)
    return *(each.to(dtype).requires_grad_() for each in (hidden, weight, bias)), targets


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float64, 1e-13)]
)
@pytest.mark.parametrize(
    "needed", [(True, True, True), (True, False, False), (False, True, True), (False, True, False)]
)
def test_loss_and_gradients_are_those_of_the_full_logits(
    dtype: torch.dtype, tolerance: float, needed: tuple[bool, ...]
) -> None:
    *leaves, targets = inputs(dtype)
    for leaf, wanted in zip(leaves, needed, strict=True):
        leaf.requires_grad_(wanted)
    wide = torch.promote_types(dtype, torch.float32)
    others = [leaf.detach().to(wide).requires_grad_(leaf.requires_grad) for leaf in leaves]
    loss = linear_cross_entropy(*leaves, targets)
    expected = F.cross_entropy(F.linear(*others), targets, reduction="sum")
    (loss * 0.3).backward()
    (expected * 0.3).backward()
    assert loss.dtype == wide
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(leaves, others, strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None and theirs.grad is not None:
            assert ours.grad.dtype == dtype
            torch.testing.assert_close(
                ours.grad.to(wide), theirs.grad, rtol=tolerance, atol=tolerance
            )


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    scaled = hidden.detach() * 1e4
    expected = F.cross_entropy(F.linear(scaled, weight, bias), targets, reduction="sum")
    torch.testing.assert_close(linear_cross_entropy(scaled, weight, bias, targets), expected)


def test_without_labels_the_loss_is_zero_and_so_are_the_gradients() -> None:
    *leaves, targets = inputs(torch.float32, num=0)
    loss = linear_cross_entropy(*leaves, targets)
    loss.backward()
    assert loss.item() == 0
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


def test_no_more_than_a_chunk_of_logits_exists_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_head, "CHUNK_ELEMENTS", 4 * 1000)
    weight = torch.randn(1000, 4, requires_grad=True)
    hidden = torch.randn(500, 4, requires_grad=True)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        linear_cross_entropy(hidden, weight, None, torch.zeros(500, dtype=torch.int64)).backward()
    sizes = [event.cpu_memory_usage for event in profile.events() or []]
    assert 0 < max(sizes) < 100_000  # the logits of all positions would be 2,000,000 bytes


def gradients(
    model: Any, batch: dict[str, torch.Tensor], head: ComputesLoss | None, all_up_to: int = 0
) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    rest = {name: tensor for name, tensor in batch.items() if name != "labels"} | OPTIONS
    if head is None:
        loss = next_token_loss(model(**rest).logits, batch["labels"])
    else:
        labeled = labelled_positions(batch["labels"], all_up_to=all_up_to)
        with head.computing_loss(*labeled) as loss_pass:
            loss = loss_pass.loss_in(model(**rest))
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 97, (3, 9), generator=generator)
    labels = tokens.masked_fill(torch.rand(3, 9, generator=generator) < 0.6, -100)
    return {"input_ids": tokens, "labels": labels}


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("frozen_head", [False, True])
def test_a_model_with_a_loss_head_learns_the_same(model_type: str, frozen_head: bool) -> None:
    model = build(model_type).eval()
    model.get_output_embeddings().weight.requires_grad_(not frozen_head)
    names, state = dict(model.named_parameters()).keys(), copy.deepcopy(model.state_dict())
    expected_loss, expected = gradients(model, batch(), None)
    head = install_loss_head(model, OPTIONS)
    assert head is model.get_output_embeddings()
    assert dict(model.named_parameters()).keys() == names
    assert model.state_dict().keys() == state.keys()
    for all_up_to in (0, head.all_up_to):
        loss, ours = gradients(model, batch(), head, all_up_to)
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert model(input_ids=batch()["input_ids"], **OPTIONS).logits.shape == (3, 9, 97)


def test_tied_weights_stay_tied() -> None:
    model = build("gpt2")
    head = install_loss_head(model, OPTIONS)
    assert isinstance(head, LossHead)
    assert head.weight is model.get_input_embeddings().weight


def test_a_model_that_does_more_to_the_logits_keeps_its_layer() -> None:
    class Capped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.layer = nn.Embedding(9, 4), nn.Linear(4, 9)

        def get_output_embeddings(self) -> nn.Linear:
            return self.layer

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.layer(self.body(input_ids))
            return torch.tanh(logits / 30) * 30

    model = Capped()
    assert install_loss_head(model, {}) is None
    assert type(model.layer) is nn.Linear
    assert install_loss_head(nn.Linear(2, 2), {}) is None


@pytest.mark.parametrize(
    ("model_type", "setting"), [("cohere", "logit_scale"), ("gemma2", "final_logit_softcapping")]
)
def test_scaled_and_capped_logits_of_transformers_are_noticed(
    model_type: str, setting: str
) -> None:
    from tests.unit.models import test_packing_probe

    sizes = {"num_key_value_heads": 2, "head_dim": 8, setting: 0.5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(test_packing_probe._SIZES, model_type, sizes)
        model = build(model_type, "eager")
    assert install_loss_head(model, OPTIONS) is None


def test_autocast_computes_in_its_type() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, bias, targets)
        expected = F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, reduction="sum")
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def adapted(**options: Any) -> Any:
    torch.manual_seed(1)
    model = add_adapters(build("llama"), Lora(r=4, **options), task_type="CAUSAL_LM").model.eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["lm_head"], "use_dora": True, "bias": "all"},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["lora", "dora", "trained as a whole"],
)
def test_an_output_layer_with_an_adapter_learns_the_same(options: dict[str, Any]) -> None:
    model = adapted(**options)
    expected_loss, expected = gradients(model, batch(), None)
    names = dict(model.named_parameters()).keys()
    head = install_loss_head(model, OPTIONS)
    assert head is not None
    assert dict(model.named_parameters()).keys() == names
    loss, ours = gradients(model, batch(), head)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert len(ours) == len(expected)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert model(input_ids=batch()["input_ids"], **OPTIONS).logits.shape == (3, 9, 97)
    unlabelled = batch() | {"labels": torch.full((3, 9), -100)}
    loss, zeros = gradients(model, unlabelled, head)
    assert loss == 0 and not any(each.any() for each in zeros)


def test_an_adapted_output_layer_never_gives_the_logits_of_all_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_head, "CHUNK_ELEMENTS", 3 * 97)
    model = adapted(target_modules=["lm_head"])
    head = install_loss_head(model, OPTIONS)
    assert head is not None
    lengths: list[int] = []
    model.get_output_embeddings().base_layer.register_forward_hook(
        lambda module, inputs, output: lengths.append(len(output))
    )
    gradients(model, batch(), head)
    assert max(lengths) == 3 and len(lengths) > 4


def test_an_output_layer_that_looks_at_other_positions_keeps_its_logits() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 9)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.inner(hidden)
            return logits - logits.mean(-2, keepdim=True)

    model: Any = nn.Module()
    model.body, model.layer = nn.Embedding(9, 4), Centred()
    model.get_output_embeddings = lambda: model.layer
    model.forward = lambda input_ids: model.layer(model.body(input_ids))
    assert install_loss_head(model, {}) is None
    assert type(model.layer) is Centred
