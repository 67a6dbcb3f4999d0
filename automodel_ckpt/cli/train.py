"""``ckpt-train``: read the command line and the recipe, refuse what is wrong with them, and launch."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shutil import get_terminal_size

import automodel_ckpt
from automodel_ckpt.cli.limits import raise_file_limit
from automodel_ckpt.cli.selftest import refuse_stray_modes, selftest
from automodel_ckpt.cli.terminal import coloured, leave_reader, occupy_standard_streams, print_error, table
from automodel_ckpt.cli.topology import num_joined
from automodel_ckpt.config.bind import closest
from automodel_ckpt.config.flags import LaunchFlags
from automodel_ckpt.config.load import LoadedRecipe, load_recipe
from automodel_ckpt.config.nodes import Node
from automodel_ckpt.config.overrides import CommandLine, parse
from automodel_ckpt.distributed.sizes import Sizes, choose_strategy, share_out
from automodel_ckpt.errors import EXIT_DONE, AutomodelError, Problem, RecipeError, describe
from automodel_ckpt.own_code import telling_own_failures

EXAMPLES = Path(automodel_ckpt.__file__).parent / "examples"
SUFFIXES = (".yaml", ".yml")
ONLY_SHOW = {"help", "version", "list", "print_config", "dry_run"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ckpt-train``; returns its exit code. Without arguments it is the command: its process may end here."""
    occupy_standard_streams()
    line = parse(sys.argv[1:] if argv is None else argv)
    try:
        code = run(line)
        sys.stdout.flush()
    except BrokenPipeError:
        if not line.modes.keys() & ONLY_SHOW:
            raise
        leave_reader()
        code = EXIT_DONE
    except (AutomodelError, KeyboardInterrupt) as error:
        code, message = describe(error)
        if _speaks():
            print_error(message)
    except Exception as error:  # of code that the recipe names, or a defect
        from automodel_ckpt.cli.failure import record_of, text_of

        record = record_of(error, 0)
        code = record.code
        print_error(text_of(record, several_ranks=False))
    if argv is None and "torch" in sys.modules:
        from automodel_ckpt.cli.launch import leave

        leave(code)
    return code


def run(line: CommandLine) -> int:
    """Do what a command line asks for. Raises :class:`RecipeError` with all that is wrong with it or the recipe."""
    if "help" in line.modes:
        from automodel_ckpt.config.help import help_text

        print(help_text(), end="")
    elif "version" in line.modes:
        print(f"automodel_ckpt {automodel_ckpt.__version__}")
    elif line.problems and line.modes.keys() & {"list", "copy"}:
        raise RecipeError.all_of(line.problems)
    elif "list" in line.modes:
        print("\n".join(_example_lines()))
    elif "copy" in line.modes:
        print(copy_example(*line.modes["copy"]))
    else:
        return _run_recipe(line)
    return EXIT_DONE


def _run_recipe(line: CommandLine) -> int:
    _refuse_no_directory()
    path = _recipe_path(line)
    check = None if "print_config" in line.modes else _early_check(line)
    loaded = load_recipe(path, line.overrides, problems=line.problems, check=check)
    refuse_stray_modes(line)
    if "print_config" in line.modes:
        if loaded.problems:
            raise RecipeError.all_of(loaded.problems)
        print(loaded.explain(), end="")
        return EXIT_DONE
    raise_file_limit()
    if "selftest_resume" in line.modes:
        return selftest(path, line, lambda *arguments: _observed(line, *arguments))
    ranks = known_ranks(line.flags)
    check_batches(loaded, ranks)
    warn_of_machines(loaded, line.flags)
    from automodel_ckpt.config import targets

    trust = targets.Trust(line.flags.trust)
    if "dry_run" in line.modes:
        from automodel_ckpt.cli.dry_run import report

        recipe = targets.prepare(loaded, trust)
        with telling_own_failures(RecipeError):
            told = report(loaded, recipe, line.flags, grid(loaded, ranks) if ranks else None)
        print(told, end="")
        return EXIT_DONE
    from automodel_ckpt.cli.launch import launch

    return launch(loaded, line.flags, lambda: targets.prepare(loaded, trust))


def _early_check(line: CommandLine) -> Callable[[Node], list[Problem]]:
    """What can be checked in a recipe's tree without torch, besides its schema: to be reported with the rest."""

    def check(root: Node) -> list[Problem]:
        from automodel_ckpt.cli.data_files import missing_data_files
        from automodel_ckpt.config.targets import Trust, untrusted_names

        return [*untrusted_names(root, Trust(line.flags.trust)), *missing_data_files(root)]

    return check


def _refuse_no_directory() -> None:
    """Without one no relative path leads anywhere, and torch's libraries end the process when they are loaded."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise RecipeError(
            "the current directory does not exist",
            where=os.environ.get("PWD", "."),
            value="it was removed",
            remedy="cd to an existing directory",
        ) from error


def _observed(line: CommandLine, loaded: LoadedRecipe, notes: Path, stop_after: int | None) -> type:
    from automodel_ckpt.config import targets
    from automodel_ckpt.recipes.base import FinetuneRecipe
    from automodel_ckpt.recipes.observed import observed

    recipe = targets.prepare(loaded, targets.Trust(line.flags.trust))
    if not issubclass(recipe, FinetuneRecipe):
        raise RecipeError(
            "the selftest requires a recipe derived from FinetuneRecipe",
            where="--selftest-resume",
            value=f"{recipe.__module__}.{recipe.__qualname__}",
            remedy="derive the recipe from automodel_ckpt.recipes.base.FinetuneRecipe",
        )
    made: type = observed(recipe, notes, stop_after=stop_after)
    return made


def _recipe_path(line: CommandLine) -> str:
    files = [word for word in line.words if word.endswith(SUFFIXES)] or line.words[:1]
    rest = list(line.words)
    if files:
        rest.remove(files[0])
    for word in rest:
        remedy = f"did you mean --{word}?" if "=" in word else "give only one recipe file; overrides begin with --"
        line.problems.append(Problem(f"unexpected argument {word}", "command line", "", remedy))
    if not files:
        remedy = "run ckpt-train RECIPE.yaml; ckpt-train --list lists the example recipes"
        line.problems.append(Problem("no recipe file given", "command line", "", remedy))
        raise RecipeError.all_of(line.problems)
    return files[0]


def _speaks() -> bool:
    """Whether this process may print an error that its siblings on this machine have too."""
    return os.environ.get("LOCAL_RANK" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_LOCALID", "0") == "0"


def known_ranks(flags: LaunchFlags) -> int | None:
    """The number of ranks where the command line or the environment tells it, else None."""
    if joined := num_joined(os.environ, flags):
        return joined
    if flags.nproc_per_node.isdecimal() and flags.nnodes.isdecimal():
        return int(flags.nproc_per_node) * int(flags.nnodes)
    return None


def check_batches(loaded: LoadedRecipe, ranks: int | None) -> None:
    """Refuses ranks that the sizes do not make up, and a global batch that they cannot share evenly."""
    steps = loaded.config.step_scheduler
    if ranks is None:
        return
    ranks = grid(loaded, ranks).dp
    if steps.global_batch_size % (steps.local_batch_size * ranks) == 0:
        return
    keys = ("global_batch_size", "local_batch_size")
    written = ", ".join(f"{key}: {loaded.tree.at(f'step_scheduler.{key}')}" for key in keys)
    raise RecipeError(
        "step_scheduler.global_batch_size must be a multiple of local_batch_size x ranks",
        where=loaded.origins["step_scheduler.global_batch_size"],
        value=f"{written}, ranks: {ranks}",
        remedy="change the global batch, the local batch or the number of ranks",
    )


def warn_of_machines(loaded: LoadedRecipe, flags: LaunchFlags) -> None:
    """Of the numbers of machines that an elastic run may come to: refuses where none fits as :func:`check_batches`
    does, and tells of those that do not, since the run would end when as many are there."""
    least, _, most = flags.nnodes.partition(":")
    if not most or not flags.nproc_per_node.isdecimal():
        return
    problems: dict[int, RecipeError] = {}
    for machines in range(int(least), int(most) + 1):
        try:
            check_batches(loaded, machines * int(flags.nproc_per_node))
        except RecipeError as error:
            problems[machines] = error
    if len(problems) > int(most) - int(least):
        raise problems[int(least)]
    if problems:
        numbers = ", ".join(map(str, list(problems)[:10])) + (", ..." if len(problems) > 10 else "")
        why = next(iter(problems.values()))
        print_error(f"warning: with {numbers} nodes, the run will end with exit code 2\n{why}")


def grid(loaded: LoadedRecipe, ranks: int) -> Sizes:
    """What the ranks share. Raises :class:`RecipeError` for sizes that do not fit together."""
    section = loaded.config.distributed
    sizes = share_out(
        ranks,
        dp_size=section.dp_size,
        dp_replicate_size=section.dp_replicate_size,
        tp_size=section.tp_size,
        pp_size=section.pp_size,
        cp_size=section.cp_size,
    )
    choose_strategy(section.strategy, sizes)
    return sizes


def examples() -> dict[str, Path]:
    """Name -> path of each recipe that comes with the package."""
    paths = sorted(EXAMPLES.rglob("*.yaml"))
    return {path.relative_to(EXAMPLES).with_suffix("").as_posix(): path for path in paths}


def _example_lines() -> Iterator[str]:
    """Name and title of each: a line for programs; for people the title stands below, as wide as the terminal."""
    known = {name: _title(path) for name, path in examples().items()}
    if not sys.stdout.isatty():
        yield from table(list(known.items()))
        return
    for name, title in known.items():
        yield coloured(name, "bold", sys.stdout)
        yield textwrap.fill(title, get_terminal_size().columns, initial_indent="    ", subsequent_indent="    ")


def copy_example(name: str, directory: str) -> Path:
    """Copies a recipe into a directory, which is made, and the file of code that it names; never over a file.

    Returns the recipe's copy. Raises :class:`RecipeError`.
    """
    known = examples()
    found = [path for key, path in known.items() if name.removesuffix(".yaml") in (key, path.stem)]
    if not found:
        meant = closest(name, [*known, *(path.stem for path in known.values())])
        remedy = f"did you mean {meant}?" if meant else "ckpt-train --list lists the example recipes"
        raise RecipeError("unknown example recipe", where="--copy", value=name, remedy=remedy)
    code = re.search(r"^recipe: (\w+\.py):", found[0].read_text(encoding="utf-8"), re.MULTILINE)
    if code:
        _copy(found[0].with_name(code[1]), Path(directory))
    return _copy(found[0], Path(directory))


def _copy(source: Path, directory: Path) -> Path:
    target = directory / source.name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as copy:
            copy.write(source.read_bytes())
    except OSError as error:
        reason = "choose another directory, or remove the existing file"
        raise RecipeError(
            "the recipe cannot be copied", where=str(target), value=error.strerror, remedy=reason
        ) from error
    return target


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next(lines, "").lstrip("# ").strip()


if __name__ == "__main__":
    sys.exit(main())
