"""The launch flags of ``ckpt-train``: how many ranks to start, and how they find each other."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from automodel_ckpt.config.tree.rules import AT_LEAST_0, NOT_EMPTY, Rule, setting

RANKS = Rule(
    lambda text: bool(re.fullmatch(r"[1-9][0-9]*|auto|gpu|cpu", text)),
    "a number from 1, auto, gpu or cpu",
)
RUN_NAME = Rule(
    lambda name: re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,=+-]{0,99}", name) is not None,
    "a name of at most 100 letters, digits and _.,=+-, that begins with a letter, a digit or _",
)
PORT = Rule(lambda port: 0 < port < 65536, "a port from 1 to 65535")


def _is_node_range(text: str) -> bool:
    parts = text.split(":")
    return bool(re.fullmatch(r"[1-9][0-9]*(:[1-9][0-9]*)?", text)) and int(parts[0]) <= int(
        parts[-1]
    )


@dataclass
class LaunchFlags:
    """Validated launch flags; written with dashes or underscores, as ``--flag value`` or ``--flag=value``."""

    nproc_per_node: str = setting("1", RANKS)
    """Ranks per node: a number, auto or gpu (one per GPU), or cpu (one per core)."""
    nnodes: str = setting("1", Rule(_is_node_range, "a number from 1, or MIN:MAX"))
    """Number of nodes, or MIN:MAX for an elastic run."""
    node_rank: int | None = setting(None, AT_LEAST_0)
    """Rank of this node; not used with --rdzv-endpoint."""
    rdzv_endpoint: str | None = setting(None, NOT_EMPTY)
    """Rendezvous endpoint, as HOST:PORT."""
    rdzv_id: str | None = setting(None, NOT_EMPTY)
    """Job ID of the rendezvous."""
    master_addr: str | None = setting(None, NOT_EMPTY)
    """Address of node 0."""
    master_port: int | None = setting(None, PORT)
    """Port on node 0."""
    max_restarts: int | None = setting(None, AT_LEAST_0)
    """Maximum number of restarts after a crash (0; 3 if --nnodes is MIN:MAX)."""
    run_name: str | None = setting(None, RUN_NAME)
    """Name of a directory for this run in checkpoint.checkpoint_dir, such as the settings that a sweep varies."""
    trust: list[str] = field(default_factory=list)
    """Trust this package or path of a .py file, or trust_remote_code; env:NAME: the recipe may send this variable;
    host:NAME[:PORT]: it may send credentials to this host. Can be repeated (also AUTOMODEL_CKPT_TRUST)."""
