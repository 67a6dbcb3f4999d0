"""``ckpt completion bash|zsh|fish``: print a script with which a shell completes ``ckpt`` and ``ckpt-train``.

The scripts contain all words, so that completing a command line does not start Python.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from automodel_ckpt.errors import EXIT_DONE

SHELLS = ("bash", "zsh", "fish")
_LINE = "\n"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe the command ``ckpt completion``."""
    command.description = (
        'Print a completion script for ckpt and ckpt-train. bash: add eval "$(ckpt completion bash)" to '
        '~/.bashrc. zsh: add eval "$(ckpt completion zsh)" to ~/.zshrc. fish: ckpt completion fish | source.'
    )
    command.add_argument("shell", choices=SHELLS)


def run(arguments: argparse.Namespace) -> int:
    """Run ``ckpt completion``. ``arguments.parser`` makes the parser of all commands."""
    whole = arguments.parser()
    words, choices = command_words(whole), _choices(whole)
    if arguments.shell == "fish":
        print("\n".join(_fish(words, choices, _training_words())))
        return EXIT_DONE
    if arguments.shell == "zsh":
        print("autoload -Uz compinit bashcompinit && compinit && bashcompinit")
    print(_bash(words, choices, _training_words()))
    return EXIT_DONE


def command_words(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Map each command of ``ckpt`` to its options and the fixed words of its arguments."""
    return {name: sorted(_words(command)) for name, command in _commands(parser).items()}


def _choices(parser: argparse.ArgumentParser) -> dict[tuple[str, str], list[str]]:
    """Map (command, option) to the words that the value of the option can be, if they are fixed."""
    found = {}
    for name, command in _commands(parser).items():
        for action in command._actions:
            for option in action.option_strings:
                if action.choices is not None:
                    found[name, option] = [str(choice) for choice in action.choices]
    return found


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    # argparse has no public way to list the commands and options of a parser
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found.update(action.choices)
    return found


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if not action.option_strings:
            yield from map(str, action.choices or ())
        for option in action.option_strings:
            if option.startswith("--"):
                yield option


def _training_words() -> list[str]:
    """Return the flags, modes and recipe keys that ``ckpt-train`` accepts, as options."""
    from automodel_ckpt.config.overrides import MODES, VERBOSE
    from automodel_ckpt.config.schema import RecipeConfig
    from automodel_ckpt.config.tree.flags import LaunchFlags

    flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(LaunchFlags)]
    flags += [f"--{mode.replace('_', '-')}" for mode in MODES]
    flags += VERBOSE
    return sorted({*flags, *(f"--{key}" for key in _keys(RecipeConfig, ""))})


def _keys(section: type[Any], prefix: str) -> Iterator[str]:
    from automodel_ckpt.config.tree.convert import members, section_type

    for name, hint in typing.get_type_hints(section).items():
        if typing.get_origin(hint) is typing.ClassVar:
            continue
        section_class = section_type(members(hint))
        if section_class is None:
            yield prefix + name
        else:
            yield from _keys(section_class, f"{prefix}{name}.")


def _bash(
    commands: Mapping[str, Sequence[str]],
    choices: Mapping[tuple[str, str], Sequence[str]],
    training: Sequence[str],
) -> str:
    options, fixed = [], []
    for name, words in commands.items():
        options.append(f'    "{name} -"*) words="{" ".join(_options(words))}" ;;')
        others = [word for word in words if not word.startswith("-")]
        if others:
            fixed.append(f'    "{name} "*) words="{" ".join(others)}" ;;')
    values = []
    for (name, option), words in choices.items():
        values.append(f'    "{name} {option}") words="{" ".join(words)}" ;;')
    # Without a match, bash completes the names of files. It takes = as a word.
    return f"""\
_ckpt() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  [ "$word" = "=" ] && word=""
  [ "$before" = "=" ] && before="${{COMP_WORDS[COMP_CWORD-2]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(commands)}"; else
    case "${{COMP_WORDS[1]}} $before" in
{_LINE.join(values)}
    *) case "${{COMP_WORDS[1]}} $word" in
{_LINE.join([*options, *fixed])}
    esac ;;
    esac
  fi
  COMPREPLY=( $(compgen -W "$words" -- "$word") )
}}
_ckpt_train() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  case "$word" in -*) words="{" ".join(training)}" ;; esac
  COMPREPLY=( $(compgen -W "$words" -- "$word") )
}}
complete -o bashdefault -o default -F _ckpt ckpt
complete -o bashdefault -o default -F _ckpt_train ckpt-train"""


def _options(words: Sequence[str]) -> list[str]:
    return [word for word in words if word.startswith("-")]


def _fish(
    commands: Mapping[str, Sequence[str]],
    choices: Mapping[tuple[str, str], Sequence[str]],
    training: Sequence[str],
) -> Iterator[str]:
    yield f"complete -c ckpt -n __fish_use_subcommand -f -a '{' '.join(commands)}'"
    for name, words in commands.items():
        for word in words:
            argument = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            if (name, word) in choices:
                argument += f" -x -a '{' '.join(choices[name, word])}'"
            yield f"complete -c ckpt -n '__fish_seen_subcommand_from {name}' {argument}"
    for word in training:
        yield f"complete -c ckpt-train -l {word[2:]}"
