"""Memory that can be exposed: what is, what isn't, and that it is given back."""

from __future__ import annotations

import gc
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_wt.errors import CorruptTransfer, TransportError
from vllm_wt_ipc import memory, room
from vllm_wt_ipc.transport import IpcTransport

CPU = torch.device("cpu")


@contextmanager
def sharing(strategy: str) -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def memfds() -> int:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    named = sum("memfd:vllm-wt-ipc" in os.readlink(link) for link in links if os.path.lexists(link))
    return named + Path("/proc/self/maps").read_text().count("memfd:vllm-wt-ipc")


def test_what_is_allocated_is_zeros() -> None:
    tensor = IpcTransport.allocate(5001, CPU)
    assert (tensor.dtype, list(tensor.shape), tensor.device) == (torch.uint8, [5001], CPU)
    assert not tensor.any()
    assert IpcTransport.exposable(tensor)


def test_nothing_is_allocated_for_nothing() -> None:
    assert list(IpcTransport.allocate(0, CPU).shape) == [0]


def test_views_of_what_is_allocated_can_be_exposed() -> None:
    whole = IpcTransport.allocate(4096, CPU)
    for view in (whole[100:], whole.view(torch.bfloat16), whole.view(64, 64)[3], whole.detach()):
        assert IpcTransport.exposable(view)
    assert not IpcTransport.exposable(whole.clone())


def test_what_torch_shares_can_be_exposed_where_it_is() -> None:
    tensor = torch.arange(1000, dtype=torch.float32).share_memory_()
    place = tensor.data_ptr()
    files = len(os.listdir("/proc/self/fd"))
    assert IpcTransport.exposable(tensor)
    assert IpcTransport.exposable(tensor[7:])
    assert IpcTransport.exposable(torch.nn.Parameter(tensor))
    assert tensor.data_ptr() == place
    assert len(os.listdir("/proc/self/fd")) == files


def test_what_torch_shares_by_name_is_neither_exposed_nor_moved() -> None:
    with sharing("file_system"):
        tensor = torch.arange(1000, dtype=torch.float32).share_memory_()
        place = tensor.data_ptr()
        assert not IpcTransport.exposable(tensor)
        assert tensor.data_ptr() == place


def test_a_file_that_torch_has_mapped_cannot_be_exposed() -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(4096)
        tensor = torch.from_file(file.name, shared=True, size=1000)
        assert not IpcTransport.exposable(tensor)


def test_plain_memory_cannot_be_exposed() -> None:
    tensor = torch.zeros(1 << 20, dtype=torch.uint8)
    assert not IpcTransport.exposable(tensor)
    tensor.share_memory_()
    assert IpcTransport.exposable(tensor)


def test_freed_memory_cannot_be_exposed() -> None:
    tensor = torch.zeros(100)
    tensor.untyped_storage().resize_(0)
    assert not IpcTransport.exposable(tensor)
    assert not IpcTransport.exposable(torch.zeros(1, device="meta"))


def test_memory_goes_with_the_last_tensor() -> None:
    gc.collect()
    before = memfds()
    view = IpcTransport.allocate(1 << 20, CPU)[10:20]
    assert memfds() == before + 2
    view.fill_(7)
    assert view.sum() == 70
    del view
    assert memfds() == before


def test_a_transport_holds_no_memory_after_unregister() -> None:
    transport = IpcTransport("here", CPU)
    gc.collect()
    transport.expose(transport.register([IpcTransport.allocate(10, CPU)]), 1)
    before = memfds()  # with the control page
    regions = [transport.register([IpcTransport.allocate(10, CPU)]) for _ in range(3)]
    for generation, region in enumerate(regions, start=2):
        transport.expose(region, generation)
    assert memfds() == before + 6
    for region in regions:
        transport.unregister(region)
    assert memfds() == before
    transport.close()
    assert memfds() == before - 4


def test_registered_storage_can_be_resized_afterwards() -> None:
    transport = IpcTransport("here", CPU)
    tensor = torch.zeros(100)
    transport.unregister(transport.register([tensor]))
    tensor.untyped_storage().resize_(0)
    transport.close()


def test_allocated_memory_cannot_be_shrunk_under_a_reader() -> None:
    tensor = IpcTransport.allocate(4096, CPU)
    descriptor = memory.descriptor_of(tensor)
    assert descriptor is not None
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)


def test_a_shortage_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: a real one would have the kernel kill somebody."""
    assert 0 < room.available() < 1 << 50
    monkeypatch.setattr(room, "available", lambda: 4095)
    with pytest.raises(TransportError) as caught:
        IpcTransport.allocate(4096, CPU)
    assert "memory limit" in str(caught.value.cure)
    assert caught.value.got == "4095 bytes to be had"


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Folders as the kernel shows them within a container, and on a host that limits a service."""
    for folder, limit in ((tmp_path, "max"), (tmp_path / "outer", "9000")):
        folder.mkdir(exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("5000\n")
        (folder / "memory.stat").write_text("anon 1\nactive_file 100\ninactive_file 20\n")
    (tmp_path / "outer/inner").mkdir()
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("1:name=systemd:/\n0::/outer/inner\n")
    (tmp_path / "meminfo").write_text("MemTotal: 90 kB\nMemAvailable:   80 kB\n")
    monkeypatch.setattr(room, "_PROC", tmp_path)
    monkeypatch.setattr(room, "_CGROUPS", tmp_path)
    assert room.available() == 9000 - 5000 + 120
    (tmp_path / "meminfo").write_text("MemAvailable:   2 kB\n")
    assert room.available() == 2048


def test_too_many_open_files_are_a_typed_error() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(TransportError) as caught:
            IpcTransport.allocate(100, CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "ulimit -n" in str(caught.value.cure)


def test_too_many_open_files_at_the_reader_are_a_typed_error(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    handle = owner.expose(*[10] * 50)
    before = bench.held()["files"]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 5, limits[1]))
    try:
        with pytest.raises(TransportError) as caught:
            reader.open("owner", 1, handle, bench.deadline())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "ulimit -n" in str(caught.value.cure)
    assert bench.held()["files"] == before
    reader.open("owner", 1, handle, bench.deadline())


def test_a_short_segment_is_not_mapped() -> None:
    tensor = IpcTransport.allocate(100, CPU)
    descriptor = memory.descriptor_of(tensor)
    assert descriptor is not None
    with pytest.raises(CorruptTransfer):
        memory.map_shared(descriptor, 101, where="open")
    assert len(memory.map_shared(descriptor, 100, where="open")) == 100


@pytest.mark.parametrize(
    "buffer",
    [
        torch.empty(0, dtype=torch.uint8),
        torch.empty((0, 128), dtype=torch.uint8),
        torch.zeros((4, 4), dtype=torch.uint8).t(),
        torch.zeros(4, dtype=torch.uint8, device="meta"),
    ],
    ids=["empty", "empty with columns", "not contiguous", "on the meta device"],
)
def test_buffers_that_cannot_be_registered_are_refused(bench: Any, buffer: torch.Tensor) -> None:
    reader = bench.reader()
    with pytest.raises(TransportError) as caught:
        reader.register([torch.zeros(4, dtype=torch.uint8), buffer])
    assert caught.value.where == "buffer 1"
