"""A trainer process that is killed, stopped or cut off while it syncs a server over HTTP."""

from __future__ import annotations

import pytest
from cutting import cutting_link
from trainers import in_background, wait_for

from vllm_wt import WeightSync
from vllm_wt.errors import PeerDead, Superseded, Timeout
from vllm_wt.testing.models import random_model, randomize, save_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

INIT = ("/init_weight_transfer_engine", "")
START = ("/start_weight_update", "")
OPEN, SEAL, CONFIRM = (("/update_weights", op) for op in ("open", "seal", "confirm"))
FINISH = ("/finish_weight_update", "")


def _connected(server):
    trainer = server.trainer()
    trainer.call("connect", 60.0, server.url)
    return trainer


def _new_trainer_syncs(server, seed):
    trainer = server.trainer()
    checkpoint = trainer.call("randomize", seed)
    trainer.call("connect", 60.0, server.url)
    trainer.call("push", 1)
    assert server.tokens() == server.reference(checkpoint)
    server.assert_in_step()


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_trainer_that_ends_in_the_middle(server, end):
    """Killed or frozen while the workers read: they keep their deadline, a new trainer takes over."""
    trainer = _connected(server)
    old, digests = server.tokens(), server.checksums()
    server.rpc("wt_hold_read")
    trainer.call("randomize", 800)
    pushing = in_background(lambda: trainer.call("push", 1))
    wait_for(lambda: all(state["state"] == "receiving" for state in server.state()))
    getattr(trainer, end)()
    server.assert_in_step()
    assert server.tokens() == old
    assert server.checksums() == digests
    _new_trainer_syncs(server, seed=801)
    if end == "stop":
        trainer.go_on()
        with pytest.raises(Superseded, match="Another trainer has connected"):
            pushing.result(60)
    else:
        with pytest.raises(PeerDead):
            pushing.result(60)
    server.assert_in_step()


@pytest.mark.parametrize("when", ["before", "after"])
def test_link_that_breaks_in_a_round(server, tmp_path, when):
    """The call, or just the answer to it, gets lost."""
    model = random_model(server.shape, seed=0)
    with (
        cutting_link(server.url) as link,
        WeightSync.connect(link.url, backend="rdma", source=model) as sync,
    ):
        sync.push(1)
        version = 1
        for call in (START, OPEN, SEAL, FINISH, CONFIRM):
            digests = server.checksums()
            randomize(model, seed=811 + version)
            setattr(link, f"cut_{when}", call)
            with pytest.raises(PeerDead) as error:
                sync.push(version + 1)
            assert call[0] in error.value.where
            assert error.value.cure
            server.assert_in_step()
            committed = call == CONFIRM or (call, when) == (FINISH, "after")
            assert (server.checksums() != digests) == committed, call
            (status,) = sync.status()
            holds = version + committed
            assert (status.version, status.torn, status.error) == (holds, False, None), call
            version += 2
            randomize(model, seed=810 + version)
            sync.push(version)
            save_checkpoint(model, tmp_path / str(version))
            assert server.tokens() == server.reference(tmp_path / str(version)), call
            server.assert_in_step()


@pytest.mark.parametrize("when", ["before", "after"])
def test_link_that_breaks_at_connect(server, when):
    model = random_model(server.shape, seed=0)
    with cutting_link(server.url) as link:
        setattr(link, f"cut_{when}", INIT)
        with pytest.raises(PeerDead) as error:
            WeightSync.connect(link.url, backend="rdma", source=model)
        assert INIT[0] in error.value.where
        server.assert_in_step()
        with WeightSync.connect(link.url, backend="rdma", source=model) as sync:
            sync.push(1)
    server.assert_in_step()


def test_server_that_is_not_there(server):
    """B55's kind: the trainer says so at once, instead of waiting for a receiver."""
    with cutting_link(server.url) as link:
        url = link.url
    model = random_model(server.shape, seed=0)
    with pytest.raises(PeerDead) as error:
        WeightSync.connect(url, backend="rdma", source=model)
    assert url in error.value.where
    assert "start the server" in error.value.cure


@pytest.mark.slow
def test_trainer_that_stops_polling_times_out_at_connect(server):
    trainer = _connected(server)
    old = server.tokens()
    info = trainer.call("describe", 2.0)
    trainer.stop()
    with pytest.raises(Timeout, match="has not answered"):
        server.call("init_weight_transfer_engine", info)
    server.assert_in_step()
    assert server.tokens() == old
    trainer.kill()
    _new_trainer_syncs(server, seed=820)
