"""What ``vllm-wt bench round`` asks of vLLM's worker.

On a CPU importing this changes vLLM's model code for the whole process, so that weights are plain
parameters as on a GPU: see `vllm_wt.testing.unpacked`.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from vllm.platforms import current_platform

from vllm_wt.cli.bench_round_checksums import checksums
from vllm_wt.cli.bench_round_timing import seconds_of

if current_platform.is_cpu():
    import vllm_wt.testing.unpacked  # noqa: F401


class RoundWorker:
    """Methods for vLLM's worker, as its ``worker_extension_cls``; ``self`` is the worker."""

    device: torch.device
    model_runner: Any
    weight_transfer_engine: Any

    def wt_checksums(self, names: list[str] | None = None) -> dict[str, str]:
        """Of parameters and buffers as the model computes with them: of these, or of all."""
        model = self.model_runner.get_model()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return checksums({name: tensors[name] for name in names or tensors})

    def wt_memory(self, reset: bool = False) -> dict[str, int] | None:
        """Bytes of device memory, of this process but for what is free; None on a CPU.

        Args:
            reset: Whether the peaks begin anew.
        """
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        if reset:
            torch.cuda.reset_peak_memory_stats(self.device)
        return {
            "allocated": torch.cuda.memory_allocated(self.device),
            "allocated_peak": torch.cuda.max_memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
            "free": torch.cuda.mem_get_info(self.device)[0],
        }

    def wt_copy_seconds(self, rounds: int) -> float | None:
        """Of the copies of the last commit, done again; None if none are prepared.

        Where the memory that they read has been used again since, this spoils the model.
        """
        parts = self.weight_transfer_engine.round._loader._target.parts
        prepared = [part.direct.prepared for part in parts]
        if any(copies is None for copies in prepared):
            return None

        def run() -> None:
            for copies in prepared:
                copies.run()

        return statistics.median(seconds_of(run, self.device) for _ in range(rounds))
