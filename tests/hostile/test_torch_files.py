"""Files of torch.save that other programs wrote: nothing in them is executed, and they cost no more than they are."""

import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from automodel_ckpt.cli import ckpt
from tests.hostile.harness import bombs
from tests.hostile.harness.commands import check_harmless

_DEEP = 1_000_000
_STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
PROGRAMS: dict[str, bytes] = {
    "deep_list": b"\x80\x02" + b"]" * _DEEP + b"a" * (_DEEP - 1) + b".",
    "deep_tuple_as_key": b"\x80\x02})" + b"\x85" * _DEEP + b"K\x01s.",
    "deep_set": b"\x80\x04" + b"\x8f(" * 10_000 + b"\x90" * 10_000 + b".",
    "laughs": b"\x80\x04]\x94" + b"".join(b"](h%ch%ce\x94" % (i, i) for i in range(60)) + b".",
    "deep_mapping": b"\x80\x02}" + b"X\x01\x00\x00\x00a}" * 10_000 + b"s" * 10_000 + b".",
    "many_lists": b"\x80\x02](" + b"]" * 2_000_000 + b"e.",
    "long_text": b"\x80\x02X\xff\xff\xff\x7fa.",
    "long_bytes": b"\x80\x04B\xff\xff\xff\x7fa.",
    "huge_bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"a.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "memo_index": b"\x80\x02r\xff\xff\xff\x7f}.",
    "frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
    "no_stop": b"\x80\x02}",
    "nothing": b"",
    "long_number": b"\x80\x02\x8b\xff\xff\xff\x7fabc",
    "hook": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\ncos\nsystem\n(X\x02\x00\x00\x00idt}tR.",
    "giant_view": b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n("
    + _STORAGE
    + b"K\x04tQK\x00\x8a\x06\x00\x00\x00\x00\x00\x01\x85K\x00\x85\x89}tRs.",
    "negative": b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n("
    + _STORAGE
    + b"K\x04tQK\x00J\xff\xff\xff\xff\x85K\x01\x85\x89}tRs.",
}
BOMBS: dict[str, Callable[[], bytes]] = {
    "compressed_tensor": bombs.compressed_tensor,
    "compressed_pickle": bombs.compressed_pickle,
    "overlapping": bombs.overlapping_records,
    "beyond": bombs.storage_beyond_its_record,
}


NAMES = sorted([*bombs.executing_state(Path("x")), *PROGRAMS, *BOMBS])


def content(name: str, marker: Path) -> bytes:
    """The bytes of a hostile file; *marker* is what its code would create."""
    if name in BOMBS:
        return BOMBS[name]()
    if name in PROGRAMS:
        return bombs.archive({"data.pkl": PROGRAMS[name], "data/0": bytes(16)})
    return bombs.executing_state(marker)[name]


FIXTURES = Path(__file__).parents[1] / "fixtures"
STATE = ("--training-state", "--dry-run")


@dataclass(frozen=True)
class Place:
    """A file of torch.save in a fixture ("": it is alone), and the exit codes of an import with it."""

    fixture: str
    file: str
    options: tuple[str, ...] = ()
    codes: tuple[int, ...] = (3,)
    every: int = 12
    """One in so many hostile files is tried; HOSTILE=all (make hostile) tries all."""

    @property
    def names(self) -> list[str]:
        return NAMES if bombs.EVERY else NAMES[:: self.every]


PLACES = (
    Place("", "m.pt", every=4),
    Place("", "pytorch_model.bin"),
    Place("deepspeed/stage2-float32", "global_step3/mp_rank_00_model_states.pt"),
    Place("deepspeed/stage2-float32", "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    # Weights do not depend on meta.pt: the directory is then one of PyTorch DCP.
    Place("lightning/distributed", "meta.pt", codes=(0,)),
    Place("lightning/distributed", "__1_0.distcp"),
    Place("lightning/distributed", ".metadata"),
    Place("megatron/llama", "iter_0000020/common.pt"),
    Place("trainer/checkpoint-5", "optimizer.pt", STATE),
    # Of the schedule and the counters only plain values are used, and of the arguments the number of samples.
    Place("trainer/checkpoint-5", "scheduler.pt", STATE, (0, 3)),
    Place("trainer/checkpoint-5", "training_args.bin", STATE, (0, 3)),
    Place("automodel/run/epoch_0_step_4", "step_scheduler.pt", STATE, (0, 3)),
)


@pytest.fixture(scope="module", autouse=True)
def _read_sources(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import intact files: the sandbox would report the sources of transformers that a first import reads."""
    run = tmp_path_factory.mktemp("intact") / "run"
    assert ckpt.main(["import", str(FIXTURES / "trainer/checkpoint-5"), str(run), *STATE]) == 0


@pytest.mark.parametrize(
    ("place", "name"),
    [(place, name) for place in PLACES for name in place.names],
    ids=lambda value: value.file if isinstance(value, Place) else value,
)
def test_a_hostile_file_is_an_error_and_does_no_harm(
    place: Place, name: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    source = run / "source"
    if place.fixture:
        shutil.copytree(FIXTURES / place.fixture, source)
    else:
        source.mkdir()
    (source / place.file).write_bytes(content(name, tmp_path / "executed"))
    if place.file == "m.pt":
        source /= place.file
    check_harmless(run, "import", source, run / "imported", *place.options, codes=place.codes)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_model_beside_hostile_objects_is_read_and_they_are_not(
    tmp_path: Path, protocol: int
) -> None:
    hostile = bombs.Hostile(tmp_path / "executed")
    value = {"state_dict": {"w": torch.ones(2)}, "callbacks": [hostile], "args": hostile}
    torch.save(value, tmp_path / "m.ckpt", pickle_module=pickle, pickle_protocol=protocol)
    assert ckpt.main(["import", str(tmp_path / "m.ckpt"), str(tmp_path / "run")]) == 0
    assert not (tmp_path / "executed").exists()
