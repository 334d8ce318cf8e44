"""Which generations of an owner's memory readers may read."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass

from vllm_wt.errors import Revoked, TransportError
from vllm_wt_nccl.p2p import BACKEND
from vllm_wt_nccl.p2p.messages import SECRET_BYTES, Hello
from vllm_wt_nccl.p2p.regions import Region


@dataclass(eq=False)
class Exposure:
    """One generation; of no region any more once it is revoked."""

    region: Region | None
    secret: bytes


class Exposures:
    """By generation; what was revoked is remembered, so that its readers can be told."""

    def __init__(self) -> None:
        self._all: dict[int, Exposure] = {}

    def expose(self, region: Region, generation: int) -> Exposure:
        """Expose a region, if it isn't yet.

        Raises:
            Revoked: The generation was revoked.
            TransportError: It names another region.
        """
        fresh = Exposure(region, secrets.token_bytes(SECRET_BYTES))
        exposure = self._all.setdefault(generation, fresh)
        if exposure.region is region:
            return exposure
        revoked = exposure.region is None
        raise (Revoked if revoked else TransportError)(
            f"Generation {generation} {'was revoked' if revoked else 'names another region'}",
            backend=BACKEND,
            where="expose",
            cure="expose the region as a new generation",
        )

    def revoke(self, generation: int) -> None:
        """One that isn't exposed is left alone."""
        if generation in self._all:
            self._all[generation].region = None

    def revoke_region(self, region: Region) -> None:
        """Revoke every generation of a region."""
        for exposure in self._all.values():
            if exposure.region is region:
                exposure.region = None

    def find(self, hello: Hello, challenge: bytes) -> Exposure | None:
        """What a reader asks for, if it can show that it was told of it."""
        exposure = self._all.get(hello.generation)
        if exposure is None:
            return None
        proof = hello.proven(exposure.secret, challenge)
        return exposure if hmac.compare_digest(proof, hello.proof) else None
