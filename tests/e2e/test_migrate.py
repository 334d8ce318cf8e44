"""The code of docs/migrate.md, run as printed, in its order, on real engines."""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from native_trainers import NativeTrainer
from trainers import in_background

from vllm_wt.testing.engines import environment, greedy_tokens, settings
from vllm_wt.testing.models import (
    ModelShape,
    prompts,
    random_model,
    randomize,
    reference_tokens,
    save_checkpoint,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

DOCUMENT = Path(__file__).parents[2] / "docs" / "migrate.md"
BLOCKS = re.findall(r"^```python\n# (\w+)\n(.*?)^```", DOCUMENT.read_text(), re.S | re.M)
NEW_TOKENS = 8
SHAPE = ModelShape(vocab=500)

OWN = f"""

def main(folder):
    import json
    from vllm_wt.testing.engines import greedy_tokens, start_llm
    from vllm_wt.testing.models import ModelShape, prompts, random_model, randomize

    shape = ModelShape(vocab={SHAPE.vocab})
    llm = start_llm(folder / "start", shape.dtype, "my_weight_transfer")
    llm.init_weight_transfer_engine({{"init_info": {{"folder": str(folder)}}}})
    model = random_model(shape, seed=0)
    randomize(model, 5)
    MyWeightTransferEngine.trainer_send_weights(
        iterator=model.named_parameters(), trainer_args={{"file": folder / "weights"}}
    )
    llm.start_weight_update()
    llm.update_weights({{"update_info": {{"file": "weights"}}}})
    llm.finish_weight_update()
    tokens = greedy_tokens(llm, prompts(shape, count=3), {NEW_TOKENS})
    (folder / "tokens.json").write_text(json.dumps(tokens))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    import sys

    main(Path(sys.argv[1]))
"""


class Sides:
    """Where each block runs: the engine's in this process, the trainer's in one of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {"model_dir": str(folder / "start")}
        self.trainer = NativeTrainer(folder, SHAPE)
        self.prompts = prompts(SHAPE, count=3)
        save_checkpoint(random_model(SHAPE, seed=0), folder / "start")

    def script(self, number: int) -> str:
        script = self.folder / f"block{number}.py"
        script.write_text(BLOCKS[number][1])
        return str(script)

    def run(self, number: int) -> None:
        """An engine's block; its names are there for the next one."""
        assert BLOCKS[number][0] == "engine"
        found = runpy.run_path(self.script(number), init_globals=self.names)
        self.names |= {name: value for name, value in found.items() if name[:2] != "__"}

    def begin(self, number: int) -> None:
        """A trainer's block, which its process begins."""
        assert BLOCKS[number][0] == "trainer"
        self.trainer.begin("run", self.script(number))

    def assert_holds(self, checkpoint: Path) -> None:
        tokens = greedy_tokens(self.names["llm"], self.prompts, NEW_TOKENS)
        assert tokens == reference_tokens(checkpoint, self.prompts, NEW_TOKENS)

    def close(self) -> None:
        self.trainer.close()
        if (llm := self.names.pop("llm", None)) is not None:
            llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    made = Sides(tmp_path)
    yield made
    made.close()


def test_the_code_as_printed(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(1).items():
        monkeypatch.setenv(name, value)
    import vllm

    small = settings(Path(), SHAPE.dtype, "", 1)
    for given in ("model", "weight_transfer_config"):
        small.pop(given)
    monkeypatch.setattr(vllm, "LLM", functools.partial(vllm.LLM, **small))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = {"master_address": "127.0.0.1", "master_port": probe.getsockname()[1]}
    place["world_size"] = 2
    sides.names |= place
    sides.trainer.call("let", **place)
    engine, init, trainer_init, send, receive, sync = range(6)

    sides.run(engine)
    connecting = in_background(lambda: sides.run(init))
    sides.begin(trainer_init)
    sides.trainer.answer()
    connecting.result()

    checkpoint = Path(sides.trainer.call("randomize", 1))
    parameters = dict(random_model(SHAPE, seed=0).named_parameters())
    sides.names["names"] = list(parameters)
    sides.names["dtype_names"] = [str(each.dtype).split(".")[-1] for each in parameters.values()]
    sides.names["shapes"] = [list(each.shape) for each in parameters.values()]
    sides.begin(send)
    sides.run(receive)
    sides.trainer.answer()
    sides.assert_holds(checkpoint)

    model, seeds = random_model(SHAPE, seed=0), iter((2, 3, 4))
    names = {"engine": sides.names["llm"], "model": model}
    names["train_step"] = lambda model: randomize(model, next(seeds))
    runpy.run_path(sides.script(sync), init_globals=names)
    save_checkpoint(model, sides.folder / "synced")
    sides.assert_holds(sides.folder / "synced")


@pytest.mark.slow  # an engine of its own; tests/e2e/test_native.py has another that is registered
def test_the_engine_of_ones_own_as_printed(tmp_path: Path) -> None:
    """It is registered by the script that starts vLLM, and nowhere else."""
    (tmp_path / "own.py").write_text(BLOCKS[-1][1] + OWN)
    model = random_model(SHAPE, seed=0)
    save_checkpoint(model, tmp_path / "start")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "own.py"), str(tmp_path)],
        env=os.environ | environment(1),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    randomize(model, 5)
    save_checkpoint(model, tmp_path / "own")
    tokens = json.loads((tmp_path / "tokens.json").read_text())
    assert tokens == reference_tokens(tmp_path / "own", prompts(SHAPE, count=3), NEW_TOKENS)


def test_each_block_says_where_it_runs() -> None:
    text = DOCUMENT.read_text()
    assert len(BLOCKS) == text.count("```python\n") == 7
    assert {where for where, _ in BLOCKS} == {"engine", "trainer"}


def test_the_tables_have_each_field() -> None:
    from dataclasses import fields

    from vllm_wt_nccl import (
        NCCLTrainerSendWeightsArgs,
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )

    text = DOCUMENT.read_text()
    for cls in (
        NCCLTrainerSendWeightsArgs,
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    ):
        for field in fields(cls):
            assert f"`{field.name}`" in text, field.name


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", DOCUMENT.read_text()):
        assert (DOCUMENT.parent / target).exists(), target
