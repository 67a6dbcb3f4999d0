"""Jobs: what is planned with torch can be carried out without it, to the same bytes as torch's own."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from automodel_ckpt.checkpoint.files.digests import digest_of
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, FileJob, Span, run_all
from automodel_ckpt.checkpoint.jobs.rank_manifest import RankManifest
from automodel_ckpt.checkpoint.parts.manifest import Blob
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor

CHUNK = 64 << 10  # not gathered with others by a buffer


def test_a_job_writes_its_chunks_and_completes_the_rank_manifest(tmp_path: Path) -> None:
    memory = memoryview(bytearray(b"..weights.."))
    tensor = Tensor("w", "U8", (7,), (Slice("w", "U8", (0,), (7,), "model/a", 2, 7),))
    chunks = [
        Chunk(0, b"h:"),
        Chunk(2, Span(2, 7), tensor),
        Chunk(9, b"<0000>", crc_at=(1,)),
        Chunk(15, lambda: memoryview(b"value"), Blob("v", "model/a", 15, 5, "")),
    ]
    written = RankManifest(0)
    run_all([FileJob("model/a", chunks, "model", 20)], tmp_path, written, memory)
    crc = zlib.crc32(b"weights").to_bytes(4, "little")
    content = (tmp_path / "model/a").read_bytes()
    assert content == b"h:weights<" + crc + b">value"
    assert (
        written.files["model/a"].digest == digest_of(content)
        and written.files["model/a"].size == 20
    )
    (stored,) = written.trees["model"].tensors[0].slices
    assert (stored.start, stored.digest) == (2, digest_of(b"weights"))
    assert written.trees["model"].objects == [Blob("v", "model/a", 15, 5, digest_of(b"value"))]
    assert RankManifest.parse(written.to_bytes()) == written


def test_chunks_that_are_consecutive_in_memory_are_written_in_one_call(tmp_path: Path) -> None:
    def write_calls() -> int:
        counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counters["syscw"])

    def calls_for(name: str, starts: range) -> int:
        chunks = [Chunk(CHUNK * number, Span(start, CHUNK)) for number, start in enumerate(starts)]
        before = write_calls()
        run_all([FileJob(name, chunks)], tmp_path, RankManifest(0), memory)
        taken = write_calls() - before
        expected = b"".join(memory[start : start + CHUNK] for start in starts)
        assert (tmp_path / name).read_bytes() == expected
        return taken

    memory = memoryview(os.urandom(20 * CHUNK))
    assert calls_for("model/consecutive", range(0, 10 * CHUNK, CHUNK)) == 1
    assert calls_for("model/with_gaps", range(0, 20 * CHUNK, 2 * CHUNK)) == 10
