"""Many copies as one write what ``copy_`` would, and nothing beside it."""

import threading

import pytest
import torch

from vllm_wt.errors import ManifestMismatch
from vllm_wt.packing import DTYPES, Copies, as_bytes, host

GUARD = 0xA5


def _random(dtype, shape):
    numel = torch.Size(shape).numel()
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (numel * dtype.itemsize,)).to(torch.uint8).view(dtype).view(shape)


def _guarded(nbytes, offset):
    """Room for some bytes at an offset, and all around it."""
    memory = torch.full((offset + nbytes + 64,), GUARD, dtype=torch.uint8)
    return memory, memory[offset : offset + nbytes]


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return request.param


@pytest.fixture
def cut_small(monkeypatch):
    """Makes work for several threads of little memory."""
    monkeypatch.setattr(host, "_PIECE", 4096)
    monkeypatch.setattr(host, "_SMALL", 64)


@pytest.mark.usefixtures("cut_small", "threads")
def test_bytes_of_every_size_and_place():
    sizes = [0, 1, 2, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 30_001]
    pairs, expected = [], []
    for number, size in enumerate(sizes):
        memory, to = _guarded(size, number % 7)
        source = _random(torch.uint8, (size + 3,))[3:]
        pairs.append((to, source))
        wanted = memory.clone()
        wanted[number % 7 : number % 7 + size] = source
        expected.append((memory, wanted))
    copies = Copies(pairs)
    assert copies.nbytes == sum(sizes)
    copies.run()
    assert all(torch.equal(memory, wanted) for memory, wanted in expected)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_bit_for_bit(name):
    shapes = [(), (5,), (0, 3), (7, 11)]
    sources = [_random(DTYPES[name], shape) for shape in shapes]
    to = [torch.empty_like(source) for source in sources]
    for tensor in to:
        as_bytes(tensor).zero_()
    Copies(zip(to, sources, strict=True)).run()
    for one, other in zip(to, sources, strict=True):
        assert torch.equal(as_bytes(one), as_bytes(other))


STRIDED = {
    "columns": lambda t: t[:, 1::3],
    "transposed": lambda t: t.t(),
    "one column": lambda t: t[:, 2:3],
    "rows": lambda t: t[3:5],
    "channels last": lambda t: t.view(1, 2, 6, 12).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("of_source", STRIDED)
@pytest.mark.parametrize("of_dest", [*STRIDED, "plain"])
def test_strides(of_source, of_dest):
    source = STRIDED[of_source](torch.randn(12, 12))
    whole = torch.zeros(12, 12)
    to = STRIDED.get(of_dest, lambda t: t[:0])(whole)
    if to.shape != source.shape:
        to = torch.zeros_like(source, memory_format=torch.contiguous_format)
    Copies([(to, source)]).run()
    assert torch.equal(to, source)


def test_strides_write_nothing_between():
    whole = torch.zeros(4, 6)
    Copies([(whole[:, ::2], torch.ones(4, 3))]).run()
    assert torch.equal(whole, torch.tensor([1.0, 0.0] * 3).expand(4, 6))


def test_an_expanded_source():
    to = torch.zeros(3, 4)
    source = torch.arange(4.0).expand(3, 4)
    Copies([(to, source)]).run()
    assert torch.equal(to, source)


@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.int8, torch.float32),
        (torch.int32, torch.float32),  # of one size, and cast all the same
    ],
)
def test_casts_round_as_copy_does(dtype, other):
    source = torch.linspace(-99, 99, 1001).to(other)
    to, wanted = torch.zeros(1001, dtype=dtype), torch.zeros(1001, dtype=dtype)
    wanted.copy_(source)
    copies = Copies([(to, source)])
    copies.run()
    assert torch.equal(as_bytes(to), as_bytes(wanted))
    assert copies.nbytes == to.nbytes


def test_lazy_conjugates_and_negatives():
    values = torch.randn(8, dtype=torch.complex64)
    to = [torch.zeros(8, dtype=torch.complex64), torch.zeros(8)]
    sources = [values.conj(), torch._neg_view(torch.randn(8))]  # both contiguous
    assert sources[0].is_conj()
    assert sources[1].is_neg()
    Copies(zip(to, sources, strict=True)).run()
    assert torch.equal(to[0], sources[0].resolve_conj())
    assert torch.equal(to[1], sources[1].resolve_neg())


@pytest.mark.usefixtures("cut_small", "threads")
def test_neighbours_in_any_order():
    source, to = _random(torch.uint8, (9000,)), torch.zeros(9100, dtype=torch.uint8)
    cuts = [(0, 100), (100, 101), (101, 8000), (8000, 8990)]
    pairs = [(to[a:b], source[a:b]) for a, b in reversed(cuts)]
    pairs.append((to[8990:9000], source[5:15]))  # neighbours of one side only
    pairs.append((to[9010:9020], source[15:25]))
    Copies(pairs).run()
    assert torch.equal(to[:8990], source[:8990])
    assert torch.equal(to[8990:9000], source[5:15])
    assert torch.equal(to[9010:9020], source[15:25])
    assert not to[9000:9010].any()
    assert not to[9020:].any()


def test_neighbours_become_one_copy(monkeypatch):
    seen = []
    monkeypatch.setattr("vllm_wt.packing.copies.HostCopies", seen.extend)
    source, to = torch.zeros(90), torch.zeros(90)
    pairs = [(to[a : a + 10], source[a : a + 10]) for a in (20, 0, 10, 40)]
    Copies(pairs)
    assert [run.nbytes for run in seen] == [120, 40]


def test_dense_memory_in_any_order_of_dimensions_goes_as_bytes(monkeypatch):
    seen = []
    monkeypatch.setattr("vllm_wt.packing.copies.HostCopies", seen.extend)
    image = torch.zeros(2, 3, 4, 5)
    images = [image.to(memory_format=torch.channels_last) for _ in range(2)]
    Copies([(torch.zeros(5, 7).t(), torch.zeros(5, 7).t()), tuple(images), (image, images[0])])
    assert sorted(run.nbytes for run in seen) == [4 * 35, 4 * 120]


def test_runs_again_with_the_values_of_then():
    source, to = torch.zeros(1000), torch.zeros(1000)
    copies = Copies([(to, source)])
    for value in (1.0, 2.0, 3.0):
        source.fill_(value)
        copies.run()
        assert to.unique().tolist() == [value]


def test_holds_its_tensors():
    to = torch.zeros(1 << 20)
    copies = Copies([(to, torch.ones(1 << 20))])
    torch.zeros(1 << 20)  # would take the memory of a source that was let go
    copies.run()
    assert to.min() == 1


@pytest.mark.usefixtures("cut_small")
@pytest.mark.parametrize(("count", "elements", "expected"), [(1, 9000, 0), (4, 9000, 3), (4, 9, 0)])
def test_as_many_threads_as_torch_has(count, elements, expected, monkeypatch):
    """None of ours where it has one, as in a worker bound to a core, or where there is little."""
    started = []

    class Counted(threading.Thread):
        def start(self):
            started.append(self)
            super().start()

    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    monkeypatch.setattr(host.threading, "Thread", Counted)
    to = torch.zeros(elements)
    Copies([(to, torch.ones(elements))]).run()
    assert len(started) == expected
    assert not any(thread.is_alive() for thread in started)
    assert to.min() == 1


@pytest.mark.usefixtures("cut_small")
def test_after_an_interrupt_nothing_is_begun_and_no_thread_left(monkeypatch):
    waited_for = threading.Event()

    class Held(threading.Thread):
        """Begins when it is waited for."""

        def run(self):
            assert waited_for.wait(60)
            super().run()

        def join(self, timeout=None):
            waited_for.set()
            super().join(timeout)

    work, main = host._work, threading.current_thread()

    def interrupted(tasks):
        if threading.current_thread() is main:
            raise KeyboardInterrupt
        work(tasks)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(host.threading, "Thread", Held)
    monkeypatch.setattr(host, "_work", interrupted)
    to = torch.zeros(9000)
    copies = Copies([(to, torch.ones(9000))])
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        copies.run()
    assert threading.active_count() == before
    assert not to.any()


def test_autograd_counts_the_writes():
    """Whoever has saved a destination for backward, or exposed it, is told."""
    weight = torch.nn.Parameter(torch.ones(4))
    loss = (weight * weight).sum()
    Copies([(weight, torch.zeros(4))]).run()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_and_tensors_of_inference():
    with torch.inference_mode():
        frozen = torch.zeros(4)
    weight = torch.nn.Parameter(torch.zeros(4))
    copies = Copies([(weight, torch.ones(4)), (frozen, weight)])
    Copies([(weight, torch.ones(4))]).run()
    with torch.inference_mode():
        copies.run()
    assert weight.tolist() == frozen.tolist() == [1] * 4
    Copies([(weight, torch.full((4,), 2.0, dtype=torch.float64, requires_grad=True))]).run()
    assert weight.tolist() == [2] * 4
    assert weight.requires_grad
    assert weight.grad_fn is None


def test_nothing_to_copy():
    for pairs in ([], [(torch.zeros(0, 3), torch.zeros(0, 3))]):
        copies = Copies(pairs)
        copies.run()
        assert copies.nbytes == 0
        assert copies.in_place


@pytest.mark.parametrize("which", [0, 1])
def test_memory_that_was_taken_away_is_not_read_or_written(which):
    pair, others = (torch.zeros(9), torch.ones(9)), (torch.zeros(9), torch.ones(9))
    copies = Copies([others, pair])
    assert copies.in_place
    pair[which].untyped_storage().resize_(0)
    assert not copies.in_place
    with pytest.raises(ManifestMismatch, match="freed or resized"):
        copies.run()
    assert not others[0].any()
    with pytest.raises(ManifestMismatch, match="lost its memory"):
        Copies([pair])


@pytest.mark.parametrize(
    ("to", "source", "what"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), r"differs in shape.*pair 1.*\[2, 3\].*\[3, 2\]"),
        (torch.zeros(3), torch.zeros(1, 3), "differs in shape"),
        (torch.zeros(3), torch.zeros(3, device="meta"), "one device.*cpu or cuda.*meta"),
        (torch.zeros(3, device="meta"), torch.zeros(3), "one device"),
        (torch.zeros(3), torch.zeros(3).to_sparse(), "no plain memory"),
    ],
)
def test_pairs_that_do_not_match_are_refused(to, source, what):
    with pytest.raises(ManifestMismatch, match=what):
        Copies([(torch.zeros(1), torch.zeros(1)), (to, source)])


def test_only_devices_that_are_known():
    with pytest.raises(ManifestMismatch, match="cpu or cuda"):
        Copies([(torch.zeros(3, device="meta"), torch.zeros(3, device="meta"))])


def test_tensors_without_memory_of_their_own_are_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(3)
    with pytest.raises(ManifestMismatch, match="no plain memory"):
        Copies([(torch.zeros(3), fake)])
