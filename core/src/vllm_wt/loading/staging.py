"""Takes what an engine receives: all of it before the model is touched, or a part at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakValueDictionary

import torch

from vllm_wt.errors import CorruptTransfer, ManifestMismatch
from vllm_wt.loading.apply import Kept, ModelLoader, Weights
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
        at_hand: Whether all of it is there already, so that ``receive_weights`` waits for nothing that
            is not bounded by its own deadline. In a round of one call it has no thread of its own then.
    """

    plan: LoadPlan
    batches: tuple[tuple[str, ...], ...] | None = None
    at_hand: bool = False

    @cached_property
    def manifests(self) -> tuple[Manifest, ...]:
        """Of each batch."""
        tensors = {tensor.name: tensor for tensor in self.plan.manifest.tensors}
        batches = self.batches or ()
        return tuple(Manifest(tuple(map(tensors.__getitem__, names))) for names in batches)


Known = WeakValueDictionary[int, Kept]
"""What was found right in an earlier round, by the call that brought it."""


class Staging:
    """The tensors received in one round. Called by an engine as its ``load_weights``.

    Args:
        manifest: What a full update consists of.
        known: From earlier rounds.
    """

    def __init__(self, manifest: Manifest, known: Known | None = None) -> None:
        self._expected = {tensor.name: tensor for tensor in manifest.tensors}
        self._manifest = manifest
        self._received: dict[str, torch.Tensor] = {}
        self._known = Known() if known is None else known
        self._all: weakref.ref[Kept] | None = None
        """What came at once. The engine holds it, and may have to let go of it before the commit."""

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take tensors in; each name once a round.

        Raises:
            ManifestMismatch: Unknown or repeated name, other dtype or shape than announced.
        """
        if isinstance(weights, Kept) and self._is_first and weights is self._known.get(0):
            self._all = weakref.ref(weights)
            return
        if self._all is not None:
            self._received, self._all = dict(self.weights()), None
        self._take(weights)
        if isinstance(weights, Kept) and [name for name, _ in weights] == list(self._expected):
            self._known[0] = weights
            self._received, self._all = {}, weakref.ref(weights)

    @property
    def _is_first(self) -> bool:
        return self._all is None and not self._received

    def _take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
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
        if self._all is not None:
            return
        missing = [name for name in self._expected if name not in self._received]
        if missing:
            nbytes = sum(t.numel() * t.element_size() for t in self._received.values())
            raise CorruptTransfer(
                "The update is not complete",
                expected=f"{len(self._manifest)} tensors, {self._manifest.nbytes} bytes",
                got=f"{len(self._received)} tensors, {nbytes} bytes, first missing {missing[:3]}",
                cure="push again; if it stays, report it to the authors of the backend",
            )

    def weights(self) -> Weights:
        """What was received, in manifest order; as it came, if it came at once.

        Raises:
            CorruptTransfer: The engine has let go of it.
        """
        if self._all is not None:
            weights = self._all()
            if weights is None:
                raise CorruptTransfer(
                    "The engine has let go of what it had received",
                    expected=f"{len(self._manifest)} tensors, held until the commit",
                    got="none",
                    cure="push again; if it stays, report it to the authors of the backend",
                )
            return weights
        return [(name, self._received[name]) for name in self._expected]


class Streaming:
    """Loads the tensors of one round as they come. Called by an engine as its ``load_weights``.

    Args:
        intake: The batches that a full update consists of.
        loader: Uses the same batches.
        first: Called before the model is touched.
        known: From earlier rounds.
    """

    def __init__(
        self,
        intake: Intake,
        loader: ModelLoader,
        first: Callable[[], None],
        known: Known | None = None,
    ) -> None:
        self._batches = intake.manifests
        self._loader = loader
        self._first = first
        self._known = Known() if known is None else known
        self._loaded = 0
        self._looked = False

    def look(self) -> None:
        """Look at the model ahead of the first batch, which this thread loads next, if anything.

        Raises:
            Exception: Of any class: the loader's.
        """
        self._loader.look()
        self._looked = True

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the next batch.

        Raises:
            ManifestMismatch: It is not the one whose turn it is, or not as announced.
            Exception: Of any class: the loader's.
        """
        received = weights if isinstance(weights, Kept) else list(weights)
        number = self._loaded
        if number == len(self._batches):
            raise ManifestMismatch(
                "More was received than was announced",
                expected=f"{number} batches",
                got=f"another one, with {[name for name, _ in received[:3]]}",
                cure="this is a bug of the backend: report it to its authors",
            )
        if received is not self._known.pop(number, None):
            metas = [meta_of(name, tensor) for name, tensor in received]
            self._batches[number].require_same(metas, where=f"batch {number}")
        if isinstance(received, Kept):
            self._known[number] = received
        self._first()
        self._loader.apply_batch(number, received, looked=self._looked)
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
