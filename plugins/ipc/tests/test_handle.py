"""Handles: what is refused before anything is connected to or mapped, and what right after."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_wt.errors import (
    CorruptTransfer,
    InvalidInfo,
    PeerDead,
    Revoked,
    TransportError,
    WrongOrder,
)
from vllm_wt_ipc import connection, host, info

RAW = "A" * 86 + "=="
GPU = "d78e3ceaa8142c5642f34ff7810337c8"


def changed(handle: bytes, **fields: Any) -> bytes:
    return json.dumps(json.loads(handle) | fields).encode()


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        pytest.fail("it was connected to")

    monkeypatch.setattr(connection.Connection, "__init__", refuse)


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize(
    "change",
    [
        lambda handle: b"",
        lambda handle: handle[:-1],
        lambda handle: handle + b"}",
        lambda handle: b"\x80\x04N.",
        lambda handle: b"[" * 100_000,
        lambda handle: b"[]",
        lambda handle: b"null",
        lambda handle: changed(handle, protocol=2),
        lambda handle: changed(handle, more=1),
        lambda handle: changed(handle, owner="other"),
        lambda handle: changed(handle, generation=2),
        lambda handle: changed(handle, boot="../x"),
        lambda handle: changed(handle, address="/tmp/x"),
        lambda handle: changed(handle, nonce="00"),
        lambda handle: changed(handle, slot=info.SLOTS),
        lambda handle: changed(handle, slot=-1),
        lambda handle: changed(handle, word=0),
        lambda handle: changed(handle, gpu="GPU-0"),
        lambda handle: changed(handle, gpu=GPU),
        lambda handle: changed(handle, segments=[]),
        lambda handle: changed(handle, segments=[99]),
        lambda handle: changed(handle, segments=[0]),
        lambda handle: changed(handle, allocations=[{"handle": RAW, "nbytes": 9}]),
        lambda handle: changed(handle, allocations=[{"handle": "AAAA", "nbytes": 9}], gpu=GPU),
        lambda handle: changed(handle, allocations=[{"handle": RAW + "A", "nbytes": 9}], gpu=GPU),
        lambda handle: changed(
            handle, buffers=[{"kind": "host", "memory": 1, "offset": 0, "nbytes": 100}]
        ),
        lambda handle: changed(
            handle, buffers=[{"kind": "host", "memory": 0, "offset": 1, "nbytes": 100}]
        ),
        lambda handle: changed(
            handle, buffers=[{"kind": "host", "memory": 0, "offset": 2**63, "nbytes": 1}]
        ),
        lambda handle: changed(
            handle, buffers=[{"kind": "cuda", "memory": 0, "offset": 0, "nbytes": 1}]
        ),
        lambda handle: changed(
            handle, buffers=[{"kind": "file", "memory": 0, "offset": 0, "nbytes": 1}]
        ),
    ],
)
def test_nothing_is_done_for_a_wrong_handle(bench: Any, change: Callable[[bytes], bytes]) -> None:
    owner, reader = bench.owner(), bench.reader()
    with pytest.raises((InvalidInfo, CorruptTransfer)):
        reader.open("owner", 1, change(owner.expose(100)), bench.deadline())


def test_a_handle_round_trips(bench: Any) -> None:
    handle = bench.owner().expose(100, 50, 1)
    assert info.decode(handle, owner="owner", generation=1).to_bytes() == handle


def test_a_handle_is_of_moderate_size(bench: Any) -> None:
    here = bench.reader("here")
    tensors = [here.allocate(64, torch.device("cpu")) for _ in range(500)]
    assert len(here.expose(here.register(tensors), 1)) < (64 << 10) + 500 * 100


def test_the_handle_of_gpu_memory_is_of_moderate_size() -> None:
    """Had every buffer an allocation of its own."""
    handle = info.IpcHandle(
        owner="o" * 128,
        generation=2**63 - 1,
        boot="0" * 36,
        network=2**63 - 1,
        address="a" * 44,
        nonce="0" * 32,
        slot=511,
        word=2**63 - 1,
        gpu=GPU,
        segments=(),
        allocations=(info.Allocation(handle=RAW, nbytes=2**63 - 1),) * 1000,
        buffers=(info.BufferInfo(kind="cuda", memory=999, offset=2**62 - 1, nbytes=2**62),) * 1000,
    )
    assert len(handle.to_bytes()) < (64 << 10) + 1000 * 1024
    assert info.decode(handle.to_bytes(), owner="o" * 128, generation=2**63 - 1) == handle
    assert handle.allocations[0].raw == bytes(64)


@pytest.mark.usefixtures("unreachable")
def test_an_owner_on_another_host_is_refused(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    handle = changed(owner.expose(100), boot="00000000-1111-2222-3333-444444444444")
    with pytest.raises(TransportError, match="on another host") as caught:
        reader.open("owner", 1, handle, bench.deadline())
    assert "rdma" in str(caught.value.cure)


@pytest.mark.usefixtures("unreachable")
def test_an_owner_in_another_network_namespace_is_refused(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    handle = changed(owner.expose(100), network=1)
    with pytest.raises(TransportError, match="network namespace") as caught:
        reader.open("owner", 1, handle, bench.deadline())
    assert "--network=host" in str(caught.value.cure)


def test_a_host_that_cannot_be_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "_BOOT", tmp_path / "boot_id")
    with pytest.raises(TransportError):
        host.here()


def test_a_wrong_nonce_is_peer_dead(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    handle = owner.expose(100)
    with pytest.raises(PeerDead):
        reader.open("owner", 1, changed(handle, nonce="0" * 32), bench.deadline())
    reader.open("owner", 1, handle, bench.deadline())


def test_the_word_of_another_generation_is_revoked(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    handle = owner.expose(100)
    with pytest.raises(Revoked):
        reader.open("owner", 1, changed(handle, word=1), bench.deadline())
    reader.open("owner", 1, handle, bench.deadline())


def test_a_segment_that_is_shorter_than_announced_is_corrupt(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    handle = owner.expose(100)
    before = bench.held()
    with pytest.raises(CorruptTransfer) as caught:
        reader.open("owner", 1, changed(handle, segments=[1 << 20]), bench.deadline())
    assert caught.value.got == "100"
    assert bench.held()["files"] == before["files"]
    reader.open("owner", 1, handle, bench.deadline())


def test_a_segment_of_torchs_that_was_truncated_is_corrupt(bench: Any) -> None:
    here = bench.reader("here")
    tensor = torch.zeros(100_000, dtype=torch.uint8).share_memory_()
    handle = json.loads(here.expose(here.register([tensor]), 1))
    (_, descriptor) = here._exposures.get(1).descriptors
    os.ftruncate(descriptor, 10)
    reader, waiting = bench.reader(), bench.deadline()
    waiting.wait = lambda seconds: here.progress()
    with pytest.raises(CorruptTransfer):
        reader.open("here", 1, json.dumps(handle).encode(), waiting)


def test_an_owner_is_opened_once(bench: Any) -> None:
    owner, reader = bench.opened(100)
    mapped = reader.map("owner")
    with pytest.raises(WrongOrder):
        reader.open("owner", 2, owner.expose(100, generation=2), bench.deadline())
    reader.check("owner")
    assert reader.map("owner") is mapped


def test_gpu_memory_is_refused_by_a_reader_without_a_gpu(bench: Any) -> None:
    reader = bench.reader()
    handle = changed(
        bench.owner().expose(100),
        gpu=GPU,
        allocations=[{"handle": RAW, "nbytes": 9}],
        buffers=[{"kind": "cuda", "memory": 0, "offset": 0, "nbytes": 9}],
    )
    with pytest.raises(TransportError, match="another kind"):
        reader.open("owner", 1, handle, bench.deadline())


def test_memory_that_cannot_be_mapped_is_not_exposed(bench: Any) -> None:
    here = bench.reader("here")
    with pytest.raises(TransportError) as caught:
        here.expose(here.register([torch.zeros(100, dtype=torch.uint8)]), 1)
    assert "share_memory_()" in str(caught.value.cure)
