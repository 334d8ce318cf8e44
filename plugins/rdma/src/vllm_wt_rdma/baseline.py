"""Raw NIXL READs, which ``vllm-wt bench wire`` holds the backend against."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from itertools import pairwise

import torch

from vllm_wt.deadline import Deadline
from vllm_wt_rdma import nixl


class NixlRead:
    """A bare NIXL agent that reads one buffer by as many descriptors as there are tensors in it.

    Args:
        name: Name of the agent.
        device: Where its buffer lives.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        module = nixl.load().module
        self._kind = "VRAM" if device.type == "cuda" else "DRAM"
        if device.type == "cuda":
            nixl.use_cuda(torch.device("cuda", device.index or 0))
        self._agent = module.nixl_agent(
            name, module.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        )

    def expose(self, buffer: torch.Tensor) -> str:
        """Register a contiguous uint8 buffer; what ``connect`` needs, as JSON."""
        self._agent.register_memory([self._row(buffer)], self._kind)
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return json.dumps({"metadata": metadata, "row": self._row(buffer)[:3]})

    def progress(self) -> None:
        """Drive the owner's side once."""
        self._agent.get_new_notifs()

    def connect(self, handle: str, target: torch.Tensor, parts: int) -> None:
        """Prepare reads of the exposed buffer into ``target``, of the same size, by ``parts``
        descriptors."""
        facts = json.loads(handle)
        edges = [target.numel() * n // parts for n in range(parts + 1)]
        self._agent.register_memory([self._row(target)], self._kind)
        peer = self._agent.add_remote_agent(base64.b64decode(facts["metadata"]))
        self._agent.make_connection(peer)
        self._read = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(_cut(self._row(target)[:3], edges), self._kind),
            self._agent.get_xfer_descs(_cut(facts["row"], edges), self._kind),
            peer,
            b"read",
        )

    def read(self, deadline: Deadline) -> None:
        """Read once; returns when every byte is there."""
        state = self._agent.transfer(self._read)
        while state != "DONE":
            deadline.check("The raw read has not completed", where="bench", got=state)
            state = self._agent.check_xfer_state(self._read)

    @staticmethod
    def _row(buffer: torch.Tensor) -> tuple[int, int, int, str]:
        return (buffer.data_ptr(), buffer.numel(), max(buffer.get_device(), 0), "")


def _cut(row: Sequence[int], edges: Sequence[int]) -> list[tuple[int, int, int]]:
    address, _, device = row
    return [(address + start, end - start, device) for start, end in pairwise(edges)]
