"""``ckpt-train`` on a node with its own network, host name and processes: ``... node_train NETWORK WORD...``.

The processes of other nodes are not visible in /proc. With the environment variable NODE_DISK, a path, each node sees
the directory ``PATH-NETWORK`` there, which no other node sees.
"""

import ctypes
import os
import socket
import sys

from automodel_ckpt.cli.train import main
from tests.support.servers.networks import enter_network

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWPID = 0x00020000, 0x04000000, 0x20000000
_MS_REC, _MS_PRIVATE, _MS_BIND = 0x4000, 0x40000, 0x1000


def isolate(name: str) -> None:
    """Continue in a child process on a node *name*; this process ends as the child does."""
    enter_network(name)
    library = ctypes.CDLL(None)
    assert library.unshare(_CLONE_NEWUTS | _CLONE_NEWPID | _CLONE_NEWNS) == 0
    socket.sethostname(name)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 255)
    assert library.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
    assert library.mount(b"proc", b"/proc", b"proc", 0, None) == 0
    disk = os.environ.get("NODE_DISK")
    if disk is not None:
        source = f"{disk}-{name}"
        for path in (disk, source):
            os.makedirs(path, exist_ok=True)
        assert library.mount(source.encode(), disk.encode(), None, _MS_BIND, None) == 0


if __name__ == "__main__":
    isolate(sys.argv[1])
    sys.argv[:2] = ["ckpt-train"]
    sys.exit(main())
