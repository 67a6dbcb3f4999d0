"""Archives of NeMo that an attacker wrote: nothing is written outside of the target, or costs more than it is."""

import gzip
import io
import os
import struct
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

# Imported here: the sandbox reports the files that Python writes when a command imports it for the first time.
import automodel_ckpt.convert.formats.nemo.archives  # noqa: F401
from tests.hostile.harness import bombs
from tests.hostile.harness.commands import check_harmless

from .test_torch_files import NAMES as TORCH_FILES
from .test_torch_files import content

FIXTURE = Path(__file__).parents[1] / "fixtures" / "nemo" / "model.nemo"
CONFIG = b"width: 4\n"


def entry_of(name: str, **attributes: object) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    for key, value in attributes.items():
        setattr(entry, key, value)
    return entry


def archive(*entries: tarfile.TarInfo, form: int = tarfile.PAX_FORMAT) -> bytes:
    """Return an archive with a config and then *entries*, each with as many bytes as it says, up to a kilobyte."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as file:
        file.addfile(entry_of("model_config.yaml", size=len(CONFIG)), io.BytesIO(CONFIG))
        for entry in entries:
            buffer.write(entry.tobuf(form))
            if 0 < entry.size < 1024:
                buffer.write(bytes(512 * -(-entry.size // 512)))
            file.offset = buffer.tell()
    return buffer.getvalue()


def one(name: str, **attributes: object) -> Callable[[], bytes]:
    return lambda: archive(entry_of(name, **attributes))


def compressed_zeros() -> bytes:
    """Return a gzip file of some kilobytes that unpacks to a gigabyte."""
    head = archive(entry_of("model_weights.ckpt", size=1 << 30))[: 3 * 512]
    zeros = gzip.compress(bytes(16 << 20), 1) * 64
    return gzip.compress(head) + zeros


def many_members() -> bytes:
    header = entry_of("d", type=tarfile.DIRTYPE).tobuf()
    config = archive()[:1024]
    blocks = [config]
    for number in range(25_000):
        name = f"f{number}".encode()
        blank = name.ljust(100, b"\0") + header[100:148] + b" " * 8 + header[156:]
        blocks.append(blank[:148] + f"{sum(blank):06o}\0 ".encode() + blank[156:])
    return b"".join(blocks) + bytes(1024)


def negative_size() -> bytes:
    data = bytearray(archive(entry_of("model_weights.ckpt", size=1)))
    header = data[1024:1536]
    header[124:136] = b"\xff" * 12
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    data[1024:1536] = header
    return bytes(data)


def wrong_checksum() -> bytes:
    data = bytearray(archive(entry_of("model_weights.ckpt", size=1)))
    data[1024] ^= 1
    return bytes(data)


ARCHIVES: dict[str, Callable[[], bytes]] = {
    "traversal": one("../escaped", size=1),
    "traversal_inside": one("model/../../escaped", size=1),
    "absolute": one("/tmp/escaped-from-the-archive", size=1),
    "backslash": one("..\\escaped", size=1),
    "control_characters": one("a\x1b[2Jb", size=1),
    "symbolic_link": one("model_weights.ckpt", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard_link": one("model_weights.ckpt", type=tarfile.LNKTYPE, linkname="model_config.yaml"),
    "device": one("model_weights.ckpt", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
    "pipe": one("model_weights.ckpt", type=tarfile.FIFOTYPE),
    "sparse": one("model_weights.ckpt", type=tarfile.GNUTYPE_SPARSE, size=1),
    "sparse_pax": one("m", size=1, pax_headers={"GNU.sparse.realsize": str(1 << 50)}),
    "pax_path": one("m", size=1, pax_headers={"path": "../escaped"}),
    "pax_size": one("m", size=1, pax_headers={"size": str(1 << 62)}),
    "pax_digits": one("m", size=1, pax_headers={"size": "9" * 400}),
    "long_name": one("n" * 60_000, size=1),
    "deep": one("d/" * 2_000 + "f", size=1),
    "beyond_the_end": one("model_weights.ckpt", size=1 << 40),
    "directory_with_content": one("d", type=tarfile.DIRTYPE, size=600),
    "duplicate": lambda: archive(entry_of("a", size=1), entry_of("a", size=1)),
    "duplicate_spelling": lambda: archive(entry_of("a", size=1), entry_of("./a", size=1)),
    "file_as_directory": lambda: archive(entry_of("a", size=1), entry_of("a/b", size=1)),
    "directory_as_file": lambda: archive(entry_of("a/b", size=1), entry_of("a", size=1)),
    "two_configs": lambda: archive(entry_of("model_config.yaml", size=1)),
    "compressed_zeros": compressed_zeros,
    "many_members": many_members,
    "negative_size": negative_size,
    "wrong_checksum": wrong_checksum,
    "truncated": lambda: FIXTURE.read_bytes()[:7000],
    "truncated_gzip": lambda: gzip.compress(FIXTURE.read_bytes())[:900],
    "no_end": lambda: archive().rstrip(b"\0"),
}
NAMES = sorted(ARCHIVES)
# HOSTILE=all (make hostile) runs every file; else every fourth.
CHOSEN = NAMES if bombs.EVERY else NAMES[::4]
WEIGHTS = TORCH_FILES[3::16]


def check(run: Path, command: str) -> None:
    """Run ``ckpt`` on the archive in *run*, and check that it fails with an error and leaves nothing else there."""
    check_harmless(run, command, run / "model.nemo", run / "imported")
    names = [name for name in sorted(os.listdir(run)) if "decoded" not in name]
    assert names in (["model.nemo"], ["imported", "model.nemo"])
    assert not list(run.rglob("archive.tar"))


@pytest.mark.parametrize("command", ["unpack", "import"])
@pytest.mark.parametrize("name", CHOSEN)
def test_a_hostile_archive_is_an_error_and_writes_nothing_elsewhere(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "model.nemo").write_bytes(ARCHIVES[name]())
    # Where a compressed archive is decompressed to.
    monkeypatch.setattr(tempfile, "tempdir", str(run))
    check(run, command)


@pytest.mark.parametrize("name", WEIGHTS)
def test_hostile_weights_in_an_archive_are_an_error(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    buffer = io.BytesIO()
    data = content(name, tmp_path / "executed")
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.addfile(entry_of("model_config.yaml", size=len(CONFIG)), io.BytesIO(CONFIG))
        file.addfile(entry_of("model_weights.ckpt", size=len(data)), io.BytesIO(data))
    (run / "model.nemo").write_bytes(buffer.getvalue())
    check(run, "import")


def packed(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name, data in members.items():
            file.addfile(entry_of(name, size=len(data)), io.BytesIO(data))
    return buffer.getvalue()


MAPPING = b'{"decoder": "gpt", "mapping": {"world_size": 1, "tp_size": 1}}'
HEADER = b'{"w": {"dtype": "F32", "shape": [%s], "data_offsets": [0, %s]}}'
QNEMO: dict[str, tuple[bytes, bytes]] = {
    "deep_config": (b"[" * 100_000, b""),
    "no_mapping": (b"{}", b""),
    "list": (b"[]", b""),
    "long_header": (MAPPING, struct.pack("<Q", 1 << 40) + b"{}"),
    "header_of_the_next_member": (MAPPING, struct.pack("<Q", 4096)),
    "beyond_the_member": (MAPPING, HEADER % (b"100", b"400")),
    "giant": (MAPPING, HEADER % (b"4611686018427387904", b"8")),
    "empty": (MAPPING, b""),
}


@pytest.mark.parametrize("name", sorted(QNEMO))
def test_a_hostile_checkpoint_of_tensorrt_llm_is_an_error(name: str, tmp_path: Path) -> None:
    config, weights = QNEMO[name]
    if weights[:1] == b"{":
        weights = struct.pack("<Q", len(weights)) + weights + bytes(8)
    run = tmp_path / "run"
    run.mkdir()
    # The next member has bytes that a wrong range would read as data.
    members = {"config.json": config, "rank0.safetensors": weights, "z": bytes(8192)}
    (run / "model.nemo").write_bytes(packed(members))
    check(run, "import")
