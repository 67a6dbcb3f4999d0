"""``ckpt completion bash|zsh|fish``: what a shell needs to complete ``ckpt`` and ``ckpt-train``.

The scripts hold all words themselves, so that completing starts no Python.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from automodel_ckpt.errors import EXIT_DONE

SHELLS = ("bash", "zsh", "fish")


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to ``ckpt``'s."""
    completion: argparse.ArgumentParser = commands.add_parser(
        "completion",
        help="print a shell completion script",
        description='Print a completion script for ckpt and ckpt-train. bash: add eval "$(ckpt completion bash)" to '
        '~/.bashrc. zsh: add eval "$(ckpt completion zsh)" to ~/.zshrc. fish: ckpt completion fish | source.',
    )
    completion.add_argument("shell", choices=SHELLS)
    return completion


def completion(shell: str, parser: argparse.ArgumentParser) -> int:
    """Print the script for *shell*."""
    words = commands_of(parser)
    if shell == "fish":
        print("\n".join(_fish(words, training_words())))
    else:
        zsh = (
            "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"
            if shell == "zsh"
            else ""
        )
        print(zsh + _bash(words, training_words()))
    return EXIT_DONE


def commands_of(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """{command: its options and fixed words} of ``ckpt``."""
    (choices,) = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return {name: sorted(_words(command)) for name, command in choices.items()}


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from (option for option in action.option_strings if option.startswith("--"))
        if not action.option_strings:
            yield from (str(choice) for choice in action.choices or ())


def training_words() -> list[str]:
    """Flags, modes and all keys of a recipe, as ``ckpt-train`` takes them."""
    from automodel_ckpt.config.flags import LaunchFlags
    from automodel_ckpt.config.overrides import MODES
    from automodel_ckpt.config.schema import RecipeConfig

    flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(LaunchFlags)]
    flags += [f"--{mode.replace('_', '-')}" for mode in MODES]
    return sorted({*flags, *(f"--{key}" for key in _keys(RecipeConfig, ""))})


def _keys(section: type[Any], prefix: str) -> Iterator[str]:
    from automodel_ckpt.config.convert import members, section_type

    for name, hint in typing.get_type_hints(section).items():
        if typing.get_origin(hint) is typing.ClassVar:
            continue
        inner = section_type(members(hint))
        yield from _keys(inner, f"{prefix}{name}.") if inner else (prefix + name,)


def _bash(commands: Mapping[str, Sequence[str]], training: Sequence[str]) -> str:
    cases = "\n".join(
        f'    {name}) words="{" ".join(words)}" ;;' for name, words in commands.items()
    )
    return f"""\
_ckpt() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(commands)}"; else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=( $(compgen -W "$words" -- "$word") )
}}
_ckpt_train() {{
  COMPREPLY=( $(compgen -W "{" ".join(training)}" -- "${{COMP_WORDS[COMP_CWORD]}}") )
}}
complete -o bashdefault -o default -F _ckpt ckpt
complete -o bashdefault -o default -F _ckpt_train ckpt-train"""


def _fish(commands: Mapping[str, Sequence[str]], training: Sequence[str]) -> Iterator[str]:
    yield f"complete -c ckpt -n __fish_use_subcommand -f -a '{' '.join(commands)}'"
    for name, words in commands.items():
        for word in words:
            what = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            yield f"complete -c ckpt -n '__fish_seen_subcommand_from {name}' {what}"
    yield from (f"complete -c ckpt-train -l {word[2:]}" for word in training)
