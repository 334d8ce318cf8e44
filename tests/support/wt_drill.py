"""vLLM's workers for the drill: many short passes and many batches, on a slow wire, of plain weights.

Importing this changes the whole process: see `vllm_wt.testing.unpacked` and `throttled` there.
"""

from __future__ import annotations

from wt_faults import FaultExtension

import vllm_wt.testing.throttled
import vllm_wt.testing.unpacked  # noqa: F401  # a packed weight leaves an empty parameter to digest
from vllm_wt.loading import reception
from vllm_wt.pull import worker

reception.STREAMED_NBYTES = 192 << 10
worker._CHUNK_NBYTES = {"cpu": 64 << 10}


class DrillExtension(FaultExtension):
    """Carries the import into workers."""

    def wt_drill(self) -> dict[str, int]:
        """Whether the changes above are in effect here: batches and passes of a round."""
        itinerary = self.weight_transfer_engine.round._engine._itinerary
        return {
            "batches": len(itinerary.batches),
            "passes": sum(len(stop.chunks) for batch in itinerary.batches for stop in batch.stops),
        }
