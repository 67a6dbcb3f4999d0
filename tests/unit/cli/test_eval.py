"""`ckpt eval` gives the accuracy of plain transformers on a local task. `make harness` installs the library."""

import json
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.models.measure.harness import TaskMetric, metrics_of
from tests.support.models.stand_ins import LLAMA_CHAT, write_model

Capture = pytest.CaptureFixture[str]
ROWS = [
    {"question": "What is two plus one?", "choices": ["three", "one", "seven"], "answer": 0},
    {"question": "What is not one?", "choices": ["one", "What two"], "answer": 1},
    {"question": "plus", "choices": ["is", "two"], "answer": 0},
    {"question": "two is", "choices": ["two", "one"], "answer": 1},
]
TASK = """\
task: pick
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
needs_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "chat"
    # Large weights, so that the choices have different probabilities.
    write_model(path, {"model_type": "llama", "initializer_range": 0.5}, LLAMA_CHAT)
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks")
    data = path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (path / "pick.yaml").write_text(TASK.format(data=data))
    return path


def expected_accuracy(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> float:
    """The fraction of *rows* whose answer has the highest sum of log probabilities after the question."""
    num_right = 0
    for row in rows:
        scores = []
        for choice in row["choices"]:
            prompt = tokenizer(row["question"])["input_ids"]
            whole = tokenizer(f"{row['question']} {choice}", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                probabilities = model(whole).logits.log_softmax(-1)[0, :-1]
            of_tokens = probabilities.gather(1, whole[0, 1:, None])[len(prompt) - 1 :]
            scores.append(of_tokens.sum().item())
        num_right += scores.index(max(scores)) == row["answer"]
    return num_right / len(rows)


def evaluated(capsys: Capture, path: Path, tasks: Path, *options: str) -> dict[str, Any]:
    command = ["eval", str(path), "--tasks", "pick", "--include-path", str(tasks), *options]
    assert main([*command, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@needs_harness
def test_a_checkpoint_an_export_and_an_adapter_get_the_accuracy_of_transformers(
    model: Path, tasks: Path, tmp_path: Path, capsys: Capture
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model)
    assert main(["import", str(model), str(tmp_path / "run")]) == 0
    capsys.readouterr()
    for path in (model, tmp_path / "run"):
        (metric,) = evaluated(capsys, path, tasks, "--batch-size", "2")["metrics"]
        assert metric["name"] == "eval_pick_acc" and metric["task"] == "pick"
        assert metric["value"] == expected_accuracy(plain, tokenizer, ROWS)
        assert metric["stderr"] >= 0
    (limited,) = evaluated(capsys, model, tasks, "--limit", "3")["metrics"]
    assert limited["value"] == expected_accuracy(plain, tokenizer, ROWS[:3])
    torch.manual_seed(3)
    with warnings.catch_warnings():
        # peft uses names of transformers that will be removed.
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(plain, LoraConfig(r=4, init_lora_weights=False, lora_alpha=64))
    adapted.save_pretrained(tmp_path / "adapter")
    (of_adapter,) = evaluated(capsys, tmp_path / "adapter", tasks)["metrics"]
    assert of_adapter["value"] == expected_accuracy(adapted, tokenizer, ROWS)


@needs_harness
def test_a_table_is_printed_and_mistakes_are_errors(
    model: Path, tasks: Path, tmp_path: Path, capsys: Capture
) -> None:
    command = ["eval", str(model), "--include-path", str(tasks), "--tasks"]
    assert main([*command, "pick"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("pick  acc     ")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "pick.yaml").write_text(TASK.format(data=tmp_path / "missing.jsonl"))
    assert main(["eval", str(model), "--tasks", "pick", "--include-path", str(broken)]) == 2
    assert "lm-evaluation-harness failed" in capsys.readouterr().err
    assert main(["eval", str(model), "--tasks", "pick", "--include-path", "nowhere"]) == 2
    assert "there is no directory of task files" in capsys.readouterr().err


def test_the_library_and_names_of_tasks_are_required(
    model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["eval", str(model), "--tasks", ","]) == 2
    assert "there is no name of a task" in capsys.readouterr().err
    assert main(["eval", str(model), "--tasks", "a", "--limit", "0"]) == 2
    assert "0 is less than 1" in capsys.readouterr().err
    # Python imports nothing from this name, as if it were not installed.
    monkeypatch.setattr("automodel_ckpt.models.measure.harness.find_spec", lambda name: None)
    assert main(["eval", str(model), "--tasks", "hellaswag"]) == 2
    message = capsys.readouterr().err
    assert "lm-evaluation-harness is not installed" in message
    assert "pip install 'automodel_ckpt[eval]'" in message
    assert "lm_eval" not in sys.modules or find_spec("lm_eval") is not None


def test_metrics_have_names_with_their_filter_and_errors_where_there_are_some() -> None:
    results = {
        "b": {"alias": "b", "exact_match,strict": 0.5, "exact_match_stderr,strict": "N/A"},
        "a": {"acc,none": 1, "acc_stderr,none": 0.25, "alias": "a", "sample_len": 4},
    }
    found = list(metrics_of(results))
    assert found == [
        TaskMetric("a", "acc", 1.0, 0.25),
        TaskMetric("b", "exact_match_strict", 0.5, None),
    ]
    assert [metric.name for metric in found] == ["eval_a_acc", "eval_b_exact_match_strict"]
