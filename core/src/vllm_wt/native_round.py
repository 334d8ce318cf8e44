"""The state machine of one worker whose engine has vLLM's own form; see `vllm_wt.native`.

::

    idle --start--> started --update, once or several times--> started --finish--> idle
    init, or any failure before the commit: back to idle, the weights as they were
    a failure within the commit: idle and torn, until a full round lands

What comes is copied; nothing touches the model before ``finish``, where it is known what has come.
The engine's own calls run on a thread that can be left behind when they outlive their deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from vllm_wt.agreement import GRACE_S, Agreement
from vllm_wt.commit import commit
from vllm_wt.deadline import INIT_S, MAX_S, ROUND_S, Deadline
from vllm_wt.errors import InvalidInfo, Timeout, TransportError, WeightTransferError, WrongOrder
from vllm_wt.info import decode
from vllm_wt.loading.apply import ModelLoader
from vllm_wt.loading.copied import CopiedWeights
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.native import WeightTransferEngine
from vllm_wt.ranks import Ranks
from vllm_wt.receiving import ABORT_S, Receive
from vllm_wt.round import State

logger = logging.getLogger(__name__)


class NativeRound:
    """Drives such an engine and a model through rounds, in agreement with the other workers.

    Args:
        engine: The backend's engine.
        loader: Puts the weights into the model.
        ranks: The workers of this vLLM engine.
        thread_context: Entered on the engine's thread, to select its device.
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
        self._is_connected = False
        self._is_in_use = False
        """Whether the engine may hold what its ``shutdown`` releases."""
        self._call: Receive | None = None
        self._copied = CopiedWeights()
        self._plan: LoadPlan | None = None
        """What the loader uses."""
        self.state = State.IDLE
        self.torn = False
        self.version: int | None = None
        """Of the weights; nobody tells it in this form."""

    @property
    def has_agreed(self) -> bool:
        """Whether the last step has succeeded on every rank."""
        return self._agreement.has_agreed

    # -- the four phases, as vLLM calls them --------------------------------------------------

    def init(self, data: Mapping[str, Any]) -> None:
        """Connect to a trainer; what its predecessor left open is given up.

        A trainer whose data is refused does not touch the one that is connected.
        """
        phase = "init_weight_transfer_engine"
        error: WeightTransferError | None = None
        info: Any = None
        seconds = INIT_S
        try:
            info = self._decode(self._engine.init_info_cls, data)
            seconds = self._seconds(info, INIT_S)
        except Exception as caught:
            error = self._agreement.typed(caught, phase)
        if not self._agreement.reached(phase, error, seconds, spares=(WeightTransferError,)):
            return
        self._is_connected = False
        self._plan = None  # the loader may have been used by others since
        try:
            self._abandon("a new trainer connects")
            self._require_no_call()
            if self._is_in_use:
                self._engine.shutdown()
            self._is_in_use = True
            self._run(partial(self._engine.init_transfer_engine, info), seconds, phase)
        except Exception as caught:
            error = self._agreement.typed(caught, phase)
        self._is_connected = self._agreement.reached(phase, error, seconds)

    def start(self) -> None:
        """A round begins; cheap.

        Raises:
            WrongOrder: One is open already; it stays as it is.
        """
        error: WeightTransferError | None = None
        try:
            self._require_connected("start_weight_update")
            self._require_state(State.IDLE, "start a round")
            self._require_no_call()
            self._engine.start_weight_update()
            self._copied = CopiedWeights()
            self.state = State.STARTED
        except Exception as caught:
            error = self._agreement.typed(caught, "start_weight_update")
        self._agreement.reached("start_weight_update", error, INIT_S, spares=(WrongOrder,))

    def update(self, data: Mapping[str, Any]) -> None:
        """Receive some of the weights, or all of them."""
        phase = "update_weights"
        error: WeightTransferError | None = None
        seconds = ROUND_S
        try:
            info = self._decode(self._engine.update_info_cls, data)
            seconds = self._seconds(info, ROUND_S)
            self._require_connected(phase)
            self._require_state(State.STARTED, "receive")
            self._run(partial(self._receive, info, self._copied), seconds, phase)
        except Exception as caught:
            error = self._agreement.typed(caught, phase)
        self._agreement.reached(phase, error, seconds)

    def finish(self) -> None:
        """Commit what has come.

        Raises:
            WrongOrder: There is no round.
            Aborted: Nothing has come: it is given up, and the weights are as they were.
            LoadError: What has come is not what the model takes, or not all of it; likewise.
            TornModel: The commit failed in the middle.
        """
        phase = "finish_weight_update"
        refused: WeightTransferError | None = None
        try:
            self._require_connected(phase)
            self._require_state(State.STARTED, "finish")
            self._require_loadable()
        except Exception as caught:
            refused = self._agreement.typed(caught, phase)
        if not self._agreement.reached(phase, refused, INIT_S):
            return
        self.torn = True  # until every rank has reported success
        error = commit(self._load, "what was received", backend=self._backend)
        if self._agreement.reached(phase, error, GRACE_S):
            self.torn = False
            self._reset()
            self._tell_finished()

    def refuse(self, what: str, cure: str) -> None:
        """Refuse a call of vLLM's that this engine has no part in, in agreement with the others.

        Raises:
            WrongOrder: On the highest rank.
        """
        error = self._agreement.typed(WrongOrder(f"{what} is not possible", cure=cure), what)
        self._agreement.reached(what, error, INIT_S, spares=(WrongOrder,))

    def report(self) -> dict[str, Any]:
        """What this worker says of itself; changes nothing, and needs no other rank."""
        return {
            "rank": self._agreement.rank,
            "state": self.state.value,
            "version": self.version,
            "torn": self.torn,
            "streams": False,
        }

    def shutdown(self) -> None:
        """Release the trainer's connection; idempotent, never raises."""
        self._is_connected = False
        try:
            self._abandon("shut down")
            self._require_no_call()  # the engine must not be taken from under it
            self._engine.shutdown()
            self._is_in_use = False
        except Exception:
            logger.exception("vllm-wt: backend %s did not shut down cleanly", self._backend)

    # -- steps ---------------------------------------------------------------------------------

    def _decode(self, cls: type[Any], data: Mapping[str, Any]) -> Any:
        return decode(
            cls, data, backend=self._backend, cure=f"send exactly the fields of {cls.__name__}"
        )

    def _seconds(self, info: Any, default_s: float) -> float:
        """The info's own deadline, where it has one."""
        seconds = getattr(info, "deadline_s", None)
        if seconds is None:
            return default_s
        if isinstance(seconds, (int, float)) and 0 < seconds <= MAX_S:
            return float(seconds)
        raise InvalidInfo(
            f"{type(info).__name__} has a wrong value in the field 'deadline_s'",
            backend=self._backend,
            where="deadline_s",
            expected=f"seconds, more than 0 and at most {MAX_S}",
            got=repr(seconds),
            cure="say how long the call may take",
        )

    def _require_connected(self, call: str) -> None:
        if not self._is_connected:
            raise WrongOrder(
                f"{call} before init_weight_transfer_engine",
                expected="init, start, update, finish",
                got="no trainer is connected",
                cure="connect first (init_weight_transfer_engine)",
            )

    def _require_state(self, state: State, what: str) -> None:
        if self.state is not state:
            raise WrongOrder(
                f"Cannot {what} in state {self.state.value!r}",
                expected=f"state {state.value!r}",
                got=f"state {self.state.value!r}",
                cure="the order is start, update (once or several times), finish; a finish, a failure "
                "or a new init ends a round that is open",
            )

    def _require_no_call(self) -> None:
        """A call that outlived its deadline may still hold the engine's connection and buffers."""
        if self._call is not None and self._call.running:
            raise TransportError(
                "An earlier call of the engine has not come to its end yet",
                cure="try again shortly; restart the engine if it lasts",
            )

    def _run(self, step: Callable[[], None], seconds: float, phase: str) -> None:
        """Run a step of the engine's own, and leave it behind when its time is over."""
        self._call = Receive(step, self._thread_context, Deadline(seconds))
        self._call.join(seconds)
        if self._call.running:
            raise Timeout(
                f"The engine's {phase} is not done",
                where=phase,
                expected=f"within {seconds:g} s",
                cure="look for a stopped trainer; raise deadline_s if it is just slow",
            )
        if self._call.error is not None:
            raise self._call.error

    def _receive(self, info: Any, copied: CopiedWeights) -> None:
        self._engine.receive_weights(info, copied)
        device = self._engine.context.device
        if device.type == "cuda":  # the copies are read on another thread's stream
            torch.cuda.synchronize(device)

    def _require_loadable(self) -> None:
        plan = self._loader.rehearse(self._copied.manifest())
        if plan != self._plan:
            self._plan = None
            self._loader.use(plan)
            self._plan = plan
        self._loader.check(self._copied.weights())
        self._loader.require_awake()

    def _load(self) -> None:
        self._loader.apply(self._copied.weights())

    def _tell_finished(self) -> None:
        try:
            self._engine.finish_weight_update()
        except Exception:  # the weights are in on every rank: it is no failure of the round
            logger.exception("vllm-wt: backend %s did not finish cleanly", self._backend)

    # -- clean-up ------------------------------------------------------------------------------

    def _abandon(self, reason: str) -> None:
        is_running = self._call is not None and self._call.running
        if is_running or self.state is not State.IDLE:
            try:
                self._engine.abort_weight_update(reason)
            except Exception:  # no rank may fail alone
                logger.exception("vllm-wt: backend %s did not abort cleanly", self._backend)
        if self._call is not None:
            self._call.join(ABORT_S)
        self._reset()

    def _reset(self) -> None:
        if self._call is not None and not self._call.running:
            self._call = None
        self._copied.close()
        self.state = State.IDLE
