"""Write the launcher of a recipe to standard output or a file. Nothing is submitted."""

from __future__ import annotations

from pathlib import Path

from automodel_ckpt.cli.cluster import kubernetes, skypilot, slurm
from automodel_ckpt.cli.cluster.job import describe_job
from automodel_ckpt.cli.cluster.options import (
    FLAG,
    K8S,
    SKYPILOT,
    SLURM,
    LauncherOptions,
)
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.overrides import CommandLine
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.errors import Problem, RecipeError

WRITERS = {
    SLURM: slurm.script,
    K8S: kubernetes.train_job,
    SKYPILOT: skypilot.task,
}


def check_flags(flags: LaunchFlags) -> None:
    """Raise :class:`RecipeError` for launch flags that a launcher determines, and for unknown numbers of ranks."""
    problems = []
    for name in ("node_rank", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port"):
        if getattr(flags, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            problems.append(Problem(f"{FLAG} determines {flag}", flag, "", f"remove {flag}"))
    for name, example in (("nproc_per_node", 8), ("nnodes", 2)):
        text = getattr(flags, name)
        if not text.isdecimal():
            flag = f"--{name.replace('_', '-')}"
            what = f"{FLAG} needs a number"
            problems.append(Problem(what, flag, text, f"for example {flag} {example}"))
    if problems:
        raise RecipeError.all_of(problems)


def write_launcher(loaded: LoadedRecipe, line: CommandLine, options: LauncherOptions) -> None:
    """Print the launcher, or write it to a new file and print its path.

    Raises :class:`RecipeError` if the file exists or cannot be written.
    """
    job = describe_job(loaded, line)
    text = WRITERS[options.kind](job, options)
    if options.output is None:
        print(text, end="")
        return
    try:
        # x: an edited file is never replaced.
        with Path(options.output).open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise RecipeError(
            "the launcher cannot be written",
            where="--output",
            value=f"{options.output}: {error.strerror}",
            hint="choose another file, or remove the existing one",
        ) from error
    print(options.output)
