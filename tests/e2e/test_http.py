"""A trainer pushes weights into a real server over HTTP, and the server generates with them."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from vllm_wt import WeightSync
from vllm_wt.clients.http import HttpClient
from vllm_wt.errors import EngineError, LoadError
from vllm_wt.testing.models import random_model, randomize, save_checkpoint
from vllm_wt.testing.servers import start_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

NORM = "model.norm.weight"

TRAINER = """
import json, sys
sys.modules["vllm"] = None  # the trainer must do without
from pathlib import Path
from vllm_wt import WeightSync
from vllm_wt.clients.http import HttpClient
from vllm_wt.testing.models import ModelShape, random_model, randomize, save_checkpoint

url, shape, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
model = random_model(ModelShape(**shape), seed=0)
with WeightSync.connect(HttpClient(url), backend="rdma", source=model) as sync:
    for line in sys.stdin:
        version = int(line)
        randomize(model, seed=100 + version)
        save_checkpoint(model, folder / f"pushed{version}")
        print("pushed", sync.push(version).version, flush=True)
"""


def test_three_rounds_from_a_trainer_process(server, tmp_path):
    arguments = [server.url, json.dumps(vars(server.shape)), str(tmp_path)]
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        seen = [server.tokens()]
        for version in (1, 2, 3):
            print(version, file=trainer.stdin, flush=True)
            # UCX may log in between; the end of the output is a trainer that died.
            said = next(line for line in trainer.stdout if line.startswith("pushed"))
            assert said == f"pushed {version}\n"
            tokens = server.tokens()
            assert tokens == server.reference(tmp_path / f"pushed{version}")
            assert tokens not in seen
            seen.append(tokens)
            assert server.version() == str(version)
        trainer.stdin.close()
        assert trainer.wait(30) == 0
    finally:
        trainer.kill()
        trainer.wait(10)
        trainer.stdin.close()
        trainer.stdout.close()


def test_what_a_worker_refuses_arrives_typed_and_a_good_round_follows(server, tmp_path):
    old, digests, version = server.tokens(), server.checksums(), server.version()
    model = random_model(server.shape, seed=50)
    state = dict(model.named_parameters())
    del state[NORM]
    with closing(HttpClient(server.url)) as client:
        with pytest.raises(LoadError) as refused:
            WeightSync.connect(client, backend="rdma", source=state)
        assert NORM in str(refused.value)
        assert refused.value.cure
        assert refused.value.backend == "rdma"
        assert server.checksums() == digests
        assert server.tokens() == old
        assert server.version() == version

        with WeightSync.connect(client, backend="rdma", source=model) as sync:
            randomize(model, seed=51)
            save_checkpoint(model, tmp_path / "good")
            assert client.world_size() == server.tp
            sync.push(77)
            assert client.weight_version() == server.version() == "77"
    changed = {name for name, digest in server.checksums().items() if digest != digests[name]}
    assert changed
    assert server.tokens() == server.reference(tmp_path / "good") != old


@pytest.mark.xdist_group("servers")
def test_a_server_that_cannot_start_says_why(tmp_path: Path):
    with pytest.raises(EngineError, match="exit code") as failed:
        start_server(tmp_path / "no-such-model", "float32", "rdma")
    assert "no-such-model" in failed.value.got
