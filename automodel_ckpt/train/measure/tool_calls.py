"""Tool calls that the model in training generates, compared with the expected ones (``evaluation.tool_calls``)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.base.units import counted
from automodel_ckpt.config.keys.evaluation import ToolCallsConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.data.chat import ConversationEncoder
from automodel_ckpt.data.conversations.call_formats import Call, read_calls, readers_of
from automodel_ckpt.data.conversations.call_tests import CallTest, CallTestReader, CallTests
from automodel_ckpt.data.conversations.chat_template import ChatTemplate
from automodel_ckpt.data.conversations.conversation_changes import ConversationChanges
from automodel_ckpt.data.conversations.template_choice import CHOICES, template_of
from automodel_ckpt.data.rows.arguments import require_tokenizer
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.config_values import context_length
from automodel_ckpt.models.measure.generation import Sampling, generate
from automodel_ckpt.models.measure.harness import Interrupted, TaskMetric
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.ranks.agree import broadcast_object, raise_on_all_ranks, sum_over_ranks
from automodel_ckpt.train.measure.evaluated_model import EvaluatedModel
from automodel_ckpt.train.measure.validation_metrics import TOOL_CALL_MEASURES, TOOL_CALLS
from automodel_ckpt.train.model.trainable import Trainable

log = logging.getLogger("automodel_ckpt")

SECTION = "evaluation.tool_calls"


def read_call_tests(
    config: RecipeConfig, preprocessor: Any, model_config: Any, group: ProcessGroup | None
) -> CallTests:
    """Read the conversations of ``evaluation.tool_calls`` on rank 0. A collective of *group*.

    *model_config* is None for a model without a known context. Raises :class:`RecipeError` for data without a tool
    call, and for a chat template whose calls cannot be read.
    """
    assert config.evaluation is not None
    section = config.evaluation.tool_calls
    assert section is not None
    tests = CallTests([], "", 0)
    rank0 = group is None or group.rank() == 0
    with raise_on_all_ranks(group), _naming_section():
        if rank0:
            tests = _read(section, config, preprocessor, model_config)
    tests = broadcast_object(group, tests)
    skipped = f" ({tests.num_too_long} with longer prompts skipped)" if tests.num_too_long else ""
    log.info(
        "%s: %s with tool calls%s; format: %s",
        section.path,
        counted(len(tests.tests), "turn"),
        skipped,
        tests.format,
    )
    lengths = [test.num_answer_tokens for test in tests.tests]
    num_longer = sum(length > section.max_new_tokens for length in lengths)
    if num_longer:
        log.warning(
            "%s.max_new_tokens %d: %s in the data, of up to %d tokens, cannot be generated completely",
            SECTION,
            section.max_new_tokens,
            counted(num_longer, "answer"),
            max(lengths),
        )
    return tests


def _read(
    section: ToolCallsConfig, config: RecipeConfig, preprocessor: Any, model_config: Any
) -> CallTests:
    tokenizer = require_tokenizer(getattr(preprocessor, "tokenizer", preprocessor))
    of_dataset = getattr(config.dataset, "kwargs", {})
    given = section.chat_template or of_dataset.get("chat_template")
    # The shipped templates for training render no prompts.
    text = template_of(tokenizer, "original" if given in CHOICES else given)
    variables = section.template_kwargs
    if variables is None:
        variables = of_dataset.get("template_kwargs") or {}
    template = ChatTemplate(tokenizer, text, variables, last_only=False)
    changes = ConversationChanges(False, False, False)
    encoder = ConversationEncoder(template, changes, section.messages_field, section.tools_field)
    source = Source.of(section.path, section.name, section.split, section.revision)
    reader = CallTestReader(tokenizer, template, _longest_prompt(section, model_config))
    return reader.read(source, encoder, section.max_samples, section.limit)


def _longest_prompt(section: ToolCallsConfig, model_config: Any) -> int | None:
    """The maximum tokens of a prompt; None if there is no maximum.

    A complete answer has to fit into the model's context after it, because a rank whose answer is shorter takes part in
    forward passes up to that position. Raises :class:`RecipeError` if a complete answer fills the context.
    """
    context = None if model_config is None else context_length(model_config)
    if context is None:
        return section.max_prompt_tokens
    if section.max_new_tokens >= context:
        raise RecipeError(
            "answers leave no place for a prompt in the model's context",
            where=f"{SECTION}.max_new_tokens",
            value=section.max_new_tokens,
            hint=f"the context has {context} tokens, for a prompt and its answer",
        )
    left = context - section.max_new_tokens
    return left if section.max_prompt_tokens is None else min(left, section.max_prompt_tokens)


@contextmanager
def _naming_section() -> Iterator[None]:
    """Name the section in the errors of readers of data, which name the section dataset."""
    try:
        yield
    except RecipeError as error:
        problems = []
        for each in error.problems:
            where = each.where.replace("dataset.", f"{SECTION}.")
            hint = each.hint.replace("dataset.", f"{SECTION}.")
            problems.append(replace(each, where=where, hint=hint))
        raise RecipeError.all_of(problems) from error


class ToolCallBenchmark:
    """Generates the calls of all tests with the model in training, and leaves no trace in training.

    Data-parallel ranks generate different answers, in as many forward passes as the longest of them needs.
    """

    def __init__(
        self,
        settings: ToolCallsConfig,
        tests: CallTests,
        trainable: Trainable,
        preprocessor: Any,
        layout: RankLayout,
        rng: StatefulRNG,
        stop_is_wanted: Callable[[], bool],
    ) -> None:
        """Raises :class:`RecipeError` for a model that generates no text, and without a tokenizer."""
        self.every_steps = settings.every_steps
        self._tests = tests.tests
        self._sampling = Sampling(settings.max_new_tokens, temperature=0.0)
        self._evaluated = EvaluatedModel(
            "tool calls", SECTION, trainable, preprocessor, layout, rng, stop_is_wanted
        )
        self._read = readers_of(self._evaluated.tokenizer)[tests.format]

    def run(self) -> Sequence[TaskMetric] | None:
        """Generate the calls; returns the metrics, or None if a stop was requested meanwhile. A collective; the same on
        all ranks."""
        layout = self._evaluated.layout
        counts = dict.fromkeys(TOOL_CALL_MEASURES, 0)
        failed: str | None = None
        try:
            with self._evaluated.in_use():
                for start in range(0, len(self._tests), layout.dp_size):
                    self._evaluated.check_for_stop()
                    number = start + layout.dp_rank
                    # A rank without a test takes part in the forward passes of the others.
                    test = self._tests[min(number, len(self._tests) - 1)]
                    text = self._answer(test)
                    if number >= len(self._tests) or not layout.reports:
                        continue
                    calls = read_calls(self._read, text)
                    for measure, holds in compared(calls, test.calls).items():
                        counts[measure] += holds
                    if failed is None and not compared(calls, test.calls)["exact_match"]:
                        failed = f"{', '.join(map(str, test.calls))}: the model wrote {text!r}"
        except Interrupted:
            return None
        if failed is not None:
            log.info("tool calls: one that is not right: expected %s", failed)
        sums = sum_over_ranks(layout.gloo_group, *counts.values())
        return [
            _share(measure, number, len(self._tests))
            for measure, number in zip(counts, sums, strict=True)
        ]

    def _answer(self, test: CallTest) -> str:
        """Generate the answer to a prompt, with its special tokens. A collective."""
        evaluated = self._evaluated
        tokens = torch.tensor([test.prompt], device=evaluated.layout.device)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        with evaluated.trainable.compute():
            completion = generate(
                evaluated.model,
                evaluated.preprocessor,
                inputs,
                self._sampling,
                synced=evaluated.layout.world_size > 1,
                end=test.end,
            )
        return str(evaluated.tokenizer.decode(completion.tokens))


def compared(calls: Sequence[Call], expected: Sequence[Call]) -> dict[str, bool]:
    """Compare the calls of an answer with the *expected* ones, in any order: the measures of one test by name."""
    names = sorted(call.name for call in calls)
    return {
        "exact_match": sorted(calls) == sorted(expected),
        "name_match": names == sorted(call.name for call in expected),
        "parsed": bool(calls),
    }


def _share(measure: str, number: float, num_tests: int) -> TaskMetric:
    """The share of *num_tests* tests in which a measure holds, with its standard error."""
    share = number / num_tests
    error = math.sqrt(share * (1 - share) / (num_tests - 1)) if num_tests > 1 else None
    return TaskMetric(TOOL_CALLS, measure, share, error)
