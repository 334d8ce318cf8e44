"""A trainer's process: the trainer's side of a backend, over tensors of the kit's."""

from __future__ import annotations

import threading
from typing import Any

import torch

from vllm_wt import registry
from vllm_wt.backends import trainer_engine, transport_chosen
from vllm_wt.deadline import Deadline
from vllm_wt.packing import as_bytes
from vllm_wt.source import StateDictSource
from vllm_wt.testing import unpickling
from vllm_wt.testing.conformance.content import digest, tensors
from vllm_wt.testing.conformance.resources import resources


class Trainer:
    """Carries out the steps of a sync, as `vllm_wt.delivery` does.

    Args:
        backend: Which.
        device: Of the tensors.
        kind: Of the tensors; see `vllm_wt.testing.conformance.content`.
        seed: Of their values.
        options: Of the backend.
        in_place: Whether the tensors are in memory of the Transport's ``allocate``.
    """

    def __init__(
        self,
        backend: str,
        device: str,
        kind: str,
        seed: int,
        options: dict[str, Any],
        in_place: bool,
    ) -> None:
        self._device = torch.device(device)
        self._kind = kind
        self._allocate: Any = None
        if in_place:
            spec = registry.default().get(backend).spec
            transport: Any = transport_chosen(spec, options.get("transport"))[1]
            self._allocate = transport.allocate
        self._tensors = self._made(seed)
        self._source = StateDictSource(self._tensors)
        self._engine = trainer_engine(backend, self._source, **options)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None
        self._sending: threading.Thread | None = None
        self._sent: Deadline | None = None

    def _made(self, seed: int) -> dict[str, torch.Tensor]:
        made = tensors(self._kind, seed)
        if self._allocate is not None:
            return {name: self._placed(tensor) for name, tensor in made.items()}
        if self._device.type == "cpu":
            return made
        return {name: tensor.to(self._device) for name, tensor in made.items()}

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        place: torch.Tensor = self._allocate(tensor.nbytes, self._device)
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def write(self, seed: int) -> None:
        """New values in the same memory, as an optimizer writes them."""
        for name, tensor in self._made(seed).items():
            held = self._tensors[name]
            if held.numel() and 0 not in held.stride():  # what is expanded has no memory of its own
                held.copy_(tensor)

    def poke(self, name: str, index: int) -> None:
        """Change one byte of one tensor."""
        as_bytes(self._tensors[name])[index] ^= 0xFF

    def move(self, seed: int) -> None:
        """New values in other memory."""
        self._tensors.update(self._made(seed))

    def digests(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self._tensors.items()}

    def describe(self, seconds: float) -> dict[str, Any]:
        return self._engine.describe(Deadline(seconds)).to_wire()

    def publish(self, version: int, seconds: float, readers: int = 1) -> None:
        """Publish, and send on a thread until all of it is made or the next publish comes."""
        self._over()
        deadline = Deadline(seconds)
        self._engine.publish(version, deadline)
        self._sent = deadline
        self._sending = threading.Thread(
            target=self._send, args=(readers, deadline), name="send", daemon=True
        )
        self._sending.start()

    def _send(self, readers: int, deadline: Deadline) -> None:
        try:
            self._engine.send(readers, deadline, _nothing)
        except Exception as error:
            if not deadline.remaining():  # given up by the next publish, or too late for anybody
                return
            self._failed = error

    def _over(self) -> None:
        """The round is closed, as by a push that returns or raises."""
        if self._sending is not None:
            assert self._sent is not None
            self._sent.cancel("the round is over")
            self._sending.join()
            self._sending = self._failed = None  # what it has said since is of no other round
            self._engine.settle()

    def update_info(self, op: Any, seconds: float, known: int) -> dict[str, Any]:
        return self._engine.update_info(op, Deadline(seconds), known=known).to_wire()

    def survives_json(self, op: str | None) -> bool:
        """Whether an info, of init or of a step, is the same when it has crossed."""
        deadline = Deadline(9.0)
        info: Any = (
            self._engine.describe(deadline)
            if op is None
            else self._engine.update_info(op, deadline, known=0)  # type: ignore[arg-type]
        )
        return bool(type(info).from_wire(info.to_wire(), backend=self._engine.backend) == info)

    def generation(self) -> int:
        return self._engine.generation

    def delivered(self) -> int:
        return self._engine.delivered()

    def withdraw(self) -> None:
        """The round has failed."""
        self._engine.withdraw()

    def serve(self) -> None:
        """From now on, on a thread; as while workers connect or receive."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(self._stop,), daemon=True)
        self._thread.start()

    def _serve(self, stop: threading.Event) -> None:
        try:
            self._engine.serve(stop)
        except Exception as error:
            self._failed = error

    def pause(self) -> None:
        """Serve no more.

        Raises:
            Exception: What ``serve`` has raised.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def shutdown(self) -> None:
        self._over()
        self._engine.shutdown()

    def resources(self) -> dict[str, int]:
        return resources()

    def unpickled(self) -> list[str]:
        return unpickling.seen


def _nothing() -> None:
    """There is no engine to look after."""
