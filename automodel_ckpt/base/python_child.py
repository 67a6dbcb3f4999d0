"""Start another process of this package: the only place that starts a Python interpreter.

``python -m`` and ``python -c`` search the current directory first: a ``json.py`` next to a recipe would be executed. A
process that is started here has the search path of this one, which contains what the user's PYTHONPATH, an editable
installation or a script added, and imports nothing before the path is set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

_START = (
    "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); "
    "import importlib; sys.exit(importlib.import_module(sys.argv.pop(1)).main(sys.argv[1:]))"
)


def start_python(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that calls ``main(arguments)`` of a module and exits with the code that it returns.

    Args:
        module: The full name of the module.
        arguments: The list of strings that ``main`` gets.
        options: Options of :class:`subprocess.Popen`.

    Returns:
        The process.

    Raises:
        OSError: The process could not be started.
    """
    path = "\n".join(os.path.abspath(entry) for entry in sys.path)
    # -P also protects the helper processes of multiprocessing, which inherit the flags of the interpreter.
    command = [sys.executable, "-P", "-c", _START, path, module, *arguments]
    return subprocess.Popen(command, **options)
