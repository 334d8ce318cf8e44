"""One rank of two: ``python rank_process.py RANK FILE``. Answers each line of its input by one.

``{"group_s": seconds}`` makes a new gloo group with that timeout: ``[rank, size]``.
``{"error": facts or null, "seconds": s}`` is one exchange in the newest group:
``{"reports": [error, ...]}`` or ``{"raised": name of the class, "says": text}``.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vllm_wt.ranks import GroupRanks, Report


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def _exchange(ranks: GroupRanks, order: dict[str, Any]) -> object:
    try:
        reports = ranks.exchange(Report(order["error"]), order["seconds"])
    except Exception as error:
        return {"raised": type(error).__name__, "says": str(error)}
    return {"reports": [report.error for report in reports]}


def main() -> None:
    rank, file = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=int(rank), world_size=2)
    for line in sys.stdin:
        order = json.loads(line)
        if "group_s" in order:
            ranks = GroupRanks(dist.new_group(timeout=timedelta(seconds=order["group_s"])))
            _say([ranks.rank, ranks.size])
        else:
            _say(_exchange(ranks, order))
    os._exit(0)  # gloo would wait for an exchange that nobody else joined


main()
