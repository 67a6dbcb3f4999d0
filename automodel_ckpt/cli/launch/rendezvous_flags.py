"""Where the nodes of a run rendezvous, by the flags of the command line."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from automodel_ckpt.cli.launch.started_ranks import slurm_number
from automodel_ckpt.config.schema_keys import is_number
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.errors import RecipeError

MASTER_PORT = 29500
"""The port of --master-addr if --master-port is not given, as in torchrun."""
RDZV_PORT = 29400
"""The port of --rdzv-endpoint if it has none, as in torchrun."""
ELASTIC_RESTARTS = 3
"""How often ranks are restarted by default if nodes may leave the run."""
LOCAL = "local"
STATIC = "static"
C10D = "c10d"
"""The backends: one node, --master-addr with --node-rank, --rdzv-endpoint."""


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of a run's nodes. Fields have the names of torch's LaunchConfig.

    The backend is LOCAL, STATIC or C10D.
    """

    rdzv_backend: str
    rdzv_endpoint: str
    run_id: str
    min_nodes: int
    max_nodes: int
    node_rank: int = 0

    @property
    def host(self) -> str:
        """The host of the endpoint; an IPv6 address without brackets."""
        return self.rdzv_endpoint.rpartition(":")[0].strip("[]")

    def max_restarts(self, requested: int | None) -> int:
        """Return how often the ranks may be restarted. The default is not 0 if nodes may leave the run."""
        if requested is not None:
            return requested
        return ELASTIC_RESTARTS if self.min_nodes < self.max_nodes else 0


def choose_rendezvous(flags: LaunchFlags, environment: Mapping[str, str]) -> Rendezvous:
    """Return the rendezvous that the launch flags describe, as torch.distributed.run does.

    A single node uses a free port. Raises :class:`RecipeError` for flags that contradict each other or give no address.
    """
    least, _, most = flags.nnodes.partition(":")
    min_nodes, max_nodes = int(least), int(most or least)
    if flags.rdzv_endpoint:
        _validate_no_static_flags(flags)
        endpoint = _endpoint(flags.rdzv_endpoint)
        if max_nodes > 1:
            return Rendezvous(C10D, endpoint, flags.rdzv_id or "none", min_nodes, max_nodes)
    _validate_static_nodes(flags, min_nodes, max_nodes)
    node_rank = _node_rank(flags, max_nodes, environment)
    if max_nodes == 1:
        # At any other address, other nodes could connect. Port 0: the system selects a free one, so that several runs
        # can share a node.
        endpoint = f"127.0.0.1:{flags.master_port or 0}"
        return Rendezvous(LOCAL, endpoint, flags.rdzv_id or str(uuid.uuid4()), 1, 1)
    endpoint = f"{flags.master_addr}:{flags.master_port or MASTER_PORT}"
    run_id = flags.rdzv_id or "none"
    return Rendezvous(STATIC, endpoint, run_id, min_nodes, max_nodes, node_rank=node_rank)


def _endpoint(text: str) -> str:
    """Return HOST:PORT, with torchrun's port by default. IPv6 addresses are in brackets.

    Raises :class:`RecipeError` for other text.
    """
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(RDZV_PORT)
    bare = host.strip("[]")
    is_ipv6 = ":" in bare
    is_port = is_number(port) and 0 < int(port) < 65536
    if not bare or is_ipv6 != host.startswith("[") or not is_port:
        raise RecipeError(
            "invalid rendezvous endpoint",
            where="--rdzv-endpoint",
            value=text,
            hint="use HOST:PORT, such as node0:29400 or [fd00::1]:29400",
        )
    return f"{host}:{port}"


def _validate_no_static_flags(flags: LaunchFlags) -> None:
    """Raise :class:`RecipeError` if flags of a static rendezvous are combined with --rdzv-endpoint."""
    for name in ("node_rank", "master_addr", "master_port"):
        value = getattr(flags, name)
        if value is not None:
            raise RecipeError(
                "two kinds of rendezvous are configured",
                where=f"--{name.replace('_', '-')} with --rdzv-endpoint",
                value=value,
                hint="use --rdzv-endpoint (which assigns the node ranks), or --master-addr with --node-rank",
            )


def _validate_static_nodes(flags: LaunchFlags, min_nodes: int, max_nodes: int) -> None:
    """Raise :class:`RecipeError` for flags that need --rdzv-endpoint."""
    is_elastic = min_nodes != max_nodes
    if is_elastic or (max_nodes > 1 and (flags.master_addr is None or flags.max_restarts)):
        raise RecipeError(
            "a rendezvous endpoint is required",
            where="--nnodes, --master-addr, --max-restarts",
            value=f"{flags.nnodes}, {flags.master_addr}, {flags.max_restarts}",
            hint="add --rdzv-endpoint HOST:PORT and --rdzv-id NAME, the same on all nodes (a fixed number of nodes "
            "without restarts can have --master-addr HOST and --node-rank N instead)",
        )


def _node_rank(flags: LaunchFlags, num_nodes: int, environment: Mapping[str, str]) -> int:
    """Return this node's rank, from the flag or Slurm. Raises :class:`RecipeError` if it is missing or too large."""
    rank = flags.node_rank
    if rank is None and num_nodes == 1:
        rank = 0
    if rank is None and "SLURM_NODEID" in environment:
        rank = slurm_number(environment, "SLURM_NODEID", default=0)
    if rank is None or rank >= num_nodes:
        raise RecipeError(
            "the rank of this node is missing or too large",
            where="--node-rank",
            value=rank,
            hint=f"give each node a different rank from 0 to {num_nodes - 1}",
        )
    return rank
