"""Files of Lightning and of training scripts that an attacker wrote: nothing in them is executed."""

import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from automodel_ckpt.cli import ckpt
from tests.hostile.harness import bombs

FIXTURES = Path(__file__).parents[1] / "fixtures" / "lightning"


PLACES = ("callbacks", "hyper_parameters", "loops", "lr_schedulers", "optimizer_states", "epoch")


def test_objects_beside_the_weights_are_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    saved = torch.load(FIXTURES / "epoch=0-step=5.ckpt", weights_only=True)
    for place in PLACES:
        saved[place] = [bombs.Hostile(marker)] if place.endswith("s") else bombs.Hostile(marker)
    path = tmp_path / "x.ckpt"
    torch.save(saved, path, pickle_module=pickle)
    assert ckpt.main(["import", str(path), str(tmp_path / "run")]) == 0
    ckpt.main(["import", str(path), str(tmp_path / "state"), "--training-state", "--dry-run"])
    assert not marker.exists()


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_a_truncated_file_is_an_error(tmp_path: Path, fraction: float) -> None:
    content = (FIXTURES / "epoch=0-step=5.ckpt").read_bytes()
    path = tmp_path / "x.ckpt"
    path.write_bytes(content[: int(len(content) * fraction)])
    assert ckpt.main(["import", str(path), str(tmp_path / "run")]) == 3


def pickle_in(path: Path, content: bytes) -> tuple[int, int]:
    """Write an archive of torch.save, and return the first byte of its pickle and the one behind it."""
    path.write_bytes(content)
    with zipfile.ZipFile(path) as archive:
        [info] = [each for each in archive.infolist() if each.filename.endswith("/data.pkl")]
    lengths = struct.unpack_from("<HH", content, info.header_offset + 26)
    begin = info.header_offset + 30 + sum(lengths)
    return begin, begin + info.file_size


def test_a_damaged_pickle_is_reported_and_raises_nothing_else(tmp_path: Path) -> None:
    content = bytearray((FIXTURES / "epoch=0-step=5.ckpt").read_bytes())
    path = tmp_path / "x.ckpt"
    begin, end = pickle_in(path, bytes(content))
    # A byte in the middle of each part of the pickle.
    step = (end - begin) // (200 if bombs.EVERY else 20)
    for position in range(begin, end, step):
        damaged = bytearray(content)
        damaged[position] ^= 0x55
        path.write_bytes(damaged)
        assert ckpt.main(["import", str(path), str(tmp_path / "run"), "--dry-run"]) in (0, 2, 3)


def test_a_link_in_place_of_the_metadata_is_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(FIXTURES / "distributed", tmp_path / "source")
    secret = tmp_path / "meta.pt"
    (source / "meta.pt").rename(secret)
    (source / "meta.pt").symlink_to(secret)
    assert ckpt.main(["import", str(source), str(tmp_path / "run"), "--dry-run"]) == 0
    assert "PyTorch DCP" in capsys.readouterr().out
