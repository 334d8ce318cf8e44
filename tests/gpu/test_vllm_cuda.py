"""A trainer on CUDA pushes weights into a real engine on the same GPU.

The oracles: transformers in float32, which shares no code with vLLM; in any dtype a fresh engine of
the same setting that loads the same checkpoint, by its tokens and by digests of all its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainers import in_background, wait_for

from vllm_wt.errors import PeerDead
from vllm_wt.testing.models import reference_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_three_rounds_then_the_same_as_a_fresh_engine(
    engine: Any, fresh: Callable[[str], Any]
) -> None:
    assert engine.graphs == engine.setting.graphs
    addresses = engine.rpc("wt_addresses")
    trainer = engine.trainer()
    trainer.call("connect")
    seen = [engine.tokens()]
    for version in (1, 2, 3):
        checkpoint = trainer.call("randomize", version)
        result = trainer.call("push", version)
        assert result["version"] == version
        tokens = engine.tokens()
        assert tokens not in seen
        seen.append(tokens)
        if engine.setting.dtype == "float32":
            assert tokens == reference_tokens(Path(checkpoint), engine.prompts, len(tokens[0]))
        state = engine.rpc("wt_state")
        assert (state["state"], state["version"], state["torn"]) == ("idle", version, False)
        assert state["meta"] == []
        print(engine.setting, result)
    assert trainer.call("registrations") == 1
    assert engine.rpc("wt_addresses") == addresses
    other = fresh(checkpoint)
    assert other.tokens() == seen[-1]
    assert other.rpc("wt_digests") == engine.rpc("wt_digests")


@pytest.mark.parametrize("staging", ["host", "none"])
def test_received_on_the_host_or_a_part_at_a_time_it_is_the_same(engine: Any, staging: str) -> None:
    first = engine.trainer()
    first.call("connect", 60.0, None, {"staging": "device"})
    first.call("randomize", 20)
    first.call("push", 1)
    tokens, digests = engine.tokens(), engine.rpc("wt_digests")
    engine.rpc("wt_streamed_nbytes", 1 << 20)
    second = engine.trainer()
    second.call("reconnect", 60.0, None, {"staging": staging}, True)
    second.call("randomize", 21)
    print(second.call("push", 1))
    assert engine.rpc("wt_digests") != digests
    second.call("randomize", 20)
    print(second.call("push", 2))
    assert engine.rpc("wt_digests") == digests
    assert engine.tokens() == tokens
    said = engine.rpc("wt_staging")
    assert said["staging"] == staging
    assert (len(said["batches"]) > 2) == (staging == "none")
    assert not engine.rpc("wt_state")["torn"]


def test_a_trainer_killed_in_a_round_leaves_the_old_weights_and_a_new_one_syncs(
    engine: Any,
) -> None:
    first = engine.trainer()
    first.call("connect")
    first.call("randomize", 10)
    first.call("push", 1)
    old, digests = engine.tokens(), engine.rpc("wt_digests")
    first.call("randomize", 11)
    engine.rpc("wt_hold_read")
    pushing = in_background(lambda: first.call("push", 2))
    wait_for(lambda: engine.rpc("wt_state")["state"] == "receiving")
    first.kill()
    with pytest.raises(PeerDead):
        pushing.result(60)
    engine.rpc("wt_let_go")
    assert engine.tokens() == old
    assert engine.rpc("wt_digests") == digests
    second = engine.trainer()
    second.call("connect")
    checkpoint = second.call("randomize", 12)
    second.call("push", 1)
    tokens = engine.tokens()
    assert tokens != old
    assert not engine.rpc("wt_state")["torn"]
    second.call("randomize", 10)
    second.call("push", 2)
    assert engine.tokens() == old
    assert engine.rpc("wt_digests") == digests
    if engine.setting.dtype == "float32":
        assert tokens == reference_tokens(Path(checkpoint), engine.prompts, len(tokens[0]))
