"""The state machine of one worker: what a round is, and what a failure leaves behind.

::

    idle --start--> started --open--> receiving --seal--> sealed --finish--> idle
    any failure before finish: back to idle, the weights as they were
    a failure within finish: idle and torn, until a full round lands

Receiving runs on a thread of its own while vLLM generates. Nothing touches the model before every
rank has every byte; then the commit is one step. After every step the ranks exchange reports: a
failure anywhere is a failure everywhere, and only the highest rank raises (see `vllm_wt.ranks`).
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm_wt.deadline import INIT_S, ROUND_S, Deadline
from vllm_wt.engine import WeightTransferEngine
from vllm_wt.errors import (
    InvalidInfo,
    ManifestMismatch,
    StaleRound,
    Timeout,
    TornModel,
    TransportError,
    WeightTransferError,
    WrongOrder,
    from_facts,
)
from vllm_wt.info import InitInfo, UpdateInfo
from vllm_wt.loading.apply import ModelLoader
from vllm_wt.loading.staging import Staging
from vllm_wt.manifest import Manifest
from vllm_wt.ranks import Ranks, Report

logger = logging.getLogger(__name__)

_GRACE_S = 30.0
"""Seconds beyond a step's deadline that ranks wait for each other: they started it together."""
_ABORT_S = 10.0
"""Seconds a receive that was aborted may take to return."""


class State(enum.Enum):
    """Where a worker is within a round."""

    IDLE = "idle"
    STARTED = "started"
    RECEIVING = "receiving"
    SEALED = "sealed"


class _Receive:
    """One ``receive_weights`` on its own thread."""

    def __init__(
        self,
        run: Callable[[], None],
        context: Callable[[], AbstractContextManager[Any]],
        deadline: Deadline,
    ) -> None:
        self.deadline = deadline
        self.error: Exception | None = None
        self._run = run
        self._context = context
        self._thread = threading.Thread(target=self._main, name="vllm-wt-receive", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        try:
            with self._context():
                self._run()
        except Exception as error:
            self.error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)


class WorkerRound:
    """Drives an engine and a model through rounds, on one worker, in agreement with the others.

    Args:
        engine: The backend's engine.
        loader: Puts sealed weights into the model.
        ranks: The workers of this vLLM engine.
        thread_context: Entered on the receiving thread, to select its device.
    """

    def __init__(
        self,
        engine: WeightTransferEngine[Any, Any],
        loader: ModelLoader,
        ranks: Ranks,
        thread_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._engine = engine
        self._loader = loader
        self._ranks = ranks
        self._thread_context = thread_context
        self._backend = engine.context.backend
        self._session: str | None = None
        self._manifest: Manifest | None = None
        self._staging: Staging | None = None
        self._receive: _Receive | None = None
        self._update: UpdateInfo | None = None
        self._start_error: WeightTransferError | None = None
        self._steps = 0
        self._active = False  # mirrors vLLM's own flag, which refuses start or finish out of turn
        self.state = State.IDLE
        self.torn = False
        self.version: int | None = None
        """The version that this worker has committed last."""

    # -- the four phases, as vLLM calls them --------------------------------------------------

    def init(self, data: Mapping[str, Any]) -> None:
        """Connect to a trainer, unless its predecessor has left a round open.

        Raises:
            StaleRound: It has; ``expected`` lists the calls that close it, to be made first.
        """
        reports = self._exchange("init", None, INIT_S)
        closing = _closing_calls([report.active for report in reports])
        if closing:
            # The calls that close it end in a finish, which must not commit what was sealed.
            self._abandon("a new trainer connects")
            if self._speaks:
                raise StaleRound(
                    "An earlier trainer left a round open on this engine",
                    backend=self._backend,
                    expected=",".join(closing),
                    cure="make these calls in this order, ignoring errors, then init again; "
                    "WeightSync does",
                )
            return
        error: WeightTransferError | None = None
        seconds = INIT_S
        session = self._session = None
        try:
            info = self._decode(self._engine.init_info_cls, data, "init_info")
            seconds = info.deadline_s
            self._connect(info)
            session = info.session
        except Exception as caught:
            error = self._typed(caught, "init_weight_transfer_engine")
        if self._agreed("init_weight_transfer_engine", error, seconds):
            self._session = session

    def start(self) -> None:
        """A round begins; cheap. Anything left of an earlier one is dropped.

        Never raises: the ranks have no exchange here. A failure comes out at the open.
        """
        self._start_error = None
        try:
            self._abandon("a new round starts")
            self._engine.start_weight_update()
        except Exception as caught:
            self._start_error = self._typed(caught, "start_weight_update")
        self.state = State.STARTED
        self._active = True

    def update(self, data: Mapping[str, Any]) -> None:
        """One step of the transfer: open, poll, seal, or all in one."""
        error: WeightTransferError | None = None
        seconds = ROUND_S
        try:
            info = self._decode(self._engine.update_info_cls, data, "update_info")
            seconds = info.deadline_s
            if info.op in {"open", "all"}:
                self._open(info)
            if info.op == "poll":
                self._poll(info)
            if info.op in {"seal", "all"}:
                self._seal(info)
        except Exception as caught:
            error = self._typed(caught, "update_weights")
        self._agreed("update_weights", error, seconds)

    def finish(self) -> None:
        """Commit a sealed round; close any other, leaving the weights as they are."""
        if self.state is not State.SEALED or self._staging is None or self._update is None:
            self._abandon("closed before it was sealed")
            self._active = False
            return
        # A vote on the seal that some rank did not hear of must not end in a commit of the others.
        if not self._agreed("finish_weight_update", None, _GRACE_S):
            return
        version = self._update.version
        error: WeightTransferError | None = None
        self.torn = True  # until every rank has reported success
        try:
            self._loader.apply(self._staging.weights())
        except Exception as caught:
            logger.exception("vllm-wt: the commit of version %d failed", version)
            error = TornModel(
                f"The commit failed in the middle: {type(caught).__name__}: {caught}",
                where="finish_weight_update",
                backend=self._backend,
                cure="do not generate; push a full update, or restart the engine",
            )
        if self._agreed("finish_weight_update", error, _GRACE_S):
            self.torn = False
            self.version = version
            self._release_buffers()
            self._reset()
        self._active = False

    def shutdown(self) -> None:
        """Release the trainer's connection; idempotent, never raises."""
        self._session = None
        try:
            self._abandon("shut down")
            self._engine.shutdown()
        except Exception:
            logger.exception("vllm-wt: backend %s did not shut down cleanly", self._backend)

    # -- steps ---------------------------------------------------------------------------------

    def _connect(self, info: InitInfo) -> None:
        self._abandon("a new trainer connects")
        self._require_no_receive()
        manifest = info.manifest()
        self._loader.rehearse(manifest)
        self._engine.init_transfer_engine(info)
        self._manifest = manifest
        self.version = None

    def _open(self, info: UpdateInfo) -> None:
        if self._manifest is None or self._session is None:
            raise WrongOrder(
                "update_weights before init_weight_transfer_engine",
                expected="init, start, update, finish",
                cure="connect first (WeightSync.connect)",
            )
        if info.session != self._session:
            raise InvalidInfo(
                "Another trainer has connected since",
                where="session",
                expected=self._session,
                got=info.session,
                cure="connect again",
            )
        if self._start_error is not None:
            raise self._start_error
        if self.state is not State.STARTED:
            raise WrongOrder(
                f"Cannot open a transfer in state {self.state.value!r}",
                expected=State.STARTED.value,
                got=self.state.value,
            )
        if info.manifest_digest != self._manifest.digest:
            raise ManifestMismatch(
                "What the trainer would send is not what was agreed on at init",
                expected=self._manifest.digest,
                got=info.manifest_digest,
                cure="connect again after changing what is sent",
            )
        if self.version is not None and info.version <= self.version:
            raise InvalidInfo(
                "The version does not advance",
                where="version",
                expected=f"more than {self.version}",
                got=info.version,
            )
        self._require_no_receive()
        staging = Staging(self._manifest)
        self._update, self._staging = info, staging
        self._receive = _Receive(
            lambda: self._engine.receive_weights(info, staging),
            self._thread_context,
            Deadline(info.deadline_s),
        )
        self.state = State.RECEIVING

    def _require_no_receive(self) -> None:
        """An earlier receive that outlived its abort would read, and write, for its own trainer."""
        if self._receive is not None and self._receive.running:
            raise TransportError(
                "The receive of an earlier round has not come to its end yet",
                cure="try again shortly; restart the engine if it lasts",
            )

    def _require_receiving(self, info: UpdateInfo) -> _Receive:
        if self.state is not State.RECEIVING or self._receive is None or self._update is None:
            raise WrongOrder(
                f"Cannot {info.op} in state {self.state.value!r}",
                expected=State.RECEIVING.value,
                got=self.state.value,
            )
        if (info.session, info.ticket) != (self._update.session, self._update.ticket):
            raise InvalidInfo(
                f"{info.op} of another attempt",
                where="ticket",
                expected=self._update.ticket,
                got=info.ticket,
            )
        return self._receive

    def _poll(self, info: UpdateInfo) -> None:
        receive = self._require_receiving(info)
        if receive.error is not None:
            raise receive.error
        if receive.running:
            receive.deadline.check("The transfer is not complete", where="poll")

    def _seal(self, info: UpdateInfo) -> None:
        receive = self._require_receiving(info)
        receive.join(receive.deadline.remaining())
        if receive.running:
            raise Timeout(
                "The transfer is not complete",
                where="seal",
                expected=f"within {receive.deadline.seconds:g} s",
                cure="look for a stopped trainer; raise deadline_s if the transfer is just slow",
            )
        if receive.error is not None:
            raise receive.error
        assert self._staging is not None
        self._staging.require_complete()
        self.state = State.SEALED

    def _release_buffers(self) -> None:
        try:
            self._engine.finish_weight_update()
        except Exception:  # the weights are in on every rank: it is no failure of the round
            logger.exception("vllm-wt: backend %s did not finish cleanly", self._backend)

    # -- agreement and clean-up ----------------------------------------------------------------

    @property
    def _speaks(self) -> bool:
        return self._ranks.rank == self._ranks.size - 1

    def _decode(self, cls: type[Any], data: Mapping[str, Any], what: str) -> Any:
        if not isinstance(data, Mapping):
            raise InvalidInfo(
                f"{what} must be a mapping", expected="a JSON object", got=type(data).__name__
            )
        return cls.from_wire(data, backend=self._backend)

    def _typed(self, error: Exception, phase: str) -> WeightTransferError:
        if not isinstance(error, WeightTransferError):
            logger.error("vllm-wt: %s failed", phase, exc_info=error)
            error = TransportError(f"{type(error).__name__}: {error}")
        error.backend = error.backend or self._backend
        error.where = error.where or phase
        return error

    def _agreed(self, phase: str, error: WeightTransferError | None, seconds: float) -> bool:
        """Whether every rank has succeeded. If not, clean up, and raise on the highest rank."""
        reports = self._exchange(phase, error, seconds)
        failed = {rank: r.error for rank, r in enumerate(reports) if r.error is not None}
        if not failed:
            return True
        first = from_facts(next(iter(failed.values())))
        if self._ranks.size > 1:
            first.ranks = {rank: str(facts["what"]) for rank, facts in failed.items()}
        logger.warning("vllm-wt: %s failed: %s", phase, first)
        self._abandon(str(first))
        if self._speaks:
            if phase == "update_weights":  # vLLM clears its flag where update raises
                self._active = False
            raise first
        return False

    def _exchange(
        self, phase: str, error: WeightTransferError | None, seconds: float
    ) -> list[Report]:
        """Every rank's report on this step; nothing stays open when they cannot be had."""
        self._steps += 1
        step = f"{self._steps} {phase}"
        report = Report(error.facts() if error is not None else None, self._active, step)
        try:
            reports = self._ranks.exchange(report, seconds + _GRACE_S)
            if others := sorted({r.step for r in reports} - {step}):
                raise TransportError(
                    "The ranks of this engine have fallen out of step",
                    where=f"rank {self._ranks.rank} of {self._ranks.size}",
                    expected=step,
                    got=", ".join(others),
                    backend=self._backend,
                    cure="restart the engine",
                )
        except BaseException:
            self._abandon("the ranks could not agree")
            raise
        return reports

    def _abandon(self, reason: str) -> None:
        if self._receive is not None and self._receive.running:
            self._engine.abort_weight_update(reason)
            self._receive.join(_ABORT_S)
        self._reset()

    def _reset(self) -> None:
        if self._receive is not None and not self._receive.running:
            self._receive = None
        self._staging = self._update = None
        self.state = State.IDLE


def _closing_calls(active: list[bool]) -> list[str]:
    """Calls that clear vLLM's own flag on all ranks while at most the highest rank raises."""
    *lower, highest = active
    if not any(active):
        return []
    if highest and lower and not any(lower):  # a commit failed: only the highest rank raised
        return ["start", "finish"]
    return ["finish"]
