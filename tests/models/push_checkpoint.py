"""A trainer: pushes a checkpoint folder into an engine behind a relay, some times over.

Arguments: the relay's socket, the folder, the version of the first push, how many pushes.
"""

from __future__ import annotations

import sys

sys.modules["vllm"] = None  # type: ignore[assignment]  # the trainer must do without

from vllm_wt import SafetensorsSource, WeightSync  # noqa: E402
from vllm_wt.clients.relay import RelayClient  # noqa: E402


def main(path: str, folder: str, version: str, count: str) -> None:
    engine = RelayClient(path)
    with WeightSync.connect(engine, backend="rdma", source=SafetensorsSource(folder)) as sync:
        for number in range(int(version), int(version) + int(count)):
            print(sync.push(number, deadline_s=60.0))


main(*sys.argv[1:])
