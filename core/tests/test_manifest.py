"""A manifest names what will be sent, and says exactly how something else differs."""

import pytest

from vllm_wt.errors import ManifestMismatch
from vllm_wt.manifest import ITEMSIZE, Manifest, TensorMeta
from vllm_wt.packing import DTYPES

A, B = TensorMeta("a", "float32", (2, 3)), TensorMeta("b", "bfloat16", ())


def test_bytes_and_digest():
    manifest = Manifest((A, B))
    assert manifest.nbytes == 26
    assert manifest.digest != Manifest((B, A)).digest
    assert manifest.digest != Manifest((A, TensorMeta("b", "float16", ()))).digest


def test_itemsizes_are_torchs():
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == {
        name: ITEMSIZE[name] for name in DTYPES
    }
    assert len(DTYPES) >= 20


def test_empty_source():
    with pytest.raises(ManifestMismatch, match="no tensors"):
        Manifest(())


def test_name_twice():
    with pytest.raises(ManifestMismatch, match="'a' occurs twice"):
        Manifest((A, TensorMeta("a", "float32", ())))


@pytest.mark.parametrize(
    ("other", "expected", "got"),
    [
        ([A], "missing ['b']", "1 tensors"),
        ([A, B, TensorMeta("c", "bool", (1,))], "2 tensors", "unexpected ['c']"),
        ([B, A], "a float32 [2, 3]", "b bfloat16 []"),
        ([A, TensorMeta("b", "float16", ())], "b bfloat16 []", "b float16 []"),
        ([TensorMeta("a", "float32", (3, 2)), B], "a float32 [2, 3]", "a float32 [3, 2]"),
    ],
    ids=["missing", "unexpected", "order", "dtype", "shape"],
)
def test_difference_is_named(other, expected, got):
    manifest = Manifest((A, B))
    manifest.require_same([A, B], where="publish")
    with pytest.raises(ManifestMismatch) as error:
        manifest.require_same(other, where="publish")
    assert expected in str(error.value.expected)
    assert got in str(error.value.got)
    assert error.value.where == "publish"
