"""A layout refuses what is impossible, finds what nobody holds, and crosses as JSON."""

import base64
import json
import zlib

import numpy as np
import pytest
from hypothesis import given, settings

from vllm_wt.errors import InvalidInfo, ManifestMismatch
from vllm_wt.manifest import TensorMeta
from vllm_wt_sharded import layout_wire
from vllm_wt_sharded.layout import MAX_RANKS, Layout

from .support.instances import instances

TENSORS = (
    TensorMeta("a", "bfloat16", (8, 4)),
    TensorMeta("scalar", "float32", ()),
    TensorMeta("empty", "int8", (0, 3)),
)
ROWS = [("a", 0, (0, 0), (4, 4)), ("a", 1, (2, 0), (6, 2)), ("scalar", 1, (), ())]


def layout(*more, rows=ROWS, tensors=TENSORS):
    return Layout.of(tensors, [*rows, *more])


def test_columns():
    made = layout()
    assert [column.dtype for column in made.columns()] == [np.int32, np.int32, np.int64, np.int64]
    assert made.tensor.tolist() == [0, 0, 1]
    assert made.rank.tolist() == [0, 1, 1]
    assert made.start.tolist() == [[0, 0], [2, 0], [0, 0]]
    assert made.size.tolist() == [[4, 4], [6, 2], [1, 1]]
    assert made.ranks == 2
    assert made.rows_of(1).tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        made.rank[0] = 7


def test_scalars_alone_have_one_dimension():
    made = Layout.of(TENSORS[1:2], [("scalar", 0, (), ())])
    assert made.start.tolist() == [[0]]
    assert made.size.tolist() == [[1]]


def test_no_rows():
    assert len(layout(rows=[])) == 0
    assert layout(rows=[]).ranks == 0


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (("b", 0, (0,), (1,)), "b"),
        (("a", 0, (0,), (1,)), "a"),
        (("a", 0, (0, 0), (1, 1, 1)), "a"),
        (("a", -1, (0, 0), (1, 1)), "a"),
        (("a", MAX_RANKS, (0, 0), (1, 1)), "a"),
        (("a", 0, (-1, 0), (1, 1)), r"start\[3\]"),
        (("a", 0, (0, 0), (0, 1)), r"start\[3\]"),
        (("a", 0, (0, 0), (9, 1)), r"start\[3\]"),
        (("a", 0, (5, 0), (4, 1)), r"start\[3\]"),
        (("a", 0, (2**63 - 1, 0), (2, 1)), r"start\[3\]"),
        (("empty", 0, (0, 0), (1, 3)), r"start\[3\]"),
    ],
)
def test_bad_row(row, field):
    with pytest.raises(InvalidInfo, match=f"Backend: sharded. Where: {field}"):
        layout(row)


@pytest.mark.parametrize("column", ["tensor", "rank", "start", "size"])
def test_bad_column(column):
    good = dict(zip(("tensor", "rank", "start", "size"), layout().columns(), strict=True))
    Layout(TENSORS, **good)
    for bad in (good[column].astype(np.float32), good[column][:-1], good[column][..., None]):
        with pytest.raises(InvalidInfo, match="has a wrong form"):
            Layout(TENSORS, **good | {column: bad})


@pytest.mark.parametrize("tensor", [-1, 3])
def test_tensor_out_of_range(tensor):
    good = layout()
    bad = good.tensor.copy()
    bad[1] = tensor
    with pytest.raises(InvalidInfo, match=r"Where: tensor\[1\]. Expected: 0 to 2"):
        Layout(TENSORS, bad, good.rank, good.start, good.size)


def test_tensor_too_large():
    with pytest.raises(InvalidInfo, match="too large"):
        Layout.of([TensorMeta("a", "int8", (2**25, 2**25))], [])


def test_joined():
    one, other = layout(), layout(("a", 3, (7, 3), (1, 1)), rows=[])
    both = Layout.joined([one, other, one])
    assert both.rank.tolist() == [0, 1, 1, 3, 0, 1, 1]
    assert both.start[3].tolist() == [7, 3]
    assert both.digest == Layout.joined([Layout.joined([one, other]), one]).digest


def test_joined_of_different_tensors():
    other = layout(tensors=(TensorMeta("a", "int8", (8, 4)), *TENSORS[1:]))
    with pytest.raises(ManifestMismatch, match=r"layout 1.*'bfloat16'.*'int8'"):
        Layout.joined([layout(), other])
    fewer = layout(tensors=TENSORS[:2])
    with pytest.raises(ManifestMismatch, match=r"Expected: 3 tensors. Got: 2 tensors"):
        Layout.joined([layout(), fewer])
    with pytest.raises(InvalidInfo, match="No layouts"):
        Layout.joined([])


def test_digest_tells_all_apart():
    made = [
        layout(),
        layout(rows=ROWS[:2]),
        layout(rows=ROWS[::-1]),
        layout(rows=[("a", 1, (0, 0), (4, 4)), *ROWS[1:]]),
        layout(rows=[("a", 0, (1, 0), (4, 4)), *ROWS[1:]]),
        layout(rows=[("a", 0, (0, 0), (5, 4)), *ROWS[1:]]),
        layout(tensors=(TensorMeta("a", "float16", (8, 4)), *TENSORS[1:])),
        layout(tensors=(TensorMeta("a", "bfloat16", (9, 4)), *TENSORS[1:])),
        layout(tensors=(*TENSORS, TensorMeta("b", "int8", (1,)))),
    ]
    assert len({each.digest for each in made}) == len(made)
    assert layout().digest == made[0].digest


def test_covering():
    with pytest.raises(ManifestMismatch, match=r"tensor 'a'.*Where: a\[4:8, 2:4\]"):
        layout().require_covering()
    layout(("a", 5, (3, 1), (5, 3))).require_covering()


def test_first_orphan_is_named():
    metas = [TensorMeta(f"t{i}", "int8", (4,)) for i in range(6)]
    rows = [(meta.name, 0, (0,), (4,)) for meta in metas]
    for missing in (2, 4):
        rows[missing] = (f"t{missing}", 0, (0,), (3,))
    rows[3] = ("t3", 0, (1,), (3,))
    with pytest.raises(ManifestMismatch, match=r"Where: t2\[3:4\]"):
        Layout.of(metas, rows).require_covering()
    with pytest.raises(ManifestMismatch, match=r"Where: scalar\[\]"):
        layout(("a", 5, (3, 1), (5, 3)), rows=ROWS[:2]).require_covering()


@given(instances())
@settings(max_examples=50, deadline=None)
def test_wire_round_trip(made):
    for each in made:
        wire = json.loads(json.dumps(each.to_wire()))
        back = Layout.from_wire(wire)
        assert back.tensors == each.tensors
        assert back.digest == each.digest


def packed(data):
    return base64.b64encode(zlib.compress(data)).decode()


BOMB = packed(bytes(10_000_000))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rows": 4}, "tensor"),
        ({"rows": 2}, "tensor"),
        ({"rows": -1}, "rows"),
        ({"rows": True}, "rows"),
        ({"rows": 3.0}, "rows"),
        ({"rows": layout_wire.MAX_NBYTES // 40}, "rows"),
        ({"dims": 0}, "dims"),
        ({"dims": 1}, "start"),
        ({"dims": 17}, "dims"),
        ({"rank": 7}, "rank"),
        ({"rank": "é"}, "rank"),
        ({"rank": "AAAA"}, "rank"),
        ({"rank": BOMB}, "rank"),
        ({"rank": packed(bytes(11))}, "rank"),
        ({"rank": packed(b"\xff" * 12)}, r"rank\[0\]"),
        ({"tensor": packed(b"\x03\0\0\0" * 3)}, r"tensor\[0\]"),
        ({"start": packed(b"\xff" * 48)}, r"start\[0\], size\[0\]"),
        ({"size": packed(bytes(48))}, r"start\[0\], size\[0\]"),
        ({"tensors": BOMB}, "tensors"),
        ({"tensors_nbytes": 3}, "tensors"),
        ({"more": 1}, "more"),
    ],
)
def test_damaged_wire(change, field):
    with pytest.raises(InvalidInfo, match=f"Where: {field}"):
        Layout.from_wire(layout().to_wire() | change)


@pytest.mark.parametrize("field", list(layout().to_wire()))
def test_missing_field(field):
    wire = layout().to_wire()
    del wire[field]
    with pytest.raises(InvalidInfo, match=f"Where: {field}.*Got: none"):
        Layout.from_wire(wire)


def test_wire_is_a_mapping():
    with pytest.raises(InvalidInfo, match=r"Expected: a mapping. Got: list"):
        Layout.from_wire([])


def test_dims_of_the_wire_are_those_of_its_tensors():
    wire = layout(rows=[]).to_wire() | {"dims": 3}
    with pytest.raises(InvalidInfo, match=r"Where: dims. Expected: 2. Got: 3"):
        Layout.from_wire(wire)


def test_truncated_data():
    wire = layout().to_wire()
    cut = base64.b64encode(base64.b64decode(wire["rank"])[:-3]).decode()
    with pytest.raises(InvalidInfo, match="Where: rank"):
        Layout.from_wire(wire | {"rank": cut})


@pytest.mark.parametrize(
    "metas",
    [
        b"{",
        b"{}",
        b'[["a","int8"]]',
        b'[["a","int8",[1,true]]]',
        b'[["a",7,[1]]]',
        b"[" * 100_000,
    ],
)
def test_damaged_tensors(metas):
    change = {"tensors": packed(metas), "tensors_nbytes": len(metas)}
    with pytest.raises(InvalidInfo, match="Where: tensors"):
        Layout.from_wire(layout().to_wire() | change)


@pytest.mark.parametrize(
    "metas",
    [b'[["a","int9",[1]]]', b'[["a","int8",[-1]]]', b'[["a","int8",[]],["a","int8",[]]]', b"[]"],
)
def test_impossible_tensors(metas):
    change = {"tensors": packed(metas), "tensors_nbytes": len(metas)}
    with pytest.raises(ManifestMismatch):
        Layout.from_wire(layout(rows=[]).to_wire() | change)


def test_nothing_is_decompressed_beyond_what_was_announced(monkeypatch):
    grown = []

    real = zlib.decompressobj

    class Watched:
        def __init__(self):
            self.real = real()

        def decompress(self, data, limit):
            found = self.real.decompress(data, limit)
            grown.append(len(found))
            return found

        def __getattr__(self, name):
            return getattr(self.real, name)

    monkeypatch.setattr(layout_wire.zlib, "decompressobj", Watched)
    with pytest.raises(InvalidInfo, match=r"Where: size.*Got: more"):
        Layout.from_wire(layout().to_wire() | {"size": BOMB})
    assert max(grown) <= 200
