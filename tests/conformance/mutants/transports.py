"""Transports that are broken in one way each, made from the echo backend's."""

from __future__ import annotations

import _pickle
import os
import pickle
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import torch
from mutant import caught_by

from vllm_wt.deadline import Deadline
from vllm_wt.errors import (
    CorruptTransfer,
    InvalidInfo,
    OutOfBounds,
    PeerDead,
    Revoked,
    Timeout,
    TransportError,
    WeightTransferError,
    WrongOrder,
)
from vllm_wt.transport import Copy, Progress
from vllm_wt_echo.transport import EchoTransport

_LARGE = 8 << 20


class LooksAtSubmit(EchoTransport):
    """Sound; sees at ``submit`` already what others see at the first ``poll``."""

    def submit(self, plan: Any) -> Any:
        operation = super().submit(plan)
        try:
            self.poll(operation)
        except WeightTransferError:
            self.cancel(operation)
            raise
        return operation


class Noting(EchoTransport):
    """Sound; knows the tensors that it was given and the bytes of its last plan."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        self.tensors: list[torch.Tensor] = []
        self.nbytes = 0

    def register(self, buffers: Sequence[torch.Tensor]) -> Any:
        self.tensors = list(buffers)
        return super().register(buffers)

    def prepare(self, region: Any, copies: Sequence[Copy]) -> Any:
        self.nbytes = sum(copy.nbytes for copy in copies)
        return super().prepare(region, copies)


class Misreading(EchoTransport):
    """Reads other copies than it was given, and reports the bytes of those that it was given."""

    _too_few = 0

    def others(self, region: Any, copies: list[Copy]) -> list[Copy]:
        raise NotImplementedError

    def prepare(self, region: Any, copies: Sequence[Copy]) -> Any:
        others = self.others(region, list(copies))
        self._too_few = sum(c.nbytes for c in copies) - sum(c.nbytes for c in others)
        return super().prepare(region, others)

    def poll(self, operation: Any) -> Progress:
        now = super().poll(operation)
        return Progress(now.done, now.nbytes + self._too_few if now.done else now.nbytes)


# -- memory ------------------------------------------------------------------------------------


@caught_by("test_memory_is_read_where_it_is", r"reader.wrong_byte\(")
class SnapshotsAtRegister(EchoTransport):
    """Serves what memory held when it was registered."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        self.snapshots: dict[int, Any] = {}

    def register(self, buffers: Sequence[torch.Tensor]) -> Any:
        region = super().register(buffers)
        self.snapshots[id(region)] = super().register([buffer.clone() for buffer in buffers])
        return region

    def expose(self, region: Any, generation: int) -> bytes:
        return super().expose(self.snapshots[id(region)], generation)


@caught_by("test_memory_is_read_where_it_is", r"wrong_byte\(")
class WritesToTheSource(Noting):
    """Changes the owner's memory while it serves it."""

    def progress(self) -> None:
        super().progress()
        for tensor in self.tensors:
            tensor[-8:] = 0


@caught_by("test_regions_live_side_by_side", "not registered|names another|revoked")
class OneRegionOnly(EchoTransport):
    """Forgets a region when the next one is registered."""

    last: Any = None

    def register(self, buffers: Sequence[torch.Tensor]) -> Any:
        if self.last is not None:
            super().unregister(self.last)
        self.last = super().register(buffers)
        return self.last


@caught_by("test_memory_that_cannot_be_registered_is_refused", "DID NOT RAISE")
class TakesStridedMemory(EchoTransport):
    """Registers a copy of what is not contiguous."""

    def register(self, buffers: Sequence[torch.Tensor]) -> Any:
        return super().register([buffer.contiguous() for buffer in buffers if buffer.numel()])


@caught_by("test_what_was_unregistered_is_out_of_reach", "DID NOT RAISE")
class ServesTheUnregistered(EchoTransport):
    """Goes on to serve what was unregistered."""

    def unregister(self, region: Any) -> None:
        pass


@caught_by("test_a_plan_ends_with_the_reader_s_memory", "DID NOT RAISE")
class WritesToTheUnregistered(EchoTransport):
    """Goes on to write to what was unregistered."""

    exposes = False

    def expose(self, region: Any, generation: int) -> bytes:
        self.exposes = True
        return super().expose(region, generation)

    def unregister(self, region: Any) -> None:
        if self.exposes:
            super().unregister(region)


@caught_by("test_memory_that_was_unregistered_is_freed", "MiB more")
class KeepsTheUnregistered(EchoTransport):
    """Keeps tensors after they were unregistered."""

    kept: ClassVar[list[Any]] = []

    def register(self, buffers: Sequence[torch.Tensor]) -> Any:
        self.kept.append(buffers)
        return super().register(buffers)


@caught_by("test_memory_that_was_registered_can_be_resized", "not resizable")
class BarsResizing(EchoTransport):
    """Keeps the storage of tensors from being resized."""

    kept: ClassVar[list[Any]] = []

    def register(self, buffers: Sequence[torch.Tensor]) -> Any:
        self.kept += [buffer.numpy() for buffer in buffers if buffer.device.type == "cpu"]
        return super().register(buffers)


@caught_by("test_memory_is_registered_again", "registered before")
class RegistersOnce(EchoTransport):
    """Refuses memory that it has had before."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        self.places: set[int] = set()

    def register(self, buffers: Sequence[torch.Tensor]) -> Any:
        for buffer in buffers:
            if buffer.data_ptr() in self.places:
                raise TransportError("This was registered before", cure="none")
            self.places.add(buffer.data_ptr())
        return super().register(buffers)


@caught_by("test_a_handle_is_had_again", "exposed once")
class ExposesOnce(EchoTransport):
    """Gives a handle once."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        self.generations: set[int] = set()

    def expose(self, region: Any, generation: int) -> bytes:
        if generation in self.generations:
            raise TransportError("A generation is exposed once", cure="none")
        self.generations.add(generation)
        return super().expose(region, generation)


@caught_by("test_a_handle_is_of_moderate_size", "nbytes <")
class HugeHandles(EchoTransport):
    """Has handles of 4 MiB."""

    def expose(self, region: Any, generation: int) -> bytes:
        return super().expose(region, generation) + bytes(4 << 20)

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        super().open(owner, generation, handle[: -(4 << 20)], deadline)


@caught_by("test_a_generation_names_one_region", "DID NOT RAISE")
class KeepsItsHandles(EchoTransport):
    """Gives the handle of a generation again, whatever region it is asked for."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        self.handles: dict[int, bytes] = {}

    def expose(self, region: Any, generation: int) -> bytes:
        if generation not in self.handles:
            self.handles[generation] = super().expose(region, generation)
        return self.handles[generation]


# -- connecting --------------------------------------------------------------------------------


@caught_by("test_an_owner_that_was_killed_cannot_be_opened", "DID NOT RAISE")
class OpensTheDead(EchoTransport):
    """Opens an owner that has gone, as a fabric without connections does."""

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        with suppress(PeerDead):
            super().open(owner, generation, handle, deadline)


@caught_by("test_an_owner_that_was_closed_cannot_be_opened", "ConnectionRefusedError")
class RefusedIsUntyped(EchoTransport):
    """Raises the system's error for an owner that does not listen any more."""

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        try:
            super().open(owner, generation, handle, deadline)
        except (PeerDead, Timeout):
            raise ConnectionRefusedError("no") from None


@caught_by("test_an_owner_that_is_stopped_is_opened_in_time_or_not", "has not returned within")
class OpensWithoutDeadline(EchoTransport):
    """Waits for an owner for ever."""

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        super().open(owner, generation, handle, Deadline(600))


@caught_by("test_what_was_revoked_cannot_be_opened", "DID NOT RAISE")
class OpensTheRevoked(EchoTransport):
    """Opens a generation that was revoked."""

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        with suppress(Revoked):
            super().open(owner, generation, handle, deadline)


@caught_by("test_a_cut_handle_is_refused", "opened a handle that is none")
class IgnoresTheTail(EchoTransport):
    """Does not look at the last bytes of a handle, nor at what comes after them."""

    def expose(self, region: Any, generation: int) -> bytes:
        body = super().expose(region, generation)
        return len(body).to_bytes(4, "big") + body + bytes(8)

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        end = 4 + int.from_bytes(handle[:4], "big")
        super().open(owner, generation, handle[4:end], deadline)


@caught_by("test_foreign_bytes_are_refused", "opened a handle that is none")
class OpensAnything(EchoTransport):
    """Takes foreign bytes for a handle."""

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        with suppress(CorruptTransfer, InvalidInfo):
            super().open(owner, generation, handle, deadline)


@caught_by("test_a_flipped_handle_does_no_harm", "has ended within `open`")
class DiesOfAFlippedByte(EchoTransport):
    """Ends its process for a handle that was damaged, as native code may."""

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        try:
            super().open(owner, generation, handle, deadline)
        except CorruptTransfer:
            os._exit(11)


@caught_by(
    "test_a_handle_of_another_owner_or_generation_is_refused", "opened a handle that is none"
)
class BelievesTheHandle(EchoTransport):
    """Opens whatever owner and generation a handle is of."""

    def expose(self, region: Any, generation: int) -> bytes:
        return f"{self.name} {generation} ".encode() + super().expose(region, generation)

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        name, number, body = handle.split(b" ", 2)
        super().open(name.decode(), int(number), body, deadline)


@caught_by("test_an_owner_is_opened_once", "DID NOT RAISE")
class OpensTwice(EchoTransport):
    """Does nothing when an owner is opened that is open."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        self.open_ones: set[str] = set()

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        if owner not in self.open_ones:
            super().open(owner, generation, handle, deadline)
            self.open_ones.add(owner)


@caught_by("test_a_new_generation_is_read_through_a_new_transport", "open already")
class OpensOnceAProcess(EchoTransport):
    """Knows the owners that former transports of its process have opened."""

    open_ones: ClassVar[set[str]] = set()

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        if owner in self.open_ones:
            raise WrongOrder("It is open already", cure="none")
        super().open(owner, generation, handle, deadline)
        self.open_ones.add(owner)


# -- plans and passes --------------------------------------------------------------------------


@caught_by("test_a_copy_out_of_bounds_is_refused", "DID NOT RAISE")
class LeavesOutWhatIsOutside(EchoTransport):
    """Leaves copies out of a plan that leave the memory, without a word."""

    def prepare(self, region: Any, copies: Sequence[Copy]) -> Any:
        while True:
            try:
                return super().prepare(region, copies)
            except OutOfBounds:
                copies = copies[:-1]


@caught_by("test_a_copy_that_makes_no_sense_is_refused", "DID NOT RAISE")
class TakesEmptyCopies(EchoTransport):
    """Accepts copies without bytes."""

    def prepare(self, region: Any, copies: Sequence[Copy]) -> Any:
        return super().prepare(region, [copy for copy in copies if copy.nbytes])


@caught_by("test_a_copy_that_makes_no_sense_is_refused", "DID NOT RAISE")
class CountsFromTheEnd(EchoTransport):
    """Takes buffer -1 for the last one."""

    def prepare(self, region: Any, copies: Sequence[Copy]) -> Any:
        return super().prepare(
            region,
            [replace(copy, target=0 if copy.target == -1 else copy.target) for copy in copies],
        )


@caught_by("test_copies_anywhere_are_exact", r"wrong_copy\(")
class DropsTheLastBytes(Misreading):
    """Leaves out the last byte of a plan."""

    def others(self, region: Any, copies: list[Copy]) -> list[Copy]:
        *others, last = copies
        return [*others, replace(last, nbytes=last.nbytes - 1)] if last.nbytes > 1 else others


@caught_by("test_copies_anywhere_are_exact", r"wrong_copy\(")
class RoundsCopiesUp(Misreading):
    """Moves whole words, and so bytes beside a copy."""

    def others(self, region: Any, copies: list[Copy]) -> list[Copy]:
        return [self._rounded(region, copy) for copy in copies]

    def _rounded(self, region: Any, copy: Copy) -> Copy:
        wider = replace(copy, nbytes=-(-copy.nbytes // 8) * 8)
        try:
            EchoTransport.prepare(self, region, [wider])
        except OutOfBounds:
            return copy
        return wider


@caught_by("test_ten_thousand_copies_are_exact", r"wrong_copy\(")
class SwapsTwoCopies(Misreading):
    """Reads two copies of a length in place of each other."""

    def others(self, region: Any, copies: list[Copy]) -> list[Copy]:
        seen: dict[int, int] = {}
        for late, copy in enumerate(copies):
            early = seen.setdefault(copy.nbytes, late)
            first = copies[early]
            if first.source_offset != copy.source_offset:
                copies[early] = replace(first, source_offset=copy.source_offset)
                copies[late] = replace(copy, source_offset=first.source_offset)
                break
        return copies


@caught_by("test_ten_thousand_copies_are_exact", "at most 1000")
class RefusesManyCopies(EchoTransport):
    """Takes fewer copies than its properties say."""

    def prepare(self, region: Any, copies: Sequence[Copy]) -> Any:
        if len(copies) > 1000:
            raise TransportError("Too many copies", expected="at most 1000", cure="send fewer")
        return super().prepare(region, copies)


@caught_by("test_one_byte_is_exact", r"wrong_byte\(")
class WholeWordsOnly(Misreading):
    """Moves whole words, and leaves out the bytes that make none."""

    def others(self, region: Any, copies: list[Copy]) -> list[Copy]:
        cut = [replace(copy, nbytes=copy.nbytes // 4 * 4) for copy in copies]
        return [copy for copy in cut if copy.nbytes]


@caught_by("test_a_large_buffer_is_exact", r"wrong_byte\(")
class TruncatesLargeCopies(Misreading):
    """Moves the first 8 MiB of a copy."""

    def others(self, region: Any, copies: list[Copy]) -> list[Copy]:
        return [replace(copy, nbytes=min(copy.nbytes, _LARGE)) for copy in copies]


@caught_by("test_progress_is_honest", r"wrong_byte\(")
class DoneBeforeTheBytesAreThere(Noting):
    """Says done once the requests are on their way."""

    def poll(self, operation: Any) -> Progress:
        super().poll(operation)
        return Progress(True, self.nbytes)


@caught_by("test_progress_is_honest", "progress fell")
class ProgressFalls(EchoTransport):
    """Says every other time that it is half as far."""

    odd = False

    def poll(self, operation: Any) -> Progress:
        now = super().poll(operation)
        self.odd = not self.odd
        return now if now.done or self.odd else Progress(False, now.nbytes // 2)


@caught_by("test_progress_is_honest", r"\(True, _LARGE\)")
class CountsItsHeader(EchoTransport):
    """Counts bytes of its own among those of the plan."""

    def poll(self, operation: Any) -> Progress:
        now = super().poll(operation)
        return Progress(now.done, now.nbytes + 16)


@caught_by("test_a_plan_is_used_again", "is used once")
class UsesAPlanOnce(EchoTransport):
    """Fails when a plan is submitted again."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        self.used: list[Any] = []

    def submit(self, plan: Any) -> Any:
        if any(plan is one for one in self.used):
            raise TransportError("A plan is used once", cure="none")
        self.used.append(plan)
        return super().submit(plan)


@caught_by("test_plans_live_side_by_side", 'read\\("plan"\\) == 1000')
class OnePlanOnly(EchoTransport):
    """Submits the plan that was prepared last, whichever it is given."""

    last: Any = None

    def prepare(self, region: Any, copies: Sequence[Copy]) -> Any:
        self.last = super().prepare(region, copies)
        return self.last

    def submit(self, plan: Any) -> Any:
        return super().submit(self.last)


@caught_by("test_a_second_pass_at_a_time_is_refused", "DID NOT RAISE")
class JoinsARunningPass(EchoTransport):
    """Gives the pass that is under way when a second one is submitted."""

    running: Any = None

    def submit(self, plan: Any) -> Any:
        with suppress(WrongOrder):
            self.running = super().submit(plan)
        return self.running


@caught_by("test_nothing_is_written_after_a_cancel", r"not_filled\(")
class WritesAfterACancel(Noting):
    """Has something under way that goes on after a cancel."""

    def cancel(self, operation: Any) -> bool:
        threading.Thread(target=self._write_on, daemon=True).start()
        return super().cancel(operation)

    def _write_on(self) -> None:
        for _ in range(200):
            self.tensors[-1][:64] = 0
            time.sleep(0.01)


@caught_by("test_nothing_is_written_after_a_cancel", "may still write")
class CannotCancel(EchoTransport):
    """Never knows whether something still writes."""

    def cancel(self, operation: Any) -> bool:
        super().cancel(operation)
        return False


@caught_by("test_nothing_is_written_after_a_cancel", "DID NOT RAISE")
class HalfSpent(EchoTransport):
    """Reads no more after a cancel, and works on otherwise."""

    spent = False

    def cancel(self, operation: Any) -> bool:
        self.spent = True
        return True

    def submit(self, plan: Any) -> Any:
        if self.spent:
            raise TransportError("A pass was given up", cure="make a new transport")
        return super().submit(plan)


@caught_by("test_a_pass_that_waits_for_a_stopped_owner_is_given_up", "has not returned within")
class CancelWaits(EchoTransport):
    """Reads to the end when a pass is given up."""

    def cancel(self, operation: Any) -> bool:
        while not self.poll(operation).done:
            time.sleep(0.001)
        return True


@caught_by("test_a_pass_that_is_done_is_cancelled_to_no_effect", "WeightTransferError|closed")
class CancelCloses(EchoTransport):
    """Closes when a pass is cancelled, also one that is done."""

    def cancel(self, operation: Any) -> bool:
        self.close()
        return True


# -- revoking and reporting --------------------------------------------------------------------


@caught_by("test_what_was_revoked_is_not_read", "DID NOT RAISE")
class IgnoresRevoke(EchoTransport):
    """Goes on to serve what was revoked."""

    def revoke(self, generation: int) -> None:
        pass


@caught_by("test_generations_never_mix", r"wrong_byte\(")
class RevokesLate(EchoTransport):
    """Lets a pass that is under way go on after a revoke."""

    late = 0
    generation = 0

    def revoke(self, generation: int) -> None:
        self.late, self.generation = 300, generation

    def progress(self) -> None:
        super().progress()
        self.late -= 1
        if self.late == 0:
            super().revoke(self.generation)


@caught_by("test_the_next_generation_is_read_after_a_revoke", "exposes no more")
class RevokesForGood(EchoTransport):
    """Exposes nothing more once something was revoked."""

    revoked = False

    def revoke(self, generation: int) -> None:
        super().revoke(generation)
        self.revoked = True

    def expose(self, region: Any, generation: int) -> bytes:
        if self.revoked:
            raise Revoked("It exposes no more", cure="none")
        return super().expose(region, generation)


@caught_by("test_revoking_what_is_not_exposed_does_nothing", "KeyError")
class RevokesWhatItKnows(EchoTransport):
    """Fails when what is revoked is not exposed."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        self.generations: dict[int, bytes] = {}

    def expose(self, region: Any, generation: int) -> bytes:
        self.generations[generation] = super().expose(region, generation)
        return self.generations[generation]

    def revoke(self, generation: int) -> None:
        del self.generations[generation]
        super().revoke(generation)


@caught_by("test_a_report_shows_in_its_ticket_only", r"owner.readers\(ticket\) == \[\]")
class ReportsEveryTicket(EchoTransport):
    """Reports tickets that are still to come."""

    def notify(self, owner: str, ticket: int) -> None:
        for later in range(5):
            super().notify(owner, ticket + later)


@caught_by("test_a_report_shows_in_its_ticket_only", "does not know")
class ReportsOnce(EchoTransport):
    """Loses all reports but the first."""

    reported = False

    def notify(self, owner: str, ticket: int) -> None:
        if not self.reported:
            super().notify(owner, ticket)
        self.reported = True


@caught_by("test_reports_of_a_pass_need_no_further_call", "does not know")
class HoldsReportsBack(EchoTransport):
    """Sends a report with the next call."""

    held: tuple[str, int] | None = None

    def notify(self, owner: str, ticket: int) -> None:
        if self.held is not None:
            super().notify(*self.held)
        self.held = (owner, ticket)


# -- peers -------------------------------------------------------------------------------------


@caught_by("test_an_owner_that_dies_before_a_pass", "process that was killed is done")
class SwallowsDeath(Noting):
    """Says done for an owner that has gone."""

    def poll(self, operation: Any) -> Progress:
        try:
            return super().poll(operation)
        except PeerDead:
            return Progress(True, self.nbytes)


@caught_by("test_an_owner_that_dies_before_a_pass", "OSError: gone")
class DeathIsUntyped(EchoTransport):
    """Raises the system's error for an owner that has gone."""

    def poll(self, operation: Any) -> Progress:
        try:
            return super().poll(operation)
        except PeerDead:
            raise OSError("gone") from None


@caught_by("test_an_owner_that_dies_before_a_pass", "AssertionError: gone")
class DeathIsAnAssertion(EchoTransport):
    """Asserts that an owner is there."""

    def poll(self, operation: Any) -> Progress:
        try:
            return super().poll(operation)
        except PeerDead:
            raise AssertionError("gone") from None


@caught_by("test_an_owner_that_dies_before_a_pass", "without a cure")
class DeathHasNoCure(EchoTransport):
    """Says no cure for an owner that has gone."""

    def poll(self, operation: Any) -> Progress:
        try:
            return super().poll(operation)
        except PeerDead:
            raise PeerDead("gone") from None


@caught_by("test_an_owner_that_dies_during_a_pass", r"wrong_byte\(")
class HalfIsEnough(Noting):
    """Says done for an owner that has gone once some bytes have come."""

    def poll(self, operation: Any) -> Progress:
        try:
            return super().poll(operation)
        except PeerDead:
            return Progress(True, self.nbytes)


@caught_by("test_an_owner_that_stops_and_goes_on_has_only_been_slow", "has not returned within")
class PollWaits(EchoTransport):
    """Polls to the end in one call."""

    def poll(self, operation: Any) -> Progress:
        while not (now := super().poll(operation)).done:
            time.sleep(0.001)
        return now


@caught_by("test_an_owner_that_stops_and_goes_on_has_only_been_slow", "looks dead")
class Impatient(EchoTransport):
    """Gives an owner up that has sent nothing for a moment."""

    last = (0, 0.0)

    def poll(self, operation: Any) -> Progress:
        now = super().poll(operation)
        if now.done or now.nbytes != self.last[0] or not self.last[1]:
            self.last = (now.nbytes, time.monotonic())
        elif time.monotonic() - self.last[1] > 0.2:
            raise PeerDead("The owner looks dead", cure="none")
        return now


@caught_by("test_a_reader_that_dies_takes_nobody_with_it", "OSError: a reader has gone|Timeout")
class DiesWithAReader(EchoTransport):
    """Serves no more when a reader has gone."""

    sockets = 0

    def progress(self) -> None:
        before, self.sockets = self.sockets, _open_sockets()
        super().progress()
        if self.sockets < before:
            raise OSError("a reader has gone")


def _open_sockets() -> int:
    count = 0
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{file}").startswith("socket:")
    return count


@caught_by("test_a_reader_that_stops_holds_nobody_up", "has not returned within|Timeout")
class WaitsForItsReader(EchoTransport):
    """Lets nobody in while a reader has a pass under way."""

    token: socket.socket | None = None

    def submit(self, plan: Any) -> Any:
        self.token = _only_one(self.last)
        return super().submit(plan)

    def poll(self, operation: Any) -> Progress:
        now = super().poll(operation)
        if now.done and self.token is not None:
            self.token.close()
        return now

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        while not deadline.expired:
            try:
                _only_one(owner).close()
            except TransportError:
                deadline.wait(0.01)
        self.last = owner
        deadline.check("Another reader is at it")
        super().open(owner, generation, handle, deadline)


@caught_by("test_strangers_change_nothing", "has not returned within|Timeout")
class ListensToAnybody(EchoTransport):
    """Waits for whoever connects to say something."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        self.door = socket.create_server(("127.0.0.1", 0))
        self.door.setblocking(False)

    def progress(self) -> None:
        super().progress()
        with suppress(BlockingIOError):
            caller, _ = self.door.accept()
            caller.setblocking(True)
            caller.recv(8)

    def close(self) -> None:
        self.door.close()
        super().close()


@caught_by("test_closed_twice_and_with_a_dead_peer", "is closed already")
class ClosesOnce(EchoTransport):
    """Raises when it is closed again."""

    over = False

    def close(self) -> None:
        if self.over:
            raise TransportError("It is closed already", cure="none")
        self.over = True
        super().close()


@caught_by("test_closed_with_a_stopped_peer", "`close` has not returned within")
class CloseWaits(EchoTransport):
    """Reads to the end when it is closed."""

    running: Any = None

    def submit(self, plan: Any) -> Any:
        self.running = super().submit(plan)
        return self.running

    def close(self) -> None:
        with suppress(WeightTransferError):
            while self.running is not None and not self.poll(self.running).done:
                time.sleep(0.001)
        super().close()


@caught_by("test_what_is_closed_is_used_no_more", "DID NOT RAISE")
class NeverCloses(EchoTransport):
    """Works on when it is closed."""

    def close(self) -> None:
        pass


@caught_by("test_a_new_transport_in_the_same_process", "one a process")
class OneAProcess(EchoTransport):
    """Cannot be made again in a process."""

    made: ClassVar[list[str]] = []

    def __init__(self, name: str, device: torch.device) -> None:
        if self.made:
            raise TransportError("There is one a process", cure="none")
        self.made.append(name)
        super().__init__(name, device)


# -- many --------------------------------------------------------------------------------------


def _only_one(name: str) -> socket.socket:
    """Something of which there is one a name in the whole machine."""
    token = socket.socket(socket.AF_UNIX)
    try:
        token.bind("\0vllm-wt-mutant-" + name)
    except OSError:
        token.close()
        raise TransportError("There may be one at a time", cure="none") from None
    return token


@caught_by("test_many_readers_at_a_time", "one at a time")
class OneReaderOnly(EchoTransport):
    """Lets one reader in."""

    token: socket.socket | None = None

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        self.token = _only_one(owner)
        super().open(owner, generation, handle, deadline)


@caught_by("test_many_owners_in_a_plan", "one owner")
class OneOwnerOnly(EchoTransport):
    """Opens one owner."""

    opened: str | None = None

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        if self.opened not in {None, owner}:
            raise TransportError("There may be one owner", cure="none")
        super().open(owner, generation, handle, deadline)
        self.opened = owner


@caught_by(
    "test_serving_takes_no_second_copy",
    "MiB more while",
)
class ServesACopy(Noting):
    """Keeps a copy of what it serves."""

    def expose(self, region: Any, generation: int) -> bytes:
        self.copies = [torch.empty_like(tensor) for tensor in self.tensors]
        return super().expose(region, generation)

    def progress(self) -> None:
        super().progress()
        if hasattr(self, "copies"):
            for copy, tensor in zip(self.copies, self.tensors, strict=True):
                copy.copy_(tensor)


# -- hygiene -----------------------------------------------------------------------------------


@caught_by("test_generations_leave_nothing_behind", "more threads")
class LeaksAThread(EchoTransport):
    """Leaves a thread behind."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@caught_by("test_generations_leave_nothing_behind", "more names")
class LeavesFiles(EchoTransport):
    """Leaves a file in the temporary folder when it is closed."""

    def close(self) -> None:
        super().close()
        os.close(tempfile.mkstemp()[0])


@caught_by("test_readers_that_were_killed_leave_nothing_behind", "more files")
class KeepsDeadReaders(EchoTransport):
    """An owner that holds the connections of readers that have gone."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        self.kept: dict[Any, int] = {}

    def progress(self) -> None:
        super().progress()
        for reader in self._readers:
            if reader not in self.kept:
                self.kept[reader] = os.dup(reader.sock.fileno())


@caught_by("test_nothing_is_read_at_once", "ValueError")
class NeedsBuffers(EchoTransport):
    """Cannot register a list of no buffers."""

    def register(self, buffers: Sequence[torch.Tensor]) -> Any:
        max(buffer.numel() for buffer in buffers)
        return super().register(buffers)


@caught_by("test_generations_leave_nothing_behind", "more files")
class LeaksAFile(EchoTransport):
    """Leaves an open file behind."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        os.open(os.devnull, os.O_RDONLY)


@caught_by("test_a_hundred_passes_leave_nothing_behind", "more files")
class LeaksAFileAPass(EchoTransport):
    """Leaves an open file behind for each pass."""

    def submit(self, plan: Any) -> Any:
        os.open(os.devnull, os.O_RDONLY)
        return super().submit(plan)


@caught_by("test_a_hundred_passes_leave_nothing_behind", "more MiB")
class LeaksMemoryAPass(Noting):
    """Leaves memory behind for each pass."""

    def submit(self, plan: Any) -> Any:
        self.tensors += [torch.ones(4 << 20, dtype=torch.uint8)]
        return super().submit(plan)


@caught_by("test_a_transport_unpickles_nothing", r"unpickled\(\) == \[\]")
class UnpicklesTheHandle(EchoTransport):
    """Has pickled handles."""

    def expose(self, region: Any, generation: int) -> bytes:
        return pickle.dumps(super().expose(region, generation))

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        super().open(owner, generation, pickle.loads(handle), deadline)


@caught_by("test_foreign_bytes_are_refused", r"unpickled\(\) == \[\]")
class UnpicklesWhatIsForeign(EchoTransport):
    """Tries whether a handle that it does not know is a pickle."""

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        try:
            super().open(owner, generation, handle, deadline)
        except CorruptTransfer:
            with suppress(Exception):
                pickle.loads(handle)
            raise


# -- packages ----------------------------------------------------------------------------------


@caught_by("test_the_classes_exist_and_have_the_methods", "no method .*notify")
class LacksAMethod(EchoTransport):
    """Has no notify."""

    notify = None  # type: ignore[assignment]


@caught_by("test_the_classes_exist_and_have_the_methods", "cannot be called as")
class WrongSignature(EchoTransport):
    """Has an open without a deadline."""

    def open(self, owner: str, generation: int, handle: bytes) -> None:  # type: ignore[override]
        super().open(owner, generation, handle, Deadline(20))


@caught_by("test_offsets_beyond_4_gib_are_exact", "at offset")
class OffsetsOf31Bits(EchoTransport):
    """Counts on from zero beyond 2 GiB."""

    def prepare(self, region: Any, copies: Sequence[Copy]) -> Any:
        wrapped = [
            replace(
                copy,
                source_offset=copy.source_offset % 2**31,
                target_offset=copy.target_offset % 2**31,
            )
            for copy in copies
        ]
        return super().prepare(region, wrapped)


@caught_by("test_as_many_copies_as_promised_are_exact", "too many")
class PromisesTooMuch(EchoTransport):
    """Takes fewer copies than its properties say."""

    def prepare(self, region: Any, copies: Sequence[Copy]) -> Any:
        if len(copies) > 16384:
            raise TransportError("too many", cure="send fewer")
        return super().prepare(region, copies)


@caught_by("test_a_report_shows_in_its_ticket_only", "does not know")
class TicketsOf16Bits(EchoTransport):
    """Cuts the number of a ticket."""

    def notify(self, owner: str, ticket: int) -> None:
        super().notify(owner, ticket % 2**16)


@caught_by("test_eight_tickets_are_remembered", "assert")
class RemembersOneTicket(EchoTransport):
    """Knows the reports of the latest ticket only."""

    def readers(self, ticket: int) -> frozenset[str]:
        found = super().readers(ticket)
        return found if ticket == max(self._reports, default=ticket) else frozenset()


@caught_by("test_long_names_are_told_apart", "does not know")
class CutsNames(EchoTransport):
    """Cuts the names of readers."""

    def readers(self, ticket: int) -> frozenset[str]:
        return frozenset(name[:64] for name in super().readers(ticket))


@caught_by("test_one_region_goes_and_the_other_stays", "DID NOT RAISE|Revoked|revoked|expose")
class RevokesEverything(EchoTransport):
    """Revokes all generations at once."""

    def revoke(self, generation: int) -> None:
        for exposed in (*self._exposed, generation):
            super().revoke(exposed)


@caught_by("test_one_region_goes_and_the_other_stays", "DID NOT RAISE")
class RevokesTheLatest(EchoTransport):
    """Revokes a generation only while it is the newest."""

    def revoke(self, generation: int) -> None:
        if generation >= max(self._exposed, default=0):
            super().revoke(generation)


@caught_by("test_a_stopped_owner_holds_up_no_other_call", "has not returned within")
class NotifyWaits(EchoTransport):
    """Waits for the owner's answer to a report."""

    def notify(self, owner: str, ticket: int) -> None:
        super().notify(owner, ticket)
        connection = self._require_open(owner)
        connection.confirm()
        while connection.awaited:
            connection.drive()
            time.sleep(0.001)


@caught_by("test_one_byte_that_changed_is_read", "assert")
class SkipsEqualHeads(EchoTransport):
    """Takes a copy whose first bytes have not changed for one that has not."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        self.last: list[bytes] = []

    def poll(self, operation: Any) -> Progress:
        was_done = operation.done
        progress = super().poll(operation)
        if progress.done and not was_done:
            views = [
                operation.plan.region.buffers[copy.target][copy.target_offset :][: copy.nbytes]
                for copies in operation.plan.copies.values()
                for copy in copies
            ]
            for view, last in zip(views, self.last, strict=False):
                if view[:16] == last[:16]:
                    view[:] = last
            self.last = [bytes(view) for view in views]
        return progress


@caught_by("test_a_plan_is_used_hundreds_of_times", "sequence")
class PassesOf8Bits(EchoTransport):
    """Has a byte for the number of a pass."""

    passes = 0

    def submit(self, plan: Any) -> Any:
        self.passes += 1
        if self.passes > 255:
            raise TransportError("out of sequence numbers", cure="connect again")
        return super().submit(plan)


@caught_by("test_plans_live_side_by_side", r"not_filled\(")
class WritesToTheLastRegion(EchoTransport):
    """Takes the region that was registered last for that of a plan."""

    def submit(self, plan: Any) -> Any:
        last = list(self._regions)[-1]
        return super().submit(replace(plan, region=last))


@caught_by("test_an_owner_that_stops_and_goes_on_has_only_been_slow", "retries")
class RetriesExhausted(EchoTransport):
    """Gives up after two seconds of silence, whatever the deadline."""

    heard = (0.0, -1)

    def poll(self, operation: Any) -> Progress:
        progress = super().poll(operation)
        if progress.nbytes != self.heard[1] or progress.done:
            self.heard = (time.monotonic(), progress.nbytes)
        elif time.monotonic() - self.heard[0] > 2:
            raise PeerDead("retries exhausted", cure="connect again")
        return progress


@caught_by("test_generations_leave_nothing_behind", "more MiB")
class KeepsTheArena(EchoTransport):
    """Holds what it had registered after it is closed."""

    kept: ClassVar[list[Any]] = []

    def close(self) -> None:
        self.kept.extend(self._regions.values())
        super().close()


@caught_by("test_generations_leave_nothing_behind", "more children")
class LeavesChildren(EchoTransport):
    """Starts a process for each connection, and does not end it."""

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        super().open(owner, generation, handle, deadline)
        subprocess.Popen(["sleep", "60"])


@caught_by("test_nothing_is_written_after_a_close", r"not_filled\(")
class WritesAfterAClose(EchoTransport):
    """Something goes on writing when it is closed in the middle of a pass."""

    def close(self) -> None:
        operation = self._operation
        if operation is not None and not operation.done and not self._closed:
            held = [buffer for buffers in self._regions.values() for buffer in buffers]
            threading.Thread(target=_write_late, args=(held,), daemon=True).start()
        super().close()


def _write_late(tensors: list[torch.Tensor]) -> None:
    time.sleep(0.1)
    for tensor in tensors:
        tensor[-8:] = 255


@caught_by("test_a_transport_unpickles_nothing", r"unpickled\(\) == \[\]")
class UnpicklesInC(EchoTransport):
    """Unpickles without the module `pickle`."""

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        with suppress(Exception):
            _pickle.loads(handle)
        super().open(owner, generation, handle, deadline)


@caught_by("test_many_readers_at_a_time", "Timeout|PeerDead|gone|answered")
class FourReaders(EchoTransport):
    """Turns the fifth reader away."""

    def progress(self) -> None:
        super().progress()
        for reader in [r for r in self._readers if r.reader][4:]:
            reader.sock.close()


@caught_by("test_the_classes_exist_and_have_the_methods", r"there is no method \w+\.map")
class MapsByItsWordAlone(EchoTransport):
    """Says that it maps, and has none of the methods."""

    properties = replace(EchoTransport.properties, maps=True)
