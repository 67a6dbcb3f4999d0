"""The section ``evaluation.tool_calls``: calls that the model in training generates, without a trace in training."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from automodel_ckpt.data.conversations.call_tests import CallTests
from automodel_ckpt.errors import RecipeError, Stopped
from automodel_ckpt.logs.history import read_history
from automodel_ckpt.models.measure.generation import Completion
from automodel_ckpt.train.measure import tool_calls
from tests.contract.test_benchmarks import lines_of, stand_in  # noqa: F401
from tests.support import ranks
from tests.support.models.stand_ins import CALLS_CHAT, write_model
from tests.support.runs.training import build, train

RECIPE = """\
recipe: llm_finetune
model: {{from_pretrained: {model}, dtype: float32, config_overrides: {{attention_dropout: 0.1}}}}
dataset: {{_target_: automodel_ckpt.data.chat.messages, path: {data}, seq_length: 512}}
optimizer: {{lr: 0.0, weight_decay: 0.0}}
step_scheduler: {{global_batch_size: 2, local_batch_size: 1, max_steps: 3, ckpt_every_steps: 2}}
evaluation: {{tool_calls: {{path: {data}, every_steps: 2, max_new_tokens: 6}}}}
checkpoint: {{best_metric_key: eval_tool_calls_exact_match, best_mode: max}}
"""
NONE = ("--evaluation=null", "--checkpoint.best_metric_key=val_loss", "--checkpoint.best_mode=min")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tool_calls")
    # Large weights, so that answers depend on every token before them.
    write_model(directory / "chat", {"model_type": "llama", "initializer_range": 0.5}, CALLS_CHAT)
    rows = []
    for number in range(3):
        function = {"name": "add", "arguments": {"a": number, "b": 1}}
        ask = {"role": "user", "content": f"{number} plus one" + " please" * number}
        answer = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        rows.append({"messages": [ask, answer]})
    data = directory / "calls.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = directory / "recipe.yaml"
    path.write_text(RECIPE.format(model=directory / "chat", data=data))
    return path


def evaluations_of(run: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in lines_of(run) if line.get("event") == "evaluation"}


def trained(recipe: Path, run: Path, *words: str) -> tuple[dict[str, str], list[str]]:
    """Train as this rank; returns the digests of its state at the end, and the answers it generated that count."""
    answers: list[str] = []

    def read(_: Any, text: str) -> list[Any]:
        answers.append(text)
        return []

    tool_calls.read_calls = read  # type: ignore[assignment]
    return train(recipe, f"--checkpoint.checkpoint_dir={run}", *words), answers


def test_ranks_generate_the_answers_of_one_rank_and_training_is_the_same(
    recipe: Path, tmp_path: Path
) -> None:
    single = ranks.run(partial(trained, recipe, tmp_path / "single"), 1, init=False)
    without = ranks.run(partial(trained, recipe, tmp_path / "without", *NONE), 2, init=False)
    found = ranks.run(partial(trained, recipe, tmp_path / "with"), 2, init=False)
    for (digests, _), (expected, _) in zip(found, without, strict=True):
        # It has the state of the section.
        del digests["step_scheduler"], expected["step_scheduler"]
        assert digests == expected
    # After step 2 and at the end, the first rank answers two prompts, and the second one.
    [(_, expected_answers)] = single
    assert len(set(expected_answers)) == 3
    first, second = (answers for _, answers in found)
    assert [first[0], second[0], first[1], first[2], second[1], first[3]] == expected_answers
    assert list(evaluations_of(tmp_path / "with")) == [2, 3]


def test_the_shares_of_right_calls_are_logged_and_select_the_best_checkpoint(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    texts = ["none", '<call>{"name": "add", "arguments": {"a": 3}}', "none"]
    # Then all are right.
    right = []
    for number in range(3):
        right.append(json.dumps({"arguments": {"b": 1.0, "a": number}, "name": "add"}))
    texts += right
    stops: list[Any] = []

    def generate(model: Any, preprocessor: Any, *_: Any, **options: Any) -> Completion:
        if len(texts) == 2 and stops:
            # While the last prompts of the last step are answered.
            stops.pop().requested = 15
        tokens = preprocessor.encode(texts.pop(0))
        return Completion("", 1, len(tokens), "stop", 0.0, tokens)

    monkeypatch.setattr(tool_calls, "generate", generate)
    words = (
        "--evaluation.tool_calls.every_steps=2",
        f"--checkpoint.checkpoint_dir={tmp_path / 'run'}",
    )
    run = build(recipe, *words)
    try:
        run.setup()
        stops.append(run.stop_request)
        with caplog.at_level(logging.INFO), pytest.raises(Stopped):
            run.run()
    finally:
        run.stop_request.requested = None
        run.close()
    assert list(evaluations_of(tmp_path / "run")) == [2]
    record = evaluations_of(tmp_path / "run")[2]
    for measure, share in (("exact_match", 0), ("name_match", 1 / 3), ("parsed", 1 / 3)):
        assert record[f"eval_tool_calls_{measure}"] == pytest.approx(share)
    assert record["eval_tool_calls_parsed_stderr"] == pytest.approx(1 / 3)
    assert "calls.jsonl: 3 turns with tool calls; format: JSON" in caplog.text
    assert "max_new_tokens 6: 3 answers in the data" in caplog.text
    assert """expected add({"a": 0, "b": 1}): the model wrote 'none'""" in caplog.text
    # The next start makes up for the evaluation that the stop ended.
    texts[:] = right
    train(recipe, *words)
    assert evaluations_of(tmp_path / "run")[3]["eval_tool_calls_exact_match"] == 1
    assert (tmp_path / "run/LOWEST_VAL").readlink().name.endswith("step_3")
    history = read_history(tmp_path / "run")
    assert history.series["eval_tool_calls_exact_match"].values == (0, 1)


@pytest.mark.usefixtures("stand_in")
def test_each_benchmark_runs_at_its_interval(recipe: Path, tmp_path: Path) -> None:
    words = ("--evaluation.harness={tasks: [pick], every_steps: 2}", "--step_scheduler.max_steps=3")
    at_end = "--evaluation.tool_calls.every_steps=null"
    train(recipe, f"--checkpoint.checkpoint_dir={tmp_path / 'run'}", *words, at_end)
    found = evaluations_of(tmp_path / "run")
    assert list(found) == [2, 3]
    measured = "eval_tool_calls_exact_match"
    assert [measured in found[step] for step in (2, 3)] == [False, True]
    assert ["eval_pick_acc" in found[step] for step in (2, 3)] == [True, True]
    # The best metric is null where it was not measured.
    path = next((tmp_path / "run").glob("epoch_*_step_2"))
    assert json.loads((path / "losses.json").read_text())[measured] is None


def test_each_key_selects_the_turns_and_their_prompts(recipe: Path, tmp_path: Path) -> None:
    rows = map(json.loads, (recipe.parent / "calls.jsonl").read_text().splitlines())
    data = tmp_path / "other.jsonl"
    others = [{"talk": row["messages"], "functions": [{"name": "add"}]} for row in rows]
    data.write_text("".join(json.dumps(row) + "\n" for row in others))
    tokenizer = AutoTokenizer.from_pretrained(recipe.parent / "chat")

    def tests(*words: str) -> CallTests:
        keys = (f"--evaluation.tool_calls.{word}" for word in words)
        config = build(recipe, *keys, "--dataset.template_kwargs={note: of the data}").config
        return tool_calls.read_call_tests(config, tokenizer, None, None)

    def prompt(*words: str) -> str:
        return str(tokenizer.decode(tests(*words).tests[0].prompt))

    assert len(tests().tests) == 3
    assert len(tests("limit=2").tests) == 2
    assert len(tests("max_samples=1").tests) == 1
    assert tests("split=train[1:]").tests == tests().tests[1:]
    longest = f"max_prompt_tokens={len(tests().tests[0].prompt)}"
    assert (len(tests(longest).tests), tests(longest).num_too_long) == (1, 2)
    fields = (f"path={data}", "messages_field=talk", "tools_field=functions")
    assert '{"name": "add"}' in prompt(*fields)
    assert '{"name": "add"}' not in prompt(*fields[:2])
    template = "chat_template={{ note }}" + CALLS_CHAT.replace("\n", " ")
    assert prompt(template).startswith("of the data")
    assert prompt(template, "template_kwargs={note: of its own}").startswith("of its own")
    for key, what in (("name", "has no subsets"), ("revision", "has no revision")):
        with pytest.raises(RecipeError, match=f"{what}\n  where:  evaluation.tool_calls.{key}"):
            tests(f"{key}=other")


def test_mistakes_are_errors_before_weights_are_read(recipe: Path, tmp_path: Path) -> None:
    section = "--evaluation.tool_calls"
    for words, expected in (
        ([f"{section}.path=[]"], f"{section[2:]}.path must be non-empty"),
        ([f"{section}.limit=0"], f"{section[2:]}.limit must be 1 or more"),
        ([f"{section}.max_new_tokens=0"], "max_new_tokens must be 1 or more"),
        (["--distributed.pp_size=2"], "benchmarks cannot run with pipeline stages"),
        (
            [f"{section}.limit=x", "--step_scheduler.ckpt_on_best"],
            r"^[^\n]*limit must be[^\n]*\n( .*\n?)*$",
        ),
    ):
        with pytest.raises(RecipeError, match=expected):
            build(recipe, *words)
    for words, expected in (
        ([f"{section}.max_new_tokens=4096"], "answers leave no place for a prompt"),
        ([f"{section}.max_prompt_tokens=3"], f"where:  {section[2:]}.max_prompt_tokens"),
        ([f"{section}.split=test"], f"where:  {section[2:]}.split"),
        ([f"{section}.messages_field=talk"], "the data has no field talk"),
        ([f"{section}.chat_template=" + "{{ messages }}"], f"set {section[2:]}.chat_template to"),
        (["--checkpoint.best_metric_key=eval_tool_calls"], "measures train_loss, eval_tool_calls_"),
    ):
        run = build(recipe, f"--checkpoint.checkpoint_dir={tmp_path / 'run'}", *words)
        with pytest.raises(RecipeError, match=expected):
            run.setup()
        run.close()
        assert not hasattr(run, "model")
