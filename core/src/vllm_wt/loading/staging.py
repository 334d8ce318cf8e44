"""Takes what an engine receives: all of it before the model is touched, or a part at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from vllm_wt.errors import CorruptTransfer, ManifestMismatch
from vllm_wt.loading.apply import ModelLoader
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.manifest import Manifest
from vllm_wt.packing import meta_of


@dataclass(frozen=True)
class Intake:
    """What an engine will hand to ``load_weights``.

    Args:
        plan: Of these tensors: the model's own for full tensors, or one narrowed from it (see
            `vllm_wt.loading.slices`) for an engine that receives what is needed and no more.
        batches: None when all tensors stay where they are until the commit. Otherwise the names of
            what each call of ``load_weights`` brings, in order (see `vllm_wt.loading.batches`): it is
            loaded by that call, and its memory is the engine's again afterwards.
    """

    plan: LoadPlan
    batches: tuple[tuple[str, ...], ...] | None = None


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


class Streaming:
    """Loads the tensors of one round as they come. Called by an engine as its ``load_weights``.

    Args:
        intake: The batches that a full update consists of.
        loader: Uses the same batches.
        first: Called before the model is touched.
    """

    def __init__(self, intake: Intake, loader: ModelLoader, first: Callable[[], None]) -> None:
        assert intake.batches is not None
        tensors = {tensor.name: tensor for tensor in intake.plan.manifest.tensors}
        self._batches = [
            Manifest(tuple(tensors[name] for name in batch)) for batch in intake.batches
        ]
        self._loader = loader
        self._first = first
        self._loaded = 0

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the next batch.

        Raises:
            ManifestMismatch: It is not the one whose turn it is, or not as announced.
            Exception: Of any class: the loader's.
        """
        received = list(weights)
        number = self._loaded
        if number == len(self._batches):
            raise ManifestMismatch(
                "More was received than was announced",
                expected=f"{number} batches",
                got=f"another one, with {[name for name, _ in received[:3]]}",
                cure="this is a bug of the backend: report it to its authors",
            )
        metas = [meta_of(name, tensor) for name, tensor in received]
        self._batches[number].require_same(metas, where=f"batch {number}")
        self._first()
        self._loader.apply_batch(number, received)
        self._loaded += 1

    def require_complete(self) -> None:
        """Raise :class:`CorruptTransfer` unless every batch has been loaded."""
        if self._loaded < len(self._batches):
            raise CorruptTransfer(
                "The update is not complete",
                expected=f"{len(self._batches)} batches",
                got=f"{self._loaded} of them",
                cure="push again; if it stays, report it to the authors of the backend",
            )
