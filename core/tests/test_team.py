"""Ranks of a trainer agree, over real gloo between threads that share a store."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from vllm_wt import opening
from vllm_wt.beats import Beats
from vllm_wt.deadline import Deadline
from vllm_wt.errors import (
    InvalidInfo,
    LoadError,
    ManifestMismatch,
    PeerDead,
    Timeout,
    TransportError,
    WrongOrder,
)
from vllm_wt.following import follow
from vllm_wt.group import StoreGroup
from vllm_wt.pull import TeamTrainer
from vllm_wt.session import WeightSync
from vllm_wt.source import StateDictSource
from vllm_wt.team import Team

from .conftest import MappingTransport, MemoryTransport
from .support.engines import PausingEngine, RoundEngine, assert_equal

LONG_S = 30.0
SOON_S = 0.2


@pytest.fixture
def watchful(monkeypatch):
    """Silence is noticed early."""
    monkeypatch.setattr(Beats, "every_s", 0.01)
    monkeypatch.setattr(Beats, "silence_s", 1.0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(Team, "grace_s", SOON_S)


@pytest.fixture
def store():
    return HashStore()


def at_once(*calls):
    """What each returns or raises."""

    def outcome(call):
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def make_teams(store, size):
    return at_once(
        *(
            lambda rank=rank: Team(StoreGroup(store, rank, size), Deadline(LONG_S))
            for rank in range(size)
        )
    )


@pytest.fixture(params=[2, 3], ids=["two", "three"])
def teams(request, store):
    teams = make_teams(store, request.param)
    assert [(team.rank, team.size) for team in teams] == [
        (rank, request.param) for rank in range(request.param)
    ]
    assert [team.leads for team in teams] == [True] + [False] * (request.param - 1)
    yield teams
    for team in teams:
        team.close()


def exchange(team, said, seconds=LONG_S, where="here"):
    return lambda: team.exchange(said, Deadline(seconds), where=where)


def agree(team, error=None, seconds=LONG_S):
    return lambda: team.agree({"rank": team.rank}, error, Deadline(seconds), where="here")


def until_nobody_is_left_to_itself():
    while any(thread.name == "vllm-wt-team-left" for thread in threading.enumerate()):
        time.sleep(0.01)


def is_lost(outcome):
    return isinstance(outcome, TransportError) and "connect again" in outcome.cure


def test_what_each_says_is_told_to_all(teams):
    for length in (0, 1, 100_000):
        said = [{"rank": team.rank, "text": "x" * length * team.rank} for team in teams]
        told = at_once(*map(exchange, teams, said))
        assert told == [[each | {"step": "here"} for each in said]] * len(teams)


def test_an_error_of_one_is_raised_on_all(teams):
    errors = [None] * len(teams)
    errors[1] = LoadError("It does not fit", where="there", cure="mend it")
    told = at_once(*map(agree, teams, errors))
    assert told[1] is errors[1]
    for error in (*told[:1], *told[2:]):
        assert (type(error), error.what, error.cure) == (LoadError, "It does not fit", "mend it")
        assert error.where == "there, on rank 1 of the trainer"
    assert at_once(*map(agree, teams))[0][1]["rank"] == 1, "they are still together"


def test_each_raises_its_own_error(teams):
    errors = [LoadError(f"Number {team.rank}") for team in teams]
    assert at_once(*map(agree, teams, errors)) == errors


def test_another_call(teams):
    wheres = ["connect", *["publish"] * (len(teams) - 1)]
    told = at_once(*(exchange(team, {}, where=w) for team, w in zip(teams, wheres, strict=True)))
    assert [type(each) for each in told] == [WrongOrder] * len(teams)
    assert told[0].got.startswith("connect on rank 0, publish on rank 1")
    assert all(is_lost(each) for each in at_once(*map(agree, teams)))


def test_a_rank_that_does_not_come(teams):
    *others, late = teams
    missed = at_once(*(agree(team, seconds=SOON_S) for team in others))
    assert isinstance(missed[0], Timeout)
    assert all(isinstance(each, Timeout) or is_lost(each) for each in missed)
    (told,) = at_once(agree(late))
    assert is_lost(told), "it does not wait for those who have gone"


def test_a_rank_that_is_silent(watchful, store):
    first, silent = make_teams(store, 2)
    silent._beats.close()
    (told,) = at_once(agree(first, seconds=1000.0))
    assert isinstance(told, PeerDead)
    assert (told.where, told.got) == ("here", "none from rank 1")
    assert first.is_over
    silent.close()
    until_nobody_is_left_to_itself()


_INTERRUPTED = """
import signal, threading
from torch.distributed import HashStore
from vllm_wt import StoreGroup
from vllm_wt.deadline import Deadline
from vllm_wt.team import Team
store, teams = HashStore(), {}
def join(rank):
    teams[rank] = Team(StoreGroup(store, rank, 2), Deadline(30.0))
other = threading.Thread(target=join, args=(1,))
other.start()
join(0)
other.join()
threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,)).start()
try:
    teams[0].exchange({}, Deadline(1000.0), where="here")
except KeyboardInterrupt:
    print("interrupted", teams[0].is_over)
"""


def test_a_rank_that_is_interrupted_while_it_waits_can_end():
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "interrupted True"), done.stderr


def test_a_rank_that_lives_is_waited_for(watchful, store):
    """Longer than silence is borne."""
    first, late = make_teams(store, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(agree(first))
        heard = first._beats._heard
        seen = set()
        while len(seen) < 150:  # 1.5 s of beats
            seen.add(heard.beats[1])
            assert not waiting.done()
        agree(late)()
        assert waiting.result()[1]["rank"] == 1


def test_a_process_that_was_stopped_itself_blames_nobody(watchful, store, monkeypatch):
    first, _other = make_teams(store, 2)
    first._beats.begin()
    first._beats._looked -= 1000.0
    first._beats.check("here")


def test_a_store_that_answers_no_more_is_silence(watchful):
    class Broken(HashStore):
        def set(self, key, value):
            raise RuntimeError("the store is gone")

    beats = Beats(Broken(), 0, 2)
    beats.begin()

    def wait():
        while True:
            beats.check("here")

    with pytest.raises(PeerDead, match="rank 1"):
        wait()


def test_an_error_goes_before_the_others_absence(teams):
    error = LoadError("It does not fit")
    assert at_once(agree(teams[0], error, SOON_S)) == [error]


def test_a_rank_that_leaves(teams):
    *others, last = teams
    last.close()
    last.close()
    assert all(is_lost(each) for each in at_once(*map(agree, others)))
    assert all(is_lost(each) for each in at_once(agree(last)))


@pytest.mark.parametrize("failed", [False, True])
def test_the_first_ranks_word(teams, failed):
    first, *others = teams
    words = [team.listen(Deadline(LONG_S)) for team in others]
    assert not any(word.is_bad for word in words)
    first.say(failed=failed, deadline=Deadline(LONG_S))
    for word in words:
        word._work.wait()
        assert word.is_bad == failed


def test_the_word_of_a_first_rank_that_has_left(teams):
    first, *others = teams
    words = [team.listen(Deadline(LONG_S)) for team in others]
    first.close()
    for word in words:
        with pytest.raises(RuntimeError):
            word._work.wait()
        assert word.is_bad


@pytest.mark.parametrize("early", [0, 1])
def test_one_that_came_in_vain_is_not_met_later(store, early):
    with pytest.raises(Timeout) as error:
        Team(StoreGroup(store, early, 2), Deadline(SOON_S))
    assert error.value.where == "connect"
    for _ in range(2):
        teams = make_teams(store, 2)
        assert at_once(*map(agree, teams))[0][1]["rank"] == 1


@pytest.mark.parametrize(
    ("given", "where"),
    [
        (("no store", 0, 1), "store"),
        ((HashStore(), 1, 1), "rank"),
        ((HashStore(), -1, 1), "rank"),
        ((HashStore(), True, 2), "rank"),
        ((HashStore(), 0, 0), "size"),
        ((HashStore(), 0, "1"), "size"),
    ],
)
def test_no_ranks_of_a_store(given, where):
    with pytest.raises(InvalidInfo) as error:
        StoreGroup(*given)
    assert error.value.where == f"StoreGroup: {where}"


@pytest.mark.parametrize("group", [None, 5, object()])
def test_no_group(group):
    with pytest.raises(InvalidInfo) as error:
        Team(group, Deadline(LONG_S))
    assert error.value.where == "group"


# -- trainers ----------------------------------------------------------------------------------------


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(300, 7, generator=generator), "b": torch.ones(5) * seed}


def make_trainers(store, transport_cls):
    """Two that have joined."""
    made = [
        TeamTrainer(
            StateDictSource(weights(team.rank)),
            team=team,
            backend="memory",
            transport_cls=transport_cls,
        )
        for team in make_teams(store, 2)
    ]
    assert at_once(*(lambda each=each: each.join(Deadline(LONG_S)) for each in made)) == [None] * 2
    return made


@pytest.fixture
def trainers(store, fabric):
    made = make_trainers(store, MemoryTransport)
    yield made
    for each in made:
        each.shutdown()


def publish(trainer, version, seconds=LONG_S):
    return lambda: trainer.publish(version, Deadline(seconds))


def settle_all(trainers):
    return at_once(*(each.settle for each in trainers))


def test_the_first_ranks_deadline_counts(trainers):
    first, other = trainers
    assert at_once(publish(first, 1, 1000.0), publish(other, 1, SOON_S)) == [None, None]
    assert other.until.remaining() > 900
    assert settle_all(trainers) == [None, None]
    assert at_once(publish(first, 2, SOON_S), publish(other, 2, 1000.0)) == [None, None]
    assert other.until.remaining() <= SOON_S
    assert settle_all(trainers) == [None, None]


def test_a_refusal_keeps_the_ranks_in_step(trainers):
    first, other = trainers
    refusal = InvalidInfo("No")
    told = at_once(lambda: first.refuse(refusal, Deadline(LONG_S)), publish(other, 1))
    assert told[0] is refusal
    assert isinstance(told[1], InvalidInfo)
    assert settle_all(trainers) == [None, None], "there is nothing to settle"
    assert at_once(publish(first, 2), publish(other, 2)) == [None, None]
    assert first._ticket == other._ticket
    assert settle_all(trainers) == [None, None]


def test_other_versions(trainers):
    first, other = trainers
    told = at_once(publish(first, 1), publish(other, 2))
    assert [type(each) for each in told] == [ManifestMismatch] * 2
    assert (told[0].where, told[0].expected, told[0].got) == ("publish: version", "1", "2")
    assert settle_all(trainers) == [None, None]


def test_workers_that_read_others_alone(trainers, fabric):
    """The first rank, which waits for its own readers, may have none."""
    handles = [each._handle() for each in trainers]
    owners = [handles[1].owner] * 2
    at_once(lambda: trainers[0].share(owners, 2, None), lambda: trainers[1].share(None, None, None))
    at_once(*(publish(each, 1) for each in trainers))
    assert trainers[0].delivered() == 2
    fabric.notified[handles[1].owner] = {("worker1-x", trainers[1]._ticket)}
    assert trainers[1].delivered() == 1
    assert settle_all(trainers) == [None, None]


@pytest.mark.parametrize("failing", [0, 1])
def test_what_fails_in_between_is_raised_by_the_others_settle(trainers, failing):
    at_once(*(publish(each, 1) for each in trainers))
    trainers[failing].fail(LoadError("It does not fit"))
    told = settle_all(trainers)
    assert told[failing] is None, "its caller has the error"
    assert isinstance(told[1 - failing], LoadError)
    assert settle_all(trainers) == [None, None], "once"


def test_a_change_on_another_rank_is_told(store, mapping_fabric):
    """Its readers may have loaded some of both."""
    trainers = make_trainers(store, MappingTransport)
    at_once(*(publish(each, 1) for each in trainers))
    next(iter(trainers[1].source))[1].add_(1)
    told = settle_all(trainers)
    assert [type(each) for each in told] == [ManifestMismatch] * 2
    assert "rank 1 of the trainer" in told[0].where
    for each in trainers:
        each.shutdown()


def test_a_follower_hears_that_the_first_has_failed(trainers):
    first, other = trainers

    def lead():
        first.publish(1, Deadline(LONG_S))
        first.fail(LoadError("It does not fit"))
        first.settle()

    told = at_once(lead, lambda: follow(other, 1, Deadline(LONG_S)))
    assert told[0] is None
    assert isinstance(told[1], LoadError)


def test_options_in_an_error_are_those_of_one_rank(store, fabric):
    (team,) = make_teams(store, 1)
    with pytest.raises(InvalidInfo, match="one of verify, staging, bucket_nbytes"):
        TeamTrainer(
            StateDictSource(weights(1)),
            team=team,
            backend="memory",
            transport_cls=MemoryTransport,
            colour="red",
        )


# -- the outcome is exchanged once -------------------------------------------------------------------


class Trainer(TeamTrainer):
    """``fails`` are errors of calls to come, by name."""

    fails = {}  # noqa: RUF012  # replaced, never changed

    def _fail(self, name):
        if name in self.fails:
            error, self.fails = self.fails[name], {}
            raise error

    def send(self, readers, deadline, watch):
        self._fail("send")
        super().send(readers, deadline, watch)

    @property
    def at_once(self):
        self._fail("begin")
        return super().at_once


@pytest.fixture(params=["in phases", "in one call"])
def engine(request, loader, mapping_cls, fabric):
    if request.param == "in phases":
        return PausingEngine(MemoryTransport, loader)
    return RoundEngine(MappingTransport, loader)


@pytest.fixture
def sync(monkeypatch, store, engine):
    """A session of one rank: all that it exchanges, it exchanges with itself."""

    def trainer_engine(backend, source, team):
        transport_cls = engine.engine._transport_cls
        return Trainer(source, team=team, backend=backend, transport_cls=transport_cls)

    monkeypatch.setattr(opening, "trainer_engine", trainer_engine)
    state = weights(1)
    with WeightSync.connect(
        engine, backend="memory", source=state, group=StoreGroup(store, 0, 1), deadline_s=LONG_S
    ) as sync:
        sync.state = state
        yield sync


@pytest.fixture
def exchanged(monkeypatch, sync):
    made = []
    original = Team.exchange

    def watched(self, said, deadline, *, where):
        made.append((where, said["error"] is not None))
        return original(self, said, deadline, where=where)

    monkeypatch.setattr(Team, "exchange", watched)
    return made


def test_a_push_that_succeeds(sync, exchanged, loader):
    for version in (1, 2):
        sync.push(version)
        assert exchanged == [("publish", False), ("settle", False)]
        assert_equal(loader.weights, sync.state)
        exchanged.clear()


@pytest.mark.parametrize("error", [LoadError("It fails"), KeyboardInterrupt()], ids=["error", "^C"])
@pytest.mark.parametrize(
    ("engine", "step"),
    [
        *(("in phases", s) for s in ("begin", "send", "start", "open", "seal", "finish")),
        *(("in one call", s) for s in ("begin", "send", "round")),
    ],
    indirect=["engine"],
)
def test_a_push_that_fails(sync, exchanged, engine, loader, step, error):
    sync.push(1)
    exchanged.clear()
    (sync._trainer if step in {"begin", "send"} else engine).fails = {step: error}
    with pytest.raises(type(error)):
        sync.push(2)
    assert exchanged == [("publish", False), ("settle", True)]
    exchanged.clear()
    sync.push(3)
    assert exchanged == [("publish", False), ("settle", False)]
    assert_equal(loader.weights, sync.state)


def test_a_source_that_cannot_be_read(sync, exchanged):
    del sync.state["b"]
    with pytest.raises(ManifestMismatch):
        sync.push(1)
    assert exchanged == [("publish", True)]


@pytest.mark.parametrize(("version", "deadline_s"), [(0, 5.0), (-1, 5.0), (2, -1)])
def test_a_push_that_is_refused(sync, exchanged, engine, version, deadline_s):
    sync.push(1)
    exchanged.clear()
    engine.calls.clear()
    with pytest.raises(InvalidInfo):
        sync.push(version, deadline_s=deadline_s)
    assert exchanged == [("publish", True)]
    assert engine.calls == []
    sync.push(2)


def test_a_session_that_is_closed(sync):
    sync.close()
    with pytest.raises(WrongOrder, match="after close"):
        sync.push(1)
