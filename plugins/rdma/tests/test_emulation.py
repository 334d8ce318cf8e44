"""Emulation within a host is noticed: a clock of the test's, and real reads that count as a GPU's.

There is no GPU here, and host memory is copied fast: what is patched is which kind of memory is timed,
and which rate is too low. test_cuda.py has the real thing.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_wt.errors import InvalidInfo, TransportError
from vllm_wt.transport import Copy
from vllm_wt_rdma import batching, emulation, operation
from vllm_wt_rdma.batching import Rows
from vllm_wt_rdma.emulation import Sample, Trial, Trials, this_host
from vllm_wt_rdma.info import NixlHandle, decode
from vllm_wt_rdma.transport import NixlTransport

MIB = 1 << 20
HERE = "01234567-89ab-cdef-0123-456789abcdef"
ELSEWHERE = "f1234567-89ab-cdef-0123-456789abcdef"


class Clock:
    """Goes on when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "this_host", lambda: HERE)


def handle(host: str = HERE, what: Any = "error") -> NixlHandle:
    return NixlHandle(
        nixl="nixl-cu13 1.5.1",
        host=host,
        emulation=what,
        agent="owner",
        generation=1,
        beacon=4096,
        nonce=77,
        buffers=(),
        metadata="AAAA",
    )


def rows(into: str, origin: str, *lengths: int, owner: str = "owner") -> Rows:
    each = [(4096, length, 0) for length in lengths]
    return Rows(owner, into, origin, each, each, sum(lengths))


def run(trial: Trial, clock: Clock, *seconds: float) -> list[bool]:
    """Time one read after the other."""
    found = []
    for each in seconds:
        trial.begin()
        clock.now += each
        found.append(trial.is_over())
    return found


def trial_of(clock: Clock, into: str, origin: str, what: str = "error") -> tuple[Trials, Trial]:
    trials = Trials(clock)
    sample = trials.sample(rows(into, origin, 64 * MIB), 5, handle(what=what))
    assert sample is not None
    (trial,) = trials.of([sample])
    return trials, trial


def test_this_host_is_what_linux_has_drawn() -> None:
    assert re.fullmatch(r"[0-9a-f-]{36}|", this_host())


@pytest.mark.parametrize("text", [None, "", "none", HERE.upper(), HERE + "0"])
def test_a_host_that_does_not_say_which_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    path = tmp_path / "boot_id"
    monkeypatch.setattr(emulation, "_BOOT_ID", path)
    for content, found in ((f"{HERE}\n", HERE), (text, "")):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        assert this_host.__wrapped__() == found


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("into", "origin", "lengths", "host", "is_timed"),
    [
        ("VRAM", "VRAM", [64 * MIB], HERE, True),
        ("VRAM", "DRAM", [64 * MIB], HERE, True),
        ("DRAM", "VRAM", [64 * MIB], HERE, True),
        ("DRAM", "DRAM", [64 * MIB], HERE, False),
        ("VRAM", "VRAM", [64 * MIB], ELSEWHERE, False),
        ("VRAM", "VRAM", [64 * MIB], "", False),
        ("VRAM", "VRAM", [32 * MIB], HERE, True),
        ("VRAM", "VRAM", [32 * MIB - 1], HERE, False),
        ("VRAM", "VRAM", [MIB] * 32, HERE, True),
        ("VRAM", "VRAM", [MIB] * 32 + [1], HERE, False),
    ],
)
def test_what_is_timed(
    into: str, origin: str, lengths: list[int], host: str, is_timed: bool
) -> None:
    sample = Trials().sample(rows(into, origin, *lengths), 5, handle(host))
    assert (sample is not None) == is_timed
    if sample is not None:
        key = ("owner", into, origin)
        assert sample == Sample(key, 5, sum(lengths), into == origin == "VRAM")


def test_on_a_host_that_does_not_say_which_it_is_nothing_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(emulation, "this_host", lambda: "")
    assert Trials().sample(rows("VRAM", "VRAM", 64 * MIB), 5, handle("")) is None


@pytest.mark.usefixtures("here")
def test_the_largest_read_of_each_owner_and_kind_is_timed_once() -> None:
    trials, clock = Trials(), Clock()
    made = [
        ("a", "VRAM", 40),
        ("a", "VRAM", 64),
        ("a", "VRAM", 50),
        ("a", "DRAM", 33),
        ("b", "VRAM", 36),
    ]
    samples = []
    for number, (owner, origin, size) in enumerate(made):
        sample = trials.sample(rows("VRAM", origin, size * MIB, owner=owner), number, handle())
        assert sample is not None
        samples.append(sample)
    trials._clock = clock
    first = trials.of(samples)
    assert [trial.sample.number for trial in first] == [1, 3, 4]
    for trial in first:
        assert run(trial, clock, 0.001) == [True]
    assert trials.of(samples) == []


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "seconds", [[0.067], [9.0, 0.067], [9.0, 0.068, 9.0, 0.067]], ids=["first", "second", "fourth"]
)
def test_one_fast_read_will_do(seconds: list[float], caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    trials, trial = trial_of(clock, "VRAM", "VRAM")
    with caplog.at_level(logging.INFO):
        assert run(trial, clock, *seconds) == [*[False] * (len(seconds) - 1), True]
    assert trials.of([trial.sample]) == []
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "GPU memory of owner on this host into GPU memory: 1.0 GB/s" in record.message


@pytest.mark.usefixtures("here")
def test_gpu_to_gpu_is_an_error_each_time() -> None:
    clock = Clock()
    trials, trial = trial_of(clock, "VRAM", "VRAM")
    assert run(trial, clock, 0.5, 0.16, 0.2) == [False, False, False]
    with pytest.raises(TransportError, match="by emulation") as caught:
        run(trial, clock, 0.3)
    error = caught.value
    assert (error.backend, error.where, error.expected) == ("rdma", "read", "more than 1 GB/s")
    assert error.got == f"0.42 GB/s, the fastest of 4 reads of {64 * MIB} bytes"
    for part in ("UCX_TLS", "expandable_segments", "--ipc=host", 'emulation="warning"'):
        assert part in str(error.cure)
    assert error.facts()["cure"] == error.cure  # whole, when it crosses vLLM
    assert len(trials.of([trial.sample])) == 1


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("into", "origin", "what", "cure"),
    [
        ("VRAM", "VRAM", "warning", "unset UCX_TLS"),
        ("VRAM", "DRAM", "error", 'staging="host"'),
        ("DRAM", "VRAM", "error", "keep the weights on a GPU"),
    ],
)
def test_a_warning_comes_once(
    caplog: pytest.LogCaptureFixture, into: str, origin: str, what: str, cure: str
) -> None:
    clock = Clock()
    trials, trial = trial_of(clock, into, origin, what)
    assert run(trial, clock, 0.2, 0.2, 0.2, 0.2) == [False, False, False, True]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "0.34 GB/s" in record.message
    assert cure in record.message
    assert trials.of([trial.sample]) == []


SIZES = [3 * MIB, 2 * MIB, 5]


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Host memory counts as a GPU's, reads are short, and tell something all the same."""
    for module in (batching, operation):
        monkeypatch.setattr(module, "CHUNK_BYTES", 2 * MIB)
    monkeypatch.setattr(emulation, "GPU", "DRAM")
    monkeypatch.setattr(emulation, "LEAST_BYTES", MIB)
    monkeypatch.setattr(emulation, "LEAST_ROW", 1)
    assert this_host()
    return monkeypatch


def planned(
    bench: Any, exposed: bytes, reader: NixlTransport, generation: int = 1
) -> tuple[torch.Tensor, Any]:
    """A plan over everything that an owner has exposed, a buffer behind the other."""
    reader.open("owner", generation, exposed, bench.deadline())
    target, region = bench.arena(reader, sum(SIZES))
    ends = [0, SIZES[0], SIZES[0] + SIZES[1]]
    copies = [Copy("owner", k, 0, 0, ends[k], SIZES[k]) for k in range(3)]
    return target, reader.prepare(region, copies)


def expected(bench: Any) -> torch.Tensor:
    return torch.cat([bench.content(size, k) for k, size in enumerate(SIZES)])


def posts(reader: NixlTransport, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The reads that are posted from here on."""
    made: list[int] = []
    real = reader._endpoint.post

    def post(read: int) -> bool:
        made.append(read)
        return real(read)

    monkeypatch.setattr(reader._endpoint, "post", post)
    return made


def polled(bench: Any, reader: NixlTransport, plan: Any) -> list[int]:
    """What each poll of a pass said."""
    operation = reader.submit(plan)
    said: list[int] = []

    def done() -> bool:
        progress = reader.poll(operation)
        said.append(progress.nbytes)
        return progress.done

    bench.until(done)
    return said


def test_a_slow_first_read_is_an_error_and_nothing_is_said_to_have_come(
    bench: Any, as_gpu: pytest.MonkeyPatch
) -> None:
    as_gpu.setattr(emulation, "LEAST_RATE", float("inf"))
    owner, reader = bench.owner(), bench.reader()
    target, plan = planned(bench, owner.expose(*SIZES), reader)
    made = posts(reader, as_gpu)
    running = reader.submit(plan)
    with pytest.raises(TransportError, match="by emulation"):
        bench.until(lambda: reader.poll(running).nbytes > 0)
    beacon, *timed = made
    assert beacon == plan.prepared.beacons[0].read.number
    assert timed == [plan.prepared.data[0].number] * emulation.TRIES  # and no other was begun
    assert reader.cancel(running)
    assert target[: 2 * MIB].any()
    assert not target[2 * MIB :].any()
    after = bench.reader()
    target, plan = planned(bench, owner.expose(*SIZES, generation=2), after, 2)
    after._trials._clock = Clock()  # it takes no time at all
    as_gpu.setattr(emulation, "LEAST_RATE", 1e9)
    polled(bench, after, plan)
    assert torch.equal(target, expected(bench))


@pytest.mark.parametrize("transports", ["all", "tcp"])
@pytest.mark.parametrize("rate", [1e9, float("inf")], ids=["fast", "slow"])
def test_a_pass_that_is_not_refused_is_exact_and_the_next_one_is_not_timed(
    bench: Any,
    as_gpu: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    transports: str,
    rate: float,
) -> None:
    as_gpu.setenv("UCX_TLS", transports)
    as_gpu.setattr(emulation, "LEAST_RATE", rate)
    owner, reader = bench.owner(), bench.reader()
    exposed = owner.expose(*SIZES).replace(b'"emulation":"error"', b'"emulation":"warning"')
    target, plan = planned(bench, exposed, reader)
    reader._trials._clock = Clock()
    made = posts(reader, as_gpu)
    timed = 1 if rate == 1e9 else emulation.TRIES
    for tries in (timed, 0):
        made.clear()
        target.zero_()
        said = polled(bench, reader, plan)
        assert said == sorted(said)
        assert said[-1] == sum(SIZES)
        assert torch.equal(target, expected(bench))
        assert len(made) == 2 + tries + len(plan.prepared.data)
    warnings = [r.message for r in caplog.records if "by emulation" in r.message]
    assert len(warnings) == (rate != 1e9)


def test_an_owner_on_another_host_is_not_timed(bench: Any, as_gpu: pytest.MonkeyPatch) -> None:
    as_gpu.setattr(emulation, "LEAST_RATE", float("inf"))
    owner, reader = bench.owner(), bench.reader()
    exposed = owner.expose(*SIZES).replace(this_host().encode(), ELSEWHERE.encode())
    target, plan = planned(bench, exposed, reader)
    polled(bench, reader, plan)
    assert torch.equal(target, expected(bench))


@pytest.mark.parametrize("what", ["error", "warning"])
def test_the_owners_option_is_in_its_handle(what: Any) -> None:
    owner = NixlTransport("owner", torch.device("cpu"), emulation=what)
    exposed = owner.expose(owner.register([torch.ones(8, dtype=torch.uint8)]), 1)
    found = decode(exposed, owner="owner", generation=1)
    assert (found.emulation, found.host) == (what, this_host())
    owner.close()


@pytest.mark.parametrize("what", ["silence", "", None, True, ["error"]])
def test_an_option_that_is_none(what: Any) -> None:
    with pytest.raises(InvalidInfo) as caught:
        NixlTransport("owner", torch.device("cpu"), emulation=what)
    assert (caught.value.where, caught.value.expected) == ("emulation", "'error' or 'warning'")
