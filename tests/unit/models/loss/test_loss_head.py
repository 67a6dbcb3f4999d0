"""The loss head gives the loss and gradients of full logits, and stays a plain layer for everything else."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from automodel_ckpt.loss.causal import labelled_positions, next_token_loss
from automodel_ckpt.models.layers.adapter import add_adapters
from automodel_ckpt.models.layers.lora import Lora
from automodel_ckpt.models.loss.fused_cross_entropy import (
    IDENTITY,
    LogitTransform,
    TokenHits,
    ZLoss,
    linear_cross_entropy,
)
from automodel_ckpt.models.loss.head_gradients import CHUNK_ELEMENTS, head_bytes
from automodel_ckpt.models.loss.loss_head import LossHead, install_loss_head
from tests.unit.models.building import test_packing_probe
from tests.unit.models.building.test_packing_probe import build

OPTIONS = {"use_cache": False}


@pytest.fixture(params=[1, 3, 1000], ids=lambda rows: f"chunks of {rows}")
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 53 * request.param)


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


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hits_are_the_labels_with_the_highest_of_all_logits(dtype: torch.dtype) -> None:
    hidden, weight, bias, targets = (each.detach() for each in inputs(dtype))
    targets[::2] = F.linear(hidden, weight, bias).argmax(1)[::2]
    targets[::4] = -100
    expected = int((F.linear(hidden, weight, bias).argmax(1) == targets).sum())
    hits = TokenHits(hidden.device)
    with torch.no_grad():
        without = linear_cross_entropy(hidden, weight, bias, targets)
        assert torch.equal(linear_cross_entropy(hidden, weight, bias, targets, hits=hits), without)
    assert hits.read() == expected > 0


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("transform", [IDENTITY, LogitTransform(3.0, 30.0)], ids=["plain", "both"])
def test_the_z_loss_of_chunks_is_that_of_the_full_logits(transform: LogitTransform) -> None:
    *leaves, targets = inputs(torch.float32)
    targets[::3] = -100
    others = [leaf.detach().double().requires_grad_() for leaf in leaves]
    z_loss = ZLoss(0.05, torch.device("cpu"))
    loss = linear_cross_entropy(*leaves, targets, transform=transform, z_loss=z_loss)
    logits = transform(F.linear(*others))
    squares = torch.logsumexp(logits, 1)[targets != -100].square().sum()
    expected = F.cross_entropy(logits, targets, reduction="sum") + 0.05 * squares
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        z_loss.take().double(), 0.05 * squares.detach(), rtol=1e-5, atol=1e-5
    )
    assert z_loss.take() == 0
    (loss * 0.3).backward()
    (expected * 0.3).backward()
    for ours, theirs in zip(leaves, others, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


def test_without_labels_the_loss_is_zero_and_so_are_the_gradients() -> None:
    *leaves, targets = inputs(torch.float32, num=0)
    loss = linear_cross_entropy(*leaves, targets)
    loss.backward()
    assert loss.item() == 0
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


def test_a_second_backward_pass_fails_instead_of_scaling_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 4)
    loss = linear_cross_entropy(*inputs(torch.float32))
    loss.backward(retain_graph=True)
    with pytest.raises(AttributeError):
        loss.backward()


def gradients(
    model: Any, batch: dict[str, torch.Tensor], head: LossHead | None, all_up_to: int = 0
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


Gradients = tuple[float, list[torch.Tensor]]


def assert_same(found: Gradients, expected: Gradients) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)


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
    expected = gradients(model, batch(), None)
    head = install_loss_head(model, OPTIONS)
    assert head is model.get_output_embeddings()
    assert dict(model.named_parameters()).keys() == names
    assert model.state_dict().keys() == state.keys()
    for all_up_to in (0, head.all_up_to):
        assert_same(gradients(model, batch(), head, all_up_to), expected)
    assert model(input_ids=batch()["input_ids"], **OPTIONS).logits.shape == (3, 9, 97)


class Changing(nn.Module):
    """A model that calls *change* with its logits."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.layer = nn.Embedding(97, 4), nn.Linear(4, 97)
        self.temperature = nn.Parameter(torch.ones(()), requires_grad=False)
        self.change = change

    def get_output_embeddings(self) -> nn.Linear:
        return self.layer

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.change(self.layer(self.body(input_ids))))


def shifted(logits: torch.Tensor) -> torch.Tensor:
    return logits + 1e-3


def suppressed(logits: torch.Tensor) -> torch.Tensor:
    return logits.index_fill_(-1, torch.tensor([5]), -1e9)


def rolled(logits: torch.Tensor) -> torch.Tensor:
    return logits.roll(1, 1)


def clamped(logits: torch.Tensor) -> torch.Tensor:
    return logits.clamp(-30, 30)


def rounded(logits: torch.Tensor) -> torch.Tensor:
    return (logits * 0.3).bfloat16()


@pytest.mark.parametrize("change", [shifted, suppressed, rolled, clamped, rounded])
def test_a_model_that_does_anything_else_to_the_logits_keeps_its_layer(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model = Changing(change)
    del model.temperature
    assert install_loss_head(model, {}) is None
    assert type(model.layer) is nn.Linear
    assert install_loss_head(nn.Linear(2, 2), {}) is None


def without_padding(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, :, :97]


@pytest.mark.parametrize("sizes", [None, [3, 0, 24]])
def test_a_model_may_select_the_columns_of_its_vocabulary(sizes: list[int] | None) -> None:
    model = Changing(without_padding)
    head = install_loss_head(model, {})
    assert head is not None
    positions, targets = torch.arange(27), batch()["input_ids"].flatten()
    with head.computing_loss(positions, targets, sizes) as loss_pass:
        losses = loss_pass.loss_in(model(**batch()))
    logits = model(**batch()).logits.flatten(0, 1)
    by_position = nn.functional.cross_entropy(logits, targets, reduction="none")
    groups = [part.sum() for part in by_position.split(sizes or [27])]
    expected = groups[0] if sizes is None else torch.stack(groups)
    torch.testing.assert_close(losses, expected)


def capped_in_two_steps(logits: torch.Tensor) -> torch.Tensor:
    return torch.tanh(logits * 0.7 / 15) * 15


@pytest.mark.usefixtures("_chunks")
def test_a_scale_and_a_cap_are_found_without_a_config() -> None:
    model = Changing(capped_in_two_steps)
    del model.temperature
    with torch.no_grad():
        model.layer.weight.mul_(30)
    expected = gradients(model, batch(), None)
    head = install_loss_head(model, OPTIONS)
    assert head is not None
    assert head.transform.cap == 15
    assert head.transform.scale == pytest.approx(0.7, rel=1e-6)
    assert_same(gradients(model, batch(), head), expected)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize(
    ("model_type", "setting", "value", "transform"),
    [
        ("cohere", "logit_scale", 0.3, LogitTransform(0.3)),
        ("granite", "logits_scaling", 8.0, LogitTransform(0.125)),
        ("gemma2", "final_logit_softcapping", 0.5, LogitTransform(1.0, 0.5)),
        ("gemma3_text", "final_logit_softcapping", 30.0, LogitTransform(1.0, 30.0)),
    ],
)
def test_models_that_scale_or_cap_their_logits_learn_the_same(
    model_type: str, setting: str, value: float, transform: LogitTransform
) -> None:
    sizes = {"num_key_value_heads": 2, setting: value}
    if "gemma" in model_type:
        sizes["head_dim"] = 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(test_packing_probe._SIZES, model_type, sizes)
        model = build(model_type, "eager").eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(5)
    expected = gradients(model, batch(), None)
    head = install_loss_head(model, OPTIONS)
    assert isinstance(head, LossHead)
    assert head.transform.cap == transform.cap
    # A scale of 1 is exact: the log would state that logits are multiplied by 1.
    rounding = 0 if transform.scale == 1 else 1e-6
    assert head.transform.scale == pytest.approx(transform.scale, rel=rounding)
    for all_up_to in (0, head.all_up_to):
        assert_same(gradients(model, batch(), head, all_up_to), expected)
    # Validation and generation still get the logits that the model computes.
    logits = model(input_ids=batch()["input_ids"], **OPTIONS).logits
    assert next_token_loss(logits, batch()["labels"]).item() == pytest.approx(expected[0])


def test_the_weight_of_the_loss_is_not_rounded_to_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 53)
    loss_weight = 1.3  # 1.2969 in bfloat16
    unweighted, *others, targets = inputs(torch.bfloat16, 512)
    weighted = unweighted.detach().requires_grad_()
    linear_cross_entropy(unweighted, *others, targets).backward()
    (linear_cross_entropy(weighted, *others, targets) * loss_weight).backward()
    assert unweighted.grad is not None and weighted.grad is not None
    ratio = weighted.grad.double().norm() / unweighted.grad.double().norm()
    assert ratio.item() == pytest.approx(loss_weight, abs=1e-3)


@pytest.mark.parametrize("trains_weight", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forecast_of_its_memory_is_what_it_allocates(
    dtype: torch.dtype, trains_weight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 256 * 1000)
    weight = torch.randn(1000, 64, dtype=dtype).requires_grad_(trains_weight)
    hidden = torch.randn(2000, 64, dtype=dtype, requires_grad=True)
    targets = torch.zeros(2000, dtype=torch.int64)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        linear_cross_entropy(hidden, weight, None, targets)
    now, peak = 0, 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    forecast = head_bytes(
        2000, 1000, 64, dtype, "cpu", trains_weight=trains_weight, stores=False
    ).peak
    returned = hidden.nbytes
    if trains_weight and dtype == torch.float32:
        returned += weight.nbytes
    assert peak == pytest.approx(forecast + returned, rel=0.15)


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
def test_an_output_layer_that_is_trained_as_a_whole_learns_the_same() -> None:
    model = adapted(target_modules=["q_proj"], modules_to_save=["lm_head"])
    expected = gradients(model, batch(), None)
    names = dict(model.named_parameters()).keys()
    head = install_loss_head(model, OPTIONS)
    assert head is not None
    assert dict(model.named_parameters()).keys() == names
    assert_same(gradients(model, batch(), head), expected)
    unlabelled = batch() | {"labels": torch.full((3, 9), -100)}
    loss, zeros = gradients(model, unlabelled, head)
    assert loss == 0 and not any(each.any() for each in zeros)


def test_the_loss_of_an_output_layer_with_an_adapter_is_computed_from_its_logits() -> None:
    assert install_loss_head(adapted(target_modules=["lm_head"]), OPTIONS) is None
