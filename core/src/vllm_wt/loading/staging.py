"""Receives a full update without touching the model, and says when it is complete."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vllm_wt.errors import CorruptTransfer, ManifestMismatch
from vllm_wt.manifest import Manifest
from vllm_wt.packing import meta_of


class Staging:
    """The tensors received in one round. Called by an engine as its ``load_weights``.

    Args:
        manifest: What a full update consists of.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._expected = {tensor.name: tensor for tensor in manifest.tensors}
        self._manifest = manifest
        self._received: dict[str, torch.Tensor] = {}

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take tensors in; each name once a round.

        Raises:
            ManifestMismatch: Unknown or repeated name, other dtype or shape than announced.
        """
        for name, tensor in weights:
            expected = self._expected.get(name)
            if expected is None or name in self._received:
                raise ManifestMismatch(
                    f"Received {name!r}, which "
                    + ("was received already" if expected else "was not announced"),
                    expected="each tensor of the manifest once",
                    cure="this is a bug of the backend: report it to its authors",
                )
            if (got := meta_of(name, tensor)) != expected:
                raise ManifestMismatch(
                    f"Received {name!r} in another form than announced",
                    expected=f"{expected.dtype} {list(expected.shape)}",
                    got=f"{got.dtype} {list(got.shape)}",
                    cure="this is a bug of the backend: report it to its authors",
                )
            self._received[name] = tensor

    def require_complete(self) -> None:
        """Raise :class:`CorruptTransfer` unless every announced byte is here."""
        missing = [name for name in self._expected if name not in self._received]
        if missing:
            nbytes = sum(t.numel() * t.element_size() for t in self._received.values())
            raise CorruptTransfer(
                "The update is not complete",
                expected=f"{len(self._manifest)} tensors, {self._manifest.nbytes} bytes",
                got=f"{len(self._received)} tensors, {nbytes} bytes, first missing {missing[:3]}",
                cure="push again; if it stays, report it to the authors of the backend",
            )

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        """What was received, in manifest order."""
        return [(name, self._received[name]) for name in self._expected]
