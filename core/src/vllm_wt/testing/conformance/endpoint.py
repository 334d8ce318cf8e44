"""A process with one Transport, an owner's or a reader's."""

from __future__ import annotations

import base64
import resource
import threading
import time
from pathlib import Path
from typing import Any

import torch

from vllm_wt import registry
from vllm_wt.backends import transport_named
from vllm_wt.deadline import Deadline
from vllm_wt.testing import unpickling
from vllm_wt.testing.conformance.content import content, digest
from vllm_wt.testing.conformance.memory import zeros
from vllm_wt.testing.conformance.resources import listening, resources
from vllm_wt.transport import Copy

_SERVE_S = 0.001
_POLL_S = 0.0002


class Endpoint:
    """Carries out what a check asks for, as core would: one thread at a time is in the transport.

    Args:
        backend: Whose Transport.
        name: Of the endpoint.
        device: Of its buffers.
        serve: Whether it is an owner: a thread calls ``progress``, as it does in a trainer, and what
            it holds can be exposed.
        transport: Which of the backend's Transports; empty for the default.
    """

    def __init__(
        self, backend: str, name: str, device: str, serve: bool, transport: str = ""
    ) -> None:
        self._spec = registry.default().get(backend).spec
        self._of = transport
        self._device = torch.device(device)
        self._lock = threading.Lock()
        self._buffers: dict[str, list[torch.Tensor]] = {}
        self._fixed: set[str] = set()
        """Buffers that could not be resized before they were registered either."""
        self._owns = serve
        self._regions: dict[str, Any] = {}
        self._plans: dict[str, Any] = {}
        self._passes: dict[str, Any] = {}
        self._serving = threading.Event()
        self._serving_failed: Exception | None = None
        self.renew(name)
        if serve:
            self._serving.set()
            threading.Thread(target=self._serve, daemon=True).start()

    def renew(self, name: str) -> None:
        """A new transport in this process."""
        cls: Any = transport_named(self._spec, self._of)
        with self._lock:
            self._transport = cls(name, self._device)
        self._regions, self._plans, self._passes = {}, {}, {}

    def _serve(self) -> None:
        while True:
            self._serving.wait()
            time.sleep(_SERVE_S)
            try:
                with self._lock:
                    if self._serving.is_set():
                        self._transport.progress()
            except Exception as error:
                self._serving_failed = error
                return

    def check_serving(self) -> None:
        """Raise what ``progress`` has raised."""
        if self._serving_failed is not None:
            raise self._serving_failed

    # -- memory --------------------------------------------------------------------------------

    def hold(
        self, key: str, sizes: list[int], seed: int | None = None, form: str | None = None
    ) -> None:
        """Make and register buffers: content from the seed, the next one's from the next, or zeros.

        Args:
            key: Name of the buffers.
            sizes: Of each.
            seed: Of the first.
            form: See `memory.zeros`; by default an owner's can be exposed.
        """
        self._make(key, sizes, form)
        if seed is not None:
            for index, buffer in enumerate(self._buffers[key]):
                buffer.copy_(content(buffer.numel(), seed + index))
            self._synchronize()
        self.register(key)

    def _make(self, key: str, sizes: list[int], form: str | None = None) -> None:
        if form is None:
            form = "allocated" if self._owns and self._transport.properties.maps else "private"
        # Of the class, as core calls it.
        allocate = getattr(type(self._transport), "allocate", None)
        buffers = self._buffers[key] = zeros(form, sizes, self._device, allocate)
        self._fixed.discard(key)
        if not all(buffer.untyped_storage().resizable() for buffer in buffers):
            self._fixed.add(key)

    def register(self, key: str) -> None:
        """Register buffers that are made."""
        with self._lock:
            self._regions[key] = self._transport.register(self._buffers[key])

    def register_odd(self, form: str) -> None:
        """Register what cannot be registered."""
        whole = torch.zeros(64, dtype=torch.uint8, device=self._device)
        odd = {
            "empty": whole[:0],
            "strided": whole[::2],
            "elsewhere": torch.empty(64, dtype=torch.uint8, device="meta"),
        }
        with self._lock:
            self._transport.register([whole, odd[form]])

    def unregister(self, key: str) -> None:
        with self._lock:
            self._transport.unregister(self._regions.pop(key))

    def forget(self, key: str) -> None:
        """Let go of the buffers."""
        del self._buffers[key]

    def offload(self, key: str) -> None:
        """Free the buffers' memory as trainers do that have it moved elsewhere."""
        if key not in self._fixed:
            for buffer in self._buffers[key]:
                buffer.untyped_storage().resize_(0)

    def write(self, key: str, seed: int) -> None:
        """New content in the same memory."""
        for index, buffer in enumerate(self._buffers[key]):
            buffer.copy_(content(buffer.numel(), seed + index))
        self._synchronize()

    def poke(self, key: str, index: int) -> None:
        """Change one byte of the first buffer."""
        self._buffers[key][0][index] ^= 0xFF
        self._synchronize()

    def digest(self, key: str) -> str:
        """Of the first buffer."""
        return digest(self._buffers[key][0])

    def hold_large(self, key: str, nbytes: int) -> None:
        """Make and register one buffer of whatever the memory holds; pages are there once used."""
        self._make(key, [nbytes])
        self.register(key)

    def write_part(self, key: str, offset: int, nbytes: int, seed: int) -> None:
        """Content for a part of the first buffer."""
        self._buffers[key][0][offset : offset + nbytes] = content(nbytes, seed).to(self._device)
        self._synchronize()

    def wrong_part(self, key: str, offset: int, nbytes: int, seed: int) -> bool:
        """Whether a part of the first buffer differs from the content of a seed."""
        part = self._buffers[key][0][offset : offset + nbytes].cpu()
        return not torch.equal(part, content(nbytes, seed))

    def fill(self, key: str, value: int) -> None:
        for buffer in self._buffers[key]:
            buffer.fill_(value)
        self._synchronize()

    def wrong_byte(self, key: str, seed: int) -> str | None:
        """Where buffers differ from the content of a seed; None when they do not."""
        sizes = [buffer.numel() for buffer in self._buffers[key]]
        return self._differs(
            key, [content(nbytes, seed + index) for index, nbytes in enumerate(sizes)]
        )

    def wrong_copy(
        self, key: str, copies: list[list[Any]], owned: dict[str, list[list[int]]]
    ) -> str | None:
        """Where buffers differ from zeros into which ``copies`` were made.

        Args:
            key: Name of the buffers.
            copies: As for :meth:`prepare`.
            owned: For each owner the size and seed of each of its buffers.
        """
        sources = {
            owner: [content(nbytes, seed) for nbytes, seed in buffers]
            for owner, buffers in owned.items()
        }
        expected = [torch.zeros(b.numel(), dtype=torch.uint8) for b in self._buffers[key]]
        for owner, source, start, target, offset, nbytes in copies:
            part = sources[owner][source][start : start + nbytes]
            expected[target][offset : offset + nbytes] = part
        return self._differs(key, expected)

    def not_filled(self, key: str, value: int) -> str | None:
        """Where buffers differ from one value."""
        sizes = [buffer.numel() for buffer in self._buffers[key]]
        return self._differs(
            key, [torch.full((nbytes,), value, dtype=torch.uint8) for nbytes in sizes]
        )

    def _differs(self, key: str, expected: list[torch.Tensor]) -> str | None:
        for index, (buffer, right) in enumerate(zip(self._buffers[key], expected, strict=True)):
            wrong = (buffer.cpu() != right).nonzero()
            if len(wrong):
                first = int(wrong[0])
                return (
                    f"{len(wrong)} of {len(right)} bytes of buffer {index} are wrong, the first at "
                    f"{first}: expected {int(right[first])}, got {int(buffer[first])}"
                )
        return None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # -- the owner -----------------------------------------------------------------------------

    def expose(self, key: str, generation: int) -> str:
        self.check_serving()
        with self._lock:
            handle = self._transport.expose(self._regions[key], generation)
        return base64.b64encode(handle).decode()

    def exposable(self, key: str) -> list[bool]:
        """What the transport says of each buffer, as it is, and as a tensor of another form over it."""
        exposable = type(self._transport).exposable
        return [
            bool(exposable(form))
            for buffer in self._buffers[key]
            for form in (buffer, buffer.view(torch.int8), buffer[-1:].view(1, 1).detach())
        ]

    def revoke(self, generation: int) -> None:
        self.check_serving()
        with self._lock:
            self._transport.revoke(generation)

    def readers(self, ticket: int) -> list[str]:
        self.check_serving()
        with self._lock:
            return sorted(self._transport.readers(ticket))

    # -- the reader ----------------------------------------------------------------------------

    def open(self, owner: str, generation: int, handle: str, seconds: float) -> None:
        with self._lock:
            self._transport.open(owner, generation, base64.b64decode(handle), Deadline(seconds))

    def prepare(self, plan: str, key: str, copies: list[list[Any]]) -> None:
        """Copies are owner, source buffer and offset, target buffer and offset, bytes."""
        with self._lock:
            self._plans[plan] = self._transport.prepare(
                self._regions[key], [Copy(*copy) for copy in copies]
            )

    def submit(self, plan: str) -> None:
        with self._lock:
            self._passes[plan] = self._transport.submit(self._plans[plan])

    def poll(self, plan: str) -> list[Any]:
        """Whether the pass is done, and its bytes."""
        with self._lock:
            progress = self._transport.poll(self._passes[plan])
        return [progress.done, progress.nbytes]

    def poll_until(self, plan: str, nbytes: int, seconds: float) -> dict[str, Any]:
        """Poll until done, or so many bytes, or so many seconds.

        Returns:
            The last answer, the seconds of the slowest poll, and the most bytes that an answer was
            behind the one before.
        """
        end = time.monotonic() + seconds
        before, slowest, fell = 0, 0.0, 0
        while True:
            began = time.monotonic()
            done, now = self.poll(plan)
            slowest = max(slowest, time.monotonic() - began)
            fell, before = max(fell, before - now), now
            if done or now >= nbytes or time.monotonic() > end:
                return {"done": done, "nbytes": now, "slowest": slowest, "fell": fell}
            time.sleep(_POLL_S)

    def read(self, plan: str, seconds: float = 20.0) -> int:
        """A whole pass; its bytes, or -1 when the time is over."""
        self.submit(plan)
        end = self.poll_until(plan, 1 << 62, seconds)
        return end["nbytes"] if end["done"] else -1

    def read_often(self, plan: str, count: int) -> None:
        """So many passes, each to its end."""
        for _ in range(count):
            self.read(plan)

    def cancel(self, plan: str) -> bool:
        """Cancel the plan's last pass; one whose ``submit`` has failed is none."""
        if plan not in self._passes:
            return True
        with self._lock:
            return bool(self._transport.cancel(self._passes[plan]))

    def notify(self, owner: str, ticket: int) -> None:
        with self._lock:
            self._transport.notify(owner, ticket)

    # -- the reader of an owner that it maps ---------------------------------------------------

    def is_near(self, handle: str) -> bool:
        is_near = type(self._transport).is_near
        return bool(is_near(base64.b64decode(handle), self._device))

    def map(self, key: str, owner: str) -> None:
        """Have an owner's buffers as buffers of our own."""
        with self._lock:
            self._buffers[key] = list(self._transport.map(owner))

    def forms(self, key: str) -> list[list[Any]]:
        """Of each buffer dtype, shape and kind of device, and whether it is contiguous."""
        return [
            [str(each.dtype), list(each.shape), each.device.type, each.is_contiguous()]
            for each in self._buffers[key]
        ]

    def check(self, owner: str) -> None:
        with self._lock:
            self._transport.check(owner)

    def maps(self) -> bool:
        return bool(self._transport.properties.maps)

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        self._serving.clear()
        with self._lock:
            self._transport.close()

    def alignment(self) -> int:
        return int(self._transport.properties.alignment)

    def max_descriptors(self) -> int:
        return int(self._transport.properties.max_descriptors)

    def resources(self) -> dict[str, int]:
        return resources()

    def peak(self) -> int:
        """Most bytes of memory that this process has had in use since :meth:`reset_peak`."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def reset_peak(self) -> int:
        """Forget the peak; what is in use now."""
        Path("/proc/self/clear_refs").write_text("5")
        return self.peak()

    def listening(self) -> list[tuple[str, int]]:
        return listening()

    def unpickled(self) -> list[str]:
        return unpickling.seen
