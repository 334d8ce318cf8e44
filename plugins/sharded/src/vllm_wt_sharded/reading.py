"""Connections to all ranks that a worker takes something from, and one round through all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import Aborted
from vllm_wt.info import Handle
from vllm_wt.loading.apply import Kept
from vllm_wt.packing import Copies
from vllm_wt.pull.itinerary import Itinerary
from vllm_wt.pull.names import reader_name
from vllm_wt.pull.reading import Reading
from vllm_wt.transport import Transport
from vllm_wt_sharded.reception import FromRank, Reception

_MOST_AT_ONCE = 8
"""Ranks that are read at the same time."""
_CHUNK_NBYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
"""Bytes of a pass."""


class Readings:
    """A `Reading` for each rank, and what is put together of what they bring.

    Args:
        reception: What is taken.
        arena: Zeros, uint8, of the size that it needs.
        handles: Of the ranks.
        transport_cls: What moves the bytes.
        engine: What the trainer calls this worker's engine.
        worker: Rank of the worker in it.
        backend: Named in errors.
        counted: Whether the bytes that have come are held against what should.
        deadline: For connecting.
    """

    def __init__(
        self,
        reception: Reception,
        arena: torch.Tensor,
        handles: Sequence[Handle],
        transport_cls: type[Transport],
        *,
        engine: str,
        worker: int,
        backend: str,
        counted: bool,
        deadline: Deadline,
    ) -> None:
        self._reception = reception
        self._places = reception.places(arena)
        self._weights: Kept | None = None
        self._putting: Copies | None = None
        self._readings: list[Reading] = []
        try:
            for part, place in zip(reception.parts, self._places.parts, strict=True):
                transport = transport_cls(reader_name(engine, worker), arena.device)
                try:
                    reading = Reading(
                        transport,
                        _itinerary(part, handles[part.rank].owner, transport, arena.device),
                        place,
                        handles[part.rank],
                        backend=backend,
                        counted=counted,
                        deadline=deadline,
                    )
                except BaseException:
                    transport.close()
                    raise
                self._readings.append(reading)
        except BaseException:
            self.close()
            raise

    def run(self, ticket: int, deadline: Deadline) -> Kept:
        """Read everything of an attempt; what is to be loaded.

        Raises:
            CorruptTransfer: What came is not what a rank has.
            Timeout, Aborted: The deadline has passed, or was cancelled.
            WeightTransferError: Of the transport.
        """
        brought: list[list[tuple[str, torch.Tensor]]] = [[] for _ in self._readings]
        if len(self._readings) == 1:
            self._readings[0].run(ticket, brought[0].extend, deadline)
        elif self._readings:
            self._run_all(ticket, brought, deadline)
        if self._weights is None:
            self._prepare(pair for each in brought for pair in each)
        if self._putting is not None:
            self._putting.run()
        assert self._weights is not None
        return self._weights

    def close(self) -> bool:
        """Release everything, but for reads that could not be stopped; whether nothing will write into
        the arena any more."""
        self._readings = [reading for reading in self._readings if not reading.close()]
        return not self._readings

    def _run_all(
        self, ticket: int, brought: Sequence[list[tuple[str, torch.Tensor]]], deadline: Deadline
    ) -> None:
        count = min(len(self._readings), _MOST_AT_ONCE)
        with ThreadPoolExecutor(count, "vllm-wt-sharded") as pool:
            futures = [
                pool.submit(reading.run, ticket, each.extend, deadline)
                for reading, each in zip(self._readings, brought, strict=True)
            ]
            wait(futures, return_when=FIRST_EXCEPTION)
            error = _first_error(futures)
            if error is not None:
                deadline.cancel(f"another rank of the trainer could not be read: {error}")
                wait(futures)
                raise error

    def _prepare(self, brought: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What is handed over is the same memory in each round."""
        tensors = dict(brought)
        reception, fulls = self._reception, self._places.fulls
        pairs = [
            (fulls[name][box.at], tensors[box.piece].view(box.extent)[box.within])
            for name, boxes in reception.together.items()
            for box in boxes
        ]
        self._putting = Copies(pairs) if pairs else None
        tensors |= fulls
        tensors |= {name: tensors[piece] for name, piece in reception.alone.items()}
        names = (tensor.name for tensor in reception.intake.plan.manifest.tensors)
        self._weights = Kept((name, tensors[name]) for name in names)


def _itinerary(part: FromRank, owner: str, transport: Transport, device: torch.device) -> Itinerary:
    properties = transport.properties
    return Itinerary(
        part.exposure,
        part.slices,
        [part.names],
        owner=owner,
        chunk_nbytes=_CHUNK_NBYTES[device.type],
        most=properties.max_descriptors,
        alignment=properties.alignment,
    )


def _first_error(futures: Sequence[Future[None]]) -> BaseException | None:
    """What failed first, rather than what was given up for it."""
    errors = [e for each in futures if each.done() and (e := each.exception()) is not None]
    causes = [error for error in errors if not isinstance(error, Aborted)]
    return next(iter(causes + errors), None)
