"""``ckpt completion bash|zsh``: print a script with which a shell completes ``ckpt`` and ``ckpt-train``.

The script contains all words, so that completing a command line does not start Python.
"""

from __future__ import annotations

import dataclasses
from argparse import ArgumentParser, Namespace, _SubParsersAction

from automodel_ckpt.errors import EXIT_DONE

# Without a match, bash completes the names of files.
_SCRIPT = """\
_ckpt() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"; else
    case "${{COMP_WORDS[1]}} $word" in
{options}
    esac
  fi
  COMPREPLY=( $(compgen -W "$words" -- "$word") )
}}
_ckpt_train() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  case "$word" in -*) words="{training}" ;; esac
  COMPREPLY=( $(compgen -W "$words" -- "$word") )
}}
complete -o bashdefault -o default -F _ckpt ckpt
complete -o bashdefault -o default -F _ckpt_train ckpt-train"""


USAGE = """
Print a completion script for ckpt and ckpt-train. bash: add eval "$(ckpt completion bash)" to ~/.bashrc. zsh: add eval
"$(ckpt completion zsh)" to ~/.zshrc.

shell {bash,zsh} | the shell
"""


def run(arguments: Namespace) -> int:
    """Run ``ckpt completion``. ``arguments.parser`` makes the parser of all commands."""
    if arguments.shell == "zsh":
        print("autoload -Uz compinit bashcompinit && compinit && bashcompinit")
    commands = command_options(arguments.parser())
    options = [f'    "{name} -"*) words="{" ".join(words)}" ;;' for name, words in commands.items()]
    script = _SCRIPT.format(
        commands=" ".join(commands),
        options="\n".join(options),
        training=" ".join(_training_words()),
    )
    print(script)
    return EXIT_DONE


def command_options(parser: ArgumentParser) -> dict[str, list[str]]:
    """Map each command of ``ckpt`` to its options."""
    found = {}
    # argparse has no public way to list the commands and options of a parser.
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for name, command in action.choices.items():
                words = [word for option in command._actions for word in option.option_strings]
                found[name] = sorted(word for word in words if word.startswith("--"))
    return found


def _training_words() -> list[str]:
    """Return the flags, modes and recipe keys that ``ckpt-train`` accepts, as options."""
    from automodel_ckpt.config.overrides import MODES, VERBOSE
    from automodel_ckpt.config.schema import RecipeConfig
    from automodel_ckpt.config.schema_keys import keys_of
    from automodel_ckpt.config.tree.flags import LaunchFlags

    names = [field.name for field in dataclasses.fields(LaunchFlags)]
    flags = [f"--{name.replace('_', '-')}" for name in (*names, *MODES)]
    return sorted({*flags, *VERBOSE, *(f"--{key}" for key in keys_of(RecipeConfig))})
