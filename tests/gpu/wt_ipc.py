"""What test_ipc_cuda.py asks of vLLM's workers about their GPU's memory."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import torch
from ipc_trainer import device_memory
from wt_faults import FaultExtension


class IpcExtension(FaultExtension):
    """Runs inside a worker, where ``self`` is the worker itself."""

    def wt_device_memory(self, reset: bool) -> dict[str, int]:
        """Bytes of the device that torch has allocated here, and the most since the last reset."""
        return device_memory(reset)

    def wt_free_device_memory(self) -> int:
        """Of the whole device, with nothing cached by this process."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def wt_collect_garbage(self, on: bool) -> None:
        """Whether Python looks for reference cycles."""
        gc.enable() if on else gc.disable()

    def wt_held(self) -> dict[str, int]:
        """What must not grow: threads, descriptors, maps, address space, open allocations of others."""
        mapped = getattr(self.weight_transfer_engine.round._engine, "_reading", None)
        transport: Any = getattr(mapped, "_transport", None)
        imports = getattr(transport, "_imports", None)
        process = psutil.Process()
        return {
            **self.wt_resources(),
            "maps": len(process.memory_maps(grouped=False)),
            "address space": process.memory_info().vms,
            "imports": 0 if imports is None else len(imports._pointers),
        }
