"""WeightSync: the one object a trainer needs to keep vLLM engines on its current weights."""

from __future__ import annotations

import logging
import math
import numbers
import operator
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from vllm_wt import registry
from vllm_wt.backends import trainer_engine
from vllm_wt.clients import as_clients
from vllm_wt.clients.http import HttpClient
from vllm_wt.clients.limits import shown
from vllm_wt.deadline import INIT_S, MAX_S, ROUND_S, Deadline
from vllm_wt.delivery import EngineLink, Stages, reading
from vllm_wt.engine import TrainerWeightTransferEngine
from vllm_wt.errors import InvalidInfo, WeightTransferError, WrongOrder
from vllm_wt.manifest import Manifest
from vllm_wt.source import as_source

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PushResult:
    """What one push did.

    Args:
        version: Version that every engine has now.
        nbytes: Payload bytes of a full update.
        tensors: Number of tensors.
        gather_s: Seconds until the source's values were readable.
        total_s: Seconds of the whole push.
        engines: Stage times, by engine name.
    """

    version: int
    nbytes: int
    tensors: int
    gather_s: float
    total_s: float
    engines: dict[str, Stages]


@dataclass(frozen=True)
class EngineStatus:
    """What one engine says of itself.

    Args:
        name: As in errors and in :attr:`PushResult.engines`.
        version: What it has committed last in this session, None for nothing or not known.
        torn: It mixes weights of two versions and must not generate before a full push.
        error: Why it could not be asked; the rest is what was known before.
    """

    name: str
    version: int | None
    torn: bool
    error: str | None = None


class WeightSync:
    """Pushes a source's weights into connected engines, version by version.

    Use :meth:`connect`. Every method raises errors of `vllm_wt.errors` only. One call at a time: one
    that is made while another runs is refused.
    """

    def __init__(
        self,
        trainer: TrainerWeightTransferEngine,
        manifest: Manifest,
        links: list[EngineLink],
        owned: Sequence[HttpClient],
    ) -> None:
        self._trainer = trainer
        self._manifest = manifest
        self._links = links
        self._owned = owned
        self._closed = False
        self._busy = threading.Lock()

    @classmethod
    def connect(
        cls,
        engines: Any,
        *,
        backend: str,
        source: Any,
        deadline_s: float = INIT_S,
        **options: Any,
    ) -> Self:
        """Connect to engines.

        Args:
            engines: A ``vllm.LLM``, the URL of a vLLM server, a client (`vllm_wt.clients`), or a
                sequence of them.
            backend: Name of an installed backend; the engines must run with the same.
            source: A module, plain or sharded by FSDP2, a mapping of names to tensors, a list of
                pairs, a `SafetensorsSource`, or a ``WeightSource`` of vLLM's; see `as_source`.
                Where making it is a collective, the other ranks walk it once for each `connect` and
                each `push`: ``for _ in as_source(model): pass``.
            deadline_s: Seconds for the whole of it.
            options: Options of the backend.

        Raises:
            BackendUnavailable: No such backend here.
            InvalidInfo: An argument is wrong.
            WeightTransferError: What an engine or the fabric refused, typed.
        """
        deadline = _deadline(deadline_s)
        weights = as_source(source)
        clients, owned = as_clients(engines)
        try:
            with reading("connect"):
                manifest = weights.manifest()
                trainer = trainer_engine(backend, weights, **options)
        except BaseException:
            _close_all(owned)
            raise
        try:
            links = [
                EngineLink(client, trainer, f"engine{index}")
                for index, client in enumerate(clients)
            ]
            for link in links:
                link.connect(deadline)
        except BaseException:
            trainer.shutdown()
            _close_all(owned)
            raise
        return cls(trainer, manifest, links, owned)

    def push(self, version: int, *, deadline_s: float = ROUND_S) -> PushResult:
        """Put the source's current weights into every engine.

        Args:
            version: Larger than what any engine has committed in this session; 0 or more.
            deadline_s: Seconds for the transfer. An engine that does not answer at all is given up at
                the limits of its client, which are longer; a commit under way is waited for.

        Raises:
            InvalidInfo: The version does not advance.
            WrongOrder: The session is closed, or another call of it is running.
            WeightTransferError: An engine could not take them. It still has its old weights, unless
                just the answer got lost, or the commit failed in the middle: :meth:`status` tells.
        """
        version = _version(version)
        deadline = _deadline(deadline_s)
        with self._alone("push"):
            if self._closed:
                raise WrongOrder("push after close", where="push", cure="connect again")
            self._require_advance(version)
            tell("vllm_wt_round_started", version=version)
            try:
                result = self._push(version, deadline)
            except WeightTransferError as error:
                tell("vllm_wt_round_failed", version=version, error=error)
                raise
            tell("vllm_wt_round_finished", stats=result)
        return result

    def _push(self, version: int, deadline: Deadline) -> PushResult:
        began = time.perf_counter()
        with reading("publish"):
            self._trainer.publish(version, deadline)
        gathered = time.perf_counter()
        stages = {link.name: link.deliver(version, deadline) for link in self._links}
        manifest = self._manifest  # the source's own may have changed since
        return PushResult(
            version=version,
            nbytes=manifest.nbytes,
            tensors=len(manifest),
            gather_s=gathered - began,
            total_s=time.perf_counter() - began,
            engines=stages,
        )

    def status(self, *, deadline_s: float = INIT_S) -> list[EngineStatus]:
        """What each engine says of itself now, in the order of :meth:`connect`.

        Args:
            deadline_s: Seconds for the whole of it.
        """
        deadline = _deadline(deadline_s)
        with self._alone("status"):
            return [self._status_of(link, deadline) for link in self._links]

    def close(self) -> None:
        """Release the trainer's side; the engines keep their weights. Idempotent."""
        with self._alone("close"):
            self._closed = True
            self._trainer.shutdown()
            _close_all(self._owned)

    def _status_of(self, link: EngineLink, deadline: Deadline) -> EngineStatus:
        error = None
        if not self._closed:
            try:
                link.ask(deadline)
            except WeightTransferError as caught:
                error = str(caught)
        return EngineStatus(link.name, link.version, link.torn, error)

    def _require_advance(self, version: int) -> None:
        for link in self._links:
            if link.version is not None and version <= link.version:
                raise InvalidInfo(
                    "The version does not advance",
                    where="version",
                    expected=f"more than {link.version}, which {link.name} has",
                    got=version,
                    cure="number the versions upwards; a new session may start anew",
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


def _deadline(value: Any) -> Deadline:
    try:
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        seconds = float(value) if real else math.nan
    except (OverflowError, ValueError):
        seconds = math.nan
    if not 0 < seconds <= MAX_S:
        raise InvalidInfo(
            "This cannot be a deadline",
            where="deadline_s",
            expected=f"seconds, more than 0 and at most {MAX_S}",
            got=shown(value),
            cure="leave it out for the default",
        )
    return Deadline(seconds)


def _close_all(clients: Iterable[HttpClient]) -> None:
    for client in clients:
        client.close()
