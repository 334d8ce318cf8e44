"""CUDA memory of one GPU, mapped by another process; also the script that these processes run.

Both ends are processes of their own: a process can't open its own handles.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import WeightTransferError
from vllm_wt.transport import Copy
from vllm_wt_ipc.transport import IpcTransport

_LONG_S = 60.0
_POLL_S = 0.001
SIZES = [1, 2, 3, *(1 + 37 * k for k in range(200)), 4097, 65_537, 1_000_003, 5_000_011]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def content(sizes: list[int], seed: int) -> list[torch.Tensor]:
    """What the owner's buffers hold; both ends make the same."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in sizes]


class End:
    """One end, in the process that runs this file; each method is a command."""

    def __init__(self, name: str, device: str) -> None:
        assert not torch.cuda.is_initialized()
        self._name = name
        self._device = torch.device(device)
        self.transport = IpcTransport(name, self._device)
        self._regions: dict[int, tuple[Any, list[torch.Tensor]]] = {}

    def renew(self) -> None:
        """A new transport in the same process."""
        self.transport = IpcTransport(self._name, self._device)

    def expose(self, sizes: list[int], seed: int, generation: int = 1) -> str:
        """Buffers in one allocation, so that most of them begin at odd addresses."""
        ends = list(itertools.accumulate(sizes, initial=0))
        memory = torch.empty(ends[-1], dtype=torch.uint8, device=self._device)
        buffers = [memory[ends[k] : ends[k + 1]] for k in range(len(sizes))]
        self._regions[generation] = (self.transport.register(buffers), buffers)
        self.refill(seed, generation)
        return self.transport.expose(self._regions[generation][0], generation).decode()

    def refill(self, seed: int, generation: int = 1) -> None:
        """New values in the same memory."""
        buffers = self._regions[generation][1]
        values = content([buffer.numel() for buffer in buffers], seed)
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
        torch.cuda.synchronize(self._device)

    def exposable(self) -> bool:
        return IpcTransport.exposable(torch.zeros(1 << 22, device=self._device))

    def drop(self, generation: int) -> None:
        """Memory that moves, and is given back to the driver."""
        self.transport.revoke(generation)
        self.transport.unregister(self._regions.pop(generation)[0])
        gc.collect()
        torch.cuda.empty_cache()

    def open(self, handle: str, generation: int = 1, seconds: float = _LONG_S) -> None:
        self.transport.open("owner", generation, handle.encode(), Deadline(seconds))

    def prepare(self, sizes: list[int], memory: str) -> None:
        """An arena and the plan of a read of everything."""
        ends = list(itertools.accumulate(sizes, initial=0))
        pinned = memory == "cpu"
        self.target = torch.zeros(ends[-1], dtype=torch.uint8, device=memory, pin_memory=pinned)
        region = self.transport.register([self.target])
        copies = [Copy("owner", k, 0, 0, ends[k], n) for k, n in enumerate(sizes)]
        self.plan = self.transport.prepare(region, copies)

    def read(self) -> int:
        """A pass over the plan; its bytes."""
        running = self.transport.submit(self.plan)
        deadline = Deadline(_LONG_S)
        while not (progress := self.transport.poll(running)).done:
            deadline.check("waited in vain")
        return progress.nbytes

    def read_and_cancel(self) -> bool:
        """Whether a pass that was given up has left the target alone since."""
        running = self.transport.submit(self.plan)
        assert self.transport.cancel(running)
        self.target.zero_()
        torch.cuda.synchronize()
        return not self.target.any().item()

    def equal(self, sizes: list[int], seed: int) -> bool:
        """Whether the arena holds exactly the owner's bytes."""
        return torch.equal(self.target.cpu(), torch.cat(content(sizes, seed)))

    def mapped_equal(self, sizes: list[int], seed: int) -> bool:
        """Whether what is mapped does."""
        mapped = self.transport.map("owner")
        assert [buffer.numel() for buffer in mapped] == sizes
        assert all(buffer.is_cuda for buffer in mapped)
        return torch.equal(torch.cat([b.cpu() for b in mapped]), torch.cat(content(sizes, seed)))

    def check(self) -> None:
        self.transport.check("owner")

    def notify(self, ticket: int) -> None:
        self.transport.notify("owner", ticket)

    def readers(self, ticket: int) -> list[str]:
        return sorted(self.transport.readers(ticket))

    def close(self) -> None:
        self.transport.close()
        self.target = self.plan = None

    def free_bytes(self) -> int:
        """Of the device, with nothing cached by this process."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def files(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def open_own(self) -> None:
        """A handle of this process's."""
        transport = IpcTransport("own", self._device)
        region = transport.register([torch.zeros(100, device=self._device)])
        deadline = Deadline(_LONG_S)
        deadline.wait = lambda seconds: transport.progress()  # type: ignore[method-assign]
        self.transport.open("own", 1, transport.expose(region, 1), deadline)


def serve(connection: socket.socket) -> None:
    """Carry out commands until the other side hangs up, polling the endpoint in between."""
    lines, replies = connection.makefile("r"), connection.makefile("w")
    end: End | None = None
    while True:
        if end is not None and not end.transport._closed:
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

    def __init__(self, name: str, device: str, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | environment,
        )
        theirs.close()
        self._socket = ours
        self._socket.settimeout(2 * _LONG_S)
        self._out, self._in = ours.makefile("w"), ours.makefile("r")
        self.ask("start", name=name, device=device)

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

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait(_LONG_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(_LONG_S)
        for file in (self._in, self._out, self._socket):
            file.close()


Make = Callable[..., EndProcess]


@pytest.fixture
def end() -> Iterator[Make]:
    """Makes an end on a device, in an environment."""
    made: list[EndProcess] = []

    def make(name: str, device: str = "cuda:0", **environment: str) -> EndProcess:
        made.append(EndProcess(name, device, environment))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("memory", ["cuda:0", "cpu"])
def test_odd_sizes_arrive_exactly_round_after_round(end: Make, memory: str) -> None:
    owner, reader = end("owner"), end("reader")
    reader.ask("open", handle=owner.ask("expose", sizes=SIZES, seed=1))
    reader.ask("prepare", sizes=SIZES, memory=memory)
    for seed in (1, 2, 3):
        owner.ask("refill", seed=seed)
        assert reader.ask("read") == sum(SIZES)
        assert reader.ask("equal", sizes=SIZES, seed=seed)
        assert not reader.ask("equal", sizes=SIZES, seed=seed + 1)
    reader.ask("notify", ticket=3)
    deadline = Deadline(_LONG_S)
    while owner.ask("readers", ticket=3) != ["reader"]:
        deadline.check("the report has not come")


def test_what_is_mapped_is_the_owners_own_memory(end: Make) -> None:
    owner, reader = end("owner"), end("reader")
    reader.ask("open", handle=owner.ask("expose", sizes=SIZES, seed=1))
    for seed in (1, 2):
        owner.ask("refill", seed=seed)
        assert reader.ask("mapped_equal", sizes=SIZES, seed=seed)
    reader.ask("check")


def test_a_cancelled_pass_writes_nothing_more(end: Make) -> None:
    sizes = [256 << 20]
    owner, reader = end("owner"), end("reader")
    reader.ask("open", handle=owner.ask("expose", sizes=sizes, seed=1))
    reader.ask("prepare", sizes=sizes, memory="cuda:0")
    assert reader.ask("read_and_cancel")
    reader.ask("read")
    assert reader.ask("equal", sizes=sizes, seed=1)


def test_memory_that_was_revoked_is_not_read(end: Make) -> None:
    owner, reader = end("owner"), end("reader")
    reader.ask("open", handle=owner.ask("expose", sizes=[100], seed=1))
    reader.ask("prepare", sizes=[100], memory="cuda:0")
    owner.ask("drop", generation=1)
    assert reader.outcome("read")["error"] == "Revoked"
    assert reader.outcome("check")["error"] == "Revoked"


def test_a_stopped_owner_does_not_disturb_a_pass(end: Make) -> None:
    owner, reader = end("owner"), end("reader")
    handle = owner.ask("expose", sizes=SIZES, seed=1)
    reader.ask("open", handle=handle)
    reader.ask("prepare", sizes=SIZES, memory="cuda:0")
    owner.signal(signal.SIGSTOP)
    reader.ask("read")
    assert reader.ask("equal", sizes=SIZES, seed=1)
    late = end("late")
    assert late.outcome("open", handle=handle, seconds=0.3)["error"] == "Timeout"
    owner.signal(signal.SIGCONT)
    late.ask("open", handle=handle)


def test_the_memory_of_a_killed_owner_stays_until_close(end: Make) -> None:
    sizes = [256 << 20]
    owner, reader = end("owner"), end("reader")
    handle = owner.ask("expose", sizes=sizes, seed=1)
    reader.ask("open", handle=handle)
    assert reader.ask("mapped_equal", sizes=sizes, seed=1)
    owner.kill()
    assert reader.outcome("check")["error"] == "PeerDead"
    assert reader.ask("mapped_equal", sizes=sizes, seed=1)
    before = reader.ask("free_bytes")
    reader.ask("close")
    assert reader.ask("free_bytes") - before >= 200 << 20
    reader.ask("renew")
    assert reader.outcome("open", handle=handle)["error"] == "PeerDead"


def test_moved_memory_leaves_nothing_behind(end: Make) -> None:
    """Two hundred generations of 12 MiB, of which every second one is opened by nobody."""
    sizes = [12 << 20]  # an allocation of its own
    owner, reader = end("owner"), end("reader")
    reader.ask("close")
    before = (0, 0, 0)
    for generation in range(1, 202):
        handle = owner.ask("expose", sizes=sizes, seed=generation, generation=generation)
        if generation % 2:
            reader.ask("renew")
            reader.ask("open", handle=handle, generation=generation)
            reader.ask("prepare", sizes=sizes, memory="cuda:0")
            reader.ask("read")
            assert reader.ask("equal", sizes=sizes, seed=generation)
            reader.ask("close")
        owner.ask("drop", generation=generation)
        if generation in {3, 201}:
            reader.ask("free_bytes")  # it gives back its arena, which the owner's count would miss
            now = (owner.ask("free_bytes"), owner.ask("files"), reader.ask("files"))
            before = now if generation == 3 else before
    assert before[0] - now[0] < 64 << 20, "less of the device's memory is free"
    assert now[1] <= before[1] + 1  # a connection that the owner has not noticed the end of
    assert now[2] <= before[2]


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_memory_that_cuda_ipc_does_not_take_is_refused(
    end: Make, variable: str, setting: str
) -> None:
    owner = end("owner", **{variable: setting})
    for refused in (owner.outcome("exposable"), owner.outcome("expose", sizes=[1 << 22], seed=1)):
        assert refused["error"] == "TransportError"
        assert "expandable_segments:True" in refused["text"]
        assert "PYTORCH_CUDA_ALLOC_CONF" in refused["text"]


def test_ordinary_memory_can_be_exposed(end: Make) -> None:
    assert end("owner").ask("exposable")


def _uuids() -> list[str]:
    count = torch.cuda.device_count()
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)]


def test_a_gpu_is_known_by_its_uuid(end: Make) -> None:
    owner = end("owner", CUDA_VISIBLE_DEVICES=_uuids()[0])
    reader = end("reader")
    reader.ask("open", handle=owner.ask("expose", sizes=SIZES, seed=1))
    assert reader.ask("mapped_equal", sizes=SIZES, seed=1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_indices_mean_nothing_between_processes(end: Make) -> None:
    first, second = _uuids()[:2]
    owner = end("owner", CUDA_VISIBLE_DEVICES=f"{first},{second}")
    handle = owner.ask("expose", sizes=SIZES, seed=1)
    reordered = {"CUDA_VISIBLE_DEVICES": f"{second},{first}"}
    right = end("right", "cuda:1", **reordered)
    right.ask("open", handle=handle)
    assert right.ask("mapped_equal", sizes=SIZES, seed=1)
    wrong = end("wrong", "cuda:0", **reordered).outcome("open", handle=handle)
    assert wrong["error"] == "TransportError"
    assert "device 1" in wrong["text"]
    blind = end("blind", "cuda:0", CUDA_VISIBLE_DEVICES=second).outcome("open", handle=handle)
    assert blind["error"] == "TransportError"
    assert first.removeprefix("GPU-") in blind["text"]
    assert second.removeprefix("GPU-") in blind["text"]


def test_a_handle_of_garbage_is_refused(end: Make) -> None:
    owner, reader = end("owner"), end("reader")
    handle = owner.ask("expose", sizes=[100], seed=1)
    wrong = json.loads(handle)
    wrong["allocations"][0]["handle"] = "A" * 86 + "=="
    assert reader.outcome("open", handle=json.dumps(wrong))["error"] == "TransportError"
    wrong = json.loads(handle)
    wrong["allocations"][0]["nbytes"] = 1 << 40
    wrong["buffers"][0]["nbytes"] = 1 << 39
    assert reader.outcome("open", handle=json.dumps(wrong))["error"] == "CorruptTransfer"
    reader.ask("open", handle=handle)
    assert reader.ask("mapped_equal", sizes=[100], seed=1)


def test_owner_and_reader_in_one_process_are_refused(end: Make) -> None:
    refused = end("reader").outcome("open_own")
    assert refused["error"] == "TransportError"
    assert "one process" in refused["text"]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
