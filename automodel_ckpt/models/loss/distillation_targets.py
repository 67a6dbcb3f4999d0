"""The distributions that a student learns in distillation, from logits of a teacher or from its top-k tokens.

Sources: G. Hinton, O. Vinyals, J. Dean, "Distilling the Knowledge in a Neural Network", arXiv:1503.02531 (temperature,
and the factor temperature**2); Y. Gu et al., "MiniLLM", arXiv:2306.08543 (reverse KL for language models).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.loss.fused_cross_entropy import VocabularyPart, widened

_LOWEST = -1e4
"""The lowest log-probability of a teacher, for a probability of 0: minus infinity times 0 would be NaN."""
_SMALLEST = 1e-30
"""The smallest probability of all tokens outside the top-k, so that its logarithm is finite."""


TeacherTargets: TypeAlias = "LogitTargets | TopTargets"
"""The distributions that a teacher predicts at the labeled positions of a micro-batch, position by position."""


@dataclass(frozen=True)
class DistillationWeights:
    """What a distillation loss adds up for each position.

    The loss is ``(1 - kd_ratio) * cross_entropy + kd_ratio * divergence``, and the divergence is ``temperature**2 *
    (forward * KL(teacher || student) + reverse * KL(student || teacher))`` of softmax(logits / temperature).
    """

    kd_ratio: float = 0.5
    temperature: float = 1.0
    forward: float = 1.0
    reverse: float = 0.0


class LogitTargets:
    """The complete distributions of a teacher, from logits that are computed chunk by chunk."""

    def __init__(
        self,
        logits: Callable[[int, int], Tensor],
        num_columns: int | None = None,
        part: VocabularyPart | None = None,
    ) -> None:
        """*logits* returns the teacher's logits [n, V] of the positions from a start to an end, in a new tensor; with
        *part*, only the logits of this rank's rows of the teacher's output layer. *num_columns* is the number of tokens
        that are compared, the first ones of both vocabularies; None: all."""
        self._logits = logits
        self.num_columns = num_columns
        self._part = part

    def logits(self, start: int, end: int) -> Tensor:
        """Compute the logits [n, V] that are compared, of the positions *start* to *end*, in at least float32.

        Where ranks share the output layer, they are the columns of this rank.
        """
        logits = widened(self._logits(start, end))
        return logits if self.num_columns is None else logits[:, : self.num_columns]

    def complete_logits(self, start: int, end: int) -> Tensor:
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
        student: Tensor,
        weights: DistillationWeights,
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor]:
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
        if logits.shape[1] != student.shape[1]:
            raise RecipeError(
                "the teacher and the student have vocabularies of different sizes",
                where="distill.teacher",
                value=f"{logits.shape[1]} and {student.shape[1]} logits per position",
                hint="use a teacher with the tokenizer of the student",
            )
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


@dataclass(frozen=True)
class TopTargets:
    """The *k* most probable tokens of a teacher, and the probability of all others together.

    The divergence compares distributions over these k tokens and one event "another token": at most the
    divergence of the complete distributions, and equal for k = V. The probabilities are those at the temperature of the
    loss.
    """

    tokens: Tensor
    """Ids [N, k], int64."""
    log_probs: Tensor
    """Their log-probabilities [N, k]."""
    rest: Tensor
    """The logarithm [N] of the probability of all other tokens."""
    num_columns: int | None = None

    def compare(
        self,
        start: int,
        student: Tensor,
        weights: DistillationWeights,
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor]:
        """Compare the *student* with the teacher at the positions from *start*, by the teacher's k tokens and the rest.

        *student* are log-probabilities [n, V] at the temperature, which are overwritten. Returns the divergence [n]
        without the factor temperature**2, and its gradient [n, V] with respect to the logits / temperature. With
        *part*, V are the columns of this rank, and this is collective.
        """
        end = start + len(student)
        where = Columns.of(self.tokens[start:end], student.shape[1], part)
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


@dataclass(frozen=True)
class Columns:
    """Where the columns [n, k] of a tensor [n, V] are; not all of them are on this rank."""

    columns: Tensor
    is_here: Tensor | None

    @staticmethod
    def of(tokens: Tensor, num_columns: int, part: VocabularyPart | None) -> Columns:
        """Return where the columns of *tokens* [n, k] are among *num_columns*, the columns of *part* if it is given."""
        if part is None:
            return Columns(tokens, None)
        columns = tokens - part.first
        is_here = (columns >= 0) & (columns < num_columns)
        return Columns(columns.clamp(0, num_columns - 1), is_here)

    def read(self, source: Tensor) -> Tensor:
        """The values [n, k] of the columns; 0 for columns of other ranks."""
        found = source.gather(1, self.columns)
        return found if self.is_here is None else found.masked_fill_(~self.is_here, 0)

    def write(self, target: Tensor, values: Tensor) -> None:
        """Replace the columns by *values* [n, k], as far as they are on this rank."""
        if self.is_here is None:
            target.scatter_(1, self.columns, values)
            return
        rows, numbers = self.is_here.nonzero(as_tuple=True)
        target[rows, self.columns[rows, numbers]] = values[rows, numbers]


def _weighted(forward: Tensor, reverse: Tensor, weights: DistillationWeights) -> Tensor:
    # An infinite value of the one that is not wanted, times 0, would be NaN.
    if weights.reverse == 0:
        return forward.mul_(weights.forward)
    if weights.forward == 0:
        return reverse.mul_(weights.reverse)
    return forward.mul_(weights.forward).add_(reverse, alpha=weights.reverse)


def log_softmax_(logits: Tensor, part: VocabularyPart | None = None) -> Tensor:
    """Overwrite *logits* [n, V] with their log-softmax. With *part*, V are columns of this rank. Collective."""
    largest = logits.amax(1, keepdim=True)
    if part is not None:
        part.largest(largest)
    logits.sub_(largest)
    total = logits.exp().sum(1, keepdim=True)
    if part is not None:
        part.sum(total)
    return logits.sub_(total.log_())


def top_of(logits: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
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
