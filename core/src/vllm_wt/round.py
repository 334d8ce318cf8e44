"""The state machine of one worker: what a round is, and what a failure leaves behind.

::

    idle --start--> started --open--> receiving --seal--> sealed --finish--> idle
    init, abort, or any failure before finish: back to idle, the weights as they were
    a failure within finish: idle and torn, until a full round lands
    an engine that streams loads between open and seal: a failure there leaves it torn, too

Receiving runs on a thread of its own while vLLM generates. Nothing touches the model before every
rank has every byte; then the commit is one step. (An engine whose memory is short streams: it loads
what it receives at once, and refuses to open a round while vLLM generates.) After every step the
ranks exchange reports: a failure anywhere is a failure everywhere, and only the highest rank raises
(see `vllm_wt.ranks`).
A call that comes from another trainer than the last to connect changes nothing.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm_wt.agreement import GRACE_S, Agreement
from vllm_wt.beacon import lives
from vllm_wt.commit import commit
from vllm_wt.deadline import INIT_S, ROUND_S, Deadline
from vllm_wt.engine import WeightTransferEngine
from vllm_wt.errors import (
    Aborted,
    InvalidInfo,
    ManifestMismatch,
    NotPaused,
    Superseded,
    Timeout,
    TornModel,
    TransportError,
    WeightTransferError,
    WrongOrder,
)
from vllm_wt.info import InitInfo, TrainerInfo, UpdateInfo
from vllm_wt.loading.apply import ModelLoader
from vllm_wt.loading.staging import Intake, Known, Staging, Streaming
from vllm_wt.manifest import Manifest
from vllm_wt.ranks import Ranks
from vllm_wt.receiving import ABORT_S, Receive

logger = logging.getLogger(__name__)


class State(enum.Enum):
    """Where a worker is within a round."""

    IDLE = "idle"
    STARTED = "started"
    RECEIVING = "receiving"
    SEALED = "sealed"


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
        self._thread_context = thread_context
        self._backend = engine.context.backend
        self._agreement = Agreement(ranks, self._backend, self._abandon)
        self._session: str | None = None
        self._trainer: TrainerInfo | None = None
        self._manifest: Manifest | None = None
        self._intake: Intake | None = None
        self._staging: Staging | Streaming | None = None
        self._known = Known()
        self._receive: Receive | None = None
        self._update: UpdateInfo | None = None
        self._committed = 0  # ticket of what this session has committed last
        self.state = State.IDLE
        self.torn = False
        self.version: int | None = None
        """The version that this worker has committed last."""

    @property
    def has_agreed(self) -> bool:
        """Whether the last step has succeeded on every rank."""
        return self._agreement.has_agreed

    # -- the four phases, as vLLM calls them --------------------------------------------------

    def init(self, data: Mapping[str, Any]) -> None:
        """Connect to a trainer; what its predecessor left open is given up.

        A trainer that is refused for what it would send does not touch the one that is connected.
        """
        phase = "init_weight_transfer_engine"
        error: WeightTransferError | None = None
        info = manifest = plan = None
        seconds = INIT_S
        try:
            info = self._engine.init_info_cls.from_wire(data, backend=self._backend)
            seconds = info.deadline_s
            self._require_free(info)
            manifest = info.manifest()
            plan = self._loader.rehearse(manifest)
        except Exception as caught:
            error = self._agreement.typed(caught, phase)
        if not self._agreed(phase, error, seconds, spares=(WeightTransferError,)):
            return
        self._session = None
        try:
            self._abandon("a new trainer connects")
            self._require_no_receive()
            self._known = Known()
            assert plan is not None
            assert info is not None
            self._intake = self._engine.plan_receive(plan, info)
            self._loader.use(self._intake.plan, self._intake.batches)
            self._engine.init_transfer_engine(info)
        except Exception as caught:
            error = self._agreement.typed(caught, phase)
        if self._agreed(phase, error, seconds):
            assert info is not None
            self._session, self._manifest = info.session, manifest
            self._trainer = info.trainer
            self.version, self._committed = None, 0  # of which whoever connects knows nothing

    def _require_free(self, info: InitInfo) -> None:
        """A second trainer must mean it, if the first one lives and is another process."""
        former, new = self._trainer, info.trainer
        if info.takes_over or former is None or self._session in (None, info.session):
            return
        if (new is not None and former.is_same_process(new)) or not lives(former, self._session):
            return
        raise WrongOrder(
            "The engine has a trainer already, which lives",
            where="init_weight_transfer_engine",
            expected="an engine without one, or whose trainer has ended",
            got=f"process {former.pid} on {former.host}, session {self._session}, which answers at "
            f"{former.beacon}",
            cure="close that trainer's session; or take the engine over by WeightSync.reconnect",
        )

    def start(self) -> None:
        """A round begins; cheap.

        Raises:
            WrongOrder: One is open already; it stays as it is.
        """
        error: WeightTransferError | None = None
        try:
            self._require_connected("start_weight_update")
            self._require_state(State.IDLE, "start a round")
            self._engine.start_weight_update()
            self.state = State.STARTED
        except Exception as caught:
            error = self._agreement.typed(caught, "start_weight_update")
        self._agreed("start_weight_update", error, INIT_S, spares=(WrongOrder,))

    def update(self, data: Mapping[str, Any]) -> None:
        """One step of the transfer; see :data:`~vllm_wt.info.Op`."""
        error: WeightTransferError | None = None
        seconds = ROUND_S
        try:
            info = self._engine.update_info_cls.from_wire(data, backend=self._backend)
            seconds = info.deadline_s
            self._require_session(info)
            if info.op in {"open", "all"}:
                self._open(info)
            if info.op == "poll":
                self._poll(info)
            if info.op in {"seal", "all"}:
                self._seal(info)
            # One that was long on its way must not end a later attempt.
            if info.op == "abort" and (self._update is None or info.ticket >= self._update.ticket):
                self._abandon("the trainer gave it up")
            if info.op == "confirm":
                self._confirm(info)
        except Exception as caught:
            error = self._agreement.typed(caught, "update_weights")
        self._agreed("update_weights", error, seconds, spares=(Superseded, NotPaused))

    def finish(self) -> None:
        """Commit a sealed round.

        Raises:
            WrongOrder: There is no round.
            Aborted: It was not sealed: it is given up, and the weights are as they were.
            TornModel: The commit failed in the middle.
        """
        refused: WeightTransferError | None = None
        try:
            self._require_sealed()
            self._engine.require_kept()
            self._loader.require_awake()
        except Exception as caught:
            refused = self._agreement.typed(caught, "finish_weight_update")
        # A vote on the seal that some rank did not hear of must not end in a commit of the others.
        if not self._agreed("finish_weight_update", refused, GRACE_S):
            return
        assert self._update is not None
        version, ticket = self._update.version, self._update.ticket
        self.torn = True  # until every rank has reported success
        error = commit(self._load, f"version {version}", backend=self._backend)
        if self._agreed("finish_weight_update", error, GRACE_S):
            self.torn = False
            self.version, self._committed = version, ticket
            self._release_buffers()
            self._reset()

    def refuse(self, what: str, cure: str) -> None:
        """Refuse a call of vLLM's that this engine has no part in, in agreement with the others.

        Raises:
            WrongOrder: On the highest rank.
        """
        error = self._agreement.typed(WrongOrder(f"{what} is not possible", cure=cure), what)
        self._agreed(what, error, INIT_S, spares=(WrongOrder,))

    def report(self) -> dict[str, Any]:
        """What this worker says of itself; changes nothing, and needs no other rank."""
        return {
            **self._engine.report(),  # a backend has no say in what follows
            "rank": self._agreement.rank,
            "state": self.state.value,
            "version": self.version,
            "torn": self.torn,
            "streams": self._agreement.streams,
        }

    def shutdown(self) -> None:
        """Release the trainer's connection; idempotent, never raises."""
        self._session = None
        try:
            self._abandon("shut down")
            self._require_no_receive()  # the engine must not be taken from under it
            self._engine.shutdown()
        except Exception:
            logger.exception("vllm-wt: backend %s did not shut down cleanly", self._backend)

    # -- steps ---------------------------------------------------------------------------------

    def _require_connected(self, call: str) -> Manifest:
        if self._manifest is None or self._session is None:
            raise WrongOrder(
                f"{call} before init_weight_transfer_engine",
                expected="init, start, update, finish",
                got="no trainer is connected",
                cure="connect first (WeightSync.connect)",
            )
        return self._manifest

    def _require_session(self, info: UpdateInfo) -> None:
        self._require_connected("update_weights")
        if info.session != self._session:
            raise Superseded(
                "Another trainer has connected to this engine since",
                where="session",
                expected=self._session,
                got=info.session,
                cure="let one trainer at a time push to an engine; to take it over, connect again",
            )

    def _require_state(self, state: State, what: str) -> None:
        if self.state is not state:
            raise WrongOrder(
                f"Cannot {what} in state {self.state.value!r}",
                expected=f"state {state.value!r}",
                got=f"state {self.state.value!r}",
                cure="the order is start, update (open, poll, seal), finish; a finish, an abort or "
                "a new init ends a round that is open",
            )

    def _require_sealed(self) -> None:
        if self.state is State.IDLE:
            self._require_connected("finish_weight_update")
            self._require_state(State.STARTED, "finish")
        if self.state is not State.SEALED:
            raise Aborted(
                "The round was closed before it was sealed; the weights are as they were",
                expected=f"state {State.SEALED.value!r}",
                got=f"state {self.state.value!r}",
                cure="seal it (update_weights with op 'seal' or 'all') before finish",
            )

    def _open(self, info: UpdateInfo) -> None:
        manifest = self._require_connected("update_weights")
        self._require_state(State.STARTED, "open a transfer")
        if info.manifest_digest != manifest.digest:
            raise ManifestMismatch(
                "What the trainer would send is not what was agreed on at init",
                where="manifest_digest",
                expected=manifest.digest,
                got=info.manifest_digest,
                cure="connect again after changing what is sent",
            )
        if self._agreement.streams and not info.paused:
            raise NotPaused(
                "This engine loads while it receives, and so must not generate meanwhile",
                where="open",
                expected="an engine that is paused",
                got="one that may generate",
                cure="pause it first, which WeightSync does where the client can; or leave it memory "
                'to receive everything first (staging="device" or "host")',
            )
        if self.version is not None and info.version <= self.version:
            raise InvalidInfo(
                "The version does not advance",
                where="version",
                expected=f"more than {self.version}",
                got=info.version,
                cure="push a version above the last one; a trainer that starts anew connects first",
            )
        self._require_no_receive()
        assert self._intake is not None
        here = self._intake.at_hand and info.op == "all"
        staging: Staging | Streaming
        if self._intake.batches is None:
            staging = Staging(self._intake.plan.manifest, self._known)
        else:
            staging = Streaming(self._intake, self._loader, self._tear, self._known)
            if here:  # while the trainer may still be looking at its own
                staging.look()
        self._update, self._staging = info, staging
        self._receive = Receive(
            lambda: self._engine.receive_weights(info, staging),
            self._thread_context,
            Deadline(info.deadline_s),
            here=here,
        )
        self.state = State.RECEIVING

    def _tear(self) -> None:
        self.torn = True

    def _require_no_receive(self) -> None:
        """An earlier receive that outlived its abort would read, and write, for its own trainer."""
        if self._receive is not None and self._receive.running:
            raise TransportError(
                "The receive of an earlier round has not come to its end yet",
                cure="try again shortly; restart the engine if it lasts",
            )

    def _require_receiving(self, info: UpdateInfo) -> Receive:
        self._require_state(State.RECEIVING, info.op)
        assert self._receive is not None
        assert self._update is not None
        if info.ticket != self._update.ticket:
            raise InvalidInfo(
                f"{info.op} of another attempt",
                where="ticket",
                expected=self._update.ticket,
                got=info.ticket,
                cure="open the round anew (WeightSync.push)",
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
        if isinstance(self._staging, Staging):
            self._loader.check(self._staging.weights())
        self.state = State.SEALED

    def _confirm(self, info: UpdateInfo) -> None:
        if self.torn:
            raise TornModel(
                "The model holds a mix of old and new weights since an update that failed",
                expected=f"version {info.version}",
                cure="do not generate; push a full update, or restart the engine",
            )
        if info.ticket != self._committed:
            raise Aborted(
                "This version has not been committed; the weights are those of an earlier one",
                expected=f"version {info.version}",
                got=f"version {self.version}",
                cure="push again",
            )

    def _load(self) -> None:
        if isinstance(self._staging, Staging):  # what was streamed is in already
            with self._engine.kept():
                self._loader.apply(self._staging.weights())

    def _release_buffers(self) -> None:
        try:
            self._engine.finish_weight_update()
        except Exception:  # the weights are in on every rank: it is no failure of the round
            logger.exception("vllm-wt: backend %s did not finish cleanly", self._backend)

    # -- agreement and clean-up ----------------------------------------------------------------

    def _agreed(
        self,
        phase: str,
        error: WeightTransferError | None,
        seconds: float,
        *,
        spares: tuple[type[WeightTransferError], ...] = (),
    ) -> bool:
        """See :meth:`Agreement.reached`."""
        streams = self._intake is not None and self._intake.batches is not None
        return self._agreement.reached(phase, error, seconds, spares=spares, streams=streams)

    def _abandon(self, reason: str) -> None:
        if self._receive is not None and self._receive.running:
            self._engine.abort_weight_update(reason)
            self._receive.join(ABORT_S)
        self._known = Known()
        self._reset()

    def _reset(self) -> None:
        if self._receive is not None and not self._receive.running:
            self._receive = None
        self._staging = self._update = None
        self.state = State.IDLE
