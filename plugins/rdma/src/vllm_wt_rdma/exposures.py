"""Which generations of an owner's memory readers may read."""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass

from vllm_wt.errors import Revoked, TransportError
from vllm_wt_rdma.emulation import this_host
from vllm_wt_rdma.endpoint import Endpoint
from vllm_wt_rdma.info import Emulation, NixlHandle
from vllm_wt_rdma.nixl import BACKEND
from vllm_wt_rdma.region import Region
from vllm_wt_rdma.words import Words


@dataclass(frozen=True)
class _Exposure:
    region: Region
    slot: int
    nonce: int


class Exposures:
    """Lights a beacon for each generation that is exposed, and puts it out.

    Args:
        name: The owner's.
        endpoint: Which the regions are registered with.
        words: Where the beacons are.
        emulation: What readers on this host are told of it.
    """

    def __init__(
        self, name: str, endpoint: Endpoint, words: Words, emulation: Emulation = "error"
    ) -> None:
        self._name = name
        self._emulation = emulation
        self._endpoint = endpoint
        self._words = words
        self._exposed: dict[int, _Exposure] = {}
        self._revoked: set[int] = set()

    def handle(self, region: Region, generation: int) -> bytes:
        """Expose a region, if it isn't yet, and say how to reach it; see :class:`NixlHandle`.

        Raises:
            Revoked: The generation was revoked.
            TransportError: The generation names another region.
        """
        if generation in self._revoked:
            raise Revoked(
                f"Generation {generation} was revoked",
                backend=BACKEND,
                where="expose",
                cure="expose the region as a new generation",
            )
        exposure = self._exposed.get(generation)
        if exposure is None:
            exposure = _Exposure(region, self._words.take(), secrets.randbelow(2**63 - 1) + 1)
            self._words[exposure.slot] = exposure.nonce
            self._exposed[generation] = exposure
        elif exposure.region is not region:
            raise TransportError(
                f"Generation {generation} names another region",
                backend=BACKEND,
                where="expose",
                cure="expose the region as a new generation",
            )
        return NixlHandle(
            nixl=self._endpoint.version,
            host=this_host(),
            emulation=self._emulation,
            agent=self._name,
            generation=generation,
            beacon=self._words.row(exposure.slot)[0],
            nonce=exposure.nonce,
            buffers=region.buffers,
            metadata=base64.b64encode(self._endpoint.metadata()).decode(),
        ).to_bytes()

    def revoke(self, generation: int) -> None:
        """Put a generation's beacon out; one that isn't exposed is left alone."""
        exposure = self._exposed.pop(generation, None)
        if exposure is not None:
            self._words.give_back(exposure.slot)
            self._revoked.add(generation)

    def revoke_region(self, region: Region) -> None:
        """Revoke every generation of a region."""
        for generation in [g for g, e in self._exposed.items() if e.region is region]:
            self.revoke(generation)

    def revoke_all(self) -> None:
        for generation in tuple(self._exposed):
            self.revoke(generation)
