"""An engine that comes and goes while its trainer goes on; and one that two trainers want."""

from __future__ import annotations

import socket

import pytest

from vllm_wt import WeightSync
from vllm_wt.errors import Superseded, WrongOrder
from vllm_wt.testing.models import random_model, randomize, save_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def _saved(server, model, folder):
    save_checkpoint(model, folder)
    return server.reference(folder)


def test_a_snapshot_is_what_the_trainer_had_when_it_published(server, tmp_path):
    """The trainer writes to its weights as soon as `publish` has returned; what comes later gets that
    version, too."""
    model = random_model(server.shape, seed=950)
    published = _saved(server, model, tmp_path / "published")
    with WeightSync.connect(
        server.url, backend="rdma", source=model, snapshot="host", staging="host"
    ) as sync:
        sync.publish(1)
        randomize(model, seed=951)
        assert list(sync.wait().engines) == ["engine0"]
        assert server.tokens() == published

        sync.remove("engine0")
        other = random_model(server.shape, seed=952)
        with WeightSync.connect(server.url, backend="rdma", source=other) as second:
            second.push(1)
        assert server.tokens() == _saved(server, other, tmp_path / "other")

        assert sync.add(server.url) == ["engine1"]
        assert server.tokens() == published
        assert [status.version for status in sync.status()] == [1]
        sync.push(2)
        assert server.tokens() == _saved(server, model, tmp_path / "pushed")
    server.assert_in_step()


def test_weights_may_be_written_to_once_nobody_reads_them(server, tmp_path):
    model = random_model(server.shape, seed=953)
    published = _saved(server, model, tmp_path / "published")
    with WeightSync.connect(server.url, backend="rdma", source=model) as sync:
        sync.publish(1)
        sync.wait_readers()
        randomize(model, seed=954)
        sync.wait()
    assert server.tokens() == published
    server.assert_in_step()


def test_a_second_trainer_is_refused_unless_it_means_it(server, tmp_path):
    first = server.trainer()
    first.call("connect", 60.0, server.url)
    checkpoint = first.call("randomize", 955)
    first.call("push", 1)
    model = random_model(server.shape, seed=956)
    with pytest.raises(WrongOrder, match="has a trainer already") as error:
        WeightSync.connect(server.url, backend="rdma", source=model)
    assert f"process {first.pid} on {socket.gethostname()}" in str(error.value)
    assert server.tokens() == server.reference(checkpoint)
    first.call("push", 2)  # it goes on
    with WeightSync.reconnect(server.url, backend="rdma", source=model) as sync:
        sync.push(1)
        assert server.tokens() == _saved(server, model, tmp_path / "second")
        with pytest.raises(Superseded):
            first.call("push", 3)
        sync.push(2)
    server.assert_in_step()
