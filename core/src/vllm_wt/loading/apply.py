"""What core needs of the model that receives the weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from vllm_wt.manifest import Manifest


class ModelLoader(Protocol):
    """Puts full tensors into a live model. `vllm_wt.bridge.reload` does it by vLLM's reload."""

    def rehearse(self, manifest: Manifest) -> None:
        """Run the model's loaders over storage-less tensors; the model is as before afterwards.

        Raises:
            LoadError: The model does not take these tensors, or would be left incomplete.
        """

    def check(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Look at the values before anything is touched.

        Raises:
            LoadError: Two tensors for one parameter differ.
        """

    def apply(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load everything, in one step during which no forward pass may run.

        Raises:
            Exception: Of any class. The model can run, but mixes old and new weights.
        """
