"""Archives that an attacker wrote: nothing is written outside of the run directory, and nothing is published."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.harness.commands import check_harmless
from tests.support.checkpoints import manifest_of
from tests.support.models.shards import checkpoint_in

zstandard = pytest.importorskip("zstandard", reason="the extra [archive] is not installed")

NAME = "epoch_0_step_1"
MANIFEST = f"{NAME}/MANIFEST.json"
Members = list[tuple[tarfile.TarInfo, bytes]]


def member(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, link
    entry.size = len(content) if kind == tarfile.REGTYPE else 0
    return entry, content


def good(checkpoint: Path) -> Members:
    """The members of a valid archive."""
    found = [member(MANIFEST, (checkpoint / "MANIFEST.json").read_bytes())]
    for path in sorted(manifest_of(checkpoint)["files"]):
        found.append(member(f"{NAME}/{path}", (checkpoint / path).read_bytes()))
    return found


def packed(members: Members) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for entry, content in members:
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def put_last(name: str, kind: bytes, link: str = "") -> Callable[[Members], Members]:
    return lambda members: [*members, member(name, kind=kind, link=link)]


def put_second(name: str, content: bytes = b"x") -> Callable[[Members], Members]:
    return lambda members: [members[0], member(name, content), *members[1:]]


ATTACKS: dict[str, Callable[[Members], Members]] = {
    "a file above the directory": put_second("../outside"),
    "an absolute name": put_second("/outside"),
    "a symbolic link": put_last(f"{NAME}/model/link", tarfile.SYMTYPE, "/etc/passwd"),
    "a hard link": put_last(f"{NAME}/model/link", tarfile.LNKTYPE, "../../outside"),
    "a device": put_last(f"{NAME}/model/device", tarfile.CHRTYPE),
    "a pipe": put_last(f"{NAME}/model/pipe", tarfile.FIFOTYPE),
    "a member that is not listed": put_second(f"{NAME}/model/more.safetensors"),
    "a member twice": lambda members: [*members, members[-1]],
    "no manifest": lambda members: members[1:],
    "a manifest that is not JSON": lambda members: [member(MANIFEST, b"{"), *members[1:]],
    "nested lists": lambda members: [member(MANIFEST, b"[" * 100_000), *members[1:]],
    "a manifest of another name": lambda members: [
        member("epoch_0_step_2/MANIFEST.json", members[0][1]),
        *members[1:],
    ],
    "a name that is a path": lambda members: [
        member("../../outside/MANIFEST.json", members[0][1]),
        *members[1:],
    ],
    "another manifest": lambda members: [
        member(MANIFEST, members[0][1].replace(b"1", b"2")),
        *members[1:],
    ],
    "a file that is too short": lambda members: [
        *members[:-1],
        member(members[-1][0].name, members[-1][1][:-1]),
    ],
    "a changed byte": lambda members: [
        *members[:-1],
        member(members[-1][0].name, members[-1][1][:-1] + b"?"),
    ],
    "zeros that fill the disk": put_second(f"{NAME}/zeros", bytes(300 << 20)),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_archive_is_an_error_and_does_no_harm(attack: str, tmp_path: Path) -> None:
    source = checkpoint_in(tmp_path / "source", 1)
    run = tmp_path / "run"
    run.mkdir()
    content = packed(ATTACKS[attack](good(source)))
    (run / "file.tar.zst").write_bytes(zstandard.ZstdCompressor(level=1).compress(content))
    command = ("unarchive", run / "file.tar.zst", "-o", run / "out")
    check_harmless(run, *command, codes=(3, 4), beside=["source"])
    assert not list(run.glob("out/.epoch*")) and not (run / "out" / NAME / "zeros").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not zstd",
        # A frame whose window takes 2 GiB (RFC 8878, 3.1.1.1.2).
        b"\x28\xb5\x2f\xfd\x00\xa8\x01\x00\x00",
        zstandard.ZstdCompressor().compress(b"not tar" * 1000),
        zstandard.ZstdCompressor().compress(b""),
    ],
)
def test_a_file_that_is_no_archive_is_an_error(content: bytes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "file").write_bytes(content)
    check_harmless(run, "unarchive", run / "file", "-o", run / "out")
