"""`python -m tools.crash CAMPAIGN`: exit code 1 when a promise was broken, 3 when the campaign cannot run here."""

from __future__ import annotations

import sys

from tools.crash.cli import main

sys.exit(main())
