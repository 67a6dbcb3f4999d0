"""The recipe of ``ckpt-train --model MODEL --data DATA [--lora]``, which is a file in the working directory."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.base.durable_io import replace_file
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, ValueDict
from automodel_ckpt.config.overrides import CommandLine
from automodel_ckpt.config.tree.yaml_tree import lines, node_of
from automodel_ckpt.errors import PERMISSIONS_HINT, Problem, RecipeError

_PAIRS = "text.prompt_completion as_chat=auto"
# Columns of data -> the builder that reads them, and its arguments. The first that fits is used.
_BUILDERS = {
    "messages": "chat.messages",
    "conversations": "chat.messages",
    "prompt completion": _PAIRS,
    "instruction input output": f"{_PAIRS} completion_field=output",
    "instruction output": f"{_PAIRS} prompt_field=instruction completion_field=output",
    "text": "text.text",
}
_WITH_INPUT = "{{ instruction }}{% if input %}\n\n{{ input }}{% endif %}"


@dataclass(frozen=True)
class GeneratedRecipe:
    """A recipe as YAML, and the file that it is written to."""

    path: Path
    text: str

    def write(self) -> bool:
        """Write the file, and return whether it is new. Raises :class:`RecipeError` if that fails."""
        if self.path.exists():
            return False
        try:
            replace_file(self.path, self.text.encode())
        except OSError as error:
            raise RecipeError.of_system(
                error, "the recipe cannot be written", hint=PERMISSIONS_HINT
            ) from error
        return True


def generated_recipe(line: CommandLine) -> GeneratedRecipe | None:
    """Return the recipe that ``--model`` and ``--data`` describe. Returns None when the command line names a recipe.

    Its override ``--model`` is removed from *line*.

    Raises:
        RecipeError: If one of them is missing, if no builder reads the data's columns, or if the file exists with
            other content.
    """
    models = [override for override in line.overrides if override.key == "model"]
    flags = [name for name in ("data", "lora") if name in line.modes]
    if line.words or not (models or flags):
        what, hint = "is for runs without a recipe file", "use --dataset.path or --peft.r"
        line.problems += [Problem(f"--{name} {what}", f"--{name}", "", hint) for name in flags]
        return None
    if not models or "data" not in flags:
        raise RecipeError(
            "a run without a recipe file needs --model and --data", "command line", ""
        )
    line.overrides = [override for override in line.overrides if override not in models]
    model, (data,) = str(models[-1].node.value), line.modes["data"]
    names = [
        os.path.basename(os.path.abspath(model)),
        Path(data).stem,
        *["lora"] * ("lora" in flags),
    ]
    name = re.sub(r"[^\w.-]+", "_", "-".join(names))
    recipe = _recipe(model, data, f"checkpoints/{name}", with_lora="lora" in flags)
    text = "".join(f"{text}\n" for text, _ in lines(node_of(recipe)))
    found = GeneratedRecipe(Path(f"{name}.yaml"), text)
    try:
        is_other = found.path.exists() and found.path.read_bytes() != text.encode()
    except OSError:  # such as a directory
        is_other = True
    if is_other:
        raise RecipeError(
            "a recipe with other content exists",
            found.path,
            "",
            f"`ckpt-train {found.path}` trains it; or rename it to write a new one",
        )
    return found


def _recipe(model: str, data: str, run: str, *, with_lora: bool) -> ValueDict:
    return {
        "model": {"from_pretrained": model},
        **({"peft": {"r": 16, "target_modules": "all-linear"}} if with_lora else {}),
        "dataset": {**_builder(data), "path": data, "seq_length": 2048, "truncation": "right"},
        "optimizer": {"lr": 1e-4 if with_lora else 1e-5},
        "lr_scheduler": {"name": "cosine", "warmup_ratio": 0.03},
        # 1, 2, 4 or 8 ranks can divide a global batch.
        "step_scheduler": {
            "global_batch_size": 16,
            "local_batch_size": 2,
            "num_epochs": 2,
            "ckpt_every_minutes": 15.0,
        },
        "checkpoint": {"checkpoint_dir": run, "keep_last": 2},
    }


def _builder(data: str) -> TextDict:
    """The builder that reads the columns of the first row of *data*, with its arguments."""
    from automodel_ckpt.data.rows.source import Source

    columns = next((row for row, _ in Source.of(data).stream()), {})
    for needed, words in _BUILDERS.items():
        if columns.keys() >= set(needed.split()):
            name, *arguments = words.split()
            found = {"_target_": f"automodel_ckpt.data.{name}"}
            found |= dict(each.split("=") for each in arguments)
            return found | ({"prompt_field": _WITH_INPUT} if "input" in needed else {})
    raise RecipeError(
        "no builder is known for the columns of this data",
        data,
        ", ".join(columns),
        "name the columns messages, or prompt and completion, or text; or write a recipe: "
        "`ckpt-train --help dataset` lists the builders",
    )
