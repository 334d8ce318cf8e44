"""How engines are paused for a push."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from vllm_wt.errors import InvalidInfo
from vllm_wt.options import require_one_of

PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of requests in flight: they are kept, waited for, or aborted (vLLM's
``pause_generation``)."""
Kv = Literal["recompute", "keep"]
"""What becomes of the keys and values of what was generated or read before."""


@dataclass(frozen=True)
class Pausing:
    """What a push does with engines that can be paused.

    Args:
        mode: None if they are not.
        kv: ``"recompute"``: caches are emptied, and requests that are kept are computed again by the
            new weights. ``"keep"``: they go on with what the old ones have computed, and new requests
            with the same beginning find it too.
        first: Whether before anything is received, rather than for the commit alone.
    """

    mode: PauseMode | None = "keep"
    kv: Kv = "recompute"
    first: bool = False

    @classmethod
    def asked_for(cls, pause: Any, kv: Any, overlap: Any) -> Pausing:
        """What the arguments of a push say.

        Raises:
            InvalidInfo: One of them has a wrong value, or they do not go together.
        """
        if pause is not None:
            require_one_of("pause", pause, get_args(PauseMode))
        require_one_of("kv", kv, get_args(Kv))
        if pause is None and not overlap:
            raise InvalidInfo(
                "Engines that are not paused generate while they receive",
                where="overlap",
                expected="overlap=True with pause=None",
                got="overlap=False",
                cure='leave overlap out; or pause="keep"',
            )
        return cls(pause, kv, not overlap)

    @property
    def arguments(self) -> tuple[PauseMode, bool] | tuple[()]:
        """Of the client's ``pause``: the mode, and whether caches are emptied. None where it is to do
        what it does by itself."""
        usual = self.mode in {None, "keep"} and self.kv == "recompute"
        return () if usual else (self.mode or "keep", self.kv == "recompute")


USUAL = Pausing()
