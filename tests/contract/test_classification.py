"""What users of recipe: sequence_classification see: errors, previews, and what its checkpoints are for."""

import json
import re
import shutil
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import ClassLabel, Dataset, Features, List, Value
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    pipeline,
)

from automodel_ckpt.cli.ckpt import main as run_ckpt
from automodel_ckpt.cli.train import main
from tests.support.models.sizes import model_sizes
from tests.support.models.small_tokenizer import small_tokenizer
from tests.support.servers.command_server import CommandServer

LABELS = ("json", "tarfile", "zipfile")
RECIPE = """\
recipe: sequence_classification
model: {from_pretrained: base}
classification: {labels: [json, tarfile]}
dataset: {_target_: automodel_ckpt.examples.data.library_topics.library_topics, seq_length: 24}
step_scheduler: {global_batch_size: 4, local_batch_size: 4, max_steps: 2}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model, whose tokenizer has no pad token."""
    directory = tmp_path_factory.mktemp("base")
    config = LlamaConfig(
        **model_sizes(vocab=300, hidden=16, inner=16, layers=1, heads=2, kv_heads=2, positions=32)
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer = small_tokenizer(300)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def recipe(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, "base")
    Path("recipe.yaml").write_text(RECIPE)
    return "recipe.yaml"


@pytest.mark.parametrize(
    ("override", "where", "what"),
    [
        ("--classification.labels=[a, a]", "--classification.labels", "different and not empty"),
        ("--classification.labels=[a]", "--classification.labels", "a single label needs no model"),
        ("--classification.num_labels=2", "--classification.num_labels", "cannot be combined"),
        ("--recipe=llm_finetune", "recipe.yaml:3", "only the recipe sequence_classification"),
        ("--classification=null", "classification.labels", "the labels are not known"),
        ("--packed_sequence.size=64", "packed_sequence", "a row has one label"),
    ],
)
def test_a_mistake_is_reported_with_its_place(
    recipe: str, commands: CommandServer, override: str, where: str, what: str
) -> None:
    # Not in this process: some mistakes are found after the run has started threads.
    done = commands.run("ckpt-train", recipe, override)
    assert done.returncode == 2
    assert what in done.stderr
    assert where in done.stderr
    assert "hint:" in done.stderr
    assert not Path("checkpoints").exists()


BOOLEANS = "[true, false]"
STARS = "['1 star', '2 stars', '3 stars', '4 stars', '5 stars']"
NUMBERS = "['1', '2', '3']"
TOPICS = "[sport, politics, science]"
SEVERAL = ["--classification.problem=multi_label"]


def shown_labels(
    capsys: pytest.CaptureFixture[str], labels: str, *options: str, file: str = "rows.jsonl"
) -> list[str]:
    """The labels of all rows of a file in their order, as ``--show-samples`` prints them; the error in their place."""
    words = [f"--classification.labels={labels}", f"--dataset.path={file}", *options]
    code = main(["labels.yaml", "--show-samples", "99", *words])
    printed = capsys.readouterr()
    if code:
        assert code == 2, printed.err
        return [" ".join(printed.err.split())]
    found = re.findall(r"^sample (\d+): .*?, label (.*)$", printed.out, re.MULTILINE)
    return [label for _, label in sorted(found, key=lambda each: int(each[0]))]


@pytest.fixture
def label_recipe(recipe: str) -> None:
    text = (
        Path(recipe)
        .read_text()
        .replace("examples.data.library_topics.library_topics", "data.classification.texts")
    )
    text = text.replace("{labels: [json, tarfile]}", "{}").replace(
        "seq_length", "path: x, seq_length"
    )
    Path("labels.yaml").write_text(text)


def write_rows(labels: list[Any]) -> None:
    rows = [json.dumps({"text": f"text {label}", "label": label}) for label in labels]
    Path("rows.jsonl").write_text("\n".join(rows))


@pytest.mark.parametrize(
    ("names", "options", "values", "shown"),
    [
        (TOPICS, SEVERAL, [[0, 1, 0], [1.0, 0.0, 1.0], [0, 0, 0]], ["politics", "sport, science", "none"]),
        (TOPICS, SEVERAL, [[False, True, False], [True, False, False]], ["politics", "sport"]),
        (TOPICS, SEVERAL, [["0", "1", "0"], "[1, 0, 1]"], ["politics", "sport, science"]),
        (TOPICS, SEVERAL, [[0, 2], [], "[1]"], ["sport, science", "none", "politics"]),
        ("[a]", SEVERAL, [[0], [1]], ["none", "a"]),
        ("[a, b]", [*SEVERAL, "--dataset.label_values=one_hot"], [[0, 1]], ["b"]),
        ("[a, b]", [*SEVERAL, "--dataset.label_values=indices"], [[0, 1]], ["a, b"]),
        (BOOLEANS, [], [True, False, "True", "false"], ["true", "false", "true", "false"]),
        ("[false, true]", [], [1, 0, "1", 0.0], ["true", "false", "true", "false"]),
        (BOOLEANS, ["--dataset.label_values=indices"], [1, 0], ["false", "true"]),
        ("[a, b]", ["--dataset.label_values=indices"], [True, False], ["b", "a"]),
        (STARS, [], [0, 4, 1], ["1 star", "5 stars", "2 stars"]),
        (NUMBERS, [], [1, "3", 2.0], ["1", "3", "2"]),
        (TOPICS, [], ["1", 0.0, "science"], ["politics", "sport", "science"]),
    ],
)  # fmt: skip
def test_labels_are_read_as_all_rows_allow(
    label_recipe: None,
    capsys: pytest.CaptureFixture[str],
    names: str,
    options: list[str],
    values: list[Any],
    shown: list[str],
) -> None:
    write_rows(values)
    assert shown_labels(capsys, names, *options) == shown


@pytest.mark.parametrize("several", [False, True])
def test_classes_of_the_data_are_found_by_their_names(
    label_recipe: None, capsys: pytest.CaptureFixture[str], several: bool
) -> None:
    kind: Any = ClassLabel(names=["positive", "negative"])
    options = SEVERAL if several else []
    rows = [
        {"text": "good", "label": [0] if several else 0},
        {"text": "bad", "label": [1] if several else 1},
    ]
    features = Features({"text": Value("string"), "label": List(kind) if several else kind})
    Dataset.from_list(rows, features=features).to_parquet("rows.parquet")
    shown = partial(shown_labels, capsys, file="rows.parquet")
    assert shown("[negative, positive]", *options) == ["positive", "negative"]
    [error] = shown("[neg, pos]", *options)
    assert "row 0" in error
    assert "the data has positive, negative, and the labels are neg, pos" in error
    assert shown("[pos, neg]", "--dataset.label_values=indices", *options) == ["pos", "neg"]
    assert shown("[]", "--classification.num_labels=2", *options) == ["LABEL_0", "LABEL_1"]


def loaded_as_the_model_card_says(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the code of the model card of an adapter, with its directory in place of the repository."""
    card = ["card", str(adapter.parent), "hub:org/tiny", "--base-model", "org/base"]
    with redirect_stdout(StringIO()) as printed:
        assert run_ckpt(card) == 0
    [code, *_] = re.findall(r"```python\n(.*?)```", printed.getvalue(), re.DOTALL)
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda repo, name, revision=None: f"{repo}/{name}"
    )
    namespace: dict[str, Any] = {}
    exec(code.replace("org/tiny", str(adapter)).replace("org/base", "base"), namespace)
    return namespace["model"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_adapters_with_a_new_head_load_and_are_merged(
    recipe: str,
    commands: CommandServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    labels = f"--classification.labels=[{', '.join(LABELS)}]"
    done = commands.run("ckpt-train", recipe, "--peft.r=2", labels)
    assert done.returncode == 0, done.stderr
    adapter = Path("checkpoints/LATEST/model")
    config = AutoConfig.from_pretrained(adapter / "model_config.json")
    assert config.id2label == dict(enumerate(LABELS))
    adapted = loaded_as_the_model_card_says(adapter, monkeypatch)
    texts = ["Open an archive.", "Decode a document."]
    # The checkpoint's tokenizer has the end token as its pad token.
    one = pipeline("text-classification", model=adapted, tokenizer=str(adapter))

    assert run_ckpt(["export", "--merge", "checkpoints/LATEST", "-o", "merged"]) == 0
    assert 'pipeline("text-classification"' in capsys.readouterr().err
    weights = json.loads(Path("merged/model.safetensors.index.json").read_text())["weight_map"]
    assert "score.weight" in weights
    assert "lm_head.weight" not in weights
    assert not Path("merged/generation_config.json").exists()
    other = pipeline("text-classification", model="merged")
    for a, b in zip(one(texts, batch_size=2), other(texts, batch_size=2), strict=True):
        assert a["label"] == b["label"]
        assert a["score"] == pytest.approx(b["score"], abs=1e-5)

    for path in ("merged", "checkpoints/LATEST"):
        assert run_ckpt(["generate", path, "-p", "hello"]) == 2
        assert "generates none" in " ".join(capsys.readouterr().err.split())


def stored(directory: Path) -> dict[str, str]:
    """{name: dtype} of the tensors in Hugging Face files."""
    found: dict[str, str] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = file.keys()
            found.update({name: file.get_slice(name).get_dtype() for name in names})
    return found


def headless(source: Path, kind: str) -> None:
    """Write a base in bfloat16 to ./headless: a backbone, or an encoder with another head and without a pooler."""
    config = BertConfig(
        **model_sizes(vocab=300, hidden=16, inner=16, layers=1, heads=2, positions=32)
    )
    if kind == "llama":
        model = AutoModel.from_pretrained(source)
    elif kind == "bert":
        model = AutoModel.from_config(config)
    else:
        model = AutoModelForMaskedLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained("headless")
    AutoTokenizer.from_pretrained(source).save_pretrained("headless")


TOPICS = "{_target_: automodel_ckpt.examples.data.library_topics.library_topics, seq_length: 24}"
PAIRS = "{_target_: automodel_ckpt.data.text_pairs.text_pairs, path: pairs.jsonl, seq_length: 24}"


@pytest.mark.parametrize(
    ("kind", "recipe_name", "options"),
    [
        ("llama", "sequence_classification", ()),
        ("bert", "reranker", ()),
        ("llama", "sequence_classification", ("--peft.r=2",)),
        # The pooler is new.
        ("bert with another head", "embedding", ()),
    ],
)
def test_exports_have_the_names_that_save_pretrained_writes(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    commands: CommandServer,
    kind: str,
    recipe_name: str,
    options: tuple[str, ...],
) -> None:
    """transformers 4 loads a new head only next to a backbone whose names have its prefix."""
    monkeypatch.chdir(tmp_path)
    headless(base, kind)
    row = {"query": "Who?", "positive": "She.", "negatives": ["Here."]}
    Path("pairs.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    is_classifier = recipe_name == "sequence_classification"
    text = RECIPE.replace("base", "headless").replace("sequence_classification", recipe_name)
    if not is_classifier:
        text = text.replace("classification: {labels: [json, tarfile]}\n", "")
        text = text.replace(TOPICS, PAIRS)
    Path("recipe.yaml").write_text(text.replace("headless}", "headless, dtype: float32}"))
    done = commands.run("ckpt-train", "recipe.yaml", *options)
    assert done.returncode == 0, done.stderr
    export = Path("checkpoints/LATEST/model/consolidated")
    if options:
        export = Path("merged")
        assert run_ckpt(["export", "--merge", "checkpoints", "-o", "merged"]) == 0
    config = AutoConfig.from_pretrained(export)
    model = getattr(transformers, config.architectures[0])(config)
    model.save_pretrained("saved")
    names = stored(export)
    assert names.keys() == stored(Path("saved")).keys()
    # The dtypes are those of the base, under its other names.
    own = [name for name, dtype in names.items() if dtype != "BF16"]
    assert all(name.startswith(("score.", "classifier.", "pooler.")) for name in own)
