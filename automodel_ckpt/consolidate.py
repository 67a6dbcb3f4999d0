"""``python -m automodel_ckpt.consolidate``: the command that ``consolidate.sh`` of every checkpoint runs.

The name of this module is part of the files on disk. The code is in :mod:`automodel_ckpt.cli.commands.consolidate`.
"""

from __future__ import annotations

import sys

from automodel_ckpt.cli.commands.consolidate import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
