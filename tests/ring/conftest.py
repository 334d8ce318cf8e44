"""Trainer ranks and readers in processes of their own; the test tells each what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Forker, Process, until

SCRIPT = Path(__file__).parents[1] / "support" / "wt_ring.py"


class RingForker(Forker):
    """Trainers that tests share."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SCRIPT)
        self._trainers: dict[int, Trainer] = {}

    def idle_trainer(self, world: int) -> Trainer:
        """One of an earlier test, unless that has failed and left a rank in a collective."""
        kept = self._trainers.get(world)
        if kept is None or not kept.idle():
            if kept is not None:
                kept.close()
            kept = self._trainers[world] = self.trainer(world)
        return kept

    def trainer(self, world: int) -> Trainer:
        store = str(self.folder / f"store{len(self._processes)}")
        return Trainer([self.fork("rank", rank, world, store) for rank in range(world)])


class Trainer:
    """All ranks of one; the first has the session."""

    def __init__(self, ranks: list[Process]) -> None:
        self.ranks = ranks
        self.first = ranks[0]
        self.version = 0

    def all(self, method: str, *args: Any) -> list[Any]:
        """Of each rank, at the same time."""
        for rank in self.ranks:
            rank.call("launch", method, *args)
        return [self._result(rank) for rank in self.ranks]

    def connect(self, reader: Process, bucket_nbytes: int, **options: Any) -> Any:
        """No other rank takes part."""
        self.version = 0
        return self.first.call("connect", str(reader.path), bucket_nbytes, *options.values())

    def start_push(self, deadline_s: float = 30.0) -> None:
        """The first pushes the next version, the others take part."""
        self.version += 1
        for rank in self.ranks[1:]:
            rank.call("launch", "take_part")
        self.first.call("launch", "push", self.version, deadline_s)

    def push(self) -> Any:
        """One that succeeds."""
        self.start_push()
        results = [self._result(rank) for rank in self.ranks]
        assert self.first.call("versions") == [[self.version, False]]
        return results[0]

    def idle(self) -> bool:
        return all(rank.call("outcome") is not None for rank in self.ranks)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def failure(self) -> Any:
        """Of the push that was started; all other ranks have walked to their end."""
        outcome = self._outcome(self.first)
        for rank in self.ranks[1:]:
            assert self._outcome(rank) == {"result": None}
        return outcome["error"]

    def _result(self, rank: Process) -> Any:
        outcome = self._outcome(rank)
        assert "error" not in outcome, outcome
        return outcome["result"]

    @staticmethod
    def _outcome(rank: Process) -> Any:
        return until(lambda: rank.call("outcome"), "the end of a call")


@pytest.fixture(scope="session")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RingForker]:
    forker = RingForker(tmp_path_factory.mktemp("ring"))
    yield forker
    forker.close()


@pytest.fixture(params=[2, 3], ids=["two ranks", "three ranks"])
def trainer(request: pytest.FixtureRequest, forker: RingForker) -> Trainer:
    return forker.idle_trainer(request.param)


@pytest.fixture
def new_reader(forker: RingForker) -> Iterator[Callable[[], Process]]:
    """Makes readers; those of a test end with it."""
    made = []

    def new() -> Process:
        made.append(forker.fork("reader"))
        made[-1].call("digests")
        return made[-1]

    yield new
    for reader in made:
        reader.close()


@pytest.fixture
def reader(new_reader: Callable[[], Process]) -> Process:
    return new_reader()
