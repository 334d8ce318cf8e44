"""Ranks of a trainer that each expose their own memory, and workers that read the one near them.

Ranks, and engines of stand-in workers, are real processes over gloo and the real backends.
"""

from __future__ import annotations

import os
import signal
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import pytest
from ipc_trainer import IpcEngine
from processes import LONG_S, Forker, Group, digests, until

from vllm_wt.testing.models import ModelShape, random_model, randomize, save_checkpoint

pytestmark = pytest.mark.xdist_group("team")

SCRIPT = Path(__file__).parents[1] / "support" / "wt_team.py"
BUCKET = {"bucket_nbytes": 8192}
SOON_S = 2.0
"""A deadline that is waited for, and what ranks wait beyond it."""


@pytest.fixture(scope="module")
def forker(tmp_path_factory):
    forker = Forker(tmp_path_factory.mktemp("team"), SCRIPT)
    yield forker
    forker.close()


@pytest.fixture(params=["ipc", "rdma"])
def backend(request):
    return request.param


EACH_KIND = ["copied", pytest.param("fsdp2", marks=pytest.mark.slow)]
"""Where what the ranks do is the same for every kind."""


@pytest.fixture
def make(forker, backend):
    """Makes a trainer of ranks and an engine of workers."""
    made = []

    def new(kind, world=2, workers=2, tells=True):
        engine = forker.fork("engine", backend, workers, tells)
        engine.call("calls")
        group = Group(forker, backend, world, engine)
        made.extend([engine, *group.ranks])
        group.all("make", kind, "small", 1)
        return group

    yield new
    for process in made:
        process.close()


@pytest.fixture
def plain(make):
    """A trainer of replicated tensors that has pushed once."""
    group = make("copied")
    group.connect()
    group.assert_pushes(1, seed=1)
    return group


@pytest.mark.parametrize("kind", ["copied", "shared", "fsdp2", "made"])
def test_three_pushes(make, kind):
    group = make(kind)
    group.connect(**BUCKET)
    owners = group.all("owner")
    assert len(set(owners)) == 2
    facts = group.engine.call("facts")
    assert [each["owner"] for each in facts] == owners
    mapped = group.backend == "ipc" and kind in {"copied", "shared"}
    assert [each["staging"] == "mapped" for each in facts] == [mapped] * 2
    for version in (1, 2, 3):
        group.assert_pushes(version)
    assert group.all("settled") == [3, 3]
    assert group.ranks[0].call("versions") == [[3, False]]


@pytest.mark.parametrize("kind", ["copied", "shared", "made"])
def test_each_worker_reads_its_own_rank(make, kind):
    """Told from the values, which differ here."""
    group = make(kind)
    group.connect(**BUCKET)
    for version in (1, 2):
        for number, rank in enumerate(group.ranks):
            rank.call("fill", 10 * version + number)
        group.push(version)
        assert group.engine.call("digests") == [digests(10 * version), digests(10 * version + 1)]


def test_memory_that_moved_on_one_rank(make):
    group = make("shared")
    group.connect()
    group.assert_pushes(1)
    group.engine.call("calls")
    group.ranks[1].call("move")
    group.assert_pushes(2)
    made = [call for call in group.engine.call("calls") if call.startswith("connection")]
    assert made == ["connection 1"], "the other worker's connection is kept"
    group.assert_pushes(3)
    assert not [c for c in group.engine.call("calls") if c.startswith("connection")]


@pytest.mark.parametrize("kind", ["copied", "fsdp2"])
@pytest.mark.parametrize(("world", "workers"), [(3, 2), (2, 3), (1, 2)])
def test_ranks_and_workers_of_other_numbers(make, kind, world, workers):
    group = make(kind, world, workers)
    group.connect(**BUCKET)
    owners = group.all("owner")
    read = [each["owner"] for each in group.engine.call("facts")]
    assert read == [owners[worker % world] for worker in range(workers)]
    for version in (1, 2):
        group.assert_pushes(version)


def test_workers_that_do_not_tell_whom_they_read(make):
    group = make("made", workers=3, tells=False)
    group.connect(**BUCKET)
    group.start("push_together", 1)
    errors = group.failed()
    assert [error["code"] for error in errors] == ["E01", "E01"]
    assert errors[0]["got"] == "3 workers"
    assert group.engine.call("digests") == [{}] * 3
    group = make("made", tells=False)
    group.connect(**BUCKET)
    group.assert_pushes(1)


# -- what is refused before anything is sent ---------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "options", "code"),
    [
        ("name", {}, "E03"),
        ("dtype", {}, "E03"),
        ("nothing", {"verify": "off"}, "E03"),
        ("nothing", {"bucket_nbytes": 5}, "E01"),
        ("nothing", {"colour": "red"}, "E01"),
        ("no source", {}, "E01"),
    ],
    ids=["name", "dtype", "option", "wrong option", "unknown option", "no source"],
)
@pytest.mark.parametrize("other", [0, 1])
def test_ranks_that_would_send_something_else(make, what, options, code, other):
    group = make("copied")
    group.ranks[other].call("change", what)
    for number, rank in enumerate(group.ranks):
        its = options if number == other else {}
        rank.call("launch", "connect_together", str(group.engine.path), group.backend, its)
    assert group.codes() == [code, code]
    assert group.engine.call("calls") == []
    group.all("make", "copied", "small", 1)
    group.connect()
    group.assert_pushes(1)


def test_an_announced(make):
    group = make("copied")
    group.all("change", "announced")
    group.start("connect_together", str(group.engine.path), group.backend, {})
    assert {(error["code"], error["where"].split(",")[0]) for error in group.failed()} == {
        ("E01", "group")
    }


def test_a_group_that_is_none_of_this_ranks(make):
    group = make("copied")
    group.start("connect_together", str(group.engine.path), group.backend, {}, 30.0, "wrong")
    assert group.codes() == ["E01", "E01"]


def test_no_group(make):
    group = make("copied")
    first = group.ranks[:1]
    group.start(
        "connect_together", str(group.engine.path), group.backend, {}, 30.0, "none", ranks=first
    )
    assert group.outcomes(first) == [{"result": None}]
    assert {each["owner"] for each in group.engine.call("facts")} == {group.ranks[0].call("owner")}
    group.start("push_together", 1, ranks=first)
    assert group.outcomes(first) == [{"result": 1}]
    group.assert_has(1)


@pytest.mark.parametrize(
    ("arguments", "codes"),
    [
        ([(2, 30.0), (3, 30.0)], ["E03", "E03"]),
        ([(1, 30.0), (1, 30.0)], ["E01", "E01"]),
        ([(-1, 30.0), (2, 30.0)], ["E01", "E01"]),
        ([(2, 30.0), (2, -5)], ["E01", "E01"]),
    ],
    ids=["versions differ", "no advance", "no version", "no deadline"],
)
@pytest.mark.parametrize("kind", EACH_KIND)
def test_a_push_that_is_refused(make, kind, arguments, codes):
    """On one rank, which the others hear of at once; the next one works."""
    group = make(kind)
    group.connect(**BUCKET)
    group.assert_pushes(1, seed=1)
    group.all("fill", 2)
    group.engine.call("calls")
    for rank, its in zip(group.ranks, arguments, strict=True):
        rank.call("launch", "push_together", *its)
    assert group.codes() == codes
    assert group.engine.call("calls") == []
    group.assert_has(1)
    group.assert_pushes(5)


# -- what fails --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["start", "open", "seal", "finish"])
@pytest.mark.parametrize("kind", EACH_KIND)
def test_an_engine_that_refuses(make, kind, step):
    group = make(kind)
    group.connect(**BUCKET)
    group.assert_pushes(1, seed=1)
    group.all("settled")
    group.all("fill", 2)
    group.engine.call("refuse", step)
    group.start("push_together", 2)
    assert [(e["code"], e["what"]) for e in group.failed()] == [("E16", "The engine refuses")] * 2
    assert group.all("settled") == [1, 1]
    group.assert_has(1)
    group.assert_pushes(3)


def test_an_engine_that_refuses_to_connect(make):
    group = make("copied")
    group.engine.call("refuse", "init")
    group.start("connect_together", str(group.engine.path), group.backend, {})
    assert group.codes() == ["E16", "E16"]
    group.connect()
    group.assert_pushes(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_source_that_raises_in_the_middle(make, rank):
    group = make("made")
    group.connect(**BUCKET)
    group.assert_pushes(1, seed=1)
    group.all("fill", 2)
    group.ranks[rank].call("fail_at", "w6")
    group.start("push_together", 2)
    errors = group.failed()
    assert all("w6 is not to be had" in error["what"] for error in errors), errors
    group.assert_has(1)
    group.assert_pushes(3)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_closes(plain, rank):
    others = [each for each in plain.ranks if each is not plain.ranks[rank]]
    plain.all("fill", 2)
    plain.start("push_together", 2, ranks=others)
    plain.ranks[rank].call("close")
    assert plain.codes(others) == ["E10"]
    plain.assert_has(1)
    plain.start("push_together", 2, ranks=others)
    assert plain.codes(others) == ["E10"], "it is over"
    plain.connect()
    plain.assert_pushes(1)


@pytest.mark.parametrize("kind", ["copied", "made"])
@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed(make, kind, rank, when):
    group = make(kind)
    group.all("wait_less", SOON_S)
    group.connect(**BUCKET)
    group.assert_pushes(1, seed=1)
    group.all("fill", 2)
    victim, survivor = group.ranks[rank], [group.ranks[1 - rank]]
    if when == "before":
        victim.signal(signal.SIGKILL)
        until(victim.dead, "a rank to die")
        group.start("push_together", 2, SOON_S, ranks=survivor)
    else:
        group.engine.call("signal_at", "open", victim.pid, int(signal.SIGKILL))
        group.start("push_together", 2, 2 * SOON_S)
        until(victim.dead, "a rank to die")
    (code,) = group.codes(survivor)
    assert code in {"E04", "E05", "E06", "E10"}
    group.assert_has(1)
    other = make(kind)
    other.engine = group.engine
    other.connect(**BUCKET)
    other.assert_pushes(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped(make, rank):
    group = make("copied")
    group.all("wait_less", SOON_S)
    group.connect()
    group.assert_pushes(1, seed=1)
    group.all("fill", 2)
    victim, survivor = group.ranks[rank], [group.ranks[1 - rank]]
    victim.signal(signal.SIGSTOP)
    until(victim.stopped, "a rank to stop")
    group.start("push_together", 2, SOON_S, ranks=survivor)
    assert group.codes(survivor) == ["E05"]
    victim.signal(signal.SIGCONT)
    group.start("push_together", 2, LONG_S, ranks=[victim])
    assert group.codes([victim]) == ["E10"]
    group.assert_has(1)
    group.connect()
    group.assert_pushes(1)


def test_ranks_that_share_a_store_and_no_group(make):
    group = make("copied")
    group.all("connect_together", str(group.engine.path), group.backend, {}, 30.0, "store")
    group.engine.call("calls")
    for version in (1, 2):
        group.assert_pushes(version)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_known_by_its_silence(make, rank):
    """Long before the deadline; the first rank has the store."""
    group = make("copied")
    group.all("bear_silence", SOON_S)
    group.connect()
    group.assert_pushes(1, seed=1)
    group.all("fill", 2)
    victim, survivor = group.ranks[rank], [group.ranks[1 - rank]]
    victim.signal(signal.SIGSTOP)
    until(victim.stopped, "a rank to stop")
    group.start("push_together", 2, 20 * LONG_S, ranks=survivor)
    assert group.codes(survivor) == ["E04"]
    victim.signal(signal.SIGCONT)
    group.start("push_together", 2, 20 * LONG_S, ranks=[victim])
    assert group.codes([victim]) in (["E04"], ["E10"])
    group.assert_has(1)
    group.connect()
    group.assert_pushes(1)


def test_a_rank_that_does_not_come(make):
    """And one that came in vain: the next attempt is not mistaken for it."""
    group = make("copied")
    group.all("wait_less", SOON_S)
    arguments = str(group.engine.path), group.backend, {}, SOON_S
    for rank in group.ranks:
        group.start("connect_together", *arguments, ranks=[rank])
        assert group.codes([rank]) == ["E05"]
    group.connect()
    group.assert_pushes(1)


# -- a real engine -----------------------------------------------------------------------------------


@pytest.fixture
def llm(tmp_path_factory):
    with patch.dict(os.environ, VLLM_CPU_OMP_THREADS_BIND="0|1"):
        engine = IpcEngine(tmp_path_factory.mktemp("llm"), ModelShape(vocab=500, tied=True), 2)
    yield engine
    engine.close()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.xdist_group("team engine")
def test_a_real_engine(forker, llm, tmp_path):
    """Greedy tokens are those of transformers, and vLLM's own digests those of weights it has loaded
    itself; each worker reads a rank of its own."""
    group = Group(forker, "ipc", 2, llm)
    group.engine.path = llm.folder / "engine.sock"
    seen = []
    for kind in ("copied", "shared", "fsdp2"):
        group.all("make_model", kind, asdict(llm.shape))
        group.all("connect_together", str(group.engine.path), "ipc", {"bucket_nbytes": 1 << 20})
        owners = group.all("owner")
        assert llm.facts("owner") == owners
        assert len(set(owners)) == 2
        received = "device" if kind == "fsdp2" else "mapped"
        assert llm.facts("staging") == [received] * 2
        for version, seed in enumerate((len(seen) + 1, 0, len(seen) + 2), 1):
            group.all("fill", seed)
            group.push(version)
            model = random_model(llm.shape, seed=0)
            randomize(model, seed)
            save_checkpoint(model, tmp_path / f"{kind}{version}")
            tokens = llm.tokens()
            assert tokens == llm.reference(tmp_path / f"{kind}{version}")
            assert (llm.digests() == llm.fresh) == (seed == 0)
            assert seed == 0 or tokens not in seen
            seen.append(tokens)
            assert [report.version for report in llm.reports()] == [version] * 2
    llm.assert_in_step()
    for rank in group.ranks:
        rank.close()
