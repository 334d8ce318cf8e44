"""On CUDA the digests are the CPU's, for any size and alignment, with triton and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_wt.digests import BLOCK, Digests, digest
from vllm_wt.digests import device as on_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = (0, 1, 7, 8, 9, 4095, 4096, 4097, 3 * 4096, 5 * 4096, 20000, 32 * 4096, 70 * 4096 + 5)
OFFSETS = (0, 1, 2, 4, 7, 8, 15, 16)


@pytest.fixture(params=["triton", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of the two makes the digests."""
    if request.param == "triton":
        pytest.importorskip("triton")
    else:
        monkeypatch.setattr(on_device, "has_triton", lambda: False)
    return str(request.param)


def randoms(nbytes: int, offset: int = 0) -> torch.Tensor:
    words = torch.randint(-(2**63), 2**63 - 1, ((offset + nbytes) // 8 + 1,), device="cuda")
    return words.view(torch.uint8)[offset : offset + nbytes]


def check(digests: Digests, buffers: list[torch.Tensor]) -> None:
    host = Digests([buffer.cpu() for buffer in buffers])
    expected = torch.empty(host.count, dtype=torch.int64)
    host.run(expected)
    out = torch.full((host.count + 2,), -1, device="cuda")
    digests.run(out[1:-1])
    assert torch.equal(out[1:-1].cpu(), expected)
    assert out[0] == out[-1] == -1


@pytest.mark.parametrize("offset", OFFSETS)
def test_every_size_and_alignment(way: str, offset: int):
    buffers = [randoms(size, offset) for size in SIZES]
    check(Digests(buffers), buffers)
    for buffer in buffers:  # each is the last one: nothing is written behind it
        check(Digests([buffer]), [buffer])


def test_many_small_ones(way: str):
    sizes = torch.randint(0, 6000, (10_000,)).tolist()
    pool = randoms(sum(sizes))  # cut at odd addresses
    buffers = list(pool.split(sizes))
    check(Digests(buffers), buffers)


@pytest.mark.parametrize("offset", [0, 2, 8])
def test_a_large_one(way: str, offset: int):
    buffer = randoms(2**28 + 4099, offset)
    check(Digests([buffer]), [buffer])


def test_each_run_reads_the_buffers_anew(way: str):
    buffers = [randoms(size, offset) for size in SIZES for offset in (0, 3)]
    prepared = Digests(buffers)
    for fill in (0xFF, 0, 0x5A):
        check(prepared, buffers)
        for buffer in buffers:
            buffer.fill_(fill)


def test_it_follows_the_current_stream(way: str):
    """What the stream wrote before is what is digested."""
    data = torch.zeros(2**24, dtype=torch.int64, device="cuda")
    expected = digest(torch.arange(2**24))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        torch.arange(2**24, out=data)
        out = digest(data)
    stream.synchronize()
    assert torch.equal(out.cpu(), expected)


def test_a_flipped_bit(way: str):
    data = randoms(3 * BLOCK + 100)
    before = digest(data)
    for at, block in ((0, 0), (BLOCK - 1, 0), (BLOCK, 1), (3 * BLOCK + 99, 3)):
        data[at] ^= 0x80
        assert torch.nonzero(digest(data) != before).flatten().tolist() == [block]
        data[at] ^= 0x80


def test_a_run_allocates_nothing_lasting(way: str):
    buffers = [randoms(2**26 + 5), *(randoms(300, 1) for _ in range(50))]
    prepared = Digests(buffers)
    out = torch.empty(prepared.count, dtype=torch.int64, device="cuda")
    prepared.run(out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prepared.run(out)
    assert torch.cuda.max_memory_allocated() - before < 2**20


def test_the_buffers_need_not_be_on_the_current_device(way: Any):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    data = torch.arange(5000, device="cuda:1")
    assert torch.equal(digest(data).cpu(), digest(data.cpu()))
