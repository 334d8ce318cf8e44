"""What the GPU tests add to vLLM's workers: digests, which vLLM 0.26 has no call for."""

from __future__ import annotations

import hashlib

import torch
from wt_faults import FaultExtension


class GpuExtension(FaultExtension):
    """Runs inside a worker, where ``self`` is the worker itself."""

    def wt_digests(self) -> dict[str, str]:
        """SHA-256 of every parameter and buffer as the kernels use it."""
        model = self.model_runner.get_model()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {
            name: hashlib.sha256(_bytes_of(tensor)).hexdigest() for name, tensor in tensors.items()
        }

    def wt_addresses(self) -> dict[str, int]:
        """Where every parameter lies: captured CUDA graphs read it there."""
        model = self.model_runner.get_model()
        return {name: param.data_ptr() for name, param in model.named_parameters()}


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).cpu().numpy().tobytes() if flat.numel() else b""
