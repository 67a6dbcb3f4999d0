"""``ckpt-train``: parse the command line, load and validate the recipe, and launch the ranks."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import automodel_ckpt
from automodel_ckpt.base.python_child import check_temporary_directory
from automodel_ckpt.base.terminal import (
    hiding_values,
    leave_reader,
    naming_output,
    occupy_standard_streams,
    output_failure,
    print_error,
    require_utf8,
)
from automodel_ckpt.base.user_code import reporting_user_failures
from automodel_ckpt.cli.launch.process import check_working_directory, raise_file_limit
from automodel_ckpt.cli.launch.ranks import (
    check_ranks,
    known_ranks,
    mesh_sizes,
)
from automodel_ckpt.config.bind import INVALID, Binder
from automodel_ckpt.config.load import LoadedRecipe, convert_recipe, load_recipe
from automodel_ckpt.config.overrides import CommandLine, parse
from automodel_ckpt.config.schema_keys import join
from automodel_ckpt.config.tree.yaml_tree import Node
from automodel_ckpt.errors import EXIT_DONE, AutomodelError, Problem, RecipeError, describe

if TYPE_CHECKING:
    from automodel_ckpt.cli.common.generated_recipe import GeneratedRecipe
    from automodel_ckpt.config.callables.prepare import PreparedRecipe
    from automodel_ckpt.training.recipe import Recipe

SUFFIXES = (".yaml", ".yml")
PRINTING_MODES = {
    "help",
    "schema",
    "version",
    "list",
    "print_config",
    "convert_recipe",
    "dry_run",
    "show_samples",
    "write_launcher",
}
"""Modes with output that a reader such as head(1) may cut off."""

# Modes that write nothing.
_READING_MODES = {"dry_run", "show_samples"}
# Modes that are options of another one.
_REQUIRED = {
    "selftest_steps": "selftest_resume",
    "selftest_nproc": "selftest_resume",
    "json": "selftest_resume",
    "device_memory": "dry_run",
    "output": "write_launcher",
    "time_limit": "write_launcher",
    "image": "write_launcher",
    "volume_claim": "write_launcher",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ckpt-train`` and return its exit code. With ``argv=None`` it uses ``sys.argv`` and may end the process."""
    if argv is None:
        require_utf8()
    occupy_standard_streams()
    line = parse(sys.argv[1:] if argv is None else argv)
    try:
        with naming_output():
            code = run(line)
            sys.stdout.flush()
    except BrokenPipeError:
        if not line.modes.keys() & PRINTING_MODES:
            raise
        leave_reader()
        code = EXIT_DONE
    except (AutomodelError, KeyboardInterrupt) as error:
        code, message = describe(error)
        if _reports_for_node():
            print_error(message)
    except Exception as error:  # raised by user code, or a defect
        from automodel_ckpt.cli.launch.failures import failure_record, failure_text

        record = failure_record(output_failure(error) or error, 0)
        code = record.code
        print_error(failure_text(record, several_ranks=False))
    # The interpreter's teardown sometimes aborts in torch's threads after distributed work.
    if argv is None and "torch" in sys.modules:
        from automodel_ckpt.cli.launch.process import exit_process

        exit_process(code)
    return code


def run(line: CommandLine) -> int:
    """Execute a parsed command line. Raises :class:`RecipeError` with all problems of it and of the recipe."""
    if "help" in line.modes:
        from automodel_ckpt.config.help.listing import help_text, topic_text

        topic = line.modes["help"]
        print(topic_text(*topic) if topic else help_text(), end="")
    elif "version" in line.modes:
        print(f"automodel_ckpt {automodel_ckpt.__version__}")
    elif line.problems and line.modes.keys() & {"list", "copy", "schema"}:
        raise RecipeError.all_of(line.problems)
    elif "list" in line.modes:
        from automodel_ckpt.cli.common.example_recipes import example_lines

        print("\n".join(example_lines()))
    elif "schema" in line.modes:
        from automodel_ckpt.config.help.json_schema import schema_text

        print(schema_text(), end="")
    elif "copy" in line.modes:
        from automodel_ckpt.cli.common.example_recipes import copy_example

        print(copy_example(*line.modes["copy"]))
    else:
        return _run_recipe(line)
    return EXIT_DONE


def _run_recipe(line: CommandLine) -> int:
    """Load and validate the recipe on the command line, and do with it what the mode asks: train, or print something.

    Raises :class:`RecipeError` with all problems that are known before torch is imported.
    """
    check_working_directory()
    generated = _generated(line)
    path = generated.path if generated else _recipe_path(line)
    line.problems += _mode_problems(line)
    launcher = None
    if "write_launcher" in line.modes:
        from automodel_ckpt.cli.cluster.launcher import launcher_options, write_launcher

        launcher = launcher_options(line)
    if "convert_recipe" in line.modes:
        num_ranks = known_ranks(line.flags) or 1
        yaml = convert_recipe(path, line.overrides, problems=line.problems, num_ranks=num_ranks)
        print(yaml, end="")
        return EXIT_DONE
    only_prints = "print_config" in line.modes
    # The data of a launcher's run may be on the cluster only.
    check = None if only_prints or launcher is not None else _early_check(line)
    text = generated.text if generated else None
    loaded = load_recipe(path, line.overrides, problems=line.problems, check=check, text=text)
    if loaded.notices and _reports_for_node():
        from automodel_ckpt.config.automodel.rows import report_lines

        for notice in report_lines(loaded.notices):
            print_error(notice)
    if only_prints:
        print(loaded.explain(), end="")
        return EXIT_DONE
    if generated is not None and _reports_for_node() and not line.modes.keys() & _READING_MODES:
        verb = "wrote" if generated.write() else "using"
        print_error(f"{verb} {path}; to change it, edit it and run `ckpt-train {path}`")
    if launcher is not None:
        write_launcher(loaded, line, launcher)
        return EXIT_DONE
    raise_file_limit()
    check_temporary_directory()
    if "show_samples" in line.modes:
        return _show_samples(loaded, line)
    if "selftest_resume" in line.modes:
        from automodel_ckpt.cli.checks.selftest import selftest

        return selftest(loaded, line, lambda *arguments: _observed(line, *arguments))
    ranks = known_ranks(line.flags)
    check_ranks(loaded, ranks)
    if "dry_run" in line.modes:
        return _dry_run(loaded, line, ranks)
    # Nothing else is shown on a terminal for the seconds in which these packages are imported.
    if sys.stderr.isatty() and _reports_for_node():
        print(time.strftime("%H:%M:%S"), "importing torch and transformers", file=sys.stderr)
    from automodel_ckpt.cli.launch.launcher import launch

    return launch(loaded, line.flags, lambda: _prepared(loaded, line))


def _generated(line: CommandLine) -> GeneratedRecipe | None:
    """Return the recipe that ``--model`` and ``--data`` describe. Returns None when the command line names a recipe."""
    if line.words and not line.modes.keys() & {"data", "lora"}:
        return None
    from automodel_ckpt.cli.common.generated_recipe import generated_recipe

    return generated_recipe(line)


def _mode_problems(line: CommandLine) -> Iterator[Problem]:
    """Yield the problems of options of a mode without that mode."""
    for name, needed in _REQUIRED.items():
        if name in line.modes and needed not in line.modes:
            flag, other = (f"--{each.replace('_', '-')}" for each in (name, needed))
            yield Problem(f"{flag} requires {other}", flag, "")


def _prepared(loaded: LoadedRecipe, line: CommandLine) -> PreparedRecipe:
    """Import the class of the recipe and its plug-ins. Raises :class:`RecipeError`."""
    from automodel_ckpt.config.callables.prepare import prepare
    from automodel_ckpt.config.callables.trust import Trust

    return prepare(loaded, Trust(line.flags.trust))


def _dry_run(loaded: LoadedRecipe, line: CommandLine, ranks: int | None) -> int:
    """Print what a run would do. *ranks* is None when their number is not known.

    Raises :class:`RecipeError` for what the run would reject before training.
    """
    from automodel_ckpt.base.hub_access import without_token
    from automodel_ckpt.cli.checks.dry_run import device_memory, report
    from automodel_ckpt.cli.launch.worker import import_recipe

    device_bytes = device_memory(line)
    with hiding_values(), without_token():
        loaded, recipe_class = import_recipe(lambda: _derived(loaded, line, "--dry-run"))
        sizes = mesh_sizes(loaded, ranks) if ranks else None
        with reporting_user_failures(RecipeError):
            text = report(loaded, recipe_class, line.flags, sizes, device_bytes)
        print(text, end="")
    return EXIT_DONE


def _show_samples(loaded: LoadedRecipe, line: CommandLine) -> int:
    """Print samples as they are trained. Raises :class:`RecipeError`."""
    from automodel_ckpt.cli.checks.show_samples import report

    (text,) = line.modes["show_samples"]
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise RecipeError("--show-samples must be a number of samples", "--show-samples", text)
    loaded, recipe_class = _derived(loaded, line, "--show-samples")
    with reporting_user_failures(RecipeError):
        for each in report(loaded, recipe_class, int(text)):
            print(each)
    return EXIT_DONE


def _early_check(line: CommandLine) -> Callable[[Node], list[Problem]]:
    """Return a check of trusted names and data files that needs no torch."""

    def check(root: Node) -> list[Problem]:
        from automodel_ckpt.config.callables.prepare import untrusted_names
        from automodel_ckpt.config.callables.sent_values import sent_problems
        from automodel_ckpt.config.callables.trust import Trust
        from automodel_ckpt.config.tree.urls import missing_libraries

        trust = Trust(line.flags.trust)
        return [
            *untrusted_names(root, trust),
            *sent_problems(root, trust),
            *_missing_data_files(root),
            *missing_libraries(root),
        ]

    return check


def _missing_data_files(root: Node) -> Iterator[Problem]:
    """Yield the problems of the local files in the ``path`` of this package's data builders.

    Names on the Hub and directories are not checked: the builders do that.
    """
    binder = Binder(object, [])
    for key, node in root.walk():
        target, path = (node.at(name) for name in ("_target_", "path"))
        # Files of tokens are named by a prefix or a pattern: their builders check them.
        if path is None or not re.match(r"automodel_ckpt\.data\.(?!token_files)", str(target)):
            continue
        files = binder.value(str | list[str], path, "")
        if files is INVALID:
            continue
        from automodel_ckpt.data.rows.source import Source

        try:
            source = Source.of(files)
            if source.is_file:
                _ = source.files  # resolves patterns, and raises if a file does not exist
        except RecipeError as error:
            place = join(key, "path")
            for problem in error.problems:
                value = f"{problem.where}: {problem.value}".removeprefix("dataset.path: ")
                hint = problem.hint.replace("dataset.path", place)
                yield Problem(f"{place}: {problem.what}", path.origin, value, hint)


def _derived(
    loaded: LoadedRecipe, line: CommandLine, flag: str
) -> tuple[LoadedRecipe, type[Recipe]]:
    """Prepare a recipe for the mode *flag*. Raises :class:`RecipeError`, also if it is not derived from Recipe."""
    from automodel_ckpt.training.recipe import Recipe

    loaded, recipe_class = _prepared(loaded, line)
    if not issubclass(recipe_class, Recipe):
        raise RecipeError(
            f"{flag} requires a recipe derived from automodel_ckpt.training.recipe.Recipe",
            flag,
            f"{recipe_class.__module__}.{recipe_class.__qualname__}",
        )
    return loaded, recipe_class


def _observed(
    line: CommandLine, loaded: LoadedRecipe, notes: Path, stop_after: int | None
) -> tuple[LoadedRecipe, type]:
    """Prepare the recipe with a class that records its samples and states. Raises :class:`RecipeError`."""
    from automodel_ckpt.training.selftest_probe import observed

    loaded, recipe = _derived(loaded, line, "--selftest-resume")
    return loaded, observed(recipe, notes, stop_after=stop_after)


def _recipe_path(line: CommandLine) -> str:
    """Return the recipe file on the command line. Other arguments are added to its problems.

    Raises :class:`RecipeError` if there is no recipe file.
    """
    files = [word for word in line.words if word.endswith(SUFFIXES)] or line.words[:1]
    unexpected = list(line.words)
    if files:
        unexpected.remove(files[0])
    for word in unexpected:
        hint = (
            f"run ckpt-train {files[0]}, with one recipe file and no command before it; overrides begin with --, and a "
            "list is one value, '[A, B]'"
        )
        if "=" in word:
            hint = f"did you mean --{word}?"
        line.problems.append(Problem(f"unexpected argument {word}", "command line", "", hint))
    if not files:
        hint = "run ckpt-train RECIPE.yaml; ckpt-train --list lists the example recipes"
        line.problems.append(Problem("no recipe file given", "command line", "", hint))
        raise RecipeError.all_of(line.problems)
    return files[0]


def _reports_for_node() -> bool:
    """Whether this process prints errors that are the same on all ranks of the node."""
    is_under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return os.environ.get("LOCAL_RANK" if is_under_torchrun else "SLURM_LOCALID", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
