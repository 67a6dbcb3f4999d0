"""The address at which the other nodes of a run reach this one."""

from __future__ import annotations

import os

from torch.distributed import ProcessGroup

from automodel_ckpt.parallel.ranks import agree
from automodel_ckpt.parallel.ranks.network import address_towards, is_loopback

_LOOPBACK = "127.0.0.1"


def own_address(group: ProcessGroup | None) -> str:
    """An address of this node that the nodes of the other ranks of *group* can reach. Collective."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    own = address_towards(master) or _LOOPBACK
    addresses = agree.gather_objects(group, own)
    # The host name of rank 0's node may resolve to 127.0.1.1 there.
    others = [address for address in addresses if not is_loopback(address)]
    if is_loopback(own) and others:
        return address_towards(others[0]) or own
    return own
