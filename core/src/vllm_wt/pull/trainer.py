"""The trainer's side of every Transport: tensors where they are, and others through a ring."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.digests import Digests
from vllm_wt.engine import Sender, TrainerWeightTransferEngine
from vllm_wt.errors import InvalidInfo, ManifestMismatch, WrongOrder
from vllm_wt.exposed import (
    Exposed,
    is_plain,
    require_as_announced,
    require_memory,
    require_one_device,
)
from vllm_wt.info import (
    Handle,
    InitInfo,
    Op,
    PullInitInfo,
    PullUpdateInfo,
    Staging,
    UpdateInfo,
    Verify,
    seconds_left,
)
from vllm_wt.options import own_options, require_bucket, require_one_of
from vllm_wt.packing import as_bytes
from vllm_wt.pull.copied import Copied
from vllm_wt.pull.exposure import DIGESTED, READY, SIGNAL_WORDS, WITHDRAWN, WORD, Exposure
from vllm_wt.pull.names import engine_of
from vllm_wt.pull.pouring import Pouring
from vllm_wt.pull.ring import Filling, Nothing, Ring
from vllm_wt.source import WeightSource
from vllm_wt.transport import Transport

_SERVE_S = 0.001
"""Seconds between two polls of the owner's endpoint while peers may connect or read."""
_SLOTS = 3
"""Slots of the ring: one is filled, one is read, and one is for whoever is ahead."""
_BUCKET_NBYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Size of a slot, unless all that goes through the ring is less."""
_SMALL_NBYTES = 32 << 20
"""CUDA tensors below this go through the ring, too: to read one by itself takes as long, whatever its
size, as to copy this much within the device."""


class PullTrainer(TrainerWeightTransferEngine):
    """Trainer side of every Transport.

    Contiguous tensors are exposed where they are, nothing is copied. What has to be made first (a
    gather, a file that is read, a strided tensor) goes through a ring of a few buffers, in the source's
    order, as the workers read it: the most memory that takes is the ring and one tensor. Memory that
    moved between rounds is noticed and exposed anew.

    Where workers can map the memory (`MappingTransport`), they load from it where it is, until push
    returns. Tensors that cannot be mapped are copied once a round into memory that can.

    Args:
        source: The weights.
        backend: Name of the backend.
        transport_cls: The plugin's Transport.
        verify: ``"digest"``: every block of 4 KiB is compared by a 64-bit digest before the commit.
            ``"bytes"``: only how many bytes have come. ``"off"``: nothing.
        staging: Where the workers receive; see `vllm_wt.loading.arena`.
        bucket_nbytes: Size of a buffer of the ring, a multiple of 4096.
        transport: Name of ``transport_cls``, for workers; empty for the plugin's default.
        options: Those of the Transport's own, which its ``__init__`` takes by keyword.

    Raises:
        InvalidInfo: An option has a wrong value, or is unknown.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        backend: str,
        transport_cls: type[Transport],
        verify: Verify = "digest",
        staging: Staging = "auto",
        bucket_nbytes: int | None = None,
        transport: str = "",
        **options: Any,
    ) -> None:
        self._transport_cls = transport_cls
        own = [name for name in own_options(transport_cls) if name in options]
        self._transport_options = {name: options.pop(name) for name in own}
        super().__init__(source, backend=backend, **options)
        require_one_of("verify", verify, get_args(Verify))
        require_one_of("staging", staging, get_args(Staging))
        require_bucket(bucket_nbytes)
        self._transport_name = transport
        self._verify = verify
        self._staging = staging
        self._bucket_nbytes = bucket_nbytes
        self._session = uuid.uuid4().hex
        self._manifest = source.manifest()
        self._metas = {tensor.name: tensor for tensor in self._manifest.tensors}
        self._transport: Transport | None = None
        self._lock = threading.Lock()  # the serving thread and the caller share the transport
        self._exposure: Exposure | None = None
        self._ring: Ring | None = None
        self._digests: torch.Tensor | None = None
        self._digests_of: Digests | None = None
        self._signals: torch.Tensor | None = None
        self._device = torch.device("cpu")
        self._region: Any = None
        self._exposed = Exposed([])
        self._copied: Copied | None = None
        self._pouring = Pouring(source, self._manifest, frozenset())
        self._is_ready = False
        """Whether the last publish has come to its end."""
        self._was_steady = False
        """Whether it has found everything as it was before."""
        self._is_ahead = False
        """Whether workers may have been asked for what is published next."""
        self._went_ahead = False
        self._generation = 0
        self._ticket = 0
        self._version = 0
        self._left_out: dict[str, int] = {}
        """Engines that this round goes on without, and how many workers they have."""

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def at_once(self) -> bool:
        return self._is_mapped

    def describe(self, deadline: Deadline) -> InitInfo:
        if self._exposure is None:
            self._settle_exposure()
        self._expose()
        exposure = self._settled
        return PullInitInfo(
            session=self._session,
            tensors=InitInfo.tensors_of(self._manifest),
            manifest_digest=self._manifest.digest,
            deadline_s=seconds_left(deadline),
            verify=self._verify,
            staging=self._staging,
            packed=exposure.runs,
            bucket_nbytes=exposure.bucket_nbytes,
            slots=exposure.slots,
            mapped=self._is_mapped,
            transport=self._transport_name,
            handle=self._handle(),
        )

    @property
    def is_loaded_from(self) -> bool:
        return self._is_mapped

    def go_ahead(self, version: int) -> bool:
        self._is_ahead = self._was_steady and self._is_mapped
        if self._is_ahead:
            self._attempt(version)
        return self._is_ahead

    @property
    def went_ahead(self) -> bool:
        return self._went_ahead

    def publish(self, version: int, deadline: Deadline) -> None:
        ahead, self._is_ahead, self._went_ahead = self._is_ahead, False, False
        if not ahead:
            self._attempt(version)
        self._pouring.begin()
        if self._is_steady():
            self._synchronize()  # readers see memory, not our streams
            if self._copied is not None:
                self._copied.run()
            self._exposed.look()
            self._pouring.look()
            self._was_steady = True
            if ahead:
                self._signal(READY, self._ticket)
                self._went_ahead = True
            return
        self._is_ready = self._was_steady = False
        if ahead:
            self.withdraw()
            self._attempt(version)
        self._manifest.require_same(self.source.manifest().tensors, where="publish")
        self._expose()
        self._pouring.prepare(self._ring)
        self._is_ready = True

    def _attempt(self, version: int) -> None:
        """A new one, of which workers know nothing yet."""
        self._version = version
        self._left_out = {}
        self._ticket = self._settled.next_ticket(self._ticket)

    def send(self, readers: int | None, deadline: Deadline, watch: Callable[[], None]) -> None:
        sender = self.sender(readers, deadline, watch)
        if isinstance(sender, Filling):
            self._pouring.pour(sender)

    def sender(self, readers: int | None, deadline: Deadline, watch: Callable[[], None]) -> Sender:
        if self._digests is None and self._ring is None:
            return Nothing()
        self._require_kept("nothing was committed")  # what has been freed must not be looked at
        self._synchronize()  # what other streams still write must be in what is copied here, too
        if self._digests is not None and self._digests_of is not None:
            self._digests_of.run(self._digests[: self._digests_of.count])
            self._signal(DIGESTED, self._ticket)
        if self._ring is None:
            return Nothing()
        if readers is None and self._settled.count > len(self._ring.slots):
            raise InvalidInfo(
                "An engine does not say how many workers it has, and its weights have to be made in "
                "turns",
                where="world_size",
                expected="the number of workers",
                got="none",
                cure="give the client a method world_size()",
            )
        ticket, exposure = self._ticket, self._settled

        def have_read(bucket: int) -> int:
            self._progress()  # rather than wait until the serving thread does
            return self._reported(exposure.number(ticket, bucket))

        def ready(bucket: int) -> None:
            self._signal(READY, exposure.number(ticket, bucket))

        return Filling(
            self._ring,
            self._digests,
            readers=readers or 0,
            have_read=have_read,
            ready=ready,
            watch=watch,
            deadline=deadline,
        )

    def require_kept(self) -> None:
        if self._is_mapped:
            self._require_kept("push again, since engines may have loaded some of both")

    def withdraw(self) -> None:
        if self._is_mapped and self._signals is not None:
            self._signal(WITHDRAWN, self._ticket)

    def settle(self) -> None:
        self._is_ahead = False
        self._progress()  # a round of one call may have had nobody to take its reports
        self._pouring.end()

    def update_info(self, op: Op, deadline: Deadline, *, known: int) -> UpdateInfo:
        # Before a worker says that what came is not what was sent.
        if op in {"poll", "seal", "all"} and not self._is_ahead:
            self._require_kept("nothing was committed")
        return PullUpdateInfo(
            op=op,
            session=self._session,
            version=self._version,
            ticket=self._ticket,
            manifest_digest=self._manifest.digest,
            deadline_s=seconds_left(deadline),
            handle=self._handle() if op in {"open", "all"} and known != self._generation else None,
            ahead=op == "all" and self._is_ahead,
        )

    def serve(self, stop: threading.Event) -> None:
        while not stop.wait(_SERVE_S):
            self._progress()

    def delivered(self) -> int:
        return self._reported(self._ticket)

    @property
    def can_leave_out(self) -> bool:
        return True

    def delivered_to(self, engine: str) -> int:
        return sum(engine_of(name) == engine for name in self._readers_of(self._ticket))

    def leave_out(self, engine: str, workers: int) -> None:
        self._left_out[engine] = workers

    def committed(self, seconds: float) -> int:
        if not self._is_mapped:
            return super().committed(seconds)
        with self._lock:
            transport: Any = self._transport
            if transport is not None:
                transport.listen(seconds)
        self._progress()  # nobody else does, in a round that was asked for ahead
        return self._reported(self._settled.committed(self._ticket))

    def shutdown(self) -> None:
        with self._lock:
            if self._transport is not None:
                self._transport.close()
            self._transport = self._region = None
            self._exposed = Exposed([])
            self._pouring = Pouring(self.source, self._manifest, frozenset())
            self._copied = None
            self._exposure = self._ring = None
            self._digests = self._digests_of = self._signals = None

    @property
    def _is_mapped(self) -> bool:
        """Whether workers load all of it from where it is."""
        receives = self._staging not in {"auto", "none"}
        return (
            self._maps and not receives and self._exposure is not None and not self._exposure.count
        )

    @property
    def _maps(self) -> bool:
        return self._transport_cls.properties.maps

    @property
    def _settled(self) -> Exposure:
        if self._exposure is None:
            raise WrongOrder("The trainer's memory is not exposed", cure="connect again")
        return self._exposure

    def _settle_exposure(self) -> None:
        """Decide, for the whole session, what is exposed in place and what goes through the ring."""
        made = self.source.made
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in self.source.at_hand():
            small = tensor.is_cuda and tensor.nbytes < _SMALL_NBYTES and not self._maps
            if tensor.numel() and name not in made and is_plain(tensor) and not small:
                whole[name] = tensor
        packed = frozenset(
            tensor.name
            for tensor in self._manifest.tensors
            if tensor.nbytes and tensor.name not in whole
        )
        device = next(iter(whole.values())).device if whole else self.source.device
        nbytes = self._bucket_nbytes or _BUCKET_NBYTES.get(device.type, _BUCKET_NBYTES["cpu"])
        exposure = Exposure(self._manifest, packed, nbytes, _SLOTS, self._verify == "digest")
        zeros = partial(self._zeros, device=device)
        if exposure.count:
            self._ring = Ring(exposure, zeros)
        if exposure.digested:
            self._digests = zeros(max(1, exposure.blocks) * WORD).view(torch.int64)
        self._exposure, self._device = exposure, device
        self._pouring = Pouring(self.source, self._manifest, packed)
        signals_on = torch.device("cpu") if self._is_mapped else device
        self._signals = self._zeros(SIGNAL_WORDS * WORD, signals_on).view(torch.int64)

    def _zeros(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory of our own that can be exposed."""
        if not self._maps:
            return torch.zeros(nbytes, dtype=torch.uint8, device=device)
        transport: Any = self._transport_cls
        zeros: torch.Tensor = transport.allocate(nbytes, device)
        return zeros

    def _is_steady(self) -> bool:
        """Whether everything is as it was exposed, and prepared, in the last round.

        What the source has is looked at, and so is what is exposed, which is the same memory.
        """
        return (
            self._is_ready
            and self._region is not None
            and self.source.is_same()
            and self._pouring.is_steady
            and (self._copied is None or self._copied.can_repeat)
        )

    def _buffers(self) -> list[torch.Tensor]:
        """The tensors that are exposed in place, as they are to be read."""
        exposure, made = self._settled, self.source.made
        found: dict[str, torch.Tensor] = {}
        elsewhere: dict[str, torch.Tensor] = {}
        for name, tensor in self.source.at_hand():
            if name in exposure.buffer:
                require_as_announced(self._metas, name, tensor)
                require_memory(name, tensor)
                # One that was plain when the session began, and is not for now, is copied.
                in_place = name not in made and is_plain(tensor) and self._is_exposable(tensor)
                (found if in_place else elsewhere)[name] = tensor
        for name in exposure.buffer:
            if name not in found and name not in elsewhere:
                raise ManifestMismatch(
                    f"Tensor {name!r} was there in full when the session began, and is not now",
                    where="source",
                    expected="a tensor that is there in full",
                    got="one that is gathered, or made in another way",
                    cure="connect again after changing what is sent",
                )
        if elsewhere:
            self._synchronize()  # what other streams still write must be in what is copied
            zeros = partial(self._zeros, device=self._device)
            self._copied = Copied(elsewhere, zeros, self._copied)
            self._copied.run()
            found |= self._copied.views
        else:
            self._copied = None
        return [found[name] for name in exposure.buffer]

    def _known_options(self) -> list[str]:
        return [*super()._known_options(), *own_options(self._transport_cls)]

    def _is_exposable(self, tensor: torch.Tensor) -> bool:
        transport: Any = self._transport_cls
        return not self._maps or bool(transport.exposable(tensor))

    def _expose(self) -> None:
        """Make the source's current values readable; a new generation when memory has moved."""
        buffers = self._buffers()
        assert self._signals is not None
        ours = [
            *(self._ring.slots if self._ring is not None else ()),
            *((as_bytes(self._digests),) if self._digests is not None else ()),
            as_bytes(self._signals),
        ]
        require_one_device(buffers, self._device)
        self._synchronize()  # readers see memory, not our streams
        with self._lock:
            former, self._exposed = self._exposed, Exposed(buffers)
            if self._region is not None and former.has_same_memory(self._exposed):
                return
            if self._transport is None:
                name, options = f"trainer-{self._session[:12]}", self._transport_options
                self._transport = self._transport_cls(name, self._device, **options)
            elif self._region is not None:
                region, self._region = self._region, None  # gone, whatever fails from here on
                self._transport.revoke(self._generation)
                self._transport.unregister(region)
            if self._digests is not None:
                self._digests_of = Digests(self._exposed.memory)
            memory = [*self._exposed.memory, *ours]
            self._region = self._transport.register(memory)
            self._generation += 1  # first: one that was revoked must not be told again

    def _require_kept(self, cure: str) -> None:
        """What the workers have read was in the memory that was exposed, all the time."""
        self._exposed.require_kept(cure)
        self._pouring.require_kept(cure)

    def _progress(self) -> None:
        with self._lock:
            if self._transport is not None:
                self._transport.progress()

    def _reported(self, number: int) -> int:
        left_out, readers = self._left_out, self._readers_of(number)
        return sum(engine_of(name) not in left_out for name in readers) + sum(left_out.values())

    def _readers_of(self, number: int) -> frozenset[str]:
        with self._lock:
            return self._transport.readers(number) if self._transport else frozenset()

    def _signal(self, signal: int, number: int) -> None:
        """Readers look at this word; what it speaks of has been written before."""
        assert self._signals is not None
        self._synchronize()
        self._signals[signal] = number
        if self._signals.is_cuda:
            self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _handle(self) -> Handle:
        with self._lock:
            if self._transport is None:
                raise WrongOrder("The trainer's memory is not exposed", cure="connect again")
            body = self._transport.expose(self._region, self._generation)
        return Handle.wrap(f"trainer-{self._session[:12]}", self._generation, body)
