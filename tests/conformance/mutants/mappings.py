"""Transports that map memory and are broken in one way each, made from the ipc backend's."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from mutant import caught_by

from vllm_wt.errors import PeerDead, Revoked, TransportError, WeightTransferError, WrongOrder
from vllm_wt_ipc import memory
from vllm_wt_ipc.transport import IpcTransport

_ASKS_S = 60.0


# -- the map -----------------------------------------------------------------------------------


@caught_by("test_a_map_has_the_owner_s_buffers_in_order", r"forms\(\"mapped\"\) == ")
class MapsInReverse(IpcTransport):
    """Has the last buffer first."""

    def map(self, owner: str) -> Sequence[torch.Tensor]:
        return super().map(owner)[::-1]


@caught_by("test_a_map_has_the_owner_s_buffers_in_order", r"wrong_byte\(")
class TakesBuffersForOneAnother(IpcTransport):
    """Tells buffers apart by their size alone."""

    def map(self, owner: str) -> Sequence[torch.Tensor]:
        last = {buffer.numel(): buffer for buffer in super().map(owner)}
        return [last[buffer.numel()] for buffer in super().map(owner)]


@caught_by("test_a_map_has_the_owner_s_buffers_in_order", r"forms\(\"mapped\"\) == ")
class CutsTheMap(IpcTransport):
    """Leaves out what does not fill a word."""

    def map(self, owner: str) -> Sequence[torch.Tensor]:
        return [buffer[: buffer.numel() & ~7] for buffer in super().map(owner)]


@caught_by("test_a_map_has_the_owner_s_buffers_in_order", r"forms\(\"mapped\"\) == ")
class MapsSignedBytes(IpcTransport):
    """Has another dtype."""

    def map(self, owner: str) -> Sequence[torch.Tensor]:
        return [buffer.view(torch.int8) for buffer in super().map(owner)]


@caught_by("test_a_map_is_had_again", "mapped before")
class MapsOnce(IpcTransport):
    """Refuses to map what is mapped."""

    def map(self, owner: str) -> Sequence[torch.Tensor]:
        if owner in vars(self).setdefault("mapped", set()):
            raise WrongOrder("This was mapped before", cure="keep it")
        vars(self)["mapped"].add(owner)
        return super().map(owner)


@caught_by("test_a_map_shows_what_the_owner_writes", r"wrong_byte\(\"mapped\", seed\)")
class MapsASnapshot(IpcTransport):
    """Shows what was there when it was mapped."""

    def map(self, owner: str) -> Sequence[torch.Tensor]:
        return [buffer.clone() for buffer in super().map(owner)]


@caught_by("test_a_map_outlives_what_was_exposed", "has ended within `wrong_byte`")
class ShrinksWhatItRevokes(IpcTransport):
    """Cuts memory off behind its readers, who get a SIGBUS."""

    @staticmethod
    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8).share_memory_()

    def revoke(self, generation: int) -> None:
        exposure = self._exposures.get(generation)
        super().revoke(generation)
        if exposure is not None:
            for descriptor in exposure.descriptors[1:]:  # the first one is the control page's
                os.ftruncate(descriptor, 0)


class _Unmapping(IpcTransport):
    """Takes the memory away from its own tensors when a check fails."""

    errors: ClassVar[type[WeightTransferError]]

    def check(self, owner: str) -> None:
        try:
            super().check(owner)
        except self.errors:
            for segment in self._opened[owner].segments:
                memory._libc.munmap(segment.data_ptr(), segment.numel())
            raise


@caught_by("test_a_map_outlives_what_was_exposed", "has ended within `wrong_byte`")
class UnmapsTheRevoked(_Unmapping):
    errors = Revoked


@caught_by("test_a_map_outlives_an_owner_that_was_killed", "has ended within `wrong_byte`")
class UnmapsTheDead(_Unmapping):
    errors = PeerDead


@caught_by("test_a_map_outlives_an_owner_that_is_closed", "has ended within `wrong_byte`")
class UnmapsTheClosed(_Unmapping):
    errors = WeightTransferError


@caught_by("test_owners_and_readers_are_mapped_side_by_side", r"wrong_byte\(owner\.name")
class MapsTheLatestOwner(IpcTransport):
    """Has one map."""

    def map(self, owner: str) -> Sequence[torch.Tensor]:
        return super().map(list(self._opened)[-1])


@caught_by("test_owners_and_readers_are_mapped_side_by_side", "PeerDead|Timeout|gone|answered")
class LetsOneReaderIn(IpcTransport):
    """Turns the second reader away."""

    def progress(self) -> None:
        super().progress()
        for guest in [g for g in self._server._guests if g.reader][1:]:
            guest.connection.close()
            self._server._guests.remove(guest)


@caught_by("test_what_is_not_open_is_not_mapped", "DID NOT RAISE")
class MapsNothingOfStrangers(IpcTransport):
    """Has no buffers of an owner that is not open, and says nothing."""

    def map(self, owner: str) -> Sequence[torch.Tensor]:
        with suppress(WeightTransferError):
            return super().map(owner)
        return []


@caught_by("test_what_is_not_open_is_not_mapped", "DID NOT RAISE")
class TrustsStrangers(IpcTransport):
    """Finds an owner alive that is not open."""

    def check(self, owner: str) -> None:
        if owner in self._opened:
            super().check(owner)


@caught_by("test_rounds_of_memory_that_is_mapped_in_place", "CorruptTransfer")
class MapsTheFirstGeneration(IpcTransport):
    """Goes on with the map that an owner's first generation had."""

    first: ClassVar[dict[str, Any]] = {}

    def map(self, owner: str) -> Sequence[torch.Tensor]:
        return self.first.setdefault(owner, super().map(owner))


@caught_by("test_maps_leave_nothing_behind", "more MiB")
class KeepsTheMap(IpcTransport):
    """Holds what it had mapped after it is closed."""

    kept: ClassVar[list[Any]] = []

    def map(self, owner: str) -> Sequence[torch.Tensor]:
        self.kept.append(super().map(owner))
        return self.kept[-1]


# -- the check ---------------------------------------------------------------------------------


class _Knowing(IpcTransport):
    """Knows whether an owner's process is stopped."""

    def stopped(self, owner: str) -> bool:
        connection = self._require_open(owner, "check")._socket
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _, _ = struct.unpack("3i", raw)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")


@caught_by("test_an_owner_that_lives_passes_the_check", "Revoked")
class DoubtsTheStopped(_Knowing):
    """Takes silence for a revoke."""

    def check(self, owner: str) -> None:
        super().check(owner)
        if self.stopped(owner):
            raise Revoked("The owner says nothing", cure="connect again")


@caught_by("test_an_owner_that_lives_passes_the_check", "has not returned within")
class AsksTheOwner(_Knowing):
    """Waits for the owner's word."""

    def check(self, owner: str) -> None:
        super().check(owner)
        end = time.monotonic() + _ASKS_S
        while self.stopped(owner) and time.monotonic() < end:
            time.sleep(0.01)


@caught_by("test_an_owner_that_lives_passes_the_check", "Revoked")
class RevokesEveryMap(IpcTransport):
    """Revokes all generations at once."""

    def revoke(self, generation: int) -> None:
        for each in (*self._exposures._exposed, generation):
            super().revoke(each)


@caught_by("test_an_owner_that_has_revoked_fails_the_check", "DID NOT RAISE")
class NeverDoubts(IpcTransport):
    """Checks nothing."""

    def check(self, owner: str) -> None:
        self._require_open(owner, "check")


@caught_by("test_an_owner_that_has_revoked_fails_the_check", "DID NOT RAISE")
class SaysItOnce(IpcTransport):
    """Passes again once it has said that something was revoked."""

    def check(self, owner: str) -> None:
        try:
            super().check(owner)
        except Revoked:
            if owner not in vars(self).setdefault("said", set()):
                vars(self)["said"].add(owner)
                raise


@caught_by("test_an_owner_that_has_revoked_fails_the_check", "PeerDead")
class TakesRevokedForDead(IpcTransport):
    """Knows one reason only."""

    def check(self, owner: str) -> None:
        try:
            super().check(owner)
        except Revoked:
            raise PeerDead("The owner does not answer", cure="connect again") from None


@caught_by("test_an_owner_that_was_killed_fails_the_check", "passes for an owner that has gone")
class BelievesTheDead(IpcTransport):
    """Looks at the word of the owner alone, which outlives it."""

    def check(self, owner: str) -> None:
        with suppress(PeerDead):
            super().check(owner)


# -- what can be exposed -----------------------------------------------------------------------


@caught_by("test_what_is_allocated_is_zeros", r"not_filled\(")
class AllocatesGarbage(IpcTransport):
    """Makes zeros but for the tail."""

    @staticmethod
    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        made = IpcTransport.allocate(nbytes, device)
        made[nbytes - nbytes % 4096 :] = 7
        return made


@caught_by("test_what_is_allocated_is_zeros", r"forms\(\"made\"\) == ")
class AllocatesPages(IpcTransport):
    """Makes more than it was asked for."""

    @staticmethod
    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        return IpcTransport.allocate(-(-nbytes // 4096) * 4096, device)


@caught_by("test_what_is_allocated_can_be_exposed", "exposable says no")
class DeniesViews(IpcTransport):
    """Takes a view for something else than what it is of."""

    @staticmethod
    def exposable(tensor: torch.Tensor) -> bool:
        return not tensor.storage_offset() and IpcTransport.exposable(tensor)


@caught_by("test_what_is_allocated_can_be_exposed", "has ended within")
class FreesWithTheTransport(IpcTransport):
    """Takes what it has allocated away when a transport is closed."""

    places: ClassVar[list[tuple[int, int]]] = []

    @staticmethod
    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        made = IpcTransport.allocate(nbytes, device)
        FreesWithTheTransport.places.append((made.data_ptr(), nbytes))
        return made

    def close(self) -> None:
        super().close()
        for place in self.places:
            memory._libc.munmap(*place)


@caught_by("test_exposable_is_true", "can't be exposed")
class SaysYes(IpcTransport):
    """Finds everything exposable."""

    @staticmethod
    def exposable(tensor: torch.Tensor) -> bool:
        return True


@caught_by("test_exposable_is_true", "DID NOT RAISE")
class SaysNo(IpcTransport):
    """Finds nothing exposable."""

    @staticmethod
    def exposable(tensor: torch.Tensor) -> bool:
        return False


@caught_by("test_exposable_is_true", r"wrong_byte\(\"mapped\", 50")
class ExposesACopy(IpcTransport):
    """Finds everything exposable, since it copies what is not."""

    @staticmethod
    def exposable(tensor: torch.Tensor) -> bool:
        return True

    def register(self, buffers: Sequence[torch.Tensor]) -> Any:
        return super().register([_copied(buffer) for buffer in buffers])


def _copied(buffer: torch.Tensor) -> torch.Tensor:
    if IpcTransport.exposable(buffer):
        return buffer
    return IpcTransport.allocate(buffer.numel(), buffer.device).copy_(buffer)


@caught_by("test_exposable_is_true", "DID NOT RAISE")
class LetsReadersFindOut(IpcTransport):
    """Has a handle for what cannot be exposed, which opens nothing."""

    def expose(self, region: Any, generation: int) -> bytes:
        with suppress(TransportError):
            return super().expose(region, generation)
        return b"none"


@caught_by("test_memory_that_nobody_has_opened_leaves_nothing_behind", "more files")
class LeaksADescriptor(IpcTransport):
    """Opens a descriptor for each allocation that nobody closes."""

    @staticmethod
    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        made = IpcTransport.allocate(nbytes, device)
        descriptor = memory.descriptor_of(made)
        if descriptor is not None:
            os.dup(descriptor)
        return made


@caught_by("test_memory_that_nobody_has_opened_leaves_nothing_behind", "more MiB")
class WaitsForAReader(IpcTransport):
    """Holds what was exposed until a reader has come for it."""

    waiting: ClassVar[list[Any]] = []

    def expose(self, region: Any, generation: int) -> bytes:
        self.waiting.append(region.tensors)
        return super().expose(region, generation)


@caught_by("test_what_can_be_mapped_is_near", r"is_near\(handle\)")
class IsNearNobody(IpcTransport):
    """Takes every handle for one from elsewhere."""

    @staticmethod
    def is_near(handle: bytes, device: torch.device) -> bool:
        IpcTransport.is_near(handle, device)
        return False


@caught_by("test_what_can_be_mapped_is_near", "DID NOT RAISE")
class IsNearWhateverComes(IpcTransport):
    """Does not look at the handle."""

    @staticmethod
    def is_near(handle: bytes, device: torch.device) -> bool:
        return True


# -- the class ---------------------------------------------------------------------------------


@caught_by("test_the_classes_exist_and_have_the_methods", r"allocate.* cannot be called as")
class AllocatesByInstance(IpcTransport):
    """Needs a transport to allocate."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:  # type: ignore[override]
        return super().allocate(nbytes, device)
