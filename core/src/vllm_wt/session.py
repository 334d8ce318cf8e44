"""WeightSync: the one object a trainer needs to keep vLLM engines on its current weights."""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from typing_extensions import Self

from vllm_wt import registry
from vllm_wt.deadline import INIT_S, ROUND_S, Deadline, asked_for
from vllm_wt.delivery import Delivery
from vllm_wt.errors import Aborted, InvalidInfo, WeightTransferError, WrongOrder, shown
from vllm_wt.fleet import OnFailure
from vllm_wt.following import Leading, follow
from vllm_wt.link import EngineLink
from vllm_wt.opening import Opened, opened
from vllm_wt.options import require_one_of
from vllm_wt.pausing import Kv, PauseMode, Pausing
from vllm_wt.publication import Publication
from vllm_wt.reports import WorkerReport
from vllm_wt.results import EngineStatus, PushResult
from vllm_wt.serving import reading
from vllm_wt.sources.announced import handed_over
from vllm_wt.together import TogetherTrainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Round:
    """One that has begun, and when."""

    version: int
    delivery: Delivery
    began: float


class WeightSync:
    """Puts weights into connected engines, version by version.

    Use :meth:`connect`. :meth:`push` sends what the source has. A trainer that makes its tensors
    itself, some at a time, connects with an `Announced` source and hands them over::

        sync.begin(version)
        for chunk in chunks:
            sync.send(chunk)
        sync.end()

    Every method raises errors of `vllm_wt.errors` only. One call at a time: one that is made while
    another runs is refused, and between :meth:`begin` and :meth:`end` all but :meth:`send`,
    :meth:`abort` and :meth:`close` are.
    """

    def __init__(self, parts: Opened) -> None:
        self._trainer = parts.trainer
        self._manifest = parts.manifest
        self._members = parts.members
        self._announces = parts.announces
        self._snapshot = parts.snapshot
        self._kept: int | None = None
        """Version that the snapshot is of."""
        self._publication: Publication | None = None
        self._closed = False
        self._round: _Round | None = None
        self._busy = threading.Lock()

    @classmethod
    def connect(
        cls,
        engines: Any,
        *,
        backend: str,
        source: Any,
        group: Any = None,
        snapshot: Literal["none", "device", "host"] = "none",
        deadline_s: float = INIT_S,
        **options: Any,
    ) -> Self:
        """Connect to engines.

        An engine that has a trainer which lives, in another process, is left to it; see
        :meth:`reconnect`.

        A trainer whose ranks each have all weights on a GPU that also has a worker connects on all of
        them with ``group``: every worker reads the rank on its own GPU. So does one whose ranks each
        send what they hold, as those of the backend ``nccl`` can. All ranks make the same calls of
        `connect` and `push`, as of a collective; the first one talks to the engines, and what fails
        there is raised on all.

        Args:
            engines: A ``vllm.LLM``, the URL of a vLLM server, a client (`vllm_wt.clients`), or a
                sequence of them. In a group, what the first rank gives counts.
            backend: Name of an installed backend; the engines must run with the same.
            source: A module, plain or sharded by FSDP2, a mapping of names to tensors, a list of
                pairs, a `SafetensorsSource`, or a ``WeightSource`` of vLLM's; see `as_source`. Where
                making its tensors is a collective, the other ranks call `vllm_wt.source.take_part`
                once for each `push`; nothing is made here. Or an `Announced`, for :meth:`begin`.
            group: A ``torch.distributed`` process group of the trainer's ranks.
            snapshot: Whether each version is copied when it is pushed, and read from the copy: to
                memory of the weights' ``"device"``, or of the ``"host"``. Then the trainer may go on
                while engines read (:meth:`publish`), and an engine that comes later gets that version
                (:meth:`add`). It takes as much memory as the weights.
            deadline_s: Seconds for the whole of it.
            options: Options of the backend.

        Raises:
            BackendUnavailable: No such backend here.
            InvalidInfo: An argument is wrong.
            WrongOrder: An engine has another trainer, which lives.
            WeightTransferError: What an engine or the fabric refused, typed.
        """
        deadline = asked_for(deadline_s)
        return cls(
            opened(engines, backend, source, group, snapshot, deadline, options, takes_over=False)
        )

    @classmethod
    def reconnect(
        cls,
        engines: Any,
        *,
        backend: str,
        source: Any,
        group: Any = None,
        snapshot: Literal["none", "device", "host"] = "none",
        deadline_s: float = INIT_S,
        **options: Any,
    ) -> Self:
        """:meth:`connect`, with engines that have another trainer, be it alive, too.

        For a trainer that was started again while the former one may still hang somewhere. That one
        hears of it by ``Superseded`` when it pushes next, and has no part in the engines any more.
        """
        deadline = asked_for(deadline_s)
        return cls(
            opened(engines, backend, source, group, snapshot, deadline, options, takes_over=True)
        )

    def add(self, engines: Any, *, deadline_s: float = INIT_S) -> list[str]:
        """Connect further engines; those that are connected go on, and hear nothing of it.

        With a snapshot they get the version that was pushed last, at once; without, what is pushed
        next. The address of an engine of the session, or the object, takes that one's place: it was
        started again, say.

        Args:
            engines: As of :meth:`connect`.
            deadline_s: Seconds for the whole of it.

        Returns:
            Their names in results and errors.

        Raises:
            InvalidInfo: An argument is wrong, or the trainer has connected by a ``group``.
            WrongOrder: The session is closed, another call of it is running, a round is open, or an
                engine has another trainer, which lives.
            WeightTransferError: As of :meth:`connect` and :meth:`push`. The session is as it was.
        """
        deadline = asked_for(deadline_s)
        with self._alone("add"):
            self._require_next("add")
            if isinstance(self._trainer, TogetherTrainer):
                raise InvalidInfo(
                    "Engines cannot be added to a trainer of several ranks",
                    where="add",
                    expected="a session without group",
                    got=f"a group of {self._trainer.team.size} ranks",
                    cure="connect again on all ranks, with all engines",
                )
            return self._members.add(engines, deadline, partial(self._bring, deadline=deadline))

    def remove(self, name: str) -> None:
        """Leave an engine to itself; it keeps its weights, and the others go on.

        Args:
            name: As in results and errors: ``engine0``, say.

        Raises:
            InvalidInfo: The session has no such engine.
            WrongOrder: The session is closed, another call of it is running, or a round is open.
        """
        with self._alone("remove"):
            self._require_next("remove")
            self._members.remove(name)

    def push(
        self,
        version: int,
        *,
        pause: PauseMode | None = "keep",
        kv: Kv = "recompute",
        overlap: bool = True,
        on_failure: OnFailure = "raise",
        deadline_s: float = ROUND_S,
    ) -> PushResult:
        """Put the source's current weights into every engine.

        An engine whose client can pause it is paused for the commit. One that was paused before by
        somebody else stays so. A trainer that is killed within the pause leaves the engine paused until
        the next one connects; where workers do not report, until it is resumed.

        Args:
            version: Larger than what any engine has committed in this session; 0 or more.
            pause: What becomes of requests in flight. ``"keep"``: they go on with the new weights.
                ``"wait"``: they are waited for, within the time that the client allows a pause.
                ``"abort"``: they end. None: nothing is paused; the engine commits between two steps,
                and refuses if it loads while it receives. One that is torn then is paused all the same.
            kv: ``"recompute"``: caches are emptied, and requests that are kept computed again by the
                new weights. ``"keep"``: they go on with keys and values of the old ones, and requests
                that begin alike later find those too.
            overlap: Whether engines generate while the weights are on their way; if not, each that
                can be is paused for all of the push. An engine that loads what it receives at once,
                since it has no memory for a second copy, is paused while it receives in any case.
            on_failure: ``"raise"``: an engine that fails before the first commit fails the push.
                ``"exclude"``: it is left out, with its old weights, and the others go on; so is one
                that has not received everything at nine tenths of the deadline. It is tried again by
                the next push, unless it did not answer at all: then :meth:`add` brings it back.
            deadline_s: Seconds for the transfer. An engine that stops answering in the middle of a step
                of the round is given up at the limits of its client, which are longer, unless it may
                be left out; a commit under way is waited for.

        Raises:
            InvalidInfo: The version does not advance, the source only announces, or the backend cannot
                go on without an engine.
            WrongOrder: The session is closed, another call of it is running, or a round is open.
            NotPaused: An engine must be paused while it receives, and its client cannot do that.
            WeightTransferError: An engine could not take them. Before the first commit that leaves
                all engines with their old weights; a commit that fails does not keep the other
                engines from theirs. What failed still has its old weights, unless just the answer
                got lost, or it failed in the middle of loading: :meth:`status` tells. An engine that
                is torn, or could not be asked, stays paused, as the error says.
        """
        with self._alone("push"):
            deadline = Deadline(ROUND_S)
            try:
                deadline = asked_for(deadline_s)
                version = self._next("push", version, on_failure)
                pausing = Pausing.asked_for(pause, kv, overlap)
                self._take_snapshot(deadline)
            except WeightTransferError as error:
                if isinstance(self._trainer, TogetherTrainer):  # the other ranks wait for this one
                    self._trainer.refuse(error, deadline)
                raise
            if isinstance(self._trainer, TogetherTrainer) and not self._trainer.team.leads:
                return self._follow(self._trainer, version, deadline)
            return self._deliver(self._new(version, deadline, pausing, on_failure))

    def publish(
        self,
        version: int,
        *,
        pause: PauseMode | None = "keep",
        kv: Kv = "recompute",
        overlap: bool = True,
        on_failure: OnFailure = "raise",
        deadline_s: float = ROUND_S,
    ) -> None:
        """:meth:`push` that does not wait for the engines: it goes on in the background.

        With a snapshot the trainer may write to its weights as soon as this has returned, without one
        as soon as :meth:`wait_readers` has. :meth:`wait` is for what has become of it, and comes before
        the next call of `publish` or `push`.

        Args:
            version: As of :meth:`push`, and so are the others.

        Raises:
            InvalidInfo: As of :meth:`push`; or weights have to be gathered, which needs a snapshot; or
                an engine lives in this process, where only one thread may use it.
            WrongOrder: As of :meth:`push`; or what was published last is still under way.
            WeightTransferError: As of :meth:`push`, of the snapshot.
        """
        deadline = asked_for(deadline_s)
        with self._alone("publish"):
            version = self._next("publish", version, on_failure)
            pausing = Pausing.asked_for(pause, kv, overlap)
            self._require_background()
            self._take_snapshot(deadline)
            current = self._new(version, deadline, pausing, on_failure)
            self._publication = Publication(current.delivery, partial(self._deliver, current))

    def wait_readers(self) -> None:
        """Wait until no engine reads what was published last: its memory may be written to then.

        Raises:
            WrongOrder: Nothing was published.
            WeightTransferError: The push has failed; nobody reads it any more.
        """
        self._published("wait_readers").wait_readers()

    def wait(self) -> PushResult:
        """Wait for the end of what was published last.

        Raises:
            WrongOrder: Nothing was published.
            WeightTransferError: As of :meth:`push`.
        """
        return self._published("wait").wait()

    def _bring(self, links: list[EngineLink], deadline: Deadline) -> None:
        """What engines that are new get at once."""
        if self._kept is not None:
            delivery = Delivery(links, self._trainer, self._kept, deadline)
            delivery.begin(whole=True)
            delivery.send()
            delivery.end()

    def _published(self, call: str) -> Publication:
        if self._publication is None:
            raise WrongOrder(
                f"{call} without a version that was published",
                where=call,
                expected="publish(version) before",
                got="none",
                cure="publish one; push returns when all is done",
            )
        return self._publication

    def _take_snapshot(self, deadline: Deadline) -> None:
        if self._snapshot is not None:
            self._kept = None  # until all of it is there
            with reading("snapshot", deadline):
                self._snapshot.take()

    def _deliver(self, current: _Round) -> PushResult:
        with self._step(current):
            current.delivery.begin(whole=True)
            if self._snapshot is not None:
                self._kept = current.version
            current.delivery.send()
            return self._end(current)

    def _require_background(self) -> None:
        weights = self._trainer.source
        with reading("publish", Deadline(ROUND_S)):
            makes = bool(weights.made)
        if makes or isinstance(self._trainer, TogetherTrainer):
            raise InvalidInfo(
                "Weights that all ranks of a trainer make or send cannot be pushed in the background",
                where="publish",
                expected="weights that are there in full, or a snapshot of them, on one rank",
                got="a group of ranks"
                if isinstance(self._trainer, TogetherTrainer)
                else f"{len(weights.made)} tensors that are made in each push",
                cure='connect with snapshot="host" or "device", without group; or push',
            )
        if any(link.in_process for link in self._members.links):
            raise InvalidInfo(
                "An engine of this process is used by one thread only",
                where="publish",
                expected="engines behind a URL, or an AsyncLLM",
                got="a vllm.LLM",
                cure="push instead; nothing can be generated meanwhile in any case",
            )

    def begin(
        self,
        version: int,
        *,
        pause: PauseMode | None = "keep",
        kv: Kv = "recompute",
        overlap: bool = True,
        deadline_s: float = ROUND_S,
    ) -> None:
        """Begin a round whose tensors are handed over with :meth:`send`.

        Nothing is committed before :meth:`end`. A ``vllm.LLM`` of this process is not to be used before
        that: short of memory, it loads what it receives at once. After an error of this, of `send` or
        of `end` the round is given up: every engine has its old weights, as after a `push` that
        failed, and the next round may begin.

        Args:
            version: As of :meth:`push`.
            pause, kv: As of :meth:`push`.
            overlap: As of :meth:`push`; if not, engines are paused from here to the end.
            deadline_s: Seconds for the transfer, with all that the caller does until `end`.

        Raises:
            InvalidInfo: The version does not advance; the session's source is no `Announced`; or the
                backend takes no tensors this way.
            WrongOrder: The session is closed, or a round is open: that one goes on.
            WeightTransferError: As of :meth:`push`.
        """
        version = _version(version)
        deadline = asked_for(deadline_s)
        pausing = Pausing.asked_for(pause, kv, overlap)
        with self._alone("begin"):
            self._require_next("begin")
            if not self._announces:
                raise InvalidInfo(
                    "The session's source has values of its own",
                    where="begin",
                    expected="an Announced",
                    got="a source that can be walked",
                    cure="use push; or connect with source=vllm_wt.source.Announced(...)",
                )
            self._require_advance(version)
            current = self._new(version, deadline, pausing)
            with self._step(current):
                current.delivery.begin()
                current.delivery.accept()
                self._round = current

    def send(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Hand over the next tensors of the round, in the manifest's order; empty ones may be left out.

        They are copied: their memory is the caller's again when this returns. It waits while the
        workers have yet to read what was sent before.

        Args:
            weights: Names and full tensors, as many as the caller has at the time.

        Raises:
            ManifestMismatch: A tensor is not the one whose turn it is, or of another form.
            InvalidInfo: These are no tensors that could be sent.
            Timeout: The deadline of :meth:`begin` has passed.
            WrongOrder: No round is open.
            WeightTransferError: As of :meth:`push`.
        """
        with self._alone("send"):
            current = self._require_open("send")
            with self._step(current):
                current.delivery.put(handed_over(weights))

    def end(self) -> PushResult:
        """Commit the round, once every worker has all of it.

        Raises:
            ManifestMismatch: A tensor is missing.
            WrongOrder: No round is open.
            WeightTransferError: As of :meth:`push`.
        """
        with self._alone("end"):
            current = self._require_open("end")
            with self._step(current):
                return self._end(current)

    def abort(self) -> None:
        """Give the open round up, if there is one; every engine keeps its old weights."""
        with self._alone("abort"):
            self._abort("the trainer has given it up")

    def _next(self, call: str, given: Any, on_failure: Any) -> int:
        """The version of a push, if that may be made."""
        self._require_next(call)
        version = _version(given)
        self._require_on_failure(on_failure)
        if not self._members.links and not isinstance(self._trainer, TogetherTrainer):
            raise InvalidInfo(
                "The session has no engines",
                where=call,
                expected="at least one",
                got="none",
                cure="add() one",
            )
        if self._announces:
            raise InvalidInfo(
                "The session's source only announces what will be sent",
                where=call,
                expected="a source with values",
                got="an Announced",
                cure="hand the tensors over with begin, send and end; or connect with the module or "
                "the state dict itself",
            )
        self._require_advance(version)
        return version

    def _follow(self, trainer: TogetherTrainer, version: int, deadline: Deadline) -> PushResult:
        began = time.perf_counter()
        follow(trainer, version, deadline)
        total_s = time.perf_counter() - began
        return PushResult(version, self._manifest.nbytes, len(self._manifest), 0.0, total_s, {})

    def _new(
        self, version: int, deadline: Deadline, pausing: Pausing, on_failure: OnFailure = "raise"
    ) -> _Round:
        began = time.perf_counter()
        tell("vllm_wt_round_started", version=version)
        kind = Leading if isinstance(self._trainer, TogetherTrainer) else Delivery
        delivery = kind(
            self._members.links,
            self._trainer,
            version,
            deadline,
            pausing=pausing,
            on_failure=on_failure,
        )
        return _Round(version, delivery, began)

    @contextmanager
    def _step(self, current: _Round) -> Iterator[None]:
        """A step of a round; one that fails has ended it."""
        try:
            yield
        except BaseException as error:
            self._round = None
            current.delivery.give_up(error)  # an interrupt may have come between two of its steps
            if isinstance(self._trainer, TogetherTrainer) and self._trainer.team.is_over:
                self._members.claim.beacon.close()  # these ranks cannot push any more
            if isinstance(error, WeightTransferError):
                tell("vllm_wt_round_failed", version=current.version, error=error)
            raise

    def _end(self, current: _Round) -> PushResult:
        stages = current.delivery.end()
        self._round = None
        manifest = self._manifest  # the source's own may have changed since
        result = PushResult(
            version=current.version,
            nbytes=manifest.nbytes,
            tensors=len(manifest),
            gather_s=current.delivery.published_s,
            total_s=time.perf_counter() - current.began,
            engines=stages,
            failed=current.delivery.failed,
        )
        tell("vllm_wt_round_finished", stats=result)
        return result

    def _abort(self, why: str) -> None:
        current, self._round = self._round, None
        if current is not None:
            error = Aborted(
                f"The round was not ended: {why}", cure="begin again; nothing was committed"
            )
            current.delivery.give_up(error)
            tell("vllm_wt_round_failed", version=current.version, error=error)

    def status(self, *, deadline_s: float = INIT_S) -> list[EngineStatus]:
        """What each engine says of itself now, in the order of :meth:`connect`.

        Args:
            deadline_s: Seconds for the whole of it.
        """
        deadline = asked_for(deadline_s)
        with self._alone("status"):
            self._require_idle("status")
            return [self._status_of(link, deadline) for link in self._members.links]

    def close(self) -> None:
        """Release the trainer's side; the engines keep their weights. Idempotent.

        A round that is open is given up.

        An engine that a failed push has left paused stays so, unless it is known to be whole by now.
        """
        with self._alone("close"):
            if self._publication is not None:
                self._publication.give_up("the session was closed")
            self._abort("the session was closed")
            if not self._closed:
                self._members.leave()
            self._closed = True
            self._trainer.shutdown()
            self._members.close()

    def _status_of(self, link: EngineLink, deadline: Deadline) -> EngineStatus:
        error = None
        workers: tuple[WorkerReport, ...] = ()
        paused = link.paused
        if not self._closed:
            try:
                link.ask(deadline)
                workers = link.reports(deadline)
                paused = link.is_paused()
            except WeightTransferError as caught:
                error = str(caught)
        return EngineStatus(link.name, link.version, link.torn, error, paused, workers)

    def _require_next(self, call: str) -> None:
        """A round may begin."""
        if self._closed:
            raise WrongOrder(f"{call} after close", where=call, cure="connect again")
        self._require_idle(call)

    def _require_idle(self, call: str) -> None:
        """No round is under way."""
        self._require_none_open(call)
        if self._publication is not None and not self._publication.is_over:
            raise WrongOrder(
                f"{call} while a version that was published is under way",
                where=call,
                expected="wait() first",
                got=f"version {self._publication.version}, which not all engines have yet",
                cure="wait() for it",
            )

    def _require_none_open(self, call: str) -> None:
        if self._round is not None:
            raise WrongOrder(
                f"{call} while a round is open",
                where=call,
                expected="send, and then end",
                got=f"the round of version {self._round.version}, which has begun and not ended",
                cure="end() it first, or abort() to give it up",
            )

    def _require_open(self, call: str) -> _Round:
        if self._round is None:
            raise WrongOrder(
                f"{call} without a round",
                where=call,
                expected="begin, send, end",
                got="a session that is closed" if self._closed else "no round that is open",
                cure="connect again" if self._closed else "begin() one; an error has ended it",
            )
        return self._round

    def _require_advance(self, version: int) -> None:
        for link in self._members.links:
            if link.version is not None and version <= link.version:
                raise InvalidInfo(
                    "The version does not advance",
                    where="version",
                    expected=f"more than {link.version}, which {link.name} has",
                    got=version,
                    cure="number the versions upwards; a new session may start anew",
                )

    def _require_on_failure(self, on_failure: Any) -> None:
        require_one_of("on_failure", on_failure, get_args(OnFailure))
        if on_failure == "exclude" and not self._trainer.can_leave_out:
            raise InvalidInfo(
                "This trainer cannot go on without an engine that fails",
                where="on_failure",
                backend=self._trainer.backend,
                expected="'raise'",
                got="'exclude'",
                cure="what one engine fails with fails the push; remove() that engine, and push again",
            )

    @contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        mine = False
        try:
            mine = self._busy.acquire(blocking=False)
            if not mine:
                raise WrongOrder(
                    f"{call} while another call of this session is running",
                    where=call,
                    expected="one call at a time",
                    got="a second one, from another thread or from within the first",
                    cure="wait for the first, or use one session a thread with engines of its own",
                )
            yield
        finally:
            if mine:
                self._busy.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def tell(hook: str, **facts: Any) -> None:
    """Call the observers of a round; what goes wrong in one is logged, and is no error of the round."""
    try:
        getattr(registry.default().hooks.hook, hook)(**facts)
    except Exception:
        logger.exception("vllm-wt: an observer failed in %s", hook)


def _version(value: Any) -> int:
    """An integer of any library, as int."""
    try:
        version = None if isinstance(value, bool) else operator.index(value)
    except Exception:  # of any class: it may be any object
        version = None
    if version is None or not 0 <= version < 2**63:
        raise InvalidInfo(
            "This cannot be a version",
            where="version",
            expected="an integer from 0 to 2**63 - 1",
            got=shown(value),
            cure="number the versions upwards, by the training step for example",
        )
    return version
