"""One round with all engines of a session, phase by phase."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from vllm_wt.abreast import each
from vllm_wt.deadline import Deadline
from vllm_wt.engine import Sender, TrainerWeightTransferEngine
from vllm_wt.errors import Superseded, Timeout, TransportError, WeightTransferError
from vllm_wt.fleet import Fleet, OnFailure, say_paused
from vllm_wt.link import EngineLink, Stages
from vllm_wt.pausing import USUAL, Pausing
from vllm_wt.polling import Polls
from vllm_wt.serving import Serving, reading
from vllm_wt.sources.gathering import gathers_within

logger = logging.getLogger(__name__)

_LET_END_S = 0.25
"""Seconds that a round of one call has to end by itself after an interrupt; it takes milliseconds."""
_DELIVERED_S = 0.001
"""Seconds between two looks at whether the workers have reported."""
_PATIENCE = 0.9
"""Part of a deadline after which engines that have everything go on without the others, if they may."""
_ANSWER_S = 2.0
"""Seconds for the answers to questions that were asked before a round is given up."""


class Delivery:
    """A version, put into every engine.

    ::

        begin             publish; then start, open each engine: the workers of all receive
        send              what the source has; or accept, then put as often as the caller likes
        end               until all workers have everything; then
            seal            each engine: its ranks agree
            pause           each engine that can be, unless it was paused before start
            commit, resume  each engine

    What is done with each engine is done with all of them at the same time. A failure before the first
    commit leaves every engine its old weights. From there on each engine is on its own: one that fails
    does not keep the others from their commit. A step that fails is the last: by then the round is
    given up, and the trainer's side is settled.

    One engine that generates nothing meanwhile, and a version that can be received at once: then all of
    it is one call, in ``end``.

    Each step raises the WeightTransferError of the first engine that failed, or of the trainer's side.
    Its ``cure`` also names the engines that stay paused. With ``on_failure="exclude"`` an engine that
    fails is left out, and the others go on; then just the failure of all is raised.

    Args:
        links: The engines.
        trainer: The trainer's side.
        version: What it is to publish.
        deadline: Of the whole.
        pausing: What is done with engines that can be paused.
        on_failure: What becomes of the others when an engine fails.
    """

    _goes_ahead = True
    """Whether this trainer decides by itself what is published."""

    def __init__(
        self,
        links: Sequence[EngineLink],
        trainer: TrainerWeightTransferEngine,
        version: int,
        deadline: Deadline,
        *,
        pausing: Pausing = USUAL,
        on_failure: OnFailure = "raise",
    ) -> None:
        self._links = links
        self._fleet = Fleet(links, trainer, deadline, on_failure)
        self._trainer = trainer
        self.version = version
        self.is_read = threading.Event()
        """Set once no engine reads what was published: nothing of it is needed any more."""
        self._deadline = deadline
        self._pausing = pausing
        known = [link.workers for link in links if link.workers is not None]
        self._readers = sum(known) if len(known) == len(links) else None
        self._over = False
        self._at_once = False
        """Whether the round is one call."""
        self._is_asked = False
        """Whether that call may be under way."""
        self._serving: Serving | None = None
        self._polls = Polls(self._fleet, deadline)
        self._sender: Sender | None = None
        self.published_s = 0.0
        """Seconds that publishing took."""

    def begin(self, *, whole: bool = False) -> None:
        """Publish, and have every engine receive.

        Args:
            whole: What comes next is `send` and `end`: an engine that takes a round in one call may be
                asked for it before it is known what there is to publish, and waits for that.
        """
        with self._step():
            for link in self._links:
                link.begin(self._pausing)
                link.forget_first()
            began = time.perf_counter()
            if whole:
                self._ask_ahead()
            with reading("publish", self._deadline):
                self._trainer.publish(self.version, self._deadline)
            self.published_s = time.perf_counter() - began
            if self._is_asked and not self._trainer.went_ahead:
                self._drop()
            self._serving = Serving(self._trainer)
            with self._serving.blamed():
                self._fleet.begin()
                if self._pausing.first:
                    self._fleet.each(lambda link: link.pause_first(self._deadline))
                self._at_once = self._can_be_at_once()
                # It has nothing to serve where all is there for the one engine that knows where. Else
                # until every round is closed, a failed one too: with UCX over TCP a reader that goes
                # away can abort an owner that does not poll.
                if not (self._is_asked or (self._at_once and self._links[0].knows_where)):
                    self._serving.start()
                if not self._at_once:
                    self._open()
            self._polls = Polls(self._fleet, self._deadline)

    def send(self) -> None:
        """All that the source has to make."""
        with self._transfer(), reading("send", self._deadline):
            self._trainer.send(self._readers, self._deadline, self._watch)

    def accept(self) -> None:
        """From here on the caller hands the tensors over."""
        with self._transfer(), reading("begin", self._deadline):
            self._sender = self._trainer.sender(self._readers, self._deadline, self._watch)

    def put(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The next tensors, in the manifest's order; they are copied by the time this returns."""
        assert self._sender is not None
        with self._transfer(), reading("send", self._deadline):
            # Tensors that find room do not wait, and so would not look.
            self._watch()
            self._deadline.check("The round was not ended in time", where="send")
            devices = set()
            for name, tensor in weights:
                self._sender.put(name, tensor)
                devices.add(tensor.device)
            for device in devices:
                if device.type == "cuda":  # what the caller does next may be on another stream
                    torch.cuda.current_stream(device).synchronize()

    def end(self) -> dict[str, Stages]:
        """Wait for every engine and commit; the stages' times of those that have, by their names."""
        with self._step():
            assert self._serving is not None
            with self._serving.blamed():
                if self._sender is not None:
                    with reading("end", self._deadline):
                        self._sender.end()
                self._load(self._serving)
            self._fleet.dismiss()
        self._stop_serving()
        self._over = True
        self._settle()
        return {link.name: link.stages for link in self._fleet.links}

    @property
    def failed(self) -> dict[str, WeightTransferError]:
        """Why engines were left out, by their names."""
        return {link.name: error for link, error in self._fleet.left_out.items()}

    def cancel(self, reason: str) -> None:
        """Have it fail soon, unless engines commit already; from any thread."""
        self._deadline.cancel(reason)

    def give_up(self, error: BaseException) -> BaseException:
        """End the round before its commit, for ``error``; returns that, or what is behind it.

        One that is over stays as it is.
        """
        if self._over:
            return error
        self._over = True
        replaced = None
        try:
            if self._is_asked:
                # An interrupt is no reason to take away in the middle what is there, and right.
                if not isinstance(error, Exception) and self._trainer.went_ahead:
                    self._links[0].let_end(_LET_END_S)
                self._withdraw()
                self._drop()
            if self._serving is not None:
                self._withdraw()
                self._polls.drop(Deadline(_ANSWER_S))
                try:
                    replaced = self._close_rounds(error)
                    self._let_go(replaced or error)
                finally:
                    self._stop_serving()
        finally:
            try:
                with gathers_within(self._deadline):
                    self._trainer.settle()
            except Exception:  # what failed first is what is reported
                logger.exception("vllm-wt: the trainer's side could not settle after a failure")
        return replaced or error

    @contextmanager
    def _step(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            cause = self.give_up(error)
            if cause is not error:
                raise cause from error
            raise

    @contextmanager
    def _transfer(self) -> Iterator[None]:
        """A step between begin and end."""
        assert self._serving is not None
        with self._step(), self._serving.blamed():
            yield

    def _stop_serving(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.stop()

    def _withdraw(self) -> None:
        try:
            self._trainer.withdraw()
        except Exception:  # what failed first is what is reported
            logger.exception("vllm-wt: the trainer's side could not withdraw what it had published")

    def _settle(self) -> None:
        try:
            with gathers_within(self._deadline):
                self._trainer.settle()
        except WeightTransferError:
            raise
        except Exception as error:
            raise TransportError(
                f"The trainer's side could not end the round: {type(error).__name__}: {error}",
                where="settle",
                cure="see the cause, in the source or in the backend; every engine has the new weights",
            ) from error

    def _ask_ahead(self) -> None:
        """Ask the engine for the whole round, if it may wait for what is published."""
        if not (self._goes_ahead and self._can_be_at_once() and self._links[0].knows_where):
            return
        if self._trainer.go_ahead(self.version):
            self._is_asked = True  # first: an interrupt may come while it is being asked
            self._is_asked = self._links[0].ask_round(self.version, self._deadline)

    def _drop(self) -> None:
        """Wait until the engine has let go of a round that it was asked for, and does not get."""
        self._is_asked = False
        self._links[0].drop_round()

    def _can_be_at_once(self) -> bool:
        return self._trainer.at_once and len(self._links) == 1 and self._links[0].at_once

    def _load(self, serving: Serving) -> None:
        """From what is published and sent to new weights in every engine."""
        if self._at_once:
            (link,) = self._links
            end = link.end_round if self._is_asked else link.run_round
            has_ended = end(self.version, self._deadline)
            self._is_asked = False
            if has_ended:
                link.resume()
                return
            self._at_once = False
            serving.start()
            self._open()
        self._seal(serving)
        self._fleet.each(EngineLink.pause)
        # Each has the chance to, and goes on as soon as it has.
        self._fleet.each(self._commit, bounded=False)

    def _open(self) -> None:
        """The workers of every engine receive."""

        def open_one(link: EngineLink) -> None:
            if link.streams:
                link.pause_first(self._deadline)
            link.start(self._deadline)
            link.open(self._deadline)

        self._fleet.each(open_one)

    def _seal(self, serving: Serving) -> None:
        """Every engine has everything, and its ranks have agreed on that."""
        if self._readers is not None:  # else the seals do the waiting
            self._await(self._readers, serving)
        self._polls.finish(self._deadline)
        for link in self._fleet.links:
            link.received()
        self._fleet.each(lambda link: link.seal(self._deadline))
        if not self._trainer.is_loaded_from:
            self.is_read.set()

    def _await(self, readers: int, serving: Serving) -> None:
        """Until every worker has reported, or an engine has failed."""
        patience = Deadline(self._deadline.remaining() * _PATIENCE)
        while (ready := self._trainer.delivered()) < readers:
            self._watch()
            if self._fleet.excludes and patience.expired:
                self._leave_out_late()
                return
            self._deadline.check(
                f"Not all workers of {self._titles(self._links)} have received the weights",
                where="wire",
                got=f"{ready} of {readers} workers",
            )
            serving.wait(_DELIVERED_S)

    def _leave_out_late(self) -> None:
        for link in list(self._fleet.links):
            have = self._trainer.delivered_to(link.name)
            if link.workers is not None and have < link.workers:
                late = Timeout(
                    "Not all workers of the engine have received the weights in time",
                    engine=link.title,
                    where="wire",
                    expected=f"within {self._deadline.seconds * _PATIENCE:g} s",
                    got=f"{have} of {link.workers} workers",
                    cure="see what keeps it; the next push takes it up again",
                )
                self._fleet.fail(link, late)

    def _watch(self) -> None:
        """Raises when the trainer's side has failed, or an engine has whose failure is that of all."""
        assert self._serving is not None
        self._serving.check()
        self._polls()

    def _commit(self, link: EngineLink) -> None:
        link.commit(self.version, self._deadline)
        link.forget()
        link.resume()

    def _close_rounds(self, error: BaseException) -> Superseded | None:
        """Close every round that is open; the cause of ``error``, if a trainer has taken over."""
        replaced: dict[str, Superseded | None] = {}

        def close(link: EngineLink) -> None:
            replaced[link.title] = link.give_up(self._deadline)

        each(self._answering(), close)
        engine = getattr(error, "engine", None)
        causes = (cause for title, cause in replaced.items() if engine in (None, title))
        return next((cause for cause in causes if cause is not None), None)

    def _let_go(self, error: BaseException) -> None:
        """Resume what has the weights of one version, and say of the others that they stay paused."""
        each(self._answering(), lambda link: link.let_go(self._deadline))
        say_paused(self._links, error)

    def _answering(self) -> list[EngineLink]:
        """Engines that can be called: one that is stuck would keep the others waiting."""
        return [link for link in self._links if not link.caller.is_stuck]

    @staticmethod
    def _titles(links: Sequence[EngineLink]) -> str:
        return ", ".join(link.title for link in links)
