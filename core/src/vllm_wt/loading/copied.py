"""Takes what an engine receives into buffers that it uses again: by copying it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from vllm_wt.errors import Aborted, ManifestMismatch
from vllm_wt.loading.apply import Weights
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.packing import meta_of


class CopiedWeights:
    """Copies of the tensors received in one round. Called by an engine as its ``load_weights``."""

    def __init__(self) -> None:
        self._received: dict[str, tuple[TensorMeta, torch.Tensor]] = {}
        self._is_closed = False
        self._lock = threading.Lock()  # a call that was left behind may come while this is closed

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors, each where it is; each name once a round.

        Raises:
            ManifestMismatch: A name came before, or a dtype cannot be sent.
            Aborted: The round is over.
        """
        for name, tensor in weights:
            self._require_new(name)
            meta = meta_of(name, tensor)
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            with self._lock:
                self._require_new(name)
                self._received[name] = meta, copy

    def _require_new(self, name: str) -> None:
        if self._is_closed:
            raise Aborted(
                "The round is over; what comes now is not loaded",
                cure="end receive_weights when abort_weight_update is called",
            )
        if name in self._received:
            raise ManifestMismatch(
                f"Received {name!r} twice in one round",
                expected="each tensor once",
                cure="send each tensor once between start and finish",
            )

    def manifest(self) -> Manifest:
        """Of what has come, in order.

        Raises:
            Aborted: Nothing has.
        """
        if not self._received:
            raise Aborted(
                "The round was closed before any weights came; the weights are as they were",
                expected="every tensor of the model",
                got="none",
                cure="call update_weights before finish_weight_update",
            )
        return Manifest(tuple(meta for meta, _ in self._received.values()))

    def weights(self) -> Weights:
        """What has come, in order."""
        return [(name, copy) for name, (_, copy) in self._received.items()]

    def close(self) -> None:
        """Free the copies; nothing is taken any more."""
        with self._lock:
            self._is_closed = True
            self._received.clear()
