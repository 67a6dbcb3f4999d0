"""The chunked distillation loss against autograd on full logits."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.loss import head_gradients
from automodel_ckpt.models.loss.distillation_targets import (
    DistillationWeights,
    LogitTargets,
    TopTargets,
    top_of,
)
from automodel_ckpt.models.loss.fused_cross_entropy import (
    Labeled,
    LogitTransform,
    TokenHits,
    VocabularyPart,
)
from automodel_ckpt.models.loss.fused_distillation import Distillation, rows_of_chunk
from tests.support import ranks

N, H, V = 50, 8, 37
TRANSFORM = LogitTransform(1.5, 3.0)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_gradients, "CHUNK_ELEMENTS", {"cpu": 4 * V * 7})
    assert rows_of_chunk("cpu", V) == 7


def inputs(seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Hidden states, weight and bias; the teacher's logits; labels."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    leaves = [random(N, H), random(V, H), random(V)]
    for leaf in leaves:
        leaf.requires_grad_()
    return leaves, random(N, V) * 3, torch.randint(0, V, (N,), generator=generator)


def expected(
    leaves: list[torch.Tensor],
    teacher: torch.Tensor,
    labels: torch.Tensor,
    weights: DistillationWeights,
    num_columns: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss from full logits, and its two sums."""
    logits = TRANSFORM(F.linear(*leaves))
    of_student = F.log_softmax(logits[:, :num_columns] / weights.temperature, -1)
    of_teacher = F.log_softmax(teacher[:, :num_columns] / weights.temperature, -1)
    forward = (of_teacher.exp() * (of_teacher - of_student)).sum()
    reverse = (of_student.exp() * (of_student - of_teacher)).sum()
    kd = weights.temperature**2 * (weights.forward * forward + weights.reverse * reverse)
    ce = F.cross_entropy(logits, labels, reduction="sum")
    return (1 - weights.kd_ratio) * ce + weights.kd_ratio * kd, torch.stack([ce, kd])


def assert_same(
    loss: torch.Tensor, wanted: torch.Tensor, leaves: list[torch.Tensor], tolerance: float = 1e-9
) -> None:
    torch.testing.assert_close(loss, wanted, rtol=tolerance, atol=tolerance)
    # A loss weight other than 1 shows that the backward pass scales.
    found = torch.autograd.grad(3 * loss, leaves)
    for one, other in zip(found, torch.autograd.grad(3 * wanted, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


WEIGHTS = [
    DistillationWeights(ratio, temperature, 1 - reverse, reverse)
    for ratio, temperature, reverse in itertools.product((0.0, 0.3, 1.0), (1.0, 2.5), (0, 1, 0.7))
]


@pytest.mark.parametrize("num_columns", [None, 30])
def test_loss_and_gradients_are_those_of_full_logits(num_columns: int | None) -> None:
    leaves, teacher, labels = inputs()
    _, weight, bias = leaves
    for weights in WEIGHTS:
        wanted, sums = expected(leaves, teacher, labels, weights, num_columns)
        targets = LogitTargets(lambda start, end: teacher[start:end].clone(), num_columns)
        hits = TokenHits(torch.device("cpu"))
        criterion = Distillation(targets, weights)
        loss = criterion(Labeled(leaves[0], labels, TRANSFORM, hits), weight, bias)
        assert_same(loss, wanted, leaves)
        torch.testing.assert_close(criterion.sums, sums)
        assert hits.read() == (F.linear(*leaves).argmax(1) == labels).sum()


def test_a_cache_of_all_tokens_is_the_complete_divergence_and_of_some_a_part_of_it() -> None:
    leaves, teacher, labels = inputs()
    for weights in WEIGHTS[3:]:
        _, sums = expected(leaves, teacher, labels, weights)
        found = []
        for k in (1, 5, V, V + 3):
            tokens, log_probs, rest = top_of(teacher.clone(), k, weights.temperature)
            assert tokens.shape == (N, min(k, V))
            criterion = Distillation(TopTargets(tokens.long(), log_probs, rest), weights)
            loss = criterion(Labeled(leaves[0], labels, TRANSFORM), *leaves[1:])
            assert criterion.sums is not None
            found.append(criterion.sums[1])
            wanted = coarse(leaves, tokens.long(), log_probs, rest, labels, weights)
            assert_same(loss, wanted, leaves, 2e-5)
        assert found[0] <= found[1] <= found[2] == found[3]
        torch.testing.assert_close(found[2], sums[1], rtol=1e-4, atol=1e-4)


def coarse(
    leaves: list[torch.Tensor],
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    rest: torch.Tensor,
    labels: torch.Tensor,
    weights: DistillationWeights,
) -> torch.Tensor:
    """The loss with the divergence over the cached tokens and one event for all others, by autograd."""
    logits = TRANSFORM(F.linear(*leaves))
    probs = F.softmax(logits / weights.temperature, -1)
    top = probs.gather(1, tokens)
    others = (probs.sum(1) - top.sum(1)).clamp(min=1e-30).unsqueeze(1)
    of_student = torch.cat([top, others], 1).log()
    of_teacher = torch.cat([log_probs, rest.unsqueeze(1)], 1).double()
    forward = (of_teacher.exp() * (of_teacher - of_student)).sum()
    reverse = (of_student.exp() * (of_student - of_teacher)).sum()
    kd = weights.temperature**2 * (weights.forward * forward + weights.reverse * reverse)
    ce = F.cross_entropy(logits, labels, reduction="sum")
    return (1 - weights.kd_ratio) * ce + weights.kd_ratio * kd


def test_ranks_with_different_rows_of_the_vocabulary_have_the_loss_of_all_rows() -> None:
    def compare(
        case: Callable[[torch.Tensor, float], TopTargets | LogitTargets], *, shares: bool = False
    ) -> None:
        leaves, teacher, labels = inputs()
        most = -(-V // 2)
        rank = dist.get_rank()
        rows = slice(rank * most, (rank + 1) * most)
        part = VocabularyPart(dist.group.WORLD, rank * most, most)  # type: ignore[arg-type]
        for weights in WEIGHTS[8::4]:
            hidden, weight, bias = (leaf.detach().requires_grad_() for leaf in leaves)
            own = [hidden, weight, bias]
            whole = Distillation(case(teacher, weights.temperature), weights)
            wanted = whole(Labeled(own[0], labels, TRANSFORM), *own[1:])
            expected_gradients = torch.autograd.grad(wanted, own)
            targets = case(teacher, weights.temperature)
            if shares:
                targets = LogitTargets(
                    lambda start, end: teacher[start:end, rows].clone(), None, part
                )
                complete = targets.complete_logits(2, 5)
                torch.testing.assert_close(complete[:, :V], teacher[2:5])
                # The second rank has one row less.
                assert complete[:, V:].tolist() == [[-math.inf]] * 3
            local = [weight[rows].detach().requires_grad_(), bias[rows].detach().requires_grad_()]
            hits = TokenHits(torch.device("cpu"))
            labeled = Labeled(hidden, labels, TRANSFORM, hits, part)
            loss = Distillation(targets, weights)(labeled, *local)
            assert hits.read() == (F.linear(*leaves).argmax(1) == labels).sum()
            torch.testing.assert_close(loss, wanted)
            found = list(torch.autograd.grad(loss, [hidden, *local]))
            dist.all_reduce(found[0])
            torch.testing.assert_close(found[0], expected_gradients[0])
            torch.testing.assert_close(found[1], expected_gradients[1][rows])
            torch.testing.assert_close(found[2], expected_gradients[2][rows])

    def complete(teacher: torch.Tensor, _: float) -> LogitTargets:
        return LogitTargets(lambda start, end: teacher[start:end].clone())

    def all_cases() -> None:
        compare(complete, shares=True)
        # Each rank has the complete output layer of the teacher.
        compare(complete)
        compare(_top)

    ranks.run(all_cases, 2)


def _top(teacher: torch.Tensor, temperature: float) -> TopTargets:
    tokens, log_probs, rest = top_of(teacher.clone(), 6, temperature)
    return TopTargets(tokens.long(), log_probs, rest)


def test_tokens_that_a_teacher_excludes_have_no_part_in_the_forward_divergence() -> None:
    leaves, teacher, labels = inputs()
    teacher[:, 30:] = float("-inf")
    for reverse in (0.0, 1.0):
        weights = DistillationWeights(0.5, 1.0, 1 - reverse, reverse)
        criterion = Distillation(
            LogitTargets(lambda start, end: teacher[start:end].clone()), weights
        )
        loss = criterion(Labeled(leaves[0], labels, TRANSFORM), *leaves[1:])
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, leaves))
        assert loss.isfinite()


def test_without_labels_the_loss_is_zero_and_has_gradients() -> None:
    leaves, teacher, labels = inputs()
    criterion = Distillation(LogitTargets(lambda start, end: teacher[start:end]), WEIGHTS[3])
    loss = criterion(Labeled(leaves[0][:0], labels[:0], TRANSFORM), *leaves[1:])
    assert loss == 0
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, leaves))


def test_a_teacher_with_another_number_of_logits_is_an_error() -> None:
    leaves, teacher, labels = inputs()
    targets = LogitTargets(lambda start, end: teacher[start:end, 1:].clone())
    with pytest.raises(RecipeError, match="different sizes") as raised:
        Distillation(targets, WEIGHTS[3])(Labeled(leaves[0], labels, TRANSFORM), *leaves[1:])
    assert raised.value.problems[0].where == "distill.teacher"
    assert raised.value.problems[0].value == "36 and 37 logits per position"
