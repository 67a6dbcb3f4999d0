"""FSDP2 on one rank with a GPU: gradients are cast and added without the copies of torch, with the same values."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.parallel import test_one_rank as on_one_rank
from tests.support.gpu import only_gpu


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process: one that is forked from it cannot use CUDA."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@only_gpu
def test_gradients_are_those_of_fsdp2_with_all_settings(one_rank: None) -> None:
    names = [*on_one_rank.SETTINGS, *on_one_rank.ON_THE_HOST]
    found = on_one_rank.all_gradients(names, "cuda")
    assert on_one_rank.ON_THE_HOST.keys() <= found.keys()
    on_one_rank.check_equal(found)
