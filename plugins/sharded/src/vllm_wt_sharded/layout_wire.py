"""A layout as JSON-safe data: columns little-endian, compressed, in base64; and its strict decoding.

Nothing is decompressed before what it may grow to has been checked.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_wt.errors import InvalidInfo
from vllm_wt.manifest import Manifest, TensorMeta

MAX_NBYTES = 1 << 29
"""The most that one layout may take when decompressed: 13 million rows of two dimensions."""
MAX_DIMS = 16
DTYPES = {"tensor": "<i4", "rank": "<i4", "start": "<i8", "size": "<i8"}
_COUNTS = ("rows", "dims", "tensors_nbytes")
_FIELDS = (*_COUNTS, "tensors", *DTYPES)


def encoded(
    tensors: tuple[TensorMeta, ...], columns: tuple[npt.NDArray[Any], ...]
) -> dict[str, Any]:
    """The wire form of a layout's tensors and of its columns, in the order of :data:`DTYPES`."""
    metas = json.dumps(
        [[meta.name, meta.dtype, list(meta.shape)] for meta in tensors], separators=(",", ":")
    ).encode()
    wire: dict[str, Any] = {
        "rows": len(columns[0]),
        "dims": columns[2].shape[1],
        "tensors_nbytes": len(metas),
        "tensors": _packed(metas),
    }
    for (name, dtype), column in zip(DTYPES.items(), columns, strict=True):
        wire[name] = _packed(np.ascontiguousarray(column, dtype=dtype).tobytes())
    return wire


def opened(
    fields: Mapping[str, Any],
) -> tuple[tuple[TensorMeta, ...], int, tuple[npt.NDArray[Any], ...]]:
    """What :func:`encoded` has encoded: the tensors, the dimensions, the columns.

    Raises:
        InvalidInfo: Names the field that is unknown, missing, too large or malformed.
        ManifestMismatch: A tensor is impossible, or occurs twice.
    """
    if not isinstance(fields, Mapping):
        raise _wrong("(the whole)", "a mapping", type(fields).__name__)
    for name in _FIELDS:
        if name not in fields:
            raise _wrong(name, f"all of {', '.join(_FIELDS)}", "none")
    for name in fields:
        if name not in _FIELDS:
            raise _wrong(str(name), f"only {', '.join(_FIELDS)}", "an unknown field")
    for name in _COUNTS:
        value = fields[name]
        if type(value) is not int or not 0 <= value <= MAX_NBYTES:
            raise _wrong(name, f"a whole number, 0 to {MAX_NBYTES}", repr(value)[:100])
    rows, dims = fields["rows"], fields["dims"]
    if not 1 <= dims <= MAX_DIMS:
        raise _wrong("dims", f"1 to {MAX_DIMS}", dims)
    total = fields["tensors_nbytes"] + rows * (4 + 4 + 16 * dims)
    if total > MAX_NBYTES:
        raise _wrong("rows", f"at most {MAX_NBYTES} bytes in all", f"{total} bytes")
    tensors = _metas(_unpacked(fields, "tensors", fields["tensors_nbytes"]))
    columns = []
    for name, dtype in DTYPES.items():
        shape = (rows,) if dtype == "<i4" else (rows, dims)
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        column = np.frombuffer(_unpacked(fields, name, nbytes), dtype=dtype).reshape(shape)
        columns.append(column.astype(column.dtype.newbyteorder("="), copy=False))
    return tensors, dims, tuple(columns)


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


def _unpacked(fields: Mapping[str, Any], name: str, nbytes: int) -> bytes:
    """Exactly ``nbytes`` from a field, decompressing no further than that."""
    text = fields[name]
    if not isinstance(text, str):
        raise _wrong(name, "a text", type(text).__name__)
    try:
        packed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong(name, "base64", error) from None
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(packed, nbytes + 1)  # 0 would mean without a limit
    except zlib.error as error:
        raise _wrong(name, "zlib data", error) from None
    if len(data) != nbytes or not decompressor.eof or decompressor.unused_data:
        got = "more" if len(data) > nbytes or decompressor.unused_data else f"{len(data)} bytes"
        raise _wrong(name, f"{nbytes} bytes", got)
    return data


def _metas(data: bytes) -> tuple[TensorMeta, ...]:
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _wrong("tensors", "JSON", error) from None
    if not isinstance(rows, list):
        raise _wrong("tensors", "a list", type(rows).__name__)
    metas = []
    for number, row in enumerate(rows):
        if not (
            isinstance(row, list)
            and [type(part) for part in row] == [str, str, list]
            and all(type(dim) is int for dim in row[2])
        ):
            raise _wrong(f"tensors[{number}]", "[name, dtype, shape]", repr(row)[:100])
        metas.append(TensorMeta(row[0], row[1], tuple(row[2])))
    return Manifest(tuple(metas)).tensors


def _wrong(field: str, expected: object, got: object) -> InvalidInfo:
    return InvalidInfo(
        f"A layout has a wrong value in the field {field!r}",
        backend="sharded",
        where=field,
        expected=expected,
        got=got,
        cure="send what Layout.to_wire gives; both sides must run the same release",
    )
