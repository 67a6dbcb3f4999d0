"""``ckpt-train`` on a node: ``python -m tools.nodes.command NAMESPACE WORD...``."""

from __future__ import annotations

import sys

from automodel_ckpt.cli.train import main
from tests.support.servers.networks import enter_network

if __name__ == "__main__":
    enter_network(sys.argv[1])
    sys.argv[:2] = ["ckpt-train"]
    sys.exit(main())
