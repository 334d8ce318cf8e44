"""What the workers of real engines say of themselves, asked as a trainer asks."""

from __future__ import annotations

from contextlib import closing

import pytest

from vllm_wt.clients.http import HttpClient
from vllm_wt.clients.relay import RelayClient
from vllm_wt.errors import TornModel
from vllm_wt.reports import WorkerReport, decoded

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def assert_received(reports: tuple[WorkerReport, ...], version: int, ranks: int) -> None:
    """Each rank holds this version, whole, and says where it has received it, and why."""
    assert [report.rank for report in reports] == list(range(ranks))
    for report in reports:
        assert (report.version, report.torn, report.state) == (version, False, "idle")
        assert report.streams is False
        assert report.facts["staging"] == "device"
        assert "MiB" in str(report.facts["why"])
        assert report.facts["arena_nbytes"] >= report.facts["needed_nbytes"] > 0


def test_ranks_of_an_llm_say_what_they_hold(engine):
    trainer = engine.trainer()
    trainer.call("connect")
    with closing(RelayClient(engine.folder / "engine.sock")) as relay:
        for version in (1, 2):
            trainer.call("randomize", version)
            trainer.call("push", version)
            reports = decoded(engine.client.reports(), where="reports")
            assert_received(reports, version, engine.tp)
            assert decoded(relay.reports(), where="reports") == reports
            engine.assert_in_step()


def test_ranks_of_a_server_say_what_they_hold(server):
    trainer = server.trainer()
    trainer.call("connect", 60.0, server.url)
    with closing(HttpClient(server.url)) as client:
        for version in (1, 2):
            trainer.call("randomize", version)
            trainer.call("push", version)
            reports = decoded(client.reports(), where="reports")
            assert_received(reports, version, server.tp)
            server.assert_in_step()


def test_every_rank_says_that_it_is_torn(engine):
    trainer = engine.trainer()
    trainer.call("connect")
    trainer.call("randomize", 1)
    trainer.call("push", 1)
    trainer.call("randomize", 2)
    engine.fail_once("apply", 0)
    with pytest.raises(TornModel):
        trainer.call("push", 2)
    reports = decoded(engine.client.reports(), where="reports")
    assert [(report.version, report.torn) for report in reports] == [(1, True)] * engine.tp
    engine.assert_in_step()
    trainer.call("push", 3)
    assert_received(decoded(engine.client.reports(), where="reports"), 3, engine.tp)
