"""Digests and CRC-32 checksums that other threads compute while the bytes are written. Imports no torch.

The zlib of many systems computes 1 to 2 GB/s of CRC-32, less than a disk writes. Python's functions release the GIL for
large buffers, and the CRC-32 of a long range follows from the CRC-32s of its chunks.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

from automodel_ckpt.checkpoint.files.digests import digest_from
from automodel_ckpt.checkpoint.files.threads import cores_of_rank

_PIECE_BYTES = 8 << 20
_PARALLEL_FROM_BYTES = 2 << 20
"""Shorter ranges are computed by the thread that writes: passing them to another one takes as long."""
_MOST_THREADS = 8
# The polynomial of CRC-32 (IEEE 802.3), without x^32. The highest bit is the coefficient of x^0.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_X_8 = _ONE >> 8


def num_threads() -> int:
    """How many threads of this process compute checksums: the other half of its cores writes and trains."""
    return max(1, min(_MOST_THREADS, cores_of_rank() // 2))


class Checksums:
    """The digest and, with *has_crc*, the CRC-32 of bytes that are added in blocks.

    Threads of a *pool* compute the checksums of long blocks. A block must not change until :meth:`finish` has
    returned, which the other methods call.
    """

    def __init__(self, pool: ThreadPoolExecutor | None, *, has_crc: bool) -> None:
        self._pool, self._has_crc = pool, has_crc
        self._hash = xxhash.xxh3_128()
        self._crc = 0
        self._hashing: Future[None] | None = None
        self._crcs: Sequence[tuple[Future[int], int]] = ()

    def begin(self, block: bytes | memoryview) -> None:
        """Add a block."""
        if self._pool is None or len(block) < _PARALLEL_FROM_BYTES:
            self._hash.update(block)
            if self._has_crc:
                self._crc = zlib.crc32(block, self._crc)
            return
        self._hashing = self._pool.submit(self._hash.update, block)
        if self._has_crc:
            self._crcs = _submit_crcs(self._pool, block)

    def finish(self) -> None:
        """Wait for the threads."""
        if self._hashing is not None:
            self._hashing.result()
        self._crc = _joined(self._crc, self._crcs)
        self._hashing, self._crcs = None, ()

    def digest(self) -> str:
        """The digest of all blocks, in the stored format."""
        self.finish()
        return digest_from(self._hash)

    def crc(self) -> int:
        """The CRC-32 of all blocks."""
        assert self._has_crc, "it was not computed"
        self.finish()
        return self._crc


def _submit_crcs(
    pool: ThreadPoolExecutor, data: bytes | memoryview
) -> Sequence[tuple[Future[int], int]]:
    """Compute the CRC-32 of each piece of *data*. Returns it and the piece's length in bytes."""
    view = memoryview(data)
    pieces = [view[at : at + _PIECE_BYTES] for at in range(0, len(view), _PIECE_BYTES)]
    return [(pool.submit(zlib.crc32, piece), len(piece)) for piece in pieces]


def _joined(crc: int, pieces: Iterable[tuple[Future[int], int]]) -> int:
    """The CRC-32 of bytes with the checksum *crc* and the *pieces* after them. Waits for the threads."""
    for piece, nbytes in pieces:
        crc = combined(crc, piece.result(), nbytes)
    return crc


def combined(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two consecutive byte ranges, from the CRC-32 of each and the length of the second.

    The first one is multiplied by x to the power of the second range's bits (source: crc32_combine of zlib).
    """
    return _product(first, _power(nbytes)) ^ second


@functools.lru_cache(maxsize=256)
def _power(nbytes: int) -> int:
    """x to the power of ``8 * nbytes``, modulo the polynomial."""
    result = _ONE
    square = _X_8
    while nbytes:
        if nbytes & 1:
            result = _product(result, square)
        square = _product(square, square)
        nbytes >>= 1
    return result


def _product(left: int, right: int) -> int:
    """The product of two polynomials over GF(2), modulo the polynomial of CRC-32."""
    result = 0
    bit = _ONE
    while bit:
        if left & bit:
            result ^= right
        # Multiply by x.
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
        bit >>= 1
    return result
