"""WT-17 and WT-18: what an owner takes back, and what it is told."""

from __future__ import annotations

import pytest

from vllm_wt.errors import Revoked
from vllm_wt.testing.conformance.gate import transports_only
from vllm_wt.testing.conformance.harness import LONG_S, EndpointProcess, Harness, until
from vllm_wt.testing.conformance.process import MOMENTS_S

_LARGE = 40 << 20


@transports_only
class RevokingChecks:
    def test_what_was_revoked_is_not_read(self, harness: Harness) -> None:
        """WT-17"""
        owner, reader = harness.connected()
        assert reader.read("plan") == 100_000
        reader.fill("arena", 0)
        owner.revoke(1)
        with pytest.raises(Revoked):
            reader.read("plan")
        assert reader.not_filled("arena", 0) is None

    def test_generations_never_mix(self, harness: Harness) -> None:
        """WT-17: revoked, and written anew, while it is read."""
        owner, reader = harness.connected(_LARGE)
        reader.submit("plan")
        reader.poll_until("plan", 1, LONG_S, within=LONG_S + MOMENTS_S)
        owner.revoke(1)
        owner.write("weights", 2)
        try:
            end = reader.poll_until("plan", 1 << 62, LONG_S, within=LONG_S + MOMENTS_S)
        except Revoked:
            return
        assert end["done"], "a pass over what was revoked neither ends nor fails"
        assert reader.wrong_byte("arena", 1, within=LONG_S) is None

    def test_the_next_generation_is_read_after_a_revoke(self, harness: Harness) -> None:
        """WT-17: in the same memory."""
        owner, reader = harness.connected()
        owner.revoke(1)
        owner.write("weights", 2)
        owner.expose("weights", 2)
        with pytest.raises(Revoked):
            reader.read("plan")
        fresh = harness.reader_of(owner, 2, [100_000])
        assert fresh.read("plan") == 100_000
        assert fresh.wrong_byte("arena", 2) is None

    def test_revoking_what_is_not_exposed_does_nothing(self, harness: Harness) -> None:
        """WT-17"""
        owner, reader = harness.connected()
        owner.revoke(7)
        owner.revoke(0)
        assert reader.read("plan") == 100_000
        owner.revoke(1)
        owner.revoke(1)

    def test_a_report_shows_in_its_ticket_only(self, harness: Harness) -> None:
        """WT-18"""
        owner, reader = harness.connected()
        assert owner.readers(1) == []
        for ticket in (1, 2, 2**16 + 1, 2**31 + 1, 2**53):
            reader.read("plan")
            assert owner.readers(ticket) == []
            reader.notify(owner.name, ticket)
            _await_readers(owner, ticket, [reader.name])
        assert owner.readers(4) == []
        reader.notify(owner.name, 2**53)
        assert reader.read("plan") == 100_000
        assert owner.readers(2**53) == [reader.name]

    def test_eight_tickets_are_remembered(self, harness: Harness) -> None:
        """WT-18"""
        owner, reader = harness.connected()
        for ticket in range(1, 9):
            reader.notify(owner.name, ticket)
        _await_readers(owner, 8, [reader.name])
        assert [owner.readers(ticket) for ticket in range(1, 9)] == [[reader.name]] * 8

    def test_long_names_are_told_apart(self, harness: Harness) -> None:
        """WT-18: of 128 characters, the last of which differ."""
        owner, readers = harness.owner([1000]), [harness.reader(), harness.reader()]
        for last, reader in zip("ab", readers, strict=True):
            reader.close()
            reader.renew("n" * 127 + last)
            reader.hold("arena", [1000])
            harness.connect(reader, owner, 1, [1000])
            assert reader.read("plan") == 1000
        readers[1].notify(owner.name, 1)
        _await_readers(owner, 1, ["n" * 127 + "b"])

    def test_reports_of_a_pass_need_no_further_call(self, harness: Harness) -> None:
        """WT-18: a reader that has nothing more to do is heard."""
        owner, reader = harness.connected()
        reader.read("plan")
        reader.notify(owner.name, 1)
        _await_readers(owner, 1, [reader.name])


def _await_readers(owner: EndpointProcess, ticket: int, names: list[str]) -> None:
    until(
        lambda: owner.readers(ticket) == names,
        MOMENTS_S,
        f"the owner does not know that {names} reported ticket {ticket}",
    )
