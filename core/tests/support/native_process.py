"""One worker of two: ``python native_process.py RANK FILE``. Answers each line of its input by one.

``{"call": name, "args": [...], "fail": text or null}`` calls that method of its round; ``fail`` is what
the model's loader raises. ``{"raised": name of the class or null, "ranks": {...}, "weights": {...},
"state": text, "torn": bool, "agreed": bool}`` is what came of it.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch.distributed as dist
from native_engine import MyEngine, MyModel

from vllm_wt.errors import WeightTransferError
from vllm_wt.native_round import NativeRound
from vllm_wt.ranks import GroupRanks


def main() -> None:
    rank, file = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    engine, model = MyEngine(rank, 2), MyModel()
    worker = NativeRound(engine, model, GroupRanks(dist.new_group(timeout=timedelta(seconds=120))))
    for line in sys.stdin:
        order = json.loads(line)
        model.fail = order["fail"]
        raised: str | None = None
        ranks: dict[int, str] = {}
        try:
            getattr(worker, order["call"])(*order["args"])
        except WeightTransferError as error:
            raised, ranks = type(error).__name__, error.ranks
        answer = {
            "raised": raised,
            "ranks": ranks,
            "weights": model.weights,
            "state": worker.state.value,
            "torn": worker.torn,
            "agreed": worker.has_agreed,
        }
        print(json.dumps(answer), flush=True)
    os._exit(0)  # gloo would wait for an exchange that nobody else joined


main()
