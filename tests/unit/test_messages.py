"""Error messages that no other test meets: each is met here, with where, the value and what to do."""

from __future__ import annotations

import dataclasses
import logging
import struct
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.cli.ckpt import main as ckpt
from automodel_ckpt.cli.launch.recipe_import import validate_cuda_not_initialized
from automodel_ckpt.cli.train import main as train
from automodel_ckpt.config.callables.prepare import prepare
from automodel_ckpt.config.callables.trust import Rejected, Trust, resolve
from automodel_ckpt.config.load import load_recipe
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.convert.open import open_source
from automodel_ckpt.data.batches.sampler import accumulation_steps
from automodel_ckpt.data.image_collate import ImageTextCollator
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.errors import AutomodelError, CheckpointUnusable, RecipeError
from automodel_ckpt.examples.data import digits
from automodel_ckpt.logs.metrics import JsonlLog
from automodel_ckpt.logs.tracker_process import require_trackers
from automodel_ckpt.models.layers.activation_memory import checkpoint_activations
from tests.support.models.shards import checkpoint_in

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(
    ("provoke", "said"),
    [
        (lambda: accumulation_steps(6, 4, 1), "equal micro-batches"),
        (lambda: accumulation_steps(0, 1, 1), "at least 1"),
        (lambda: require_trackers(["tensorboard"], has_logs=False), "writes none"),
        (lambda: checkpoint_activations(torch.nn.Linear(1, 1)), "recompute its activations"),
    ],
)
def test_an_argument_that_cannot_be_followed(provoke: Callable[[], object], said: str) -> None:
    refused(provoke, said)


def refused(provoke: Callable[[], object], said: str) -> None:
    with pytest.raises(AutomodelError, match=said) as caught:
        provoke()
    (problem,) = caught.value.problems
    assert problem.where and problem.value and problem.hint


def test_a_gpu_that_is_used_before_the_ranks_are_forked(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    refused(lambda: validate_cuda_not_initialized(torch), "uses a GPU while it is imported")


def test_a_recipe_is_not_copied_over_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "llm_finetune/tiny_llama_lora"
    assert train(["--copy", name, str(tmp_path)]) == 0
    assert train(["--copy", name, str(tmp_path)]) == 2
    assert "the recipe cannot be copied" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [(["pin"], "no checkpoint found"), (["prune", "--keep-last", "1"], "no checkpoints found")],
)
def test_a_directory_without_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert ckpt([*words, str(tmp_path)]) == 3
    assert said in capsys.readouterr().err


def test_an_adapter_has_nothing_to_consolidate(tmp_path: Path) -> None:
    checkpoint = checkpoint_in(tmp_path, 20)
    (checkpoint / "model" / "adapter_config.json").write_text("{}")
    manifest = Manifest.read(checkpoint)
    manifest.files["model/adapter_config.json"] = next(iter(manifest.files.values()))  # type: ignore[index]
    (checkpoint / "MANIFEST.json").write_bytes(manifest.to_bytes())
    with pytest.raises(CheckpointUnusable, match="are not a complete model"):
        open_source(checkpoint)


def test_a_log_line_that_cannot_be_written_now_is_a_warning(
    tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "training.jsonl"
    log = JsonlLog(path)
    monkeypatch.setattr(logging.getLogger("automodel_ckpt"), "propagate", True)
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(log, "_open", lambda: full)
        log.append({"step": 1})
        # The save that needs the line fails, and says which file it is about.
        with pytest.raises(OSError, match="No space left") as caught:
            log.flush()
    assert caught.value.filename == str(path)
    assert f"where:  {path}" in caplog.text
    assert "cannot be written now" in caplog.text and "ENOSPC" in caplog.text


@pytest.mark.parametrize(
    ("code", "name", "said"),
    [
        ("1 / 0", "Recipe", "cannot be imported: ZeroDivisionError"),
        (
            "raise MemoryError",
            "Recipe",
            r"out of memory[\s\S]*ulimit -v is[\s\S]*raise the memory limit",
        ),
        ("open('x' * 300)", "Recipe", "cannot be imported: OSError"),
        ("class Recipes: ...", "Recipe", r"has no Recipe[\s\S]*did you mean Recipes"),
        (
            "class Recipe:\n    setup = run = close = print\n    Config = dict",
            "Recipe",
            "its Config is a RecipeConfig",
        ),
    ],
)
def test_code_of_a_recipe_that_is_none(tmp_path: Path, code: str, name: str, said: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(code)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"recipe: own.py:{name}\nmodel: {{from_config: {{model_type: llama}}}}\n"
        "dataset: {_target_: automodel_ckpt.examples.data.python_docs.language_modeling}\n"
    )
    with pytest.raises(RecipeError, match=said):
        prepare(load_recipe(recipe), Trust([str(file)]))


def test_names_that_lead_nowhere(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "lazy_parts.py").write_text(
        "def __getattr__(name):\n    raise RuntimeError(name)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    trust = Trust(["nowhere_at_all", "lazy_parts"])
    with pytest.raises(Rejected, match="package nowhere_at_all not found"):
        resolve("nowhere_at_all.thing", trust)
    with pytest.raises(Rejected, match="Thing cannot be imported: RuntimeError"):
        resolve("lazy_parts.Thing", trust)


def test_an_answer_that_no_token_shows() -> None:
    processor = digits.processor()
    sample = digits.scans(processor)[0]
    collate = ImageTextCollator(processor, [processor.image_token_id])
    end = len(sample.text)
    with pytest.raises(
        RecipeError, match=r"this conversation has no assistant token to train on[\s\S]*scan 0"
    ):
        collate([dataclasses.replace(sample, labeled_spans=[(end, end)])])


def test_a_row_whose_text_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    # Parquet's reader does not check that text is UTF-8.
    offsets = pa.py_buffer(struct.pack("<2i", 0, 2))
    damaged = pa.StringArray.from_buffers(1, offsets, pa.py_buffer(b"\xff\xfe"))
    parquet.write_table(pa.table({"text": damaged}), path)
    with pytest.raises(RecipeError, match=r"a row cannot be read[\s\S]*rows.parquet, row 0"):
        Source(str(path)).row(0)


@dataclasses.dataclass
class Warmth:
    """A section that looks at itself."""

    degrees: int = 20

    def __post_init__(self) -> None:
        if self.degrees > 40:
            raise ValueError("no warmer than 40")


@dataclasses.dataclass
class WarmConfig(RecipeConfig):
    """Of a recipe in a user's own file."""

    warmth: Warmth = dataclasses.field(default_factory=Warmth)


def test_a_section_of_a_custom_recipe_may_check_itself(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("recipe: mine.py:Mine\nwarmth: {degrees: 50}\n")
    with pytest.raises(AutomodelError, match="warmth: no warmer than 40") as caught:
        load_recipe(path, [], schema=WarmConfig)
    assert any(problem.where == f"{path}:2" for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 samples"), (1, "1 sample"), (2, "2 samples"), (1024, "1,024 samples")],
)
def test_numbers_of_things_have_a_singular_and_a_plural(number: int, text: str) -> None:
    assert counted(number, "sample") == text
    assert counted(number, "box", "boxes") == text.replace("samples", "boxes").replace(
        "sample", "box"
    )
