"""Whether the copies of a plan stay within the memory of both sides; for every Transport."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vllm_wt.errors import OutOfBounds
from vllm_wt.transport import Copy


def check_copies(
    copies: Iterable[Copy],
    targets: Sequence[int],
    sources: Mapping[str, Sequence[int]],
    *,
    backend: str,
) -> None:
    """Refuse copies that leave their buffers.

    Args:
        copies: The plan; every owner of it is in ``sources``.
        targets: Sizes of the reader's buffers.
        sources: Sizes of each owner's buffers.
        backend: Named in errors.

    Raises:
        OutOfBounds: Names the copy, the buffer and its size.
    """
    for number, copy in enumerate(copies):
        ends = (
            ("source", copy.source, copy.source_offset, sources[copy.owner]),
            ("target", copy.target, copy.target_offset, targets),
        )
        for end in ends:
            _check_end(number, copy, *end, backend=backend)


def _check_end(
    number: int,
    copy: Copy,
    side: str,
    index: int,
    offset: int,
    sizes: Sequence[int],
    *,
    backend: str,
) -> None:
    if not 0 <= index < len(sizes):
        expected, got = f"a {side} buffer below {len(sizes)}", f"{side} buffer {index}"
    elif copy.nbytes < 1:
        expected, got = "at least 1 byte", f"{copy.nbytes} bytes"
    elif not 0 <= offset <= sizes[index] - copy.nbytes:
        expected = f"within the {sizes[index]} bytes of {side} buffer {index}"
        got = f"{copy.nbytes} bytes from offset {offset}"
    else:
        return
    raise OutOfBounds(
        f"Copy {number} from owner {copy.owner!r} leaves the {side} memory",
        backend=backend,
        where=f"copy {number}",
        expected=expected,
        got=got,
        cure="both sides must describe the same tensors; connect again",
    )
