"""Many copies as one kernel on a GPU write what ``copy_`` would, and nothing beside it."""

from __future__ import annotations

import sys

import pytest
import torch

from vllm_wt.manifest import Manifest
from vllm_wt.packing import DTYPES, Copies, Layout, as_bytes, meta_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = [0, 1, 2, 15, 16, 17, 31, 4095, 4096, 4097, 65_535, 65_536, 65_537, 1_000_003]
SHIFTS = [(0, 0), (0, 1), (1, 0), (3, 3), (8, 0), (15, 15), (5, 9)]


@pytest.fixture(params=["kernel", "foreach"])
def way(request, monkeypatch):
    """By Triton's kernel, and as where Triton is not installed."""
    if request.param == "foreach":
        monkeypatch.setitem(sys.modules, "vllm_wt.packing.kernels", None)
    else:
        pytest.importorskip("triton", reason="Triton is not installed")
    return request.param


def _random(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shift", SHIFTS)
def test_bytes_of_every_size_and_place(shift):
    pairs, expected = [], []
    for size in SIZES:
        memory = torch.full((size + 64,), 0xA5, dtype=torch.uint8, device="cuda")
        source = _random(size + 32)[shift[1] :][:size]
        pairs.append((memory[shift[0] :][:size], source))
        wanted = memory.clone()
        wanted[shift[0] : shift[0] + size] = source
        expected.append((memory, wanted))
    copies = Copies(pairs)
    assert copies.nbytes == sum(SIZES)
    copies.run()
    assert all(torch.equal(memory, wanted) for memory, wanted in expected)


@pytest.mark.usefixtures("way")
def test_columns_and_transposed_parts():
    """As tensor parallelism cuts them; of some the runs are long, of others short."""
    whole = torch.randn(64, 3000, device="cuda")
    sources = [whole[:, 500:1500], whole[:, 1:1001], whole[::2, 700:1700], whole[:, ::3], whole.t()]
    sources += [whole.view(8, 8, 3000)[:, 2:5, :999].transpose(0, 1)]
    pairs = [(torch.zeros(s.shape, device="cuda"), s) for s in sources]
    into = torch.zeros(64, 2000, device="cuda")
    pairs.append((into[:, 1000:], whole[:, :1000]))
    Copies(pairs).run()
    assert all(torch.equal(to, source) for to, source in pairs)
    assert not into[:, :1000].any()


@pytest.mark.usefixtures("way")
def test_through_one_buffer_in_every_dtype():
    tensors = {}
    for number, (name, dtype) in enumerate(DTYPES.items()):
        values = _random(dtype.itemsize * (1000 * number + 7))
        tensors[name] = (values & 1).view(dtype) if name == "bool" else values.view(dtype)
    layout = Layout(Manifest(tuple(meta_of(name, each) for name, each in tensors.items())), 16)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda")
    received = {name: torch.empty_like(each) for name, each in tensors.items()}
    views = dict(layout.views(buffer))
    Copies((views[name], each) for name, each in tensors.items()).run()
    Copies((each, views[name]) for name, each in received.items()).run()
    for name, each in tensors.items():
        assert torch.equal(as_bytes(received[name]), as_bytes(each)), name


@pytest.mark.usefixtures("way")
def test_casts_and_strides_among_plain_ones():
    matrix = torch.randn(129, 67, device="cuda")
    whole = torch.zeros(129, 134, device="cuda")
    pairs = [
        (torch.zeros(129, 67, device="cuda", dtype=torch.bfloat16), matrix),
        (torch.zeros(129, 67, device="cuda", dtype=torch.float8_e4m3fn), matrix),
        (whole[:, ::2], matrix),
        (torch.zeros(67, 129, device="cuda"), matrix.t()),
        (torch.zeros(129, 67, device="cuda").t(), matrix.t()),  # dense on both sides
        (torch.zeros(129, 67, device="cuda"), matrix[:1].expand(129, 67)),
        (torch.zeros(129, 67, device="cuda"), matrix),
    ]
    wanted = [to.clone().copy_(source) for to, source in pairs]
    Copies(pairs).run()
    for (to, _), other in zip(pairs, wanted, strict=True):
        assert torch.equal(as_bytes(to.contiguous()), as_bytes(other.contiguous()))
    assert not whole[:, 1::2].any()


@pytest.mark.usefixtures("way")
def test_runs_behind_the_work_of_the_current_stream():
    source = torch.zeros(8 << 20, device="cuda")
    to = torch.zeros_like(source)
    copies = Copies([(to, source)])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for value in (1.0, 2.0, 3.0):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)  # keeps the stream busy, so that order shows
            source.fill_(value)
            copies.run()
            seen = to.min()
        stream.synchronize()
        assert seen.item() == value


@pytest.mark.usefixtures("way")
def test_runs_allocate_nothing():
    sources = [_random(size + 1)[1:] for size in SIZES]
    copies = Copies((torch.zeros_like(source), source) for source in sources)
    copies.run()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        copies.run()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_memory_that_was_taken_away_is_seen():
    source = torch.ones(9, device="cuda")
    copies = Copies([(torch.zeros(9, device="cuda"), source)])
    assert copies.in_place
    source.untyped_storage().resize_(0)
    assert not copies.in_place
