"""A tiny training run on real text, started, killed and started again; what it leaves behind, to be compared."""

import hashlib
import importlib
import io
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import automodel_ckpt
from automodel_ckpt.checkpoint.parts.manifest import environment
from automodel_ckpt.config.callables.prepare import prepare
from automodel_ckpt.config.callables.trust import Trust
from automodel_ckpt.config.load import LoadedRecipe, load_recipe
from automodel_ckpt.config.overrides import parse
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import keys_of
from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.parallel.ranks.stop import stop_request
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.counters.step_scheduler import Due
from automodel_ckpt.training.loop import TrainingLoop
from automodel_ckpt.training.recipe import Recipe as AnyRecipe
from automodel_ckpt.training.values.records import Control
from tests.support.models.tiny_model import tiny_llama
from tests.support.models.whole_state import whole_state
from tools.support import MEASURED, step_lines

# What each rank would otherwise do for itself after the fork: 0.1 s of regular expressions, some imports, two processes
# of git and the metadata of packages for the manifest, and the types of the keys.
for module in (
    "transformers.models.llama.modeling_llama",
    "transformers.optimization",
    "automodel_ckpt.checkpoint.saving.async_saves",
    "automodel_ckpt.config.automodel.translation",
    "automodel_ckpt.config.other_recipes",
    "automodel_ckpt.examples.data.python_docs",
    "automodel_ckpt.models.model_checks",
    "automodel_ckpt.parallel.tensor_parallel",
    "automodel_ckpt.training.watch.hang_watch",
):
    importlib.import_module(module)
get_checkpoint_conversion_mapping("llama")  # type: ignore[no-untyped-call]
environment()
list(keys_of(RecipeConfig))

MODEL = tiny_llama(attention_dropout=0.2, tie_word_embeddings=True)
RECIPE = f"""
seed: 7
{MODEL}tokenizer:
  _target_: automodel_ckpt.examples.data.python_docs.train_tokenizer
  vocab_size: 300
dataset:
  _target_: automodel_ckpt.examples.data.python_docs.language_modeling
  seq_length: 16
  max_samples: 44
optimizer:
  lr: 1e-2
lr_scheduler:
  name: cosine
  warmup_steps: 2
step_scheduler:
  global_batch_size: 8
  local_batch_size: 4
  num_epochs: 2
  ckpt_every_steps: 5
  ckpt_every_epochs: null
logging:
  sample_ids: true
"""
"""44 samples in global batches of 8: 6 steps an epoch, the last of 4 samples; saves at 5, 10 and the end, 12."""

VALIDATION = """
validation_dataset:
  _target_: automodel_ckpt.examples.data.python_docs.language_modeling
  seq_length: 16
  max_samples: 11
  split: validation
"""

EXPORT = "--checkpoint.save_consolidated=final"
"""For runs whose export a test reads: without it, those of :func:`build` export nothing."""


Recipe = LLMFinetune


def with_loop(recipe_class: type[AnyRecipe], mixin: type[TrainingLoop]) -> Any:
    """*recipe_class* with a loop whose methods *mixin* extends."""
    loop_class = type(mixin.__name__, (mixin, recipe_class.loop_class), {})
    return type(recipe_class.__name__, (recipe_class,), {"loop_class": loop_class})


def write_recipe(directory: Path, text: str = RECIPE) -> Path:
    path = directory / "recipe.yaml"
    path.write_text(text)
    return path


def installed(*arguments: Any, **options: Any) -> Any:
    """Train with the signal handlers that the command line installs."""
    stop_request().install()
    return train(*arguments, **options)


def build(
    recipe_file: Path,
    *overrides: str,
    recipe_class: type[AnyRecipe] | None = None,
    trust: Sequence[str] = ("tests",),
) -> AnyRecipe:
    """The recipe object of a file and command-line overrides, not set up; by default of the class that it names."""
    prepared = prepare(_loaded(recipe_file, *overrides), Trust(list(trust)))
    loaded = prepared.loaded
    recipe: AnyRecipe = (recipe_class or prepared.recipe_class)(
        loaded.config, config_yaml=loaded.to_yaml()
    )
    recipe.origins = loaded.origins
    recipe.overridden = frozenset(loaded.overridden)
    return recipe


def train(
    recipe_file: Path,
    *overrides: str,
    recipe_class: type[AnyRecipe] | None = None,
    dies_after: int = 0,
    trust: Sequence[str] = ("tests",),
) -> dict[str, str]:
    """Train in this process, as the rank that RANK says; the digests of the state at the end.

    A *recipe_class* takes the place of the class that the recipe names. *dies_after* is a step that kills the process.
    """
    if dies_after:
        named = prepare(_loaded(recipe_file, *overrides), Trust(list(trust))).recipe_class
        recipe_class = killed_after(dies_after, recipe_class=recipe_class or named)
    if recipe_class is not None:
        recipe = build(recipe_file, *overrides, recipe_class=recipe_class, trust=trust)
        try:
            recipe.setup()
            recipe.run()
            return digests(recipe)
        finally:
            recipe.close()
    result = automodel_ckpt.train(_loaded(recipe_file, *overrides), trust=trust)
    found = {"weights": digest(dict(result.model.state_dict()))}
    if result.checkpoint is not None:
        found |= saved_digests(result.checkpoint)
    return found


def trained_weights(recipe_file: Path, *overrides: str) -> dict[str, torch.Tensor]:
    """Train in this process, as the rank that RANK says; the complete weights and buffers at the end."""
    recipe = build(recipe_file, *overrides)
    try:
        recipe.setup()
        recipe.run()
        return whole_state(recipe.model)
    finally:
        recipe.close()


def _loaded(recipe_file: Path, *overrides: str) -> LoadedRecipe:
    """Load a recipe with command-line overrides.

    Unless the recipe or an override has ``checkpoint.save_consolidated``, the run exports nothing: the final export
    takes a fifth of the time of such a run.
    """
    given = recipe_file.read_text() + " ".join(overrides)
    if "save_consolidated" not in given:
        overrides = (*overrides, "--checkpoint.save_consolidated=false")
    line = parse(overrides)
    return load_recipe(recipe_file, line.overrides, problems=line.problems)


def saved_digests(checkpoint: Path) -> dict[str, str]:
    """A digest of each part of a checkpoint that docs/format.md describes, without its step counter and its times.

    ``rng`` are the random numbers of this rank.
    """
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    found = {}
    for name, tree in manifest["trees"].items():
        tensors = {
            key: [tensor["dtype"], *(slice_["digest"] for slice_ in tensor["slices"])]
            for key, tensor in tree["tensors"].items()
        }
        values = {
            key: _pickled(checkpoint / value["file"], value["start"], value["nbytes"])
            for key, value in tree.get("objects", {}).items()
        }
        found[name] = digest({"tensors": tensors, "values": values})
    for file in manifest["files"]:
        if file.startswith(("rng/", "dataloader/")):
            found[file] = digest(_pickled(checkpoint / file))
        if re.fullmatch(rf"rng/.*_rank_{os.environ.get('RANK', '0')}\.pt", file):
            found["rng"] = found[file]
    return found


def _pickled(file: Path, start: int = 0, size: int = -1) -> Any:
    with file.open("rb") as stream:
        stream.seek(start)
        return torch.load(io.BytesIO(stream.read(size)), weights_only=False)


def killed_after(*steps: int, recipe_class: type[AnyRecipe] = LLMFinetune) -> type[AnyRecipe]:
    """*recipe_class*, which kills its process right after each of *steps*."""

    class Killed(TrainingLoop):
        def step(self, batch: GlobalBatch, control: Control) -> Due:
            due = super().step(batch, control)
            if self.step_scheduler.step in steps:
                os.kill(os.getpid(), signal.SIGKILL)
            return due

    killed: type[AnyRecipe] = with_loop(recipe_class, Killed)
    return killed


def digests(recipe: AnyRecipe) -> dict[str, str]:
    """A digest of this rank's weights, optimizer, schedule, random state and counters."""
    counters = {
        k: v for k, v in recipe.step_scheduler.state_dict().items() if k != "elapsed_seconds"
    }
    states: dict[str, Any] = {
        "weights": dict(recipe.model.state_dict()),
        "optimizer": recipe.optimizer.state_dict(),
        "lr_scheduler": recipe.lr_scheduler.state_dict() if recipe.lr_scheduler else {},
        "rng": recipe.rng.state_dict(),
        "dataloader": recipe.dataloader.state_dict(),
        "step_scheduler": counters,
    }
    if recipe.weight_average is not None:
        states["average"] = dict(recipe.weight_average.module.state_dict())
    return {name: digest(state) for name, state in states.items()}


def digest(state: Any) -> str:
    content = hashlib.blake2b()
    for key, value in sorted(_leaves("", state)):
        content.update(f"{key}={value}\n".encode())
    return content.hexdigest()


def _leaves(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, element in value.items():
            yield from _leaves(f"{key}.{name}", element)
    elif isinstance(value, list | tuple):
        for index, element in enumerate(value):
            yield from _leaves(f"{key}[{index}]", element)
    elif isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        raw = (
            local.detach()
            .cpu()
            .clone(memory_format=torch.contiguous_format)
            .reshape(-1)
            .view(torch.uint8)
            .numpy()
            .tobytes()
        )
        yield key, f"{local.dtype} {tuple(local.shape)} {hashlib.blake2b(raw).hexdigest()}"
    else:
        yield key, value.hex() if isinstance(value, float) else repr(value)


def steps_of(run_directory: Path) -> list[dict[str, Any]]:
    """The step records of training.jsonl, floats as hex; without what depends on the clock or the machine."""
    return [
        {key: value.hex() if isinstance(value, float) else value for key, value in record.items()}
        for record in step_lines(run_directory / "training.jsonl", MEASURED)
    ]
