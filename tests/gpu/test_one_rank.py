"""FSDP2 on one rank with a GPU: gradients are cast and added without the copies of torch, with the same values."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
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


def sums(in_two_types: bool) -> torch.Tensor:
    """Float32 sums of values in bfloat16 of all exponents, or of these values after a cast."""
    generator = torch.Generator().manual_seed(0)
    shape = (1 << 20,)
    exponents = torch.randint(-120, 120, shape, generator=generator)
    values = torch.randn(shape, generator=generator).ldexp(exponents).bfloat16().cuda()
    total = torch.randn(shape, generator=generator).ldexp(exponents // 2).cuda()
    total += values if in_two_types else values.float()
    return total.cpu()


@only_gpu
def test_bfloat16_values_are_added_in_float32() -> None:
    assert torch.equal(sums(in_two_types=True), sums(in_two_types=False))
