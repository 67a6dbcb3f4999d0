"""Run a command of this package with the Hub that its environment names.

    python -m tests.support.servers.hub_command ckpt-train recipe.yaml

The command server imported huggingface_hub before, with the environment of the tests.
"""

import importlib
import sys

from huggingface_hub import constants

from tests.support.servers.command_server import OUR_COMMANDS


def main() -> int:
    importlib.reload(constants)
    command, *words = sys.argv[1:]
    return int(importlib.import_module(OUR_COMMANDS[command]).main(words))


if __name__ == "__main__":
    sys.exit(main())
