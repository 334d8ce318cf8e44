"""On one GPU: by NCCL, where each process is as if on a host of its own; by gloo where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_wt.errors import PeerDead, Revoked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
NBYTES = 600 * MIB + 4321
NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}


def apart(bench: Any, name: str) -> Any:
    """A process on this GPU that NCCL takes for one of another host."""
    return bench.process(name, "cuda", NCCL_HOSTID=name, **NCCL)


@pytest.mark.parametrize(
    ("owner_on", "reader_on", "is_apart", "fabric"),
    [
        ("cuda", "cuda", True, "NCCL"),
        ("cuda", "cuda", False, "GLOO"),
        ("cpu", "cuda", True, "GLOO"),
        ("cuda", "cpu", True, "GLOO"),
    ],
)
def test_each_pass_brings_what_is_there(
    bench: Any, owner_on: str, reader_on: str, is_apart: bool, fabric: str
) -> None:
    names = ("owner", "reader") if is_apart else ("", "")
    owner = bench.process("owner", owner_on, NCCL_HOSTID=names[0], **NCCL)
    reader = bench.process("reader", reader_on, NCCL_HOSTID=names[1], **NCCL)
    handle = owner.expose(NBYTES).decode()
    reader.ask("open", owner="owner", handle=handle, nbytes=NBYTES)
    assert reader.ask("fabric", owner="owner") == fabric
    for seed in (0, 3):
        owner.ask("refill", generation=1, seed=seed)
        assert reader.ask("read", seed=seed)


def test_several_readers_and_owners_share_a_gpu(bench: Any) -> None:
    owner, nbytes = apart(bench, "owner"), 100 * MIB
    handle = owner.expose(nbytes).decode()
    readers = [apart(bench, f"reader{number}") for number in range(4)]
    for reader in readers:
        reader.ask("open", owner="owner", handle=handle, nbytes=nbytes)
    for reader in readers:
        reader.begin("read", seed=0)
    assert [reader.result() for reader in readers] == [True] * 4


def test_an_owner_killed_during_a_read_is_peer_dead(bench: Any) -> None:
    owner, reader = apart(bench, "owner"), apart(bench, "reader")
    handle = owner.expose(NBYTES).decode()
    reader.ask("open", owner="owner", handle=handle, nbytes=NBYTES)
    owner.stop()  # so that it is in the middle of it
    reader.begin("read", seed=0)
    owner.kill()
    with pytest.raises(PeerDead):
        reader.result()
    assert reader.ask("cancel")
    reader.ask("reported", ticket=0)


def test_a_reader_killed_during_a_read_keeps_nobody_waiting(bench: Any) -> None:
    owner, dying, reader = (apart(bench, name) for name in ("owner", "dying", "reader"))
    handle = owner.expose(NBYTES).decode()
    for each in (dying, reader):
        each.ask("open", owner="owner", handle=handle, nbytes=NBYTES)
    dying.ask("begin", until=1)
    dying.kill()
    assert reader.ask("read", seed=0)


def test_a_pass_that_is_cancelled_leaves_the_next_one_right(bench: Any) -> None:
    owner, reader = apart(bench, "owner"), apart(bench, "reader")
    handle = owner.expose(NBYTES).decode()
    reader.ask("open", owner="owner", handle=handle, nbytes=NBYTES)
    reader.ask("begin", until=1)
    assert reader.ask("cancel")
    owner.ask("refill", generation=1, seed=5)
    assert reader.ask("read", seed=5)


def test_a_generation_that_is_revoked_is_revoked(bench: Any) -> None:
    owner, reader = apart(bench, "owner"), apart(bench, "reader")
    handle = owner.expose(NBYTES).decode()
    reader.ask("open", owner="owner", handle=handle, nbytes=NBYTES)
    assert reader.ask("read", seed=0)
    owner.ask("free", generation=1)
    with pytest.raises(Revoked):
        reader.ask("read", seed=0)
