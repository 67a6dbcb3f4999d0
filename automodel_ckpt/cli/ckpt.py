"""``ckpt``: inspect, verify, convert and manage checkpoints. Runs on CPU, without a network, and starts without torch
(``generate`` and ``chat`` use both).

A new command is a module in ``cli/commands/`` or ``cli/models/`` with ``USAGE`` and ``run``, and a line in
:data:`_TABLE`. The module is imported when its command is run.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from automodel_ckpt.base.terminal import (
    leave_reader,
    naming_output,
    occupy_standard_streams,
    output_failure,
    print_error,
    require_utf8,
)
from automodel_ckpt.base.version import __version__
from automodel_ckpt.cli.commands import completion
from automodel_ckpt.cli.common.arguments import CHECK_PATH, add_usage, resolve_paths
from automodel_ckpt.cli.common.output import problem_json
from automodel_ckpt.cli.common.remote import reject_urls
from automodel_ckpt.cli.launch.process import check_working_directory
from automodel_ckpt.errors import (
    EXIT_DONE,
    AutomodelError,
    CheckpointUnusable,
    RecipeError,
    SaveFailed,
    describe,
    limit_error,
)


@dataclass(frozen=True)
class Verb:
    """A command of ``ckpt``.

    *module* is in ``cli/``: ``USAGE`` has its description and arguments (:func:`add_usage`), and ``run`` executes it
    and returns the exit code. Of several commands in a module, each has a ``USAGE_NAME``, and may have a
    ``run_NAME``.
    *help* is its line in ``ckpt --help``. The words in *traits*:

    * writes: it writes files. If a system call or a store fails, the exit code is then 4 instead of 3.
    * urls: a path may be the URL of a store.
    * torch: it always imports torch.
    * text: it has no ``--json``.
    """

    name: str
    module: str
    traits: frozenset[str]
    help: str

    def part(self, name: str) -> Any:
        """Import the module of the command, and return its ``NAME_COMMAND``, or the module's ``NAME``."""
        module = import_module(f"automodel_ckpt.cli.{self.module}")
        own = f"{name}_{self.name}"
        return getattr(module, own.upper() if name.isupper() else own, None) or getattr(
            module, name, None
        )


_TABLE = """
ls          commands.ls          urls         | list checkpoints or runs
show        commands.show        urls         | show the contents of a checkpoint
diff        commands.diff        urls         | compare two checkpoints
verify      commands.verify      urls         | verify the digests of all files
generate    models.generate      torch        | complete prompts with a model
eval        models.eval_         torch        | run benchmarks on a model
chat        models.generate      torch text   | talk to a model
export      models.export        writes       | export a checkpoint's model for other programs
consolidate models.export        writes       | alias of `ckpt export --to hf`
import      models.import_       writes       | import a checkpoint of another program
unpack      models.archive       writes       | unpack a .nemo or .qnemo file
pack        models.archive       writes       | pack a directory as a .nemo or .qnemo file
average     models.average       writes       | combine the weights of several checkpoints
archive     models.archive       writes       | compress checkpoints for cold storage
unarchive   models.archive       writes       | extract the checkpoints of an archive
push        models.push          writes urls  | upload a checkpoint to a store, or its model to the Hub
pull        models.push          writes urls  | download a checkpoint from a store, or a model from the Hub
card        models.hub           writes       | print the model card of a checkpoint for the Hub
save        commands.save        writes urls  | make a running job save now
prune       commands.prune       writes urls  | remove old checkpoints
pin         commands.pin         writes       | protect a checkpoint from removal
unpin       commands.pin         writes       | remove a pin
plot        commands.plot        writes       | plot the curves of one or more runs
goodput     commands.goodput                  | show how the time of a run was spent
track       commands.track       writes       | upload a run's log to an experiment tracker
env         commands.env                      | print information for a bug report
completion  commands.completion  text         | print a shell completion script
"""


def _verbs() -> Iterator[Verb]:
    for line in _TABLE.strip().splitlines():
        words, _, text = line.partition("|")
        name, module, *traits = words.split()
        yield Verb(name, module, frozenset(traits), text.strip())


VERBS: Sequence[Verb] = tuple(_verbs())
"""All commands, in the order of ``ckpt --help``."""


_PRUNE = "prune, which removes all checkpoints that its options do not keep, such as --keep-last 2"
# What other programs call commands, and the commands here.
_OTHER_WORDS = {
    "list": "ls",
    "info": "show",
    "inspect": "show",
    "compare": "diff",
    "check": "verify",
    "rm": _PRUNE,
    "remove": _PRUNE,
    "delete": _PRUNE,
    "merge": "export --merge for an adapter and its base, ckpt average for several checkpoints",
    "convert": "import for a checkpoint of another program, ckpt export for one of this program",
    "upload": "push",
    "download": "pull",
}


class _Parser(ArgumentParser):
    """An argument parser that raises :class:`RecipeError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(message, self.prog, "", f"`{self.prog} --help` lists the arguments")


def parser(only: str = "") -> ArgumentParser:
    """Build the parser of ``ckpt``'s command line; with *only*, with the arguments of this command alone."""
    result = _Parser(prog="ckpt", description="Inspect, verify, convert and manage checkpoints.")
    result.add_argument("--version", action="version", version=f"automodel_ckpt {__version__}")
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for verb in VERBS:
        command = commands.add_parser(verb.name, help=verb.help)
        if only not in ("", verb.name):
            continue
        add_usage(command, verb.part("USAGE"), verb.part("TYPES"))
        if "text" not in verb.traits:
            command.add_argument("--json", action="store_true", help="print JSON")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ckpt`` and return its exit code. With ``argv=None`` it uses ``sys.argv``."""
    if argv is None:
        require_utf8()
    occupy_standard_streams()
    with naming_output():
        return _run(sys.argv[1:] if argv is None else list(argv))


def _run(words: list[str]) -> int:
    """Parse and run a command line, and report its failure. Returns the exit code."""
    # Until the command line is parsed, errors are printed as if it had only these two values.
    arguments = Namespace(command="", json="--json" in words)
    try:
        arguments = _parsed(words)
        resolve_paths(arguments)
        verb = next(verb for verb in VERBS if verb.name == arguments.command)
        if "torch" in verb.traits:
            check_working_directory()
        if "urls" not in verb.traits:
            reject_urls(arguments)
        code: int = verb.part("run")(arguments)
        sys.stdout.flush()
        return code
    # Before OSError, its base class: a reader such as head(1) that has enough is no failure.
    except BrokenPipeError:
        leave_reader()
        return EXIT_DONE
    except (AutomodelError, KeyboardInterrupt) as error:
        return _report_failure(error, arguments)
    except Exception as error:
        failure = output_failure(error) or limit_error(error)
        if failure is None and not isinstance(error, OSError):
            raise
        return _report_failure(failure or error, arguments)


def _parsed(words: list[str]) -> Namespace:
    """Parse a command line. Raises :class:`RecipeError`, with the command or option that was probably meant."""
    whole = parser(words[0] if words and words[0] in {verb.name for verb in VERBS} else "")
    known = completion.command_options(whole)
    if words and not words[0].startswith("-") and words[0] not in known:
        meant = _OTHER_WORDS.get(words[0])
        hint = f"here: ckpt {meant}" if meant else _suggestion(words[0], known, "ckpt")
        raise RecipeError("unknown command", "ckpt", words[0], hint)
    arguments, unknown = whole.parse_known_args(words)
    arguments.parser = parser
    if not unknown:
        return arguments
    command = f"ckpt {arguments.command}"
    hint = _suggestion(unknown[0].partition("=")[0], known[arguments.command], command)
    raise RecipeError("unknown arguments", command, " ".join(unknown), hint)


def _suggestion(word: str, names: Iterable[str], command: str) -> str:
    """The hint with the one of *names* that *word* was probably meant to be, or how to list those of *command*."""
    from automodel_ckpt.config.schema_keys import closest

    meant = closest(word, names)
    return f"did you mean {meant}?" if meant else f"`{command} --help` lists them"


def _report_failure(error: BaseException, arguments: Namespace) -> int:
    """Print an error, with ``--json`` also as a document on standard output; return the exit code."""
    is_writing = any(verb.name == arguments.command and "writes" in verb.traits for verb in VERBS)
    if isinstance(error, OSError):
        kind = SaveFailed if is_writing else CheckpointUnusable
        error = kind.of_system(error, "cannot access a file or directory", hint=CHECK_PATH)
    elif isinstance(error, SaveFailed) and not is_writing:
        # A store that cannot be read: commands that only read save nothing.
        error = CheckpointUnusable.all_of(error.problems)
    code, message = describe(error)
    print_error(message)
    if getattr(arguments, "json", False) and isinstance(error, AutomodelError):
        problems = [problem_json(problem) for problem in error.problems]
        try:
            print(json.dumps({"error": {"code": code, "problems": problems}}), flush=True)
        except OSError as unwritten:
            # The error is on standard error already, and one of standard output must not follow it.
            output_failure(unwritten)
    return code


if __name__ == "__main__":
    sys.exit(main())
