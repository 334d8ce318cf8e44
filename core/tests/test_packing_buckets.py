"""Buckets hold every byte of every tensor once, and say which bytes are nobody's."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from vllm_wt.errors import InvalidInfo, ManifestMismatch, OutOfBounds
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.packing import ALIGNMENT, Buckets, Layout, Piece

set_hypothesis_home_dir(Path(__file__).parents[2] / ".venv/cache/hypothesis")

_SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 17, 40]), max_size=3).map(tuple)
_DTYPES = st.sampled_from(["bool", "float8_e4m3fn", "int8", "bfloat16", "float32", "complex128"])


@st.composite
def _buckets(draw):
    tensors = draw(st.lists(st.tuples(_DTYPES, _SHAPES), min_size=1, max_size=12))
    manifest = Manifest(
        tuple(TensorMeta(f"t{n}", dtype, shape) for n, (dtype, shape) in enumerate(tensors))
    )
    layout = Layout(manifest, draw(st.sampled_from([16, 64, ALIGNMENT])))
    # Enough of them to hold all, and so few bytes that a tensor goes over many.
    multiple = draw(st.integers(1, max(1, layout.nbytes // layout.alignment)))
    return Buckets(layout, multiple * layout.alignment)


@settings(deadline=None, max_examples=200)
@given(_buckets())
def test_pieces_and_padding_cover_each_byte_once(buckets):
    layout = buckets.layout
    seen = [bytearray(buckets.size(number)) for number in range(buckets.count)]
    for slot in layout.slots:
        done = 0
        for piece in buckets.pieces(slot.tensor.name):
            assert piece.nbytes > 0
            assert piece.tensor_offset == done
            # Where the layout has it.
            assert piece.bucket * buckets.nbytes + piece.offset == slot.offset + done
            for at in range(piece.offset, piece.offset + piece.nbytes):
                seen[piece.bucket][at] += 1
            done += piece.nbytes
        assert done == slot.nbytes
    for number in range(buckets.count):
        end = 0
        for offset, nbytes in buckets.padding(number):
            assert nbytes > 0
            assert offset >= end
            end = offset + nbytes
            for at in range(offset, end):
                seen[number][at] += 1
    assert all(set(bucket) == {1} for bucket in seen)
    assert sum(map(len, seen)) == layout.nbytes
    assert {len(bucket) for bucket in seen[:-1]} <= {buckets.nbytes}


def test_a_tensor_over_several_buckets():
    layout = Layout(Manifest((TensorMeta("a", "int8", (5,)), TensorMeta("b", "int16", (50,)))), 16)
    buckets = Buckets(layout, 48)
    assert (buckets.count, [buckets.size(n) for n in range(3)]) == (3, [48, 48, 20])
    assert buckets.pieces("a") == (Piece(0, 0, 0, 5),)
    assert buckets.pieces("b") == (Piece(0, 16, 0, 32), Piece(1, 0, 32, 48), Piece(2, 0, 80, 20))
    assert [buckets.padding(n) for n in range(3)] == [((5, 11),), (), ()]


def test_nothing_but_empty_tensors():
    buckets = Buckets(Layout(Manifest((TensorMeta("a", "int8", (0, 3)),))), ALIGNMENT)
    assert buckets.pieces("a") == ()
    assert (buckets.count, buckets.size(0), buckets.padding(0)) == (1, 1, ((0, 1),))


@pytest.mark.parametrize("nbytes", [0, -256, 255, 300])
def test_sizes_that_break_the_alignment_are_refused(nbytes):
    with pytest.raises(InvalidInfo, match="multiple of 256 bytes"):
        Buckets(Layout(Manifest((TensorMeta("a", "int8", (3,)),))), nbytes)


def test_what_is_not_there_is_refused():
    buckets = Buckets(Layout(Manifest((TensorMeta("a", "int8", (3,)),))), 256)
    for ask in (buckets.size, buckets.padding):
        for number in (-1, 1):
            with pytest.raises(OutOfBounds, match="no such bucket"):
                ask(number)
    with pytest.raises(ManifestMismatch, match="'b'"):
        buckets.pieces("b")
