"""The conformance kit's trainer and worker, with what the drills need of them besides.

Run as the kit's own forker is: ``drill_process.py`` forks a process for each line of its input. Both
sides are the real ones, over the real NIXL; a worker can be held in the middle of a
read, since a moment there can't be met otherwise.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch

from vllm_wt.pull import worker
from vllm_wt.testing.conformance import forker
from vllm_wt.testing.conformance.trainer import Trainer
from vllm_wt.testing.conformance.worker import Worker

_CHUNK_NBYTES = 4 << 20
"""Bytes of a worker's pass: what the drills send takes several."""
_LONG_S = 30.0


def holdings() -> dict[str, Any]:
    """What this process has of NIXL, and which threads of Python's."""
    from vllm_wt_rdma import nixl
    from vllm_wt_rdma.endpoint import Endpoint

    agent_cls = nixl.load().module.nixl_agent
    gc.collect()
    every = gc.get_objects()
    live = [each for each in every if type(each) is Endpoint and not each.destroyed]
    return {
        "agents": sum(type(each) is agent_cls for each in every),
        "registrations": sum(len(each._registered) for each in live),
        "memory": sum(len(each._memory) for each in live),
        "reads": sum(len(each._reads) for each in live),
        "peers": sum(len(each._peers) for each in live),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }


class _Gate:
    """Holds a pass once, where more is to come."""

    def __init__(self) -> None:
        self._waits_for: str | None = None
        self.reached = threading.Event()
        self.opened = threading.Event()

    def arm(self, moment: str) -> None:
        self.reached.clear()
        self.opened.clear()
        self._waits_for = moment

    def look(self, nbytes: int, operation: Any) -> None:
        moments = {
            "landed": nbytes > 0,
            "in flight": bool(operation._stage and operation._in_flight),
        }
        if self._waits_for is not None and moments[self._waits_for]:
            self._waits_for = None
            self.reached.set()
            assert self.opened.wait(_LONG_S), "nobody let the read go on"


class DrillTrainer(Trainer):
    """A trainer whose tensors are not left alone while they are read."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._sends = threading.Event()
        self._sends.set()

    def _send(self, readers: int, deadline: Any) -> None:
        assert self._sends.wait(_LONG_S), "nobody let the digests be made"
        super()._send(readers, deadline)

    def hold_digests(self) -> None:
        self._sends.clear()

    def make_digests(self) -> None:
        """Go on, and wait until they are there."""
        self._sends.set()
        self.await_digests()

    def await_digests(self) -> None:
        assert self._sending is not None
        self._sending.join(_LONG_S)
        assert not self._sending.is_alive(), "the digests are not made"

    def overwrite(self, name: str, index: int) -> None:
        """Change a byte by its address, of which autograd does not hear."""
        self._tensors[name].view(-1).view(torch.uint8).numpy()[index] ^= 0xFF

    def free(self, name: str) -> None:
        """Give a tensor's memory back while it is exposed, as FSDP does when it reshards."""
        self._tensors[name].untyped_storage().resize_(0)

    def replace(self, name: str, seed: int) -> None:
        """A new tensor in other memory."""
        self._tensors[name] = self._made(seed)[name]

    def holdings(self) -> dict[str, Any]:
        return holdings()


class DrillWorker(Worker):
    """A worker that can be held in the middle of a read."""

    def join(self) -> None:
        worker._CHUNK_NBYTES["cpu"] = _CHUNK_NBYTES
        super().join()
        self._gate = gate = _Gate()
        base: Any = self._engine._transport_cls

        def poll(transport: Any, operation: Any) -> Any:
            progress = base.poll(transport, operation)
            gate.look(progress.nbytes, operation)
            return progress

        self._engine._transport_cls = type("HeldTransport", (base,), {"poll": poll})

    def hold(self, moment: str) -> None:
        """The next receive, when some bytes have landed, or when some are in flight."""
        self._gate.arm(moment)

    def await_held(self) -> None:
        assert self._gate.reached.wait(_LONG_S), "nothing has been read"

    def let_go(self) -> None:
        self._gate.opened.set()

    def outcome(self) -> None:
        """Wait for the end of the receive.

        Raises:
            WeightTransferError: What it has raised.
        """
        receive = self._round._receive
        assert receive is not None
        receive.join(_LONG_S)
        assert not receive.running, "the receive has not ended"
        if receive.error is not None:
            raise receive.error

    def fill(self, value: int) -> None:
        """The arena, which nothing is to write to any more."""
        self._engine._arena._buffer.fill_(value)

    def not_filled(self, value: int) -> int:
        """How many bytes of the arena are others."""
        return int((self._engine._arena._buffer != value).sum())

    def holdings(self) -> dict[str, Any]:
        engine = self._engine
        return holdings() | {"quarantine": len(engine._quarantine)}


if __name__ == "__main__":
    forker._ROLES |= {"trainer": DrillTrainer, "worker": DrillWorker}
    forker.main()
