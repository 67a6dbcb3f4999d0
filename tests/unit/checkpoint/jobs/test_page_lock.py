"""Host memory that CUDA cannot page-lock is used as it is, with one line in the log."""

from __future__ import annotations

import pytest

from automodel_ckpt.checkpoint.saving.host_memory import HostMemory, PageLock


class Cuda:
    """A CUDA runtime whose functions return *status*, or raise *error*."""

    def __init__(self, status: int = 0, error: Exception | None = None) -> None:
        self.status = status
        self.error = error
        self.locked: dict[int, int] = {}
        self.num_calls = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.num_calls += 1
        assert flags == 0
        if self.error is not None:
            raise self.error
        if self.status == 0:
            assert address not in self.locked
            self.locked[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


def test_memory_is_locked_as_it_grows_and_unlocked_at_the_end() -> None:
    cuda = Cuda()
    memory = HostMemory(PageLock(cuda))
    memory.reserve(10_000)
    assert list(cuda.locked.values()) == [12_288]
    memory.reserve(20_000)
    assert list(cuda.locked) == [memory.tensor.data_ptr()]
    assert list(cuda.locked.values()) == [20_480]
    memory.close()
    assert not cuda.locked


@pytest.mark.parametrize(
    ("cuda", "reason"),
    [
        (Cuda(status=2), "cudaHostRegister returned error 2"),
        (Cuda(status=801), "cudaHostRegister returned error 801"),
        (Cuda(error=RuntimeError("no driver\nwith a trace")), "no driver;"),
    ],
)
def test_memory_that_cannot_be_locked_is_used_with_one_line(
    cuda: Cuda, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "automodel_ckpt")
    memory = HostMemory(PageLock(cuda))
    memory.reserve(10_000)
    memory.reserve(20_000)
    memory.tensor.fill_(7)
    assert int(memory.tensor.sum()) == 7 * 20_480
    memory.close()
    assert cuda.num_calls == 1, "it is not tried again"
    (record,) = caplog.records
    assert "cannot page-lock 12.3 kB for asynchronous saves" in record.message
    assert reason in record.message
    assert "ulimit -l is" in record.message
