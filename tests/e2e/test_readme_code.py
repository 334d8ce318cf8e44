"""The README's trainer, run as printed, on an `LLM` and on a server's URL."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from vllm_wt.testing.models import random_model, randomize, save_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
README = Path(__file__).parents[2] / "README.md"


def test_trainer_code(host, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.S | re.M)
    script = tmp_path / "trainer.py"
    script.write_text(blocks[1])
    model = random_model(host.shape, seed=0)
    seeds = iter((41, 42, 43))
    result = runpy.run_path(
        str(script),
        init_globals={
            "engine": host.target,
            "model": model,
            "train_step": lambda model: randomize(model, next(seeds)),
        },
    )["result"]
    assert result.version == 3
    save_checkpoint(model, tmp_path / "checkpoint")
    assert host.tokens() == host.reference(tmp_path / "checkpoint")
