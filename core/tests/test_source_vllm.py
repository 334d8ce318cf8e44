"""vLLM's own sources, of every shape that its releases have had.

The classes are stand-ins, as core's tests go without vLLM: the members that
``vllm/distributed/weight_transfer/base.py`` has in 0.27.0, in 0.32.0 and in 0.33.0.
"""

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

from vllm_wt.errors import InvalidInfo, ManifestMismatch
from vllm_wt.packing import meta_of
from vllm_wt.source import VllmSource, as_source


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: object
    shape: object


class Source026:
    """0.26 to 0.28."""

    def __init__(self, params, metas=None):
        self.params = params
        self.metas = [ParamMeta(n, p.dtype, tuple(p.shape)) for n, p in metas or params]
        self.asked = 0

    def metadata(self):
        self.asked += 1
        return self.metas

    def __iter__(self):
        yield from self.params


class Source029(Source026):
    """0.29 to 0.32: also what a rank holds, and the stream in groups of layers."""

    held = None

    def held_names(self):
        return self.held

    def groups(self):
        return [[meta.name for meta in self.metadata()]]

    def iter_groups(self):
        raise AssertionError("the plain pass is enough")


class Source033:
    """0.33: ``metadata`` has to be a ``cached_property``, and no ``__iter__``."""

    def __init__(self, params, metas=None):
        self.params = params
        self.metas = [ParamMeta(n, p.dtype, tuple(p.shape)) for n, p in metas or params]
        self.asked = 0

    @cached_property
    def metadata(self):
        self.asked += 1
        return self.metas

    def iter_full(self):
        yield from self.params

    def iter_local(self):
        raise AssertionError("pieces are of no use")


SHAPES = pytest.mark.parametrize("shape", [Source026, Source029, Source033])


def params():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, dtype=torch.bfloat16))
    return list(module.named_parameters())


@SHAPES
def test_every_release(shape):
    theirs = shape(params())
    source = as_source(theirs)
    assert isinstance(source, VllmSource)
    assert theirs.asked == 0  # may be a collective: not before it is needed
    for _ in range(2):
        items = list(source)
        assert [name for name, _ in items] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert tuple(meta_of(*item) for item in items) == source.manifest().tensors
        assert all(
            tensor.data_ptr() == param.data_ptr() and not tensor.requires_grad
            for (_, tensor), (_, param) in zip(items, theirs.params, strict=True)
        )
    assert source.made == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert theirs.asked == 1


@SHAPES
def test_values_of_this_pass(shape):
    made = params()
    source = as_source(shape(made))
    first = {name: tensor.clone() for name, tensor in source}
    with torch.no_grad():
        for _, param in made:
            param.add_(1)
    assert all(torch.equal(tensor, first[name] + 1) for name, tensor in source)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.bfloat16, torch.Size([2, 3])),
        ("bfloat16", [2, 3]),
        ("torch.bfloat16", (2, 3)),
    ],
)
def test_spellings_of_metadata(dtype, shape):
    theirs = Source026([("w", torch.ones(2, 3, dtype=torch.bfloat16))])
    theirs.metas = [ParamMeta("w", dtype, shape)]
    source = as_source(theirs)
    assert source.manifest().tensors == tuple(meta_of(*item) for item in source)


A, B = ("a", torch.ones(2, 3)), ("b", torch.ones(4, dtype=torch.int8))


@SHAPES
@pytest.mark.parametrize(
    ("yielded", "index", "expected", "got"),
    [
        ([A], 1, "b int8 [4]", "no more tensors"),
        ([A, B, ("c", torch.ones(1))], 2, "no more tensors", "c float32 [1]"),
        ([B, A], 0, "a float32 [2, 3]", "b int8 [4]"),
        ([("a", torch.ones(1, 3)), B], 0, "a float32 [2, 3]", "a float32 [1, 3]"),
        ([A, ("b", torch.ones(4))], 1, "b int8 [4]", "b float32 [4]"),
        ([A, A, B], 1, "b int8 [4]", "a float32 [2, 3]"),
    ],
    ids=["missing", "more", "order", "a shard", "dtype", "twice"],
)
def test_pass_that_differs_from_metadata(shape, yielded, index, expected, got):
    passed = []
    with pytest.raises(ManifestMismatch, match=f"at tensor {index}") as error:
        passed.extend(as_source(shape(yielded, [A, B])))
    assert error.value.expected == expected
    assert error.value.got == got
    assert "order of metadata" in error.value.cure


def test_tensors_before_the_difference_were_right():
    walk = iter(as_source(Source026([A, A], [A, B])))
    assert next(walk)[0] == "a"
    with pytest.raises(ManifestMismatch):
        next(walk)


def test_rank_that_holds_a_part():
    theirs = Source029([A, ("b", None)], [A, B])
    theirs.held = {"a"}
    source = as_source(theirs)
    for ask in (source.manifest, lambda: next(iter(source)), lambda: source.made):
        with pytest.raises(InvalidInfo, match="only a part of the model") as error:
            ask()
        assert error.value.expected == "all 2 names of metadata()"
        assert error.value.got == "1 of them, without 'b'"
        assert "gathers" in error.value.cure


def test_rank_that_holds_all():
    theirs = Source029([A, B])
    theirs.held = ["b", "a"]
    assert len(list(as_source(theirs))) == 2


@SHAPES
def test_yields_no_tensor(shape):
    walk = iter(as_source(shape([A, ("b", None)], [A, B])))
    next(walk)
    with pytest.raises(InvalidInfo, match="'b' is not a tensor") as error:
        next(walk)
    assert error.value.where == "vLLM's WeightSource"


@pytest.mark.parametrize(
    ("metas", "what", "got"),
    [
        (None, "The metadata is not a list", "NoneType"),
        (["a"], "An entry of the metadata", "'a'"),
        ([ParamMeta("a", torch.float32, None)], "An entry of the metadata", "shape=None"),
        ([ParamMeta("a", torch.float32, ("x",))], "An entry of the metadata", "shape=('x',)"),
    ],
)
def test_metadata_that_is_none(metas, what, got):
    theirs = Source026([A])
    theirs.metas = metas
    with pytest.raises(InvalidInfo, match=what) as error:
        as_source(theirs).manifest()
    assert got in error.value.got
    assert "name, dtype and shape" in error.value.expected


def test_unknown_dtype():
    theirs = Source026([A])
    theirs.metas = [ParamMeta("a", "bf16", (2, 3))]
    with pytest.raises(ManifestMismatch, match="'a' has a dtype that cannot be sent"):
        as_source(theirs).manifest()


def test_mapping_and_module_are_not_taken_for_one():
    class State(dict):
        def metadata(self):
            raise AssertionError("a mapping comes first")

    class Module(torch.nn.Linear):
        metadata = None

        def iter_full(self):
            raise AssertionError("a module comes first")

    assert as_source(State(a=torch.ones(1))).manifest().nbytes == 4
    assert len(as_source(Module(2, 2)).manifest()) == 2
