"""What the trainer has at hand, as a source: modules, mappings, lists; and what is refused."""

import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch

from vllm_wt.errors import InvalidInfo, ManifestMismatch
from vllm_wt.packing import meta_of
from vllm_wt.source import (
    ModuleSource,
    PairsSource,
    SafetensorsSource,
    StateDictSource,
    WeightSource,
    as_source,
)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(3, 4)
        self.down = torch.nn.Linear(4, 3, bias=False)
        self.down.weight.requires_grad_(False)
        self.tied = self.down
        self.register_buffer("bias_correction", torch.arange(3.0))
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)


PARAMETERS = ["up.weight", "up.bias", "down.weight"]


def walk(source):
    """One pass, once it has been held against the manifest."""
    items = list(source)
    assert tuple(meta_of(name, tensor) for name, tensor in items) == source.manifest().tensors
    assert not any(tensor.requires_grad for _, tensor in items)
    return dict(items)


def test_module_in_place():
    module = Layer()
    source = as_source(module)
    tensors = walk(source)
    assert list(tensors) == PARAMETERS
    for name, param in module.named_parameters():
        assert tensors[name].data_ptr() == param.data_ptr()
        assert tensors[name].stride() == param.stride()
    assert source.made == frozenset()


def test_module_with_buffers():
    module = Layer()
    tensors = walk(ModuleSource(module, buffers=True))
    assert list(tensors) == [*PARAMETERS, "bias_correction"]
    assert tensors["bias_correction"].data_ptr() == module.bias_correction.data_ptr()


def test_state_dict_is_read_anew():
    state = OrderedDict(Layer().state_dict())
    source = as_source(state)
    assert list(walk(source)) == list(state)
    new = torch.full((4, 3), 7.0, dtype=torch.bfloat16)
    state["up.weight"] = new
    assert walk(source)["up.weight"].data_ptr() == new.data_ptr()
    assert source.made == frozenset()


@pytest.mark.parametrize("form", [list, tuple, lambda items: items], ids=["list", "tuple", "items"])
def test_pairs(form):
    state = {"b": torch.ones(2), "a": torch.tensor(1), "c": torch.empty(0, 5).T}
    source = as_source(form(state.items()))
    assert isinstance(source, PairsSource)
    assert list(walk(source)) == ["b", "a", "c"]
    assert [t.data_ptr() for t in walk(source).values()] == [t.data_ptr() for t in state.values()]


@pytest.mark.parametrize(
    ("pairs", "got"),
    [
        ([("a", torch.ones(1)), ("b", torch.ones(1), 3)], "tuple of 3"),
        ([("a", torch.ones(1)), torch.ones(2)], "Tensor"),
        ([("a", torch.ones(1)), "ab"], "str"),
    ],
)
def test_no_pair(pairs, got):
    with pytest.raises(InvalidInfo, match="Item 1 is not a pair") as error:
        as_source(pairs).manifest()
    assert error.value.expected == "(name, tensor)"
    assert error.value.got == got


def test_pair_twice():
    with pytest.raises(ManifestMismatch, match="'a' occurs twice"):
        as_source([("a", torch.ones(1)), ("a", torch.ones(1))]).manifest()


class Subclass(torch.Tensor):
    """Keeps its values elsewhere, as torchao's quantised weights do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} must not be asked of it")


def _quantised():
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("value", "what", "got", "cure"),
    [
        (lambda: None, "'w' is not a tensor", "builtins.NoneType", "leave it out"),
        (lambda: 3, "'w' is not a tensor", "builtins.int", "torch.as_tensor"),
        (lambda: np.ones(2), "'w' is not a tensor", "numpy.ndarray", "torch.as_tensor"),
        (lambda: torch.ones(2, device="meta"), "'w' was never materialised", "meta", "load the"),
        (lambda: torch.ones(2, 2).to_sparse(), "'w' is not a dense", "sparse_coo", "to_dense()"),
        (_quantised, "'w' is not a dense", "qint8", "dequantize()"),
        (lambda: Subclass(torch.ones(2)), "'w' is not a dense", "Subclass", "dequantize()"),
        (torch.nn.UninitializedParameter, "'w' has no shape yet", "Uninit", "run the module"),
    ],
    ids=["none", "int", "numpy", "meta", "sparse", "quantised", "subclass", "lazy"],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_value_that_cannot_be_sent(value, what, got, cure):
    source = as_source({"v": torch.ones(1), "w": value()})
    asks = [source.manifest, lambda: next(iter(source)), lambda: source.made]
    for ask in asks:  # a pass too yields nothing before it fails
        with pytest.raises(InvalidInfo) as error:
            ask()
        assert error.value.what.startswith(what)
        assert error.value.where == "state dict"
        assert error.value.expected
        assert got in error.value.got
        assert cure in error.value.cure


def test_key_that_is_no_name():
    with pytest.raises(InvalidInfo, match="The key 0 is not a name") as error:
        as_source({0: torch.ones(1)}).manifest()
    assert error.value.got == "int"
    assert "checkpoint" in error.value.cure


def test_subclass_that_is_plain_memory_is_sent():
    class Tagged(torch.nn.Parameter):
        """As vLLM's and bitsandbytes' parameters: attributes, and no operations of its own."""

    tensor = Tagged(torch.ones(2))
    assert walk(as_source({"w": tensor}))["w"].data_ptr() == tensor.data_ptr()


def test_module_on_meta():
    with torch.device("meta"):
        module = Layer()
    with pytest.raises(InvalidInfo, match=r"'up\.weight' was never materialised") as error:
        as_source(module).manifest()
    assert error.value.where == "module"


def test_dtype_that_cannot_be_sent():
    with pytest.raises(ManifestMismatch, match="'w' has a dtype that cannot be sent") as error:
        as_source({"w": torch.ones(2, dtype=torch.uint8).view(torch.bits8)}).manifest()
    assert error.value.got == "bits8"


def test_nothing_to_send():
    for empty in ({}, [], torch.nn.Identity()):
        with pytest.raises(ManifestMismatch, match="yields no tensors"):
            as_source(empty).manifest()


ACCEPTED = ["WeightSource", "torch.nn.Module", "mapping", "(name, tensor)", "vLLM's own"]


@pytest.mark.parametrize(
    ("source", "got", "cure"),
    [
        (None, "NoneType", None),
        (torch.ones(2), "Tensor", None),
        (as_source, "function", None),
        ({"a", "b"}, "set", None),
        ("/models/llama", "str", "SafetensorsSource(folder)"),
        (b"ab", "bytes", None),
        (Layer().named_parameters(), "generator", "walked only once"),
        (iter([("a", torch.ones(1))]), "list_iterator", "walked only once"),
        (Layer, "the class Layer", "give an instance"),
    ],
    ids=["none", "tensor", "function", "set", "str", "bytes", "generator", "iterator", "class"],
)
def test_no_source(source, got, cure):
    with pytest.raises(InvalidInfo, match="cannot be a source") as error:
        as_source(source)
    assert all(word in error.value.expected for word in ACCEPTED)
    assert error.value.got == got
    assert (cure in error.value.cure) if cure else error.value.cure is None


def test_source_is_itself(tmp_path):
    for source in (StateDictSource({}), SafetensorsSource(tmp_path), ModuleSource(Layer())):
        assert as_source(source) is source


def test_made_is_empty_unless_told():
    class Own(WeightSource):
        def manifest(self):
            raise NotImplementedError

        def __iter__(self):
            raise NotImplementedError

    assert Own().made == frozenset()


IMPORTS = """
import sys
import vllm_wt.source, torch
vllm_wt.source.as_source({"w": torch.ones(1)}).made
print(sorted({"torch.distributed.tensor", "torch.distributed.fsdp", "safetensors"} & {*sys.modules}))
"""


def test_plain_tensors_import_nothing_for_dtensors_or_files():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
