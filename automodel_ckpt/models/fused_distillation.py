"""The output layer's product and a distillation loss in one function, computed in chunks of logits.

The loss is cross-entropy with the labels and a divergence from the distributions of a teacher. Neither the student's
nor the teacher's logits of a micro-batch ever exist as a whole: for each chunk of positions, both are computed, then
the losses and the gradients with respect to the student's layer and hidden states, and the chunk is freed. A teacher
that was cached is given by its top-k tokens instead of logits.

Sources: G. Hinton, O. Vinyals, J. Dean, "Distilling the Knowledge in a Neural Network", arXiv:1503.02531 (temperature,
and the factor temperature**2); Y. Gu et al., "MiniLLM", arXiv:2306.08543 (reverse KL for language models).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.fused_cross_entropy import (
    GradientSums,
    chunk_rows,
    in_autocast_dtype,
    wide_logits,
    widened,
)
from automodel_ckpt.models.loss_inputs import Labeled, LayerCall, VocabularyPart

_TENSORS_OF_A_CHUNK = 4
"""Tensors of the size of a chunk of logits that are in memory at the same time; the loss of a label alone needs one."""
_LOWEST = -1e4
"""The lowest log-probability of a teacher, whose probability is 0: minus infinity times 0 would be NaN."""
_SMALLEST = 1e-30
"""The smallest probability of all tokens beside the top-k, so that its logarithm is finite."""


@dataclass(frozen=True, slots=True)
class DistillationWeights:
    """What a distillation loss adds up for each position.

    The loss is ``(1 - kd_ratio) * cross_entropy + kd_ratio * divergence``, and the divergence is ``temperature**2 *
    (forward * KL(teacher || student) + reverse * KL(student || teacher))`` of softmax(logits / temperature).
    """

    kd_ratio: float = 0.5
    temperature: float = 1.0
    forward: float = 1.0
    reverse: float = 0.0


class TeacherTargets(Protocol):
    """The distributions that a teacher predicts at the labeled positions of a micro-batch, position by position."""

    @property
    def num_columns(self) -> int | None:
        """The number of tokens that are compared, the first ones of both vocabularies; None: all of them."""

    def compare(
        self,
        start: int,
        student: torch.Tensor,
        weights: DistillationWeights,
        part: VocabularyPart | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare the *student* with the teacher at the positions from *start*.

        *student* are log-probabilities [n, V] at the temperature, which are overwritten. Returns the divergence [n]
        without the factor temperature**2, and its gradient [n, V] with respect to the logits / temperature. With
        *part*, the columns are those of this rank, and this is collective.
        """


class LogitTargets:
    """The complete distributions of a teacher, from logits that are computed chunk by chunk."""

    def __init__(
        self,
        logits: Callable[[int, int], torch.Tensor],
        num_columns: int | None = None,
        part: VocabularyPart | None = None,
    ) -> None:
        """*logits* returns the teacher's logits [n, V] of the positions from a start to an end, in a new tensor; with
        *part*, those of this rank's rows of the teacher's output layer."""
        self._logits = logits
        self.num_columns = num_columns
        self._part = part

    def logits(self, start: int, end: int) -> torch.Tensor:
        """Compute the logits [n, V] that are compared, of the positions *start* to *end*, in at least float32.

        Where ranks share the output layer, they are the columns of this rank.
        """
        logits = widened(self._logits(start, end))
        return logits if self.num_columns is None else logits[:, : self.num_columns]

    def complete_logits(self, start: int, end: int) -> torch.Tensor:
        """Compute what :meth:`logits` returns, with the columns of all ranks that share the layer. A collective.

        Columns that no token has are minus infinity.
        """
        logits, part = self.logits(start, end), self._part
        if part is None:
            return logits
        num_missing = part.most - logits.shape[1]
        columns = F.pad(logits, (0, num_missing), value=-math.inf)
        return part.gather(columns)

    def compare(
        self,
        start: int,
        student: torch.Tensor,
        weights: DistillationWeights,
        part: VocabularyPart | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare the *student* with the teacher at the positions from *start*, by all columns of both.

        *student* are log-probabilities [n, V] at the temperature, which are overwritten. Returns the divergence [n]
        without the factor temperature**2, and its gradient [n, V] with respect to the logits / temperature. With
        *part*, V are the columns of this rank, and this is collective. Raises :class:`RecipeError` for a teacher with
        another vocabulary.
        """
        logits = self.logits(start, start + len(student))
        if part is not None and logits.shape[1] > student.shape[1]:
            # The teacher's output layer is not shared by the tensor parallel ranks.
            logits = logits[:, part.first : part.first + student.shape[1]]
        _require_columns(logits, student)
        teacher = log_softmax_(logits.div_(weights.temperature), part)
        teacher.clamp_(min=_LOWEST)
        ratio = student - teacher
        in_teacher = teacher.exp_()
        in_student = student.exp_()
        forward = torch.linalg.vecdot(in_teacher, ratio).neg_()
        reverse = torch.linalg.vecdot(in_student, ratio)
        if part is not None:
            sums = torch.stack([forward, reverse])
            part.sum(sums)
            forward, reverse = sums.unbind()
        # forward: student - teacher; reverse: student * (ratio - reverse).
        errors = ratio.sub_(reverse.unsqueeze(1))
        errors.mul_(weights.reverse).add_(weights.forward)
        errors.mul_(in_student).sub_(in_teacher, alpha=weights.forward)
        return _weighted(forward, reverse, weights), errors


@dataclass(frozen=True, slots=True)
class TopTargets:
    """The *k* most probable tokens of a teacher, and the probability of all others together.

    The divergence is that of the distributions over these k tokens and one event "another token": at most the
    divergence of the complete distributions, and equal for k = V. The probabilities are those at the temperature of the
    loss.
    """

    tokens: torch.Tensor
    """Ids [N, k], int64."""
    log_probs: torch.Tensor
    """Their log-probabilities [N, k]."""
    rest: torch.Tensor
    """The logarithm [N] of the probability of all other tokens."""
    num_columns: int | None = None

    def compare(
        self,
        start: int,
        student: torch.Tensor,
        weights: DistillationWeights,
        part: VocabularyPart | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare the *student* with the teacher at the positions from *start*, by the teacher's k tokens and the rest.

        *student* are log-probabilities [n, V] at the temperature, which are overwritten. Returns the divergence [n]
        without the factor temperature**2, and its gradient [n, V] with respect to the logits / temperature. With
        *part*, V are the columns of this rank, and this is collective.
        """
        end = start + len(student)
        where = _Columns.of(self.tokens[start:end], student.shape[1], part)
        teacher = self.log_probs[start:end].to(student.dtype)
        teacher_rest = self.rest[start:end].to(student.dtype).clamp(min=_LOWEST)
        top = where.read(student)
        probs = student.exp_()
        where.write(probs, torch.zeros_like(top))
        others = probs.sum(1, keepdim=True)
        # One tensor for both, so that ranks exchange them in one collective.
        sums = torch.cat([top, others], dim=1)
        if part is not None:
            part.sum(sums)
        top = sums[:, :-1]
        student_rest = sums[:, -1].clamp(min=_SMALLEST)
        ratio = top - teacher
        rest_ratio = student_rest.log() - teacher_rest
        in_teacher, in_rest = teacher.exp(), teacher_rest.exp()
        in_student = top.exp()
        forward = -torch.linalg.vecdot(in_teacher, ratio) - in_rest * rest_ratio
        reverse = torch.linalg.vecdot(in_student, ratio) + student_rest * rest_ratio
        # All other tokens have the same ratio.
        slope = weights.forward * (1 - in_rest / student_rest)
        slope += weights.reverse * (rest_ratio - reverse)
        errors = probs.mul_(slope.unsqueeze(1))
        of_top = weights.forward * (in_student - in_teacher)
        of_top += weights.reverse * in_student * (ratio - reverse.unsqueeze(1))
        where.write(errors, of_top)
        return _weighted(forward, reverse, weights), errors


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where the columns [n, k] of a tensor [n, V] are; not all of them are on this rank."""

    columns: torch.Tensor
    is_here: torch.Tensor | None

    @staticmethod
    def of(tokens: torch.Tensor, num_columns: int, part: VocabularyPart | None) -> _Columns:
        if part is None:
            return _Columns(tokens, None)
        columns = tokens - part.first
        is_here = (columns >= 0) & (columns < num_columns)
        return _Columns(columns.clamp(0, num_columns - 1), is_here)

    def read(self, source: torch.Tensor) -> torch.Tensor:
        """The values [n, k] of the columns; 0 for those of other ranks."""
        found = source.gather(1, self.columns)
        return found if self.is_here is None else found.masked_fill_(~self.is_here, 0)

    def write(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the columns by *values* [n, k], as far as they are on this rank."""
        if self.is_here is None:
            target.scatter_(1, self.columns, values)
            return
        rows, numbers = self.is_here.nonzero(as_tuple=True)
        target[rows, self.columns[rows, numbers]] = values[rows, numbers]


def _weighted(
    forward: torch.Tensor, reverse: torch.Tensor, weights: DistillationWeights
) -> torch.Tensor:
    # An infinite value of the one that is not wanted, times 0, would be NaN.
    if weights.reverse == 0:
        return forward.mul_(weights.forward)
    if weights.forward == 0:
        return reverse.mul_(weights.reverse)
    return forward.mul_(weights.forward).add_(reverse, alpha=weights.reverse)


def _require_columns(teacher: torch.Tensor, student: torch.Tensor) -> None:
    if teacher.shape[1] != student.shape[1]:
        raise RecipeError(
            "the teacher and the student have vocabularies of different sizes",
            where="distill.teacher",
            value=f"{teacher.shape[1]} and {student.shape[1]} logits per position",
            hint="use a teacher with the tokenizer of the student",
        )


def log_softmax_(logits: torch.Tensor, part: VocabularyPart | None = None) -> torch.Tensor:
    """Overwrite *logits* [n, V] with their log-softmax. With *part*, V are columns of this rank. Collective."""
    largest = logits.amax(1, keepdim=True)
    if part is not None:
        part.largest(largest)
    logits.sub_(largest)
    total = logits.exp().sum(1, keepdim=True)
    if part is not None:
        part.sum(total)
    return logits.sub_(total.log_())


class Distillation:
    """The loss of a pass through a loss head: cross-entropy with the labels, and a divergence from *targets*."""

    def __init__(self, targets: TeacherTargets, weights: DistillationWeights) -> None:
        self.targets, self.weights = targets, weights
        self.sums: torch.Tensor | None = None
        """The summed cross-entropy and the summed divergence (with its factor temperature**2), [2]; set by a pass."""

    def linear(
        self, labeled: Labeled, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the loss for a layer of *weight* [V, H] and *bias* [V]; 0-dim.

        With ``labeled.part``, these are this rank's rows of the layer, and this is collective.
        """
        hidden, weight, bias = in_autocast_dtype(labeled.hidden, weight, bias)
        loss, self.sums = _LinearDistillation.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, labeled, self, torch.is_grad_enabled()
        )
        return loss  # type: ignore[no-any-return]

    def module(self, labeled: Labeled, layer: LayerCall) -> torch.Tensor:
        """Compute the loss for a layer of any kind; 0-dim."""
        trained = [parameter for parameter in layer.parameters if parameter.requires_grad]
        loss, self.sums = _ModuleDistillation.apply(  # type: ignore[no-untyped-call]
            labeled.hidden, labeled, layer, self, torch.is_grad_enabled(), *trained
        )
        return loss  # type: ignore[no-any-return]

    def losses_and_errors(
        self,
        start: int,
        logits: torch.Tensor,
        labeled: Labeled,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the sums [2] of a chunk, and the gradient of its loss with respect to *logits* [n, V].

        *logits* are the output of the layer for the positions from *start*, in at least float32. They are overwritten,
        and counted as hits before.
        """
        weights, transform, part = self.weights, labeled.transform, labeled.part
        labels = labeled.labels[start : start + len(logits)]
        if labeled.hits is not None:
            labeled.hits.add(logits, labels, part)
        slope: torch.Tensor | float = 1.0
        if not transform.is_identity:
            logits = transform(logits)
            slope = transform.slope(logits)
        num_columns = self.targets.num_columns
        # None as the end of the slice means all columns.
        student = log_softmax_(logits[:, :num_columns] / weights.temperature, part)
        log_probs = log_softmax_(logits, part)
        where = _Columns.of(labels.unsqueeze(1), logits.shape[1], part)
        of_labels = where.read(log_probs)
        if part is not None:
            part.sum(of_labels)
        ce_share = 1 - weights.kd_ratio
        errors = log_probs.exp_().mul_(ce_share)
        where.write(errors, where.read(errors) - ce_share)
        divergence, kd_errors = self.targets.compare(start, student, weights, part)
        factor = weights.kd_ratio * weights.temperature
        # Errors that are not finite would count even with the factor 0.
        if factor:
            errors[:, : kd_errors.shape[1]].add_(kd_errors, alpha=factor)
        if not transform.is_identity:
            errors.mul_(slope)
        sums = torch.stack([-of_labels.sum(), divergence.sum() * weights.temperature**2])
        return sums, errors

    def loss_of(self, sums: torch.Tensor) -> torch.Tensor:
        """The loss, 0-dim, of the *sums* [2]. With only one of the two parts, the other does not count even as NaN."""
        cross_entropy, divergence = sums.unbind()
        ratio = self.weights.kd_ratio
        if ratio in (0, 1):
            return (divergence if ratio else cross_entropy).clone()
        return (1 - ratio) * cross_entropy + ratio * divergence


def rows_of_chunk(device_type: str, num_columns: int) -> int:
    """The number of positions in a chunk whose logits have *num_columns* columns, at least 1."""
    return max(chunk_rows(device_type, num_columns) // _TENSORS_OF_A_CHUNK, 1)


def peak_bytes(num_positions: int, num_columns: int, dtype: torch.dtype, device_type: str) -> int:
    """Bytes that the chunks of :meth:`Distillation.linear` need for *num_positions* labels, without its inputs and the
    gradients that it returns."""
    rows = min(num_positions, rows_of_chunk(device_type, num_columns))
    wide = torch.promote_types(dtype, torch.float32)
    bytes_of_tensor = rows * num_columns * wide.itemsize
    return (_TENSORS_OF_A_CHUNK + 1) * bytes_of_tensor


class _LinearDistillation(torch.autograd.Function):
    """Computes the gradients for a loss weight of 1 together with the loss; the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labeled: Labeled,
        criterion: Distillation,
        with_gradients: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needed = ctx.needs_input_grad[:3] if with_gradients else (False, False, False)
        gradients = ctx.gradients = GradientSums(hidden, weight, bias, needed)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums = torch.zeros(2, dtype=wide, device=hidden.device)
        # All ranks need the same number of chunks, because each chunk is a collective.
        num_columns = labeled.part.most if labeled.part is not None else weight.shape[0]
        size = rows_of_chunk(hidden.device.type, num_columns)
        for start in range(0, len(hidden), size):
            chunk = hidden[start : start + size]
            logits = wide_logits(chunk, weight, bias)
            added, errors = criterion.losses_and_errors(start, logits, labeled)
            sums += added
            if any(needed):
                gradients.add(start, chunk, errors.to(hidden.dtype))
            # The memory of this chunk becomes the next one's.
            del logits, errors
        ctx.mark_non_differentiable(sums)
        return criterion.loss_of(sums), sums

    @staticmethod
    def backward(
        ctx: Any, loss_weight: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        # Scaling changes the sums in place: a second backward pass must fail, not scale them twice.
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.scaled(loss_weight), None, None, None


class _ModuleDistillation(torch.autograd.Function):
    """The loss of :class:`_LinearDistillation`, for an output layer of any kind.

    Autograd computes the gradients chunk by chunk in the forward pass. In the backward pass, as with activation
    checkpointing, the teacher's weights would no longer be gathered.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        labeled: Labeled,
        layer: LayerCall,
        criterion: Distillation,
        with_gradients: bool,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with_gradients = with_gradients and (hidden.requires_grad or bool(parameters))
        found: list[torch.Tensor] = []
        if with_gradients:
            found = [torch.zeros_like(each) for each in (hidden, *parameters)]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums = torch.zeros(2, dtype=wide, device=hidden.device)
        size = rows_of_chunk(hidden.device.type, layer.num_columns)
        for start in range(0, len(hidden), size):
            chunk = hidden[start : start + size].detach().requires_grad_(with_gradients)
            with torch.set_grad_enabled(with_gradients):
                output = layer.forward(chunk)
            logits = output.detach().to(wide, copy=True)
            added, errors = criterion.losses_and_errors(start, logits, labeled)
            sums += added
            if with_gradients:
                of_hidden, *others = torch.autograd.grad(
                    output, [chunk, *parameters], errors.to(output.dtype)
                )
                found[0][start : start + size] = of_hidden
                for total, gradient in zip(found[1:], others, strict=True):
                    total += gradient
            del output, logits, errors
        ctx.gradients = found
        ctx.mark_non_differentiable(sums)
        return criterion.loss_of(sums), sums

    @staticmethod
    def backward(
        ctx: Any, loss_weight: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        scaled = []
        for gradient in gradients:
            product = gradient * loss_weight
            scaled.append(product.to(gradient.dtype))
        of_hidden, *of_parameters = scaled
        return of_hidden, None, None, None, None, *of_parameters


class CapturedHidden:
    """In place of a loss: keeps the hidden states of labeled positions, from which logits are computed later."""

    def __init__(self) -> None:
        self.hidden: torch.Tensor | None = None
        """[N, H], set by a forward pass."""
        self.part: VocabularyPart | None = None
        """This rank's rows of the layer; None: all of them."""

    def linear(
        self, labeled: Labeled, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Keep the hidden states and the part; returns 0."""
        return self._keep(labeled)

    def module(self, labeled: Labeled, layer: LayerCall) -> torch.Tensor:
        """Keep the hidden states; returns 0."""
        return self._keep(labeled)

    def _keep(self, labeled: Labeled) -> torch.Tensor:
        self.hidden, self.part = labeled.hidden, labeled.part
        return labeled.hidden.new_zeros((), dtype=torch.float32)


def top_of(
    logits: torch.Tensor, k: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the *k* most probable tokens of *logits* [n, V] at a *temperature*, for :class:`TopTargets`.

    These are ids int32 [n, k], their log-probabilities float32 [n, k], and the logarithm of the probability of all
    other tokens float32 [n]. *logits* are overwritten.
    """
    log_probs = log_softmax_(logits.div_(temperature))
    num_tokens = log_probs.shape[1]
    values, tokens = log_probs.topk(min(k, num_tokens), dim=1)
    others = log_probs.scatter_(1, tokens, -math.inf)
    rest = others.logsumexp(1).float()
    return tokens.int(), values.float(), rest.clamp(min=_LOWEST)
