"""Memory in huge pages: what it holds stays, also in processes that were forked before and after."""

from __future__ import annotations

import os
import random

from tests.support.servers import huge_pages


def test_the_memory_and_that_of_forked_processes_is_unchanged() -> None:
    content = random.Random(0).randbytes(5 * huge_pages.PAGE_BYTES)
    memory = bytearray(content)
    before = _forked(memory, content)
    huge_pages.collapse()
    assert memory == content
    after = _forked(memory, content)
    memory[:] = bytes(len(memory))
    for child in (before, after):
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _forked(memory: bytearray, content: bytes) -> int:
    """A process that writes to its copy of *memory*, and checks it."""
    child = os.fork()
    if child == 0:
        memory[1] ^= 1
        os._exit(memory[1] != content[1] ^ 1 or memory[2:] != content[2:])
    return child
