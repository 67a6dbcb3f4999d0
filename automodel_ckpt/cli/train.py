"""``ckpt-train``: parse the command line, load and validate the recipe, and launch the ranks."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shutil import get_terminal_size

import automodel_ckpt
from automodel_ckpt.cli.checks.device_memory import device_memory
from automodel_ckpt.cli.checks.finished_run import finished_text
from automodel_ckpt.cli.checks.selftest import check_selftest_options, selftest
from automodel_ckpt.cli.launch.limits import raise_file_limit
from automodel_ckpt.cli.launch.started_ranks import started_world_size
from automodel_ckpt.cli.paths import check_working_directory
from automodel_ckpt.cli.terminal import (
    coloured,
    leave_reader,
    naming_output,
    occupy_standard_streams,
    output_failure,
    print_error,
    table,
)
from automodel_ckpt.cli.write_launcher.options import LauncherOptions, launcher_options
from automodel_ckpt.config.automodel.notices import report_lines
from automodel_ckpt.config.flags import LaunchFlags
from automodel_ckpt.config.load import LoadedRecipe, load_recipe
from automodel_ckpt.config.overrides import CommandLine, parse
from automodel_ckpt.config.schema_keys import closest
from automodel_ckpt.config.yaml_tree import Node
from automodel_ckpt.distributed.mesh_sizes import (
    Sizes,
    choose_strategy,
    require_replicas,
    share_out,
)
from automodel_ckpt.errors import EXIT_DONE, AutomodelError, Problem, RecipeError, describe
from automodel_ckpt.user_code import reporting_user_failures

EXAMPLES = Path(automodel_ckpt.__file__).parent / "examples"
CLUSTERS = ("kubernetes", "skypilot")
"""Directories of examples with files that ``--write-launcher`` wrote."""
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
"""Modes whose output may be cut off by a reader such as head(1)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ckpt-train`` and return its exit code. With ``argv=None`` it uses ``sys.argv`` and may end the process."""
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
        from automodel_ckpt.config.help import help_text, topic_text

        topic = line.modes["help"]
        print(topic_text(*topic) if topic else help_text(), end="")
    elif "version" in line.modes:
        print(f"automodel_ckpt {automodel_ckpt.__version__}")
    elif line.problems and line.modes.keys() & {"list", "copy", "schema"}:
        raise RecipeError.all_of(line.problems)
    elif "list" in line.modes:
        print("\n".join(_example_lines()))
    elif "schema" in line.modes:
        print(_schema_text(), end="")
    elif "copy" in line.modes:
        print(copy_example(*line.modes["copy"]))
    else:
        return _run_recipe(line)
    return EXIT_DONE


def _run_recipe(line: CommandLine) -> int:
    check_working_directory()
    path = _recipe_path(line)
    launcher = launcher_options(line)
    only_prints = not line.modes.keys().isdisjoint({"print_config", "convert_recipe"})
    # The data of a launcher's run may be on the cluster only.
    check = None if only_prints or launcher is not None else _early_check(line)
    loaded = load_recipe(path, line.overrides, problems=line.problems, check=check)
    check_selftest_options(line)
    device_bytes = device_memory(line)
    if only_prints and loaded.problems:
        raise RecipeError.all_of(loaded.problems)
    if "convert_recipe" in line.modes:
        print(loaded.converted(), end="")
        return EXIT_DONE
    if _reports_for_node():
        for text in report_lines(loaded.notices):
            print_error(text)
    if only_prints:
        print(loaded.explain(), end="")
        return EXIT_DONE
    if launcher is not None:
        return _write_launcher(loaded, line, launcher)
    raise_file_limit()
    if "show_samples" in line.modes:
        return _show_samples(loaded, line)
    if "selftest_resume" in line.modes:
        return selftest(loaded, line, lambda *arguments: _observed(line, *arguments))
    ranks = known_ranks(line.flags)
    check_ranks(loaded, ranks)
    check_node_counts(loaded, line.flags)
    finished = finished_text(loaded, line.flags)
    if finished is not None and "dry_run" not in line.modes:
        print_error(finished)
        return EXIT_DONE
    from automodel_ckpt.config.prepare import prepare
    from automodel_ckpt.config.trust import Trust

    trust = Trust(line.flags.trust)
    if "dry_run" in line.modes:
        from automodel_ckpt.cli.checks.dry_run import report

        loaded, recipe_class = prepare(loaded, trust)
        sizes = mesh_sizes(loaded, ranks) if ranks else None
        with reporting_user_failures(RecipeError):
            text = report(loaded, recipe_class, line.flags, sizes, device_bytes, finished)
        print(text, end="")
        return EXIT_DONE
    from automodel_ckpt.cli.launch.launcher import launch

    return launch(loaded, line.flags, lambda: prepare(loaded, trust))


def _write_launcher(loaded: LoadedRecipe, line: CommandLine, options: LauncherOptions) -> int:
    """Write the script or manifest of ``--write-launcher``. Raises :class:`RecipeError`."""
    from automodel_ckpt.cli.write_launcher.write import check_flags, write_launcher

    check_flags(line.flags)
    num_ranks = int(line.flags.nnodes) * int(line.flags.nproc_per_node)
    check_ranks(loaded, num_ranks)
    write_launcher(loaded, line, options, mesh_sizes(loaded, num_ranks))
    return EXIT_DONE


def _show_samples(loaded: LoadedRecipe, line: CommandLine) -> int:
    """Print samples as they are trained. Raises :class:`RecipeError`."""
    from automodel_ckpt.cli.checks.show_samples import report
    from automodel_ckpt.config.prepare import prepare
    from automodel_ckpt.config.trust import Trust

    (text,) = line.modes["show_samples"]
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise RecipeError(
            "--show-samples must be a number of samples",
            where="--show-samples",
            value=text,
            hint="for example --show-samples 3",
        )
    loaded, recipe_class = prepare(loaded, Trust(line.flags.trust))
    with reporting_user_failures(RecipeError):
        for each in report(loaded, recipe_class, int(text)):
            print(each)
    return EXIT_DONE


def _early_check(line: CommandLine) -> Callable[[Node], list[Problem]]:
    """Return a check of trusted names and data files that needs no torch."""

    def check(root: Node) -> list[Problem]:
        from automodel_ckpt.cli.checks.data_files import missing_data_files
        from automodel_ckpt.config.target_names import untrusted_names
        from automodel_ckpt.config.trust import Trust
        from automodel_ckpt.config.urls import missing_libraries

        trust = Trust(line.flags.trust)
        return [
            *untrusted_names(root, trust),
            *missing_data_files(root),
            *missing_libraries(root),
        ]

    return check


def _observed(
    line: CommandLine, loaded: LoadedRecipe, notes: Path, stop_after: int | None
) -> tuple[LoadedRecipe, type]:
    """Prepare the recipe with a class that records its samples and states. Raises :class:`RecipeError`."""
    from automodel_ckpt.config.prepare import prepare
    from automodel_ckpt.config.trust import Trust
    from automodel_ckpt.recipes.recipe import Recipe
    from automodel_ckpt.recipes.selftest_probe import observed

    loaded, recipe = prepare(loaded, Trust(line.flags.trust))
    if not issubclass(recipe, Recipe):
        raise RecipeError(
            "the selftest requires a recipe derived from Recipe",
            where="--selftest-resume",
            value=f"{recipe.__module__}.{recipe.__qualname__}",
            hint="derive the recipe from automodel_ckpt.recipes.recipe.Recipe",
        )
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
        hint = "give one recipe file; overrides begin with --, and a list is one value, '[A, B]'"
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
    variable = "LOCAL_RANK" if is_under_torchrun else "SLURM_LOCALID"
    return os.environ.get(variable, "0") == "0"


def known_ranks(flags: LaunchFlags) -> int | None:
    """Return the number of ranks, if the command line or the environment determines it; otherwise None."""
    world_size = started_world_size(os.environ, flags)
    if world_size:
        return world_size
    if flags.nproc_per_node.isdecimal() and flags.nnodes.isdecimal():
        return int(flags.nproc_per_node) * int(flags.nnodes)
    return None


def check_ranks(loaded: LoadedRecipe, ranks: int | None) -> None:
    """Raise :class:`RecipeError` if the recipe does not fit the number of *ranks*; None: the number is not known yet.

    Checked are the parallel sizes, the global batch size, and ``checkpoint.verify_replicas``.
    """
    if ranks is None:
        return
    sizes = mesh_sizes(loaded, ranks)
    if loaded.config.checkpoint.verify_replicas:
        strategy = choose_strategy(loaded.config.distributed.strategy, sizes)
        require_replicas(strategy, sizes, loaded.origins["checkpoint.verify_replicas"])
    steps = loaded.config.step_scheduler
    dp_size = sizes.dp
    if steps.global_batch_size % (steps.local_batch_size * dp_size) == 0:
        return
    global_batch = loaded.tree.at("step_scheduler.global_batch_size")
    local_batch = loaded.tree.at("step_scheduler.local_batch_size")
    raise RecipeError(
        "step_scheduler.global_batch_size must be a multiple of local_batch_size x ranks",
        where=loaded.origins["step_scheduler.global_batch_size"],
        value=f"global_batch_size: {global_batch}, local_batch_size: {local_batch}, ranks: {dp_size}",
        hint="change the global batch, the local batch or the number of ranks",
    )


def check_node_counts(loaded: LoadedRecipe, flags: LaunchFlags) -> None:
    """Check each number of nodes that an elastic run may have.

    Warns about the numbers that do not fit the batch sizes: the run ends when it has that many nodes. Raises
    :class:`RecipeError` if no number fits.
    """
    least, _, most = flags.nnodes.partition(":")
    if not most or not flags.nproc_per_node.isdecimal():
        return
    node_counts = range(int(least), int(most) + 1)
    errors: dict[int, RecipeError] = {}
    for num_nodes in node_counts:
        try:
            check_ranks(loaded, num_nodes * int(flags.nproc_per_node))
        except RecipeError as error:
            errors[num_nodes] = error
    if not errors:
        return
    first = next(iter(errors.values()))
    if len(errors) == len(node_counts):
        raise first
    numbers = ", ".join(str(num_nodes) for num_nodes in list(errors)[:10])
    if len(errors) > 10:
        numbers += ", ..."
    print_error(f"warning: with {numbers} nodes, the run will end with exit code 2\n{first}")


def mesh_sizes(loaded: LoadedRecipe, ranks: int) -> Sizes:
    """Return the sizes of the device mesh of *ranks* ranks. Raises :class:`RecipeError` if they do not fit together."""
    section = loaded.config.distributed
    sizes = share_out(ranks, **section.mesh_sizes)
    choose_strategy(section.strategy, sizes)
    return sizes


def examples() -> dict[str, Path]:
    """Map the name of each example recipe to its path."""
    paths = [path for path in sorted(EXAMPLES.rglob("*.yaml")) if path.parent.name not in CLUSTERS]
    return {path.relative_to(EXAMPLES).with_suffix("").as_posix(): path for path in paths}


def _example_lines() -> Iterator[str]:
    """Yield the names and titles of the example recipes: one line each, or on a terminal, titles below the names."""
    titles = {name: _title(path) for name, path in examples().items()}
    if not sys.stdout.isatty():
        yield from table(list(titles.items()))
        return
    indent = "    "
    for name, title in titles.items():
        yield coloured(name, "bold", sys.stdout)
        yield textwrap.fill(
            title, get_terminal_size().columns, initial_indent=indent, subsequent_indent=indent
        )


def copy_example(name: str, directory: str) -> Path:
    """Copy an example recipe, and the Python file it uses, into a directory. Never overwrites a file.

    Creates the directory, and writes the JSON schema that the recipe's first line names. Returns the path of the copy.
    Raises :class:`RecipeError` if there is no such example, or a file exists.
    """
    recipe = _find_example(name.removesuffix(".yaml"))
    if recipe is None:
        paths = examples()
        stems = [path.stem for path in paths.values()]
        meant = closest(name, [*paths, *stems])
        hint = f"did you mean {meant}?" if meant else "ckpt-train --list lists the example recipes"
        raise RecipeError("unknown example recipe", where="--copy", value=name, hint=hint)
    text = recipe.read_text(encoding="utf-8")
    code = re.search(r"^recipe: (\w+\.py):", text, re.MULTILINE)
    if code:
        _copy(recipe.with_name(code[1]), Path(directory))
    copied = _copy(recipe, Path(directory))
    from automodel_ckpt.config.json_schema import FILE_NAME

    schema = copied.with_name(FILE_NAME)
    if not schema.exists():
        schema.write_text(_schema_text(), encoding="utf-8")
    return copied


def _schema_text() -> str:
    """The JSON schema of a recipe as text."""
    from automodel_ckpt.config.json_schema import recipe_schema

    return json.dumps(recipe_schema(), indent=1) + "\n"


def _find_example(name: str) -> Path | None:
    """Return the example recipe with this name, or this name without directories; None if there is none."""
    for key, path in examples().items():
        if name in (key, path.stem):
            return path
    return None


def _copy(source: Path, directory: Path) -> Path:
    target = directory / source.name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # x: fails if the file exists, also if another process has just created it.
        with target.open("xb") as copy:
            copy.write(source.read_bytes())
    except OSError as error:
        hint = "choose another directory, or remove the existing file"
        raise RecipeError(
            "the recipe cannot be copied", where=str(target), value=error.strerror, hint=hint
        ) from error
    return target


def _title(path: Path) -> str:
    """The first line of text in a recipe, after the line that names its schema for editors."""
    with path.open(encoding="utf-8") as lines:
        texts = (line.lstrip("# ").strip() for line in lines)
        return next((text for text in texts if not text.startswith("yaml-language-server")), "")


if __name__ == "__main__":
    sys.exit(main())
