"""The demo's trainer: a process of its own, in which vllm cannot be imported."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(config: dict[str, Any]) -> None:
    """Push new random weights, save them as a checkpoint, and have the demo compare."""
    sys.modules["vllm"] = None  # type: ignore[assignment]  # any import of it raises from here on
    from vllm_wt.clients.relay import RelayClient
    from vllm_wt.observers import RoundLog, observe
    from vllm_wt.session import WeightSync
    from vllm_wt.testing.models import ModelShape, random_model, randomize, save_checkpoint

    folder = Path(config["folder"])
    demo = RelayClient(folder / "demo.sock")
    demo.call("hello", {"pid": os.getpid(), "import_vllm": _import_vllm()})
    if config["log"] is not None:
        observe(RoundLog(config["log"]))
    engine = _client(config["engine"])
    model = random_model(ModelShape(**config["shape"]), seed=0).to(config["device"])
    with WeightSync.connect(engine, backend=config["backend"], source=model) as sync:
        for version in range(1, config["rounds"] + 1):
            randomize(model, seed=version)  # stands for a training step
            result = sync.push(version)
            save_checkpoint(model, folder / f"v{version}")
            (stages,) = result.engines.values()
            demo.call(
                "report",
                {
                    "version": version,
                    "tensors": result.tensors,
                    "nbytes": result.nbytes,
                    "gather_s": result.gather_s,
                    "wire_s": stages.wire,
                    "verify_s": stages.verify,
                    "load_s": stages.load,
                    "confirm_s": stages.confirm,
                    "total_s": result.total_s,
                },
            )
    engine.close()
    demo.close()


def _client(address: dict[str, str]) -> Any:
    """A client of the engine at ``{"socket": path}`` or ``{"url": url}``."""
    if "url" in address:
        from vllm_wt.clients.http import HttpClient

        return HttpClient(address["url"])
    from vllm_wt.clients.relay import RelayClient

    return RelayClient(Path(address["socket"]))


def _import_vllm() -> str:
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        return f"{type(error).__name__}"
    return "works"


if __name__ == "__main__":
    from vllm_wt.errors import WeightTransferError

    try:
        main(json.loads(sys.argv[1]))
    except WeightTransferError as failure:
        sys.exit(f"trainer: {failure}")
