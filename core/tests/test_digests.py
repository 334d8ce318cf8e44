"""Digests are what their definition says, wherever they are made, and a fault changes them."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from vllm_wt.digests import BLOCK, Digests, blocks, digest
from vllm_wt.digests.device import TorchPlan
from vllm_wt.errors import ManifestMismatch

set_hypothesis_home_dir(Path(__file__).parents[2] / ".venv/cache/hypothesis")

SIZES = (0, 1, 7, 8, 9, 4095, 4096, 4097, 3 * 4096, 5 * 4096, 20000, 70 * 4096 + 5)
OFFSETS = (0, 1, 2, 4, 7, 8, 15)


def splitmix64(seed: int) -> Iterator[int]:
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) % 2**64
        z = seed
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def oracle(data: bytes) -> list[int]:
    """The definition, in Python's integers."""
    digests = []
    for start in range(0, len(data), 4096):
        block = data[start : start + 4096].ljust(4096, b"\0")
        total = 0
        for at, weight in zip(range(0, 4096, 8), splitmix64(0x766C6C6D2D777431), strict=False):
            total += (weight | 1) * int.from_bytes(block[at : at + 8], "little")
        digests.append(total % 2**64)
    return digests


def unsigned(digests: torch.Tensor) -> list[int]:
    return [value % 2**64 for value in digests.tolist()]


def tensor(data: bytes, offset: int = 0) -> torch.Tensor:
    """The bytes as a tensor that starts ``offset`` bytes after an aligned address."""
    return torch.tensor([0] * offset + list(data), dtype=torch.uint8)[offset:]


def raw(buffer: torch.Tensor) -> bytes:
    return bytes(buffer.view(-1).view(torch.uint8).tolist())


def randoms(nbytes: int, offset: int = 0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(0, 256, (offset + nbytes,), generator=generator, dtype=torch.uint8)
    return made[offset:]


def by_host(buffers: list[torch.Tensor]) -> list[int]:
    digests = Digests(buffers)
    out = torch.full((digests.count,), -1)
    digests.run(out)
    return unsigned(out)


def by_torch(buffers: list[torch.Tensor]) -> list[int]:
    out = torch.full((sum(blocks(buffer.numel()) for buffer in buffers),), -1)
    TorchPlan(buffers).run(out)
    return unsigned(out)


def differing(sent: torch.Tensor, received: torch.Tensor) -> list[int]:
    """The blocks that a reader would refuse."""
    return torch.nonzero(digest(sent) != digest(received)).flatten().tolist()


def test_the_oracle_knows_splitmix64():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [value for value, _ in zip(splitmix64(1234567), published, strict=False)] == published


def test_known_answers():
    """Owner and reader may run different releases: these may never change."""
    assert BLOCK == 4096
    assert unsigned(digest(tensor(b"\x01"))) == [0x9B843A849948A697]
    assert unsigned(digest(tensor(bytes(4096)))) == [0]
    assert unsigned(digest(tensor(b"\xff" * 4096))) == [0xFED3EC82A181F770]
    counting = [0x08E2A336B8262900, 0x9375954DFABB1E10]
    assert unsigned(digest(tensor(bytes(range(256)) * 17))) == counting
    floats = [0xC48D6A5CD6E10000, 0x1141B4E64A180000, 0xD0012793DEA24000]
    assert unsigned(digest(torch.arange(3000, dtype=torch.float32))) == floats


@pytest.mark.parametrize(
    ("nbytes", "count"), [(0, 0), (1, 1), (4096, 1), (4097, 2), (2**40, 2**28)]
)
def test_count_of_blocks(nbytes, count):
    assert blocks(nbytes) == count


@pytest.mark.parametrize("way", [by_host, by_torch])
@pytest.mark.parametrize("offset", OFFSETS)
def test_every_size_and_alignment(way: Callable[..., list[int]], offset: int):
    buffers = [randoms(size, offset, seed=size) for size in SIZES]
    expected = [value for buffer in buffers for value in oracle(raw(buffer))]
    assert way(buffers) == expected


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.complex64]
)
def test_any_dtype_is_its_bytes(dtype):
    data = randoms(2 * 3 * 1000 * dtype.itemsize)
    if dtype == torch.bool:
        data %= 2
    values = data.view(dtype).view(2, 3, 1000)
    assert unsigned(digest(values)) == oracle(raw(data))
    assert torch.equal(digest(values[1, 1]), digest(values[1, 1].clone()))


def test_a_parameter_and_a_scalar():
    values = torch.nn.Parameter(torch.rand(5))
    assert unsigned(digest(values)) == oracle(raw(values.detach()))
    assert unsigned(digest(torch.tensor(3.5))) == oracle(raw(torch.tensor(3.5)))


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 9000), st.integers(0, 15), st.integers(0, 2**32 - 1)), max_size=20
    ),
    order=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=60)
def test_any_buffers_in_any_order(pieces: list[tuple[int, int, int]], order: random.Random):
    buffers = [tensor(random.Random(seed).randbytes(n), offset) for n, offset, seed in pieces]
    order.shuffle(buffers)
    expected = [value for buffer in buffers for value in oracle(raw(buffer))]
    assert by_host(buffers) == expected
    if expected:
        assert by_torch(buffers) == expected


@given(st.binary(max_size=10000))
@settings(deadline=None, max_examples=60)
def test_any_bytes(data: bytes):
    assert unsigned(digest(tensor(data))) == oracle(data)


@given(cuts=st.lists(st.integers(0, 300), max_size=6), order=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_any_split_at_blocks(cuts: list[int], order: random.Random):
    data = randoms(300 * BLOCK - 11)
    edges = sorted({0, 300, *cuts})
    runs = list(itertools.pairwise(edges))
    order.shuffle(runs)
    made = by_host([data[first * BLOCK : end * BLOCK] for first, end in runs])
    whole = unsigned(digest(data))
    assert made == [value for first, end in runs for value in whole[first:end]]


@pytest.mark.parametrize("plan", [Digests, TorchPlan])
def test_each_run_reads_the_buffers_anew(plan):
    """No run leaves anything behind for the next: neither padding nor the scratch's other pieces."""
    sizes = [*range(1, 9000, 97), 600 * BLOCK + 3, 5, 4096 * 4097]
    buffers = [randoms(size, seed=size) for size in sizes]
    count = sum(map(blocks, sizes))
    prepared, out = plan(buffers), torch.empty(count, dtype=torch.int64)
    for fill in (0xFF, 0, 0x5A):
        prepared.run(out)
        assert torch.equal(out, torch.cat([digest(buffer) for buffer in buffers]))
        for buffer in buffers:
            buffer.fill_(fill)


def test_no_buffers():
    digests = Digests([])
    assert digests.count == 0
    digests.run(torch.empty(0, dtype=torch.int64))
    assert digest(torch.empty(0, 7)).shape == (0,)


def test_out_is_filled_and_returned():
    out = torch.full((5,), -1)
    data = randoms(3 * BLOCK)
    part = out[1:4]
    assert digest(data, part) is part
    assert unsigned(out[1:4]) == oracle(raw(data))
    assert out[0] == out[4] == -1


@pytest.mark.parametrize("word", [0, 1, 100, 511])
@pytest.mark.parametrize("lane", range(64))
def test_a_flipped_bit(word: int, lane: int):
    sent = randoms(3 * BLOCK)
    received = sent.clone()
    received[BLOCK + word * 8 + lane // 8] ^= 1 << lane % 8
    assert differing(sent, received) == [1]


@pytest.mark.parametrize(("at", "block"), [(0, 0), (-1, 2), (-100, 2), (BLOCK, 1), (BLOCK - 1, 0)])
def test_a_flipped_bit_at_an_edge(at: int, block: int):
    """The last block is padded."""
    sent = randoms(2 * BLOCK + 101)
    for bit in range(8):
        received = sent.clone()
        received[at] ^= 1 << bit
        assert differing(sent, received) == [block]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("apart", [1, 2, 3, 4, 5, 64, 500])
def test_two_swapped_elements(dtype, apart):
    generator = torch.Generator().manual_seed(1)
    sent = torch.randn(4000, generator=generator).to(dtype)
    for at in (0, 1, 2, 3, 400):
        received = sent.clone()
        received[at], received[at + apart] = sent[at + apart], sent[at]
        assert differing(sent, received) == ([] if torch.equal(sent, received) else [0])


def test_two_swapped_blocks():
    """Their digests have changed places: a sum over all of them would be the same."""
    sent = randoms(5 * BLOCK)
    received = sent.clone()
    received[BLOCK : 2 * BLOCK], received[3 * BLOCK : 4 * BLOCK] = (
        sent[3 * BLOCK : 4 * BLOCK],
        sent[BLOCK : 2 * BLOCK],
    )
    assert differing(sent, received) == [1, 3]
    assert digest(sent).sum() == digest(received).sum()


@pytest.mark.parametrize("missing", [1, 8, 100, 4096, 5000])
@pytest.mark.parametrize("what", ["zeros", "stale"])
def test_a_short_read(missing: int, what: str):
    sent, stale = randoms(4 * BLOCK + 77, seed=1), randoms(4 * BLOCK + 77, seed=2)
    received = torch.zeros_like(sent) if what == "zeros" else stale
    received[:-missing] = sent[:-missing]
    assert differing(sent, received) == list(range((4 * BLOCK + 77 - missing) // BLOCK, 5))


@pytest.mark.parametrize("step", [1e-2, 1e-6])
def test_a_stale_block(step: float):
    """A block of the former version, which differs a little in every element."""
    generator = torch.Generator().manual_seed(3)
    former = torch.randn(5, 1024, generator=generator)
    sent = former + step * torch.randn(5, 1024, generator=generator)
    for block in range(5):
        received = sent.clone()
        received[block] = former[block]
        assert differing(sent, received) == [block]


def test_a_reused_buffer():
    """The owner went on to write the next version while it was being read."""
    sent = randoms(6 * BLOCK, seed=4)
    received = sent.clone()
    received[2 * BLOCK + 2000 :] = randoms(4 * BLOCK, seed=5)[2000:]
    assert differing(sent, received) == [2, 3, 4, 5]


def test_bytes_shifted_by_a_word():
    sent = randoms(2 * BLOCK)
    assert differing(sent, sent.roll(8)) == [0, 1]


def test_what_it_does_not_see():
    """The docstring says so."""
    sent = randoms(BLOCK)
    received = sent.clone()
    received[7] ^= 0x80
    received[4095] ^= 0x80
    assert differing(sent, received) == []
    assert differing(tensor(b"\1"), tensor(b"\1\0")) == []


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(8, 8).t()[:4],
        torch.zeros(10)[::2],
        torch.zeros(4, dtype=torch.complex64).conj(),
        torch.zeros(4, dtype=torch.complex64).conj().imag,
    ],
)
def test_a_buffer_out_of_order_is_refused(data):
    with pytest.raises(ManifestMismatch, match=r"Buffer 1 .*Cure: pass its \.contiguous\(\) copy"):
        Digests([torch.zeros(3), data])


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(2, dtype=torch.int32),
        torch.empty(2, dtype=torch.uint64),
        torch.empty(3, dtype=torch.int64),
        torch.empty(2, 1, dtype=torch.int64),
        torch.empty(4, dtype=torch.int64)[::2],
        torch.empty(2, dtype=torch.int64, device="meta"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out):
    with pytest.raises(ManifestMismatch, match=r"Expected: contiguous torch\.int64 \[2\] on cpu"):
        digest(torch.zeros(BLOCK + 1, dtype=torch.uint8), out)


def test_buffers_on_several_devices_are_refused():
    with pytest.raises(ManifestMismatch, match="Got: cpu, meta"):
        Digests([torch.zeros(3), torch.zeros(3, device="meta")])


def test_the_storage_can_still_be_resized():
    """FSDP frees its parameters' memory so; a numpy array that torch made would forbid it."""
    data = torch.zeros(5000)
    out = digest(data)
    for storage in (data.untyped_storage(), out.untyped_storage()):
        assert storage.resizable()
        storage.resize_(0)


def test_a_run_allocates_little():
    large = randoms(8000 * BLOCK + 3)
    small = [randoms(size) for size in range(300, 2300)]
    for buffers in ([large], [large[1:]], small):
        digests = Digests(buffers)
        out = torch.empty(digests.count, dtype=torch.int64)
        digests.run(out)
        tracemalloc.start()
        try:
            digests.run(out)
            assert tracemalloc.get_traced_memory()[1] < 256 * 1024
        finally:
            tracemalloc.stop()


ON_A_CPU = """
import sys, torch
from vllm_wt.digests import digest
before = "triton" in sys.modules
digest(torch.zeros(5000))
assert before or "triton" not in sys.modules
assert "vllm_wt.digests.kernel" not in sys.modules
assert "vllm_wt.digests.device" not in sys.modules
"""


def test_triton_is_left_alone_on_a_cpu():
    subprocess.run([sys.executable, "-c", ON_A_CPU], check=True, timeout=60)


INTERPRETED = f"""
import torch
from vllm_wt.digests import Digests, digest
from vllm_wt.digests.device import TritonPlan

buffers = []
for offset in {OFFSETS}:
    for size in {SIZES}:
        torch.manual_seed(size)
        buffers.append(torch.randint(0, 256, (offset + size,), dtype=torch.uint8)[offset:])
whole = torch.arange(3 * 512)  # nothing may be written behind the last digest
out = torch.full((5,), -1)
TritonPlan([whole.view(torch.uint8)]).run(out[1:-1])
assert out.tolist() == [-1, *digest(whole).tolist(), -1]

prepared, host = TritonPlan(buffers), Digests(buffers)
for fill in (0xFF, 0):
    out, expected = torch.full((host.count + 2,), -1), torch.empty(host.count, dtype=torch.int64)
    prepared.run(out[1:-1])
    host.run(expected)
    assert torch.equal(out[1:-1], expected), torch.nonzero(out[1:-1] != expected).flatten()
    assert out[0] == out[-1] == -1
    for buffer in buffers:
        buffer.fill_(fill)
print("same", host.count)
"""


def test_the_kernel_under_tritons_interpreter():
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"same {len(OFFSETS) * sum(map(blocks, SIZES))}\n"


def test_the_kernel_compiles_for_cuda():
    """The compiler refuses what the interpreter lets pass. It needs no GPU."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_wt.digests import kernel

    kinds = {"table": "*i64", "weights": "*i64", "out": "*i64"}
    kinds |= dict.fromkeys(("ROWS", "WORDS"), "constexpr")
    source = ASTSource(kernel.compiled, kinds, {"ROWS": kernel.ROWS, "WORDS": 512})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "ld.global" in made.asm["ptx"]
