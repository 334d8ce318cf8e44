"""The two contracts a backend fulfils. A Transport fulfils both through `vllm_wt.pull`.

Worker side, one instance in every vLLM worker process. WHO runs each step:

=======================  =========================================  =============================
step                     run by                                     may block
=======================  =========================================  =============================
plan_receive             the worker's main thread                   no
init_transfer_engine     the worker's main thread                   until ``init_info.deadline_s``
start_weight_update      the worker's main thread                   no
receive_weights          a thread of core's, while vLLM generates   until ``deadline_s``
abort_weight_update      the worker's main thread                   no
finish_weight_update     the worker's main thread, after commit     no
report                   the worker's main thread, at any time      no
shutdown                 the worker's main thread                   briefly
=======================  =========================================  =============================

An engine may raise on any rank at any step: core makes the ranks agree on the outcome. It never
touches the model; it hands the received tensors to ``load_weights``, which stages them.

Trainer side, one instance in the trainer process, driven by `vllm_wt.delivery`:
``describe`` once an engine, then for each round ``publish``, ``update_info``, ``send`` and ``settle``;
``serve`` runs on a thread of core's while workers connect or receive; ``shutdown`` at the end.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from typing_extensions import Self

from vllm_wt.deadline import Deadline
from vllm_wt.errors import InvalidInfo
from vllm_wt.info import InitInfo, Op, UpdateInfo
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.loading.staging import Intake
from vllm_wt.options import own_options
from vllm_wt.source import WeightSource

I = TypeVar("I", bound=InitInfo)  # noqa: E741
U = TypeVar("U", bound=UpdateInfo)

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], None]
"""Takes received tensors, as the plan of ``plan_receive`` has them: of full shape, unless the engine
has narrowed it. They must stay untouched until the commit, or are loaded at once where the engine has
named batches."""


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """Where a worker engine lives.

    Args:
        backend: Name of the backend.
        device: Device of the worker's model; receive buffers belong there.
        rank: Rank in the engine's worker group (tensor and pipeline parallel).
        size: Number of workers in that group.
        replica: Which of the engine's data-parallel replicas, each of which is such a group.
    """

    backend: str
    device: torch.device
    rank: int
    size: int
    replica: int = 0


class WeightTransferEngine(ABC, Generic[I, U]):
    """Worker side of a backend."""

    init_info_cls: type[I]
    update_info_cls: type[U]

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def plan_receive(self, plan: LoadPlan, init_info: I) -> Intake:
        """Say what ``load_weights`` will be given; called before ``init_transfer_engine``.

        Args:
            plan: What the model does with the full tensors, and so which parts of them it needs.
            init_info: What ``init_transfer_engine`` will be given.

        Returns:
            By default full tensors, all of them kept until the commit.
        """
        return Intake(plan)

    @abstractmethod
    def init_transfer_engine(self, init_info: I) -> None:
        """Connect to the trainer. A second call replaces the first trainer by the new one."""

    def start_weight_update(self) -> None:
        """A round begins. The model goes on generating."""

    @abstractmethod
    def receive_weights(self, update_info: U, load_weights: LoadWeights) -> None:
        """Receive every tensor of the plan and hand it to ``load_weights``, in one or many calls.

        Returns only when all bytes have landed; raises when they cannot.
        """

    def require_kept(self) -> None:
        """See that the staged tensors are what they were when they were handed over.

        Called before all ranks agree to commit. An engine whose memory is its own has nothing to do.

        Raises:
            WeightTransferError: They are not.
        """

    def kept(self) -> AbstractContextManager[None]:
        """Around the commit, on the same tensors.

        Raises:
            WeightTransferError: On leaving, they have changed meanwhile, and the model may have been
                loaded from something else.
        """
        return nullcontext()

    def finish_weight_update(self) -> None:
        """The staged tensors are in the model now; buffers may be reused."""

    def report(self) -> dict[str, Any]:
        """Facts of the backend's own for people, such as where it receives.

        Returns:
            Texts, finite numbers and truth values, by names that are no field of
            `vllm_wt.reports.WorkerReport`; by default none.
        """
        return {}

    @abstractmethod
    def abort_weight_update(self, reason: str) -> None:
        """Make a running ``receive_weights`` raise soon. Called from another thread, at any time."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release everything; idempotent, and ``init_transfer_engine`` works afterwards."""


class Sender(Protocol):
    """Takes the tensors that have to be made, one after another, in the manifest's order."""

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """The next one; it may change as soon as this has returned."""

    def end(self) -> None:
        """There are no more."""


class TrainerWeightTransferEngine(ABC):
    """Trainer side of a backend.

    Args:
        source: The weights.
        backend: Name of the backend.
        options: Options of the backend, by name.
    """

    def __init__(self, source: WeightSource, *, backend: str, **options: Any) -> None:
        if options:
            known = self._known_options()
            raise InvalidInfo(
                f"Backend {backend!r} has no option {sorted(options)[0]!r}",
                backend=backend,
                where="connect",
                expected=f"one of {', '.join(known)}" if known else "no options",
                got=", ".join(sorted(options)),
                cure="leave them out, or look the backend's options up in its README",
            )
        self.source = source
        self.backend = backend
        self.hosts: tuple[str, ...] = ()
        """Other hosts that the engines are reached on, as their clients name them; set before the first
        `describe`."""

    def _known_options(self) -> list[str]:
        """For an error: what it takes by name, without what core gives it."""
        return [
            name for name in own_options(type(self)) if name not in {"backend", "transport_cls"}
        ]

    @classmethod
    def of_team(cls) -> Callable[..., TrainerWeightTransferEngine] | None:
        """Makes one of several ranks that connect together: a `vllm_wt.together.TogetherTrainer`; None
        where the backend has none. It takes a ``team`` besides what ``cls`` takes."""
        return None

    @abstractmethod
    def describe(self, deadline: Deadline) -> InitInfo:
        """What the workers need to connect."""

    @property
    def generation(self) -> int:
        """Rises whenever workers must be told something new about where the weights are."""
        return 0

    @abstractmethod
    def publish(self, version: int, deadline: Deadline) -> None:
        """Make the source's current values available to readers as ``version``."""

    def send(  # noqa: B027  # most have nothing to make
        self, readers: int | None, deadline: Deadline, watch: Callable[[], None]
    ) -> None:
        """Make what could not be made readable at once, as the workers take it.

        Called once a round on the caller's thread, when all engines receive.

        Args:
            readers: Workers of all engines; None if an engine cannot tell.
            deadline: Of the whole round.
            watch: To be called now and then while this waits; raises when the round has failed.
        """

    def sender(self, readers: int | None, deadline: Deadline, watch: Callable[[], None]) -> Sender:
        """Instead of `send`, for a trainer that makes its tensors itself and hands them over.

        Args:
            readers: As of `send`.
            deadline: As of `send`.
            watch: As of `send`.

        Raises:
            InvalidInfo: The backend has no such way.
        """
        raise InvalidInfo(
            f"Backend {self.backend!r} does not take weights chunk by chunk",
            backend=self.backend,
            where="begin",
            cure="use push",
        )

    @property
    def at_once(self) -> bool:
        """Whether workers can receive all of a version in one call, once it is published and sent."""
        return False

    def go_ahead(self, version: int) -> bool:
        """Whether workers may be asked for a version that is yet to be published, and wait for it.

        After True, `update_info` is of that version, and `publish` is what comes next, or `withdraw`.
        """
        return False

    @property
    def went_ahead(self) -> bool:
        """Whether what the workers were asked for ahead is what was then published; if not, they have
        been told, and must be asked again."""
        return False

    def committed(self, seconds: float) -> int:
        """How many workers have told the trainer by themselves that they have committed what they were
        asked for ahead; 0 where the backend's do not tell.

        Args:
            seconds: To wait at most for one to say something, of this or of anything else.
        """
        time.sleep(seconds)
        return 0

    def withdraw(self) -> None:  # noqa: B027
        """What was published may not be loaded any more: its round has failed."""

    def require_kept(self) -> None:  # noqa: B027
        """Called after an engine's commit, which may have read the trainer's own memory.

        Raises:
            WeightTransferError: That was written to or freed meanwhile: the engine may mix versions.
        """

    @property
    def is_loaded_from(self) -> bool:
        """Whether engines load from the trainer's own memory, until their commit has ended."""
        return False

    def settle(self) -> None:  # noqa: B027
        """The round is over, well or not; called once after each ``publish``, whatever became of it.

        What all ranks of a trainer have to do together is done here to its end, where a failure has
        kept ``send`` from it: a rank that stopped half-way would leave the others in a collective.
        """

    @abstractmethod
    def update_info(self, op: Op, deadline: Deadline, *, known: int) -> UpdateInfo:
        """What the workers are sent for the version that was published last; ticket 0 before any.

        Args:
            op: The step asked for.
            deadline: Of the whole round.
            known: The generation that these workers have been told.
        """

    @abstractmethod
    def serve(self, stop: threading.Event) -> None:
        """The trainer's part of a rendezvous or a transfer; returns once ``stop`` is set."""

    @abstractmethod
    def delivered(self) -> int:
        """How many workers have reported that they hold all bytes of what was published last."""

    @property
    def can_leave_out(self) -> bool:
        """Whether a round can go on without an engine that has failed."""
        return False

    def delivered_to(self, engine: str) -> int:
        """How many workers of one engine have reported, where `can_leave_out`.

        Args:
            engine: Its name, as its workers were told at init.
        """
        return 0

    def leave_out(self, engine: str, workers: int) -> None:  # noqa: B027
        """An engine has failed in the round that was published last, which goes on without it: its
        workers count as if they had everything.

        Args:
            engine: Its name, as its workers were told at init.
            workers: How many it has; 0 if it has not told.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Release everything; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
