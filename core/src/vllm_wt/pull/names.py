"""Names of readers, by which a trainer tells the workers of its engines apart."""

from __future__ import annotations

import uuid


def reader_name(engine: str, rank: int) -> str:
    """One that no other reader has.

    Args:
        engine: What the trainer calls the reader's engine.
        rank: Of the worker in it.
    """
    return f"{engine}.worker{rank}-{uuid.uuid4().hex[:12]}"


def engine_of(name: str) -> str:
    """The engine of a reader of that name."""
    return name.rpartition(".")[0]
