"""CUDA memory of one GPU, read between two processes; also the script that these processes run.

Both ends are processes of their own: UCX looks for a CUDA context once, when an agent starts, and
the point is that the transport has made one by then, and has told UCX to read over CUDA IPC.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import WeightTransferError
from vllm_wt.transport import Copy
from vllm_wt_rdma import batching, emulation, operation
from vllm_wt_rdma.transport import NixlTransport

_LONG_S = 60.0
_POLL_S = 0.001

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def content(sizes: list[int], seed: int) -> list[torch.Tensor]:
    """What the owner's buffers hold; both ends make the same."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in sizes]


class End:
    """One end of a read, in the process that runs this file; each method is a command."""

    def __init__(self, name: str, device: str, **options: Any) -> None:
        assert not torch.cuda.is_initialized()
        self.device = torch.device(device)
        self._said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self._said.append(record.getMessage())  # type: ignore[method-assign]
        emulation.logger.addHandler(handler)
        emulation.logger.setLevel(logging.INFO)
        self.transport = NixlTransport(name, self.device, **options)
        self._calls: list[str] = []
        # On the class: an agent that referred to itself would outlive its transport.
        agent_cls = type(self.transport._endpoint._agent)
        for call in ("register_memory", "initialize_xfer", "prep_xfer_dlist", "add_remote_agent"):
            self._count(agent_cls, call)

    def _count(self, agent_cls: type, name: str) -> None:
        real = getattr(agent_cls, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._calls.append(name)
            return real(*args, **kwargs)

        setattr(agent_cls, name, counted)

    def calls(self) -> list[str]:
        """What has been made at NIXL since this was last asked."""
        calls, self._calls[:] = list(self._calls), []
        return calls

    def expose(self, sizes: list[int], seed: int) -> str:
        """Buffers in one allocation, so that most of them begin at odd addresses."""
        self.sizes = sizes
        ends = list(itertools.accumulate(sizes, initial=0))
        memory = torch.empty(ends[-1], dtype=torch.uint8, device=self.device)
        self.buffers = [memory[ends[k] : ends[k + 1]] for k in range(len(sizes))]
        self.refill(seed)
        return self.transport.expose(self.transport.register(self.buffers), 1).decode()

    def refill(self, seed: int) -> None:
        """New values in the same memory."""
        for buffer, values in zip(self.buffers, content(self.sizes, seed), strict=True):
            buffer.copy_(values)
        self._settle()

    def open(
        self,
        handle: str,
        sizes: list[int],
        memory: str,
        chunk: int | None = None,
        least_rate: float | None = None,
    ) -> None:
        """Make an arena and the plan of a read of everything."""
        if least_rate is not None:
            emulation.LEAST_RATE = least_rate
        if chunk is not None:
            batching.CHUNK_BYTES = operation.CHUNK_BYTES = chunk
            operation._IN_FLIGHT_BYTES = 2 * chunk
        self.sizes = sizes
        ends = list(itertools.accumulate(sizes, initial=0))
        self.target = torch.zeros(ends[-1], dtype=torch.uint8, device=memory)
        self._settle()
        region = self.transport.register([self.target])
        self.transport.open("owner", 1, handle.encode(), Deadline(_LONG_S))
        copies = [Copy("owner", k, 0, 0, ends[k], n) for k, n in enumerate(sizes)]
        self.plan = self.transport.prepare(region, copies)

    def read(self) -> None:
        """A pass over the plan."""
        self.running = self.transport.submit(self.plan)
        self.finish()

    def begin(self) -> None:
        """A pass of which some bytes have landed, and not all."""
        self.running = self.transport.submit(self.plan)
        _until(lambda: self.transport.poll(self.running).nbytes > 0)
        assert not self.transport.poll(self.running).done

    def finish(self) -> None:
        _until(lambda: self.transport.poll(self.running).done)

    def equal(self, seed: int) -> bool:
        """Whether the arena holds exactly the owner's bytes."""
        return torch.equal(self.target.cpu(), torch.cat(content(self.sizes, seed)))

    def said(self) -> list[str]:
        """What has been logged of emulation."""
        return self._said

    def cancel(self) -> bool:
        return self.transport.cancel(self.running)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _until(condition: Callable[[], bool]) -> None:
    deadline = Deadline(_LONG_S)
    while not condition():
        deadline.check("waited in vain")


def serve(connection: socket.socket) -> None:
    """Carry out commands until the other side hangs up, polling the endpoint in between."""
    lines, replies = connection.makefile("r"), connection.makefile("w")
    end: End | None = None
    while True:
        if end is not None and not end.transport._endpoint.destroyed:
            end.transport.progress()
        if not select.select([connection], [], [], _POLL_S)[0]:
            continue
        line = lines.readline()
        if not line:
            break
        command, arguments = json.loads(line)
        try:
            if command == "start":
                end, result = End(**arguments), None
            else:
                result = getattr(end, command)(**arguments)
            reply = {"result": result}
        except WeightTransferError as error:
            reply = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(reply), file=replies, flush=True)
    if end is not None:
        end.transport.close()


class EndProcess:
    """The test's hold on one end."""

    def __init__(self, name: str, device: str, environment: dict[str, str], **options: Any) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,  # UCX logs there
            env=os.environ | {"UCX_NET_DEVICES": "lo"} | environment,
        )
        theirs.close()
        self._socket = ours
        self._socket.settimeout(2 * _LONG_S)
        self._out, self._in = ours.makefile("w"), ours.makefile("r")
        self._start = {"name": name, "device": device, **options}

    def start(self) -> EndProcess:
        self.ask("start", **self._start)
        return self

    def ask(self, command: str, **arguments: Any) -> Any:
        """The result of a command."""
        reply = self.outcome(command, **arguments)
        assert "result" in reply, reply
        return reply["result"]

    def outcome(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The result of a command, or its error by class and text."""
        print(json.dumps([command, arguments]), file=self._out, flush=True)
        line = self._in.readline()
        assert line, f"{command}: the process has ended"
        reply: dict[str, Any] = json.loads(line)
        return reply

    def hang_up(self) -> None:
        """No more commands, at which the process closes its endpoint and ends."""
        self._socket.shutdown(socket.SHUT_WR)
        assert self._process.wait(_LONG_S) == 0

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(_LONG_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(_LONG_S)
        for file in (self._in, self._out, self._socket):
            file.close()


Pair = Callable[..., tuple[EndProcess, EndProcess]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Makes an owner and a reader, on these devices; ``what`` is the owner's option ``emulation``."""
    made: list[EndProcess] = []

    def make(
        owner: str, reader: str, what: str = "error", **environment: str
    ) -> tuple[EndProcess, EndProcess]:
        ends = [
            EndProcess("owner", owner, environment, emulation=what),
            EndProcess("reader", reader, environment),
        ]
        made.extend(ends)
        return ends[0].start(), ends[1].start()

    yield make
    for end in made:
        end.close()


@pytest.mark.parametrize(
    ("owner_on", "reader_on"),
    [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:0")],
    ids=["cuda to cuda", "cuda to host", "host to cuda"],
)
def test_odd_sizes_arrive_exactly_and_a_later_round_makes_nothing_new(
    pair: Pair, owner_on: str, reader_on: str
) -> None:
    sizes = [1, 2, 3, *(1 + 37 * k for k in range(200)), 4097, 65_537, 1_000_003, 5_000_011]
    owner, reader = pair(owner_on, reader_on)
    handle = owner.ask("expose", sizes=sizes, seed=1)
    reader.ask("open", handle=handle, sizes=sizes, memory=reader_on)
    assert "register_memory" in reader.ask("calls")
    owner.ask("calls")
    for seed in (1, 2, 3):
        owner.ask("refill", seed=seed)
        reader.ask("read")
        assert reader.ask("equal", seed=seed)
        assert not reader.ask("equal", seed=seed + 1)
    assert reader.ask("calls") == []
    assert owner.ask("calls") == []


def test_many_chunks_arrive_exactly(pair: Pair) -> None:
    sizes = [10_000_019, 17, 999_999, 3_000_001]
    owner, reader = pair("cuda:0", "cuda:0")
    handle = owner.ask("expose", sizes=sizes, seed=5)
    reader.ask("open", handle=handle, sizes=sizes, memory="cuda:0", chunk=1_000_003)
    reader.ask("read")
    assert reader.ask("equal", seed=5)


def test_reads_go_from_gpu_to_gpu_though_no_process_had_a_context_before(
    pair: Pair, tmp_path: Path
) -> None:
    """What UCX says that it does, since bytes arrive by an emulation over TCP just the same.

    UCX 1.23 logs, when asked, the protocol that it has chosen for each kind of operation, by size.
    """
    log = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": str(tmp_path / "%p.log")}
    owner, reader = pair("cuda:0", "cuda:0", **log)
    sizes = [64 << 20]
    reader.ask(
        "open", handle=owner.ask("expose", sizes=sizes, seed=7), sizes=sizes, memory="cuda:0"
    )
    reader.ask("read")
    assert reader.ask("equal", seed=7)
    reader.hang_up()  # UCX writes its log in blocks
    text = "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    chosen = _large_reads(text, "cuda")
    assert chosen, text
    assert all("cuda_ipc" in choice for choice in chosen), text


def _large_reads(log: str, memory: str) -> list[str]:
    """What UCX has chosen for the largest of the reads into a kind of memory."""
    chosen, within = [], False
    for line in log.splitlines():
        if re.search(r"\| .*\bby ucp_\w+", line):
            within = re.search(rf"read by ucp_get\S* into {memory}", line) is not None
        elif within and re.search(r"\.\.inf ", line):
            chosen.append(line)
    return chosen


EMULATED = {"UCX_TLS": "tcp,cuda_copy"}
"""UCX has nothing else then; NIXL wants cuda_copy where there is a GPU."""
WEIGHTS = [64 << 20]


def test_emulation_between_gpus_is_an_error(pair: Pair) -> None:
    owner, reader = pair("cuda:0", "cuda:0", **EMULATED)
    handle = owner.ask("expose", sizes=WEIGHTS, seed=3)
    reader.ask("open", handle=handle, sizes=WEIGHTS, memory="cuda:0")
    outcome = reader.outcome("read")
    assert outcome.get("error") == "TransportError", outcome
    assert "on this host is read into GPU memory by emulation" in outcome["text"]
    assert "Expected: more than 1 GB/s" in outcome["text"]
    assert reader.ask("cancel")


@pytest.mark.parametrize(
    ("owner_on", "reader_on", "what", "words"),
    [
        (
            "cuda:0",
            "cuda:0",
            "warning",
            "GPU memory of 'owner' on this host is read into GPU memory",
        ),
        ("cuda:0", "cpu", "error", "GPU memory of 'owner' on this host is read into host memory"),
        ("cpu", "cuda:0", "error", "host memory of 'owner' on this host is read into GPU memory"),
    ],
    ids=["the option", "cuda to host", "host to cuda"],
)
def test_emulation_that_is_no_error_is_said_once(
    pair: Pair, owner_on: str, reader_on: str, what: str, words: str
) -> None:
    owner, reader = pair(owner_on, reader_on, what, **EMULATED)
    # No TCP gets there; where one side is host memory it may pass what a GPU's must reach.
    handle = owner.ask("expose", sizes=WEIGHTS, seed=3)
    reader.ask("open", handle=handle, sizes=WEIGHTS, memory=reader_on, least_rate=1e10)
    for seed in (3, 4):
        owner.ask("refill", seed=seed)
        reader.ask("read")
        assert reader.ask("equal", seed=seed)
    (warning,) = reader.ask("said")
    assert f"{words} by emulation" in warning


def test_cuda_ipc_is_not_taken_for_emulation(pair: Pair) -> None:
    owner, reader = pair("cuda:0", "cuda:0")
    handle = owner.ask("expose", sizes=WEIGHTS, seed=3)
    reader.ask("open", handle=handle, sizes=WEIGHTS, memory="cuda:0")
    for _ in range(2):
        reader.ask("read")
    assert reader.ask("equal", seed=3)
    (said,) = reader.ask("said")
    assert "reads of GPU memory of owner on this host into GPU memory" in said


def test_an_owner_killed_between_rounds_is_peer_dead(pair: Pair) -> None:
    sizes = [4097]
    owner, reader = pair("cuda:0", "cuda:0")
    handle = owner.ask("expose", sizes=sizes, seed=1)
    reader.ask("open", handle=handle, sizes=sizes, memory="cuda:0")
    reader.ask("read")
    owner.kill()
    assert reader.outcome("read").get("error") == "PeerDead"
    assert reader.ask("cancel")


def test_an_owner_killed_during_a_read_is_peer_dead(pair: Pair) -> None:
    sizes = [64 << 20]
    owner, reader = pair("cuda:0", "cuda:0")
    handle = owner.ask("expose", sizes=sizes, seed=1)
    reader.ask("open", handle=handle, sizes=sizes, memory="cuda:0", chunk=1 << 20)
    reader.ask("begin")
    owner.kill()
    assert reader.outcome("finish").get("error") == "PeerDead"
    assert reader.ask("cancel")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
