"""What differs where NCCL carries the bytes, as far as it can be seen without a GPU: readers believe
that it does, and gloo does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_wt.errors import TransportError
from vllm_wt.transport import Copy
from vllm_wt_nccl.p2p import connection
from vllm_wt_nccl.p2p.messages import Fabric

NBYTES = 64 << 20


def opened(bench: Any, here: Any, owner: Any) -> None:
    here.open(owner.name, 1, owner.expose(NBYTES), bench.deadline())
    here._opened[owner.name].fabric = Fabric.NCCL


def begun(bench: Any, here: Any, plan: Any) -> Any:
    running = here.submit(plan)
    bench.until(lambda: bool(here.poll(running).nbytes))
    return running


def test_a_cancelled_pass_is_drained_and_the_next_one_read(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_DRAIN_S", 20.0)  # so that a slow machine is no failure
    owner, here = bench.process(), bench.reader()
    opened(bench, here, owner)
    target, region = bench.arena(here, NBYTES)
    plan = here.prepare(region, [Copy("owner", 0, 0, 0, 0, NBYTES)])
    running = begun(bench, here, plan)
    assert here.cancel(running)
    assert running._parts[0].is_quiet
    target.zero_()
    bench.pass_over(here, plan)
    assert torch.equal(target, bench.content(NBYTES, 0))


def test_a_cancelled_pass_of_a_stopped_owner_spends_the_transport(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    opened(bench, here, owner)
    target, region = bench.arena(here, NBYTES)
    running = begun(bench, here, here.prepare(region, [Copy("owner", 0, 0, 0, 0, NBYTES)]))
    owner.stop()
    assert here.cancel(running)
    target.zero_()
    owner.go_on()
    for call in (lambda: here.register([target]), lambda: here.submit(running.plan)):
        with pytest.raises(TransportError):
            call()
    assert here.cancel(running)
    bench.reader().open("owner", 2, owner.expose(100, generation=2), bench.deadline())
    assert not target.any()


def test_owners_take_turns_where_a_gpu_has_no_room_for_all(bench: Any) -> None:
    here = bench.reader()
    here._turns._most = 1
    target, region = bench.arena(here, 3 * NBYTES)
    copies = []
    for number in range(3):
        owner = bench.process(f"owner{number}")
        opened(bench, here, owner)
        copies.append(Copy(owner.name, 0, 0, 0, number * NBYTES, NBYTES))
    running = here.submit(here.prepare(region, copies))
    most = 0
    while not here.poll(running).done:
        under_way = [part for part in running._parts if part.number and not part.is_quiet]
        most = max(most, len(under_way))
    assert most == 1
    assert torch.equal(target, bench.content(NBYTES, 0).repeat(3))
