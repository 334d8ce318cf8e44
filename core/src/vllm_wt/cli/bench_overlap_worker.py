"""The worker of ``vllm-wt bench overlap``: weights as on a GPU, a wire as between hosts.

Importing this changes vLLM's model code for the whole process: see `vllm_wt.testing.unpacked`.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import vllm_wt.testing.throttled
import vllm_wt.testing.unpacked  # noqa: F401
from vllm_wt.cli.bench_overlap_trainer import sha256


class OverlapWorker:
    """Methods for vLLM's worker, as its ``worker_extension_cls``; ``self`` is the worker."""

    model_runner: Any
    _flat: tuple[torch.Tensor, torch.Tensor] | None = None

    def wt_flat_copy(self, nbytes: int) -> float:
        """Seconds of one copy, on the thread and the core that commits."""
        torch.set_num_threads(1)  # as it is there already, by VLLM_CPU_OMP_THREADS_BIND
        if self._flat is None:
            source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
            self._flat = source, torch.ones_like(source)
        source, target = self._flat
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began

    def wt_sha256(self) -> dict[str, str]:
        """Of every parameter as the model computes with it."""
        return {
            name: sha256([parameter.detach()])
            for name, parameter in self.model_runner.get_model().named_parameters()
        }
