"""Recorded loads do, bit for bit, what the loaders do, or say why they can't be recorded.

The oracle is the loaders themselves, run over real tensors.
"""

import contextlib
import functools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from vllm_wt.loading.recorder import record
from vllm_wt.manifest import Manifest
from vllm_wt.packing import as_bytes, meta_of

from .support.replaying import replay

# Where all caches are.
set_hypothesis_home_dir(Path(__file__).parents[2] / ".venv/cache/hypothesis")


def manifest_of(sources):
    return Manifest(tuple(meta_of(name, tensor) for name, tensor in sources.items()))


def numbers(*shape, dtype=torch.float32):
    """Distinct values."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) + 1).to(dtype).view(shape)


def state_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def same_bits(first, second):
    return torch.equal(as_bytes(first.contiguous()), as_bytes(second.contiguous()))


class Model(torch.nn.Module):
    """Leaves with one weight each: the destinations of a test."""

    def __init__(self, device="meta", **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            leaf = torch.nn.Module()
            leaf.weight = torch.nn.Parameter(tensor.to(device), requires_grad=False)
            self.add_module(name, leaf)


def check(load, sources, **tensors):
    """Record over a meta model, replay, and compare with a real load; returns the plan."""
    plan = record((meta := Model(**tensors)), functools.partial(load, meta), manifest_of(sources))
    with torch.inference_mode():
        inference = Model(**tensors)
        again = record(inference, functools.partial(load, inference), manifest_of(sources))
    assert again.copies == plan.copies
    assert again.fallbacks.keys() == plan.fallbacks.keys()
    real = Model("cpu", **{name: tensor.clone() for name, tensor in tensors.items()})
    got = {name: tensor.clone() for name, tensor in state_of(real).items()}
    replay(plan, sources, got)
    load(real, iter({name: tensor.clone() for name, tensor in sources.items()}.items()))
    for name, tensor in state_of(real).items():
        if name.rpartition(".")[0] not in plan.fallbacks:
            assert same_bits(tensor, got[name]), name
    return plan


def through(op, source, out=None):
    """What one operation gives, copied into a parameter of its shape."""
    result = op(source.clone())

    def load(model, weights):
        for _, weight in weights:
            value = op(weight)
            model.out.weight.data.copy_(value)

    dtype = result.dtype if out is None else out
    return check(load, {"w": source}, out=torch.zeros(result.shape, dtype=dtype))


VIEWS = {
    "narrow": lambda x: x.narrow(0, 1, 2),
    "narrow function": lambda x: torch.narrow(x, 1, 2, 3),
    "view": lambda x: x.view(2, 2, 6, 2),
    "view_as": lambda x: x.view_as(torch.empty(8, 6, device="meta")),
    "reshape": lambda x: x.reshape(-1, 2),
    "flatten": lambda x: x.flatten(),
    "flatten some": lambda x: torch.flatten(x, 1),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "chunk": lambda x: x.chunk(2, 1)[1],
    "torch.chunk": lambda x: torch.chunk(x, 3, dim=1)[2],
    "split": lambda x: x.split(2)[1],
    "torch.split": lambda x: torch.split(x, [1, 2, 3], dim=1)[1],
    "split_with_sizes": lambda x: x.split_with_sizes([1, 3])[1],
    "tensor_split": lambda x: x.tensor_split(4, dim=1)[1],
    "hsplit": lambda x: torch.hsplit(x, 3)[1],
    "unbind": lambda x: x.unbind(1)[4],
    "iteration": lambda x: list(x)[2],
    "select": lambda x: torch.select(x, 1, -1),
    "int": lambda x: x[2],
    "ints": lambda x: x[1, -2, 1],
    "slices": lambda x: x[1:3, ::2, :1],
    "none and ellipsis": lambda x: x[None, ..., 1],
    "T": lambda x: x[0].T,
    "mT": lambda x: x.mT,
    "t": lambda x: x[:, :, 0].t(),
    "transpose": lambda x: x.transpose(0, 2),
    "torch.transpose": lambda x: torch.transpose(x, -1, -2),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "torch.permute": lambda x: torch.permute(x, (1, 2, 0)),
    "movedim": lambda x: x.movedim(0, -1),
    "squeeze": lambda x: x[:1].squeeze(),
    "squeeze dim": lambda x: x[:, 2:3].squeeze(1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "expand": lambda x: x[:, :1].expand(4, 3, 2),
    "expand_as": lambda x: x[0, 0].expand_as(torch.empty(5, 2, device="meta")),
    "broadcast_to": lambda x: torch.broadcast_to(x[:, :1, :1], (2, 4, 3, 2)),
    "as_strided": lambda x: x.as_strided((3, 2), (7, 3), 5),
    "diagonal": lambda x: x.diagonal(dim1=0, dim2=1),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "data": lambda x: x.data,
    "detach": lambda x: x.detach(),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "clone": lambda x: x[1:].mT.clone(),
    "clone in its layout": lambda x: x.permute(2, 0, 1).clone().narrow(1, 1, 2),
    "to the same": lambda x: x.to(x.dtype),
    "cpu": lambda x: x[1].cpu(),
    "to a device": lambda x: x[1].to("cpu"),
    "requires_grad_": lambda x: x.requires_grad_(False),
    "deepcopy": lambda x: __import__("copy").deepcopy(x[1:]),
    "Parameter": lambda x: torch.nn.Parameter(x, requires_grad=False)[1:].data,
    "as_tensor": lambda x: torch.as_tensor(x[1]),
    "ravel": lambda x: x.mT.ravel(),
    "reshape that copies": lambda x: x.permute(1, 0, 2).reshape(6, 8),
    "and then a part": lambda x: x.permute(1, 0, 2).reshape(24, 2)[5:19],
    "and a part of all": lambda x: x.permute(2, 1, 0).reshape(-1)[3:41:2],
    "and a view of it": lambda x: x.permute(2, 1, 0).reshape(-1)[3:43].view(5, 8).t()[1:],
    "and again": lambda x: x.permute(2, 0, 1).reshape(8, 6).t().reshape(4, 12)[1:3, 2:9],
    "windows of a copy": lambda x: x.mT.reshape(-1).unfold(0, 9, 5),
    "diagonal of a copy": lambda x: x.permute(1, 0, 2).reshape(6, 8).diagonal(1),
    "strides of a copy": lambda x: x.mT.contiguous().as_strided((4, 3), (9, 5), 2),
    "mask": lambda x: x[torch.tensor([True, False, True, True])],
    "mask of another dim": lambda x: x[:, torch.tensor([True, False, True, True, False, True])],
    "index": lambda x: x[torch.tensor([3, 0, 0, 2])],
    "list": lambda x: x[:, [5, 4, 0]],
    "index_select": lambda x: x.index_select(2, torch.tensor([1])),
    "torch.index_select": lambda x: torch.index_select(x, -2, torch.tensor([4, 2, 0, 0])),
    "moved index": lambda x: x[torch.tensor([3, 1]).to(x.device)],
    "part of an index": lambda x: x[:, [5, 4, 0, 2]].permute(1, 0, 2).reshape(-1, 4)[1:7],
    "cat": lambda x: torch.cat([x[1:], x[:1]]),
    "cat of a dim": lambda x: torch.cat([x[..., :1], x, x[..., 1:]], dim=-1)[1:, :, 1:],
    "stack": lambda x: torch.stack([x[0], x[2]], dim=1).flatten(0, 1)[3:9],
    "repeat": lambda x: x.repeat(1, 2, 1)[:, 4:8],
    "repeat to more dims": lambda x: x[0].repeat(3, 1, 2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=0)[1:4],
    "roll by cat": lambda x: torch.cat(x.flatten().split(7)[::-1])[4:31],
    "nothing": lambda x: x[:0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_recorded_operations(name):
    plan = through(VIEWS[name], numbers(4, 6, 2))
    assert not plan.fallbacks
    assert all(copy.casts == () for copy in plan.copies)


@pytest.mark.parametrize(
    ("name", "count"),
    [("and then a part", 3), ("and a part of all", 3), ("and a view of it", 4), ("mask", 2)],
)
def test_few_pieces_are_made(name, count):
    """A row begun, whole rows, a row cut off: not one piece for each row."""
    assert len(through(VIEWS[name], numbers(4, 6, 2)).copies) == count


@pytest.mark.parametrize(
    ("op", "casts"),
    [
        (lambda x: x.to(torch.float64), []),
        (lambda x: x.double().float(), []),
        (lambda x: x.bfloat16(), []),
        (lambda x: x.bfloat16().float(), ["bfloat16"]),
        (lambda x: x.half().bfloat16().float().half(), ["float16", "bfloat16"]),
        (lambda x: x.type(torch.float16), []),
        (lambda x: x.type_as(torch.empty(1, dtype=torch.int32)), []),
        (lambda x: x.int().float(), ["int32"]),
        (lambda x: x.to("cpu", torch.float16)[1:].mT, []),
        (lambda x: x.mT.to(torch.bfloat16).reshape(-1)[3:9].float(), ["bfloat16"]),
        (lambda x: x.to(torch.float8_e4m3fn).bfloat16(), ["float8_e4m3fn"]),
        (lambda x: x.to(torch.empty(2, dtype=torch.float16)), []),
        (lambda x: x.view(torch.int32), ["int32"]),
        (lambda x: x[1:].view(torch.int32).view(torch.float32), ["int32", "float32"]),
    ],
)
def test_casts(op, casts):
    plan = through(op, numbers(3, 4, 2) / 7)
    assert not plan.fallbacks
    assert {tuple(cast.dtype for cast in copy.casts) for copy in plan.copies} == {tuple(casts)}


def test_a_copy_casts_to_the_parameter():
    plan = through(lambda x: x[1:], numbers(4, 3) / 7, out=torch.bfloat16)
    assert plan.copies[0].dest_dtype == "bfloat16"


OPAQUE = {
    "mul": lambda x: x * 2,
    "rmul": lambda x: torch.ones(3, device="meta" if x.is_meta else "cpu") * x,
    "add": lambda x: x.add(x),
    "pow": lambda x: x**2,
    "sum": lambda x: x.sum(0),
    "eq": lambda x: x == 3,
    "where": lambda x: torch.where(x > 2, x, 0),
    "flip": lambda x: x.flip(0),
    "mul_": lambda x: x.mul_(2),
    "copy_": lambda x: x.copy_(torch.ones(3, device=x.device)),
    "fill_": lambda x: x.clone()[1:].fill_(3),
    "zeros_like": torch.zeros_like,
    "cat": lambda x: torch.cat([x, torch.ones(2, 3, device=x.device)]),
    "exp": lambda x: x.exp()[1:].t().clone(),
    "view": lambda x: x.view(torch.int16),
    "add_": lambda x: (x.view(torch.int32).add_(1), x)[1],
    "view_as_real": lambda x: torch.view_as_real(torch.complex(x, x)),
    "_conj": lambda x: x.to(torch.complex64).conj(),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_what_is_no_region_falls_back_with_its_reason(name):
    op = OPAQUE[name]
    result = op(numbers(4, 3))

    def load(model, weights):
        for key, weight in weights:
            if key == "w":
                model.out.weight.data.copy_(op(weight))
            else:
                model.other.weight.data.copy_(weight)

    sources = {"w": numbers(4, 3), "v": numbers(2)}
    plan = check(load, sources, out=torch.zeros_like(result), other=torch.zeros(2))
    fallback = plan.fallbacks["out"]
    assert fallback.sources == ("w",)
    assert fallback.reasons[0].partition(" ")[0].strip("r") in {name, "mul", "clone", "complex"}
    assert "test_recorder.py:" in fallback.reasons[0]
    assert plan.direct == ("other",)
    assert plan.needed("w").runs == ((0, 48),)


def test_a_tensor_that_a_loader_sets_to_a_constant():
    """As GPT-OSS does with a bias, on all ranks but the first."""

    def load(model, weights):
        for _, weight in weights:
            model.a.weight.data[1:].copy_(weight.t())
            weight.zero_()
            model.b.weight.data.copy_(weight.view(-1)[:4])
            weight.fill_(0.1)
            model.c.weight.data.copy_(weight)

    source = numbers(2, 3, dtype=torch.bfloat16)
    outs = {"a": torch.full((4, 2), 9.0), "b": torch.full((4,), 9.0), "c": torch.full((2, 3), 9.0)}
    plan = check(load, {"w": source}, **outs)
    assert not plan.fallbacks
    assert [(fill.destination, fill.value) for fill in plan.fills] == [
        ("b.weight", 0.0),
        ("c.weight", torch.tensor(0.1, dtype=torch.bfloat16).item()),
    ]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_parameters_that_are_written_past_their_loaders(device):
    """They are told of where nothing comes of that: on meta."""

    def load(model, weights):
        for _, weight in weights:
            model.a.weight.weight_loader(model.a.weight, weight)
            model.b.weight.data.copy_(weight)
            model.c.weight.data.copy_(weight.exp())
            model.d.weight.data.fill_(1)
            model.e.weight.data.add_(weight)
            model.f.weight.data.neg_()

    model = Model(device, **{name: torch.zeros(2, 3) for name in "abcdef"})
    for leaf in model.children():
        leaf.weight.weight_loader = lambda parameter, weight: parameter.data.copy_(weight)
    plan = record(model, functools.partial(load, model), manifest_of({"w": numbers(2, 3)}))
    past = {f"{name}.weight" for name in "bcdef"}
    assert plan.bypassing == (past if device == "meta" else set())


def test_a_tensor_that_is_written_to_after_a_constant_is_none():
    def load(model, weights):
        for _, weight in weights:
            weight.zero_()
            weight[0].add_(1)
            model.a.weight.data.copy_(weight)

    plan = check(load, {"w": numbers(2, 3)}, a=torch.zeros(2, 3))
    assert list(plan.fallbacks) == ["a"]


def into(write, source, *shape, dtype=torch.float32):
    def load(model, weights):
        for _, weight in weights:
            write(model.out.weight, weight)

    return check(load, {"w": source}, out=torch.full(shape, -1, dtype=dtype))


def _set_rows(dest, x):
    dest[1:3] = x


def _set_all(dest, x):
    dest.data[...] = x


def _set_mask(dest, x):
    dest[torch.tensor([True, False, True, True])] = x


def _set_index(dest, x):
    dest.data[:, torch.tensor([2, 0])] = x.t()


def _set_repeated(dest, x):
    dest[torch.tensor([1, 3, 3, 3])] = x.expand(4, 3)


@pytest.mark.parametrize(
    ("write", "source", "copied"),
    [
        (lambda d, x: d.copy_(x), numbers(4, 3), 12),
        (lambda d, x: d.data.copy_(x), numbers(3), 12),
        (lambda d, x: d.data[1].copy_(x), numbers(3), 3),
        (lambda d, x: d.data.narrow(1, 1, 2).copy_(x.view(1, 1)), numbers(1), 8),
        (lambda d, x: d.fill_(x), numbers(), 12),
        (lambda d, x: d[2:].fill_(x[1]), numbers(3), 6),
        (lambda d, x: d.t()[:2].copy_(x), numbers(2, 4), 8),
        (lambda d, x: torch.Tensor.copy_(d.view(-1)[2:9], x), numbers(7), 7),
        (lambda d, x: d.view(2, 6).diagonal().copy_(x), numbers(2), 2),
        (_set_rows, numbers(3), 6),
        (_set_all, numbers(), 12),
        (_set_mask, numbers(3, 3), 9),
        (_set_index, numbers(2, 4), 8),
        (_set_repeated, numbers(4, 3)[:1], 6),
        (lambda d, x: d.index_copy_(0, torch.tensor([3, 1]), x), numbers(2, 3), 6),
        (lambda d, x: d.view(-1).copy_(x), numbers(1), 12),
    ],
)
def test_destinations(write, source, copied):
    plan = into(write, source, 4, 3)
    assert not plan.fallbacks
    parameter = plan.parameters["out.weight"]
    assert (parameter.copied, parameter.filled, parameter.numel) == (copied, 0, 12)


def _set_data(dest, x):
    dest.data = x


def _add(dest, x):
    dest += x


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (_add, "add_ at"),
        (lambda d, x: d.data.mul_(x), "mul_ at"),
        (lambda d, x: torch.mul(x, 2, out=d), "mul at"),
        (lambda d, x: d.set_(x.reshape(4, 3)), "set_ at"),
        (lambda d, x: d.index_add_(0, torch.tensor([1]), x[:1]), "index_add_ at"),
        (lambda d, x: d.view(torch.int32).copy_(x), "view as torch.int32 written"),
        (lambda d, x: d.copy_(torch.ones(4, 3)), "copy_ at"),
        (lambda d, x: d.uniform_(), "uniform_ at"),
        (lambda d, x: d[:1].expand(4, 3).copy_(x), "expanded parameter written"),
        (lambda d, x: d[:1].expand(4, 3).fill_(1), "fill_ at"),
        (lambda d, x: torch._foreach_copy_([d], [x]), "_foreach_copy_ at"),
        (lambda d, x: (d[:2].copy_(x[:2]), d[1:].zero_()), "a constant over what was copied"),
    ],
)
def test_other_writes_fall_back(write, reason):
    def load(model, weights):
        for _, weight in weights:
            write(model.out.weight, weight)

    model = Model(out=torch.zeros(4, 3))
    plan = record(model, functools.partial(load, model), manifest_of({"w": numbers(4, 3)}))
    assert plan.fallbacks["out"].reasons[0].startswith(reason)
    assert not plan.copies
    assert not plan.parameters


def places(model):
    return {
        name: (id(tensor), tensor.untyped_storage()._cdata, tensor.device, tensor.shape)
        for name, tensor in state_of(model).items()
    }


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_replaced_data_falls_back_and_is_put_back(device):
    def load(model, weights):
        for name, weight in weights:
            if name == "w":
                model.out.weight = torch.nn.Parameter(weight, requires_grad=False)
            elif name == "v":
                model.other.weight.data = weight
            elif name == "t":
                model.moved.weight.data = fresh
            else:
                model.last.weight.data.copy_(weight)

    sources = {"w": numbers(4, 3), "t": numbers(2), "u": numbers(2), "v": numbers(3)}
    tensors = {"out": torch.zeros(4, 3), "other": torch.zeros(3), "last": torch.zeros(2)}
    tensors["moved"] = torch.zeros(2)
    fresh = torch.ones(2, device=device)
    for inference in (False, True):
        model = Model(device, **tensors)
        before = places(model)
        with torch.inference_mode(inference):
            plan = record(model, functools.partial(load, model), manifest_of(sources))
        assert places(model) == before
        assert plan.fallbacks.keys() == {"out", "other", "moved"}
        assert plan.direct == ("last",)


def test_real_parameters_are_not_touched():
    def load(model, weights):
        for _, weight in weights:
            model.out.weight.data[:2].copy_(weight)
            model.out.weight.data[2:].fill_(0)
            model.other.weight.data.zero_()
            model.other.weight.data.add_(weight)

    model = Model("cpu", out=numbers(4, 3), other=numbers(2, 3))
    plan = record(model, functools.partial(load, model), manifest_of({"w": numbers(2, 3)}))
    assert torch.equal(model.out.weight, numbers(4, 3))
    assert torch.equal(model.other.weight, numbers(2, 3))
    parameter = plan.parameters["out.weight"]
    assert (parameter.copied, parameter.filled) == (6, 6)
    assert plan.fallbacks.keys() == {"other"}


NEEDS = {
    "item": lambda x: x[0, 0].item(),
    "bool": lambda x: bool(x[0, 0]),
    "if": lambda x: 1 if (x > 0).all() else 2,
    "float": lambda x: float(x.max()),
    "int": lambda x: int(x[0, 0]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "own mask": lambda x: x[x > 3],
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "index": lambda x: list(range(9))[x[0, 0].long()],
    "in": lambda x: x[0, 0] in [x[0, 1]],
    "data_ptr": lambda x: x.data_ptr(),
    "t_": lambda x: x.t_(),
    "pickle": lambda x: __import__("pickle").dumps(x),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", NEEDS)
def test_a_weight_loader_that_needs_values_falls_back_alone(name, inference):
    def weight_loader(param, weight):
        with contextlib.suppress(Exception):  # a model that handles errors must not hide it
            NEEDS[name](weight)
        param.data.copy_(weight)

    def load(model, weights):
        for key, weight in weights:
            param = model.get_parameter(f"{key}.weight")
            getattr(param, "weight_loader", torch.Tensor.copy_)(param, weight)

    sources = {"a": numbers(2, 2), "b": numbers(2, 2), "c": numbers(2, 2)}
    with torch.inference_mode(inference):
        model = Model(**{name: torch.zeros(2, 2) for name in sources})
        model.b.weight.weight_loader = weight_loader
        plan = record(model, functools.partial(load, model), manifest_of(sources))
    assert plan.direct == ("a", "c")
    assert plan.ended is None
    assert plan.fallbacks["b"].sources == ("b",)
    assert "test_recorder.py:" in plan.fallbacks["b"].reasons[0]
    assert model.b.weight.weight_loader is weight_loader


def test_a_value_needed_outside_of_loaders_ends_the_recording():
    def load(model, weights):
        for name, weight in weights:
            if name == "b" and weight.max() > 3:
                weight = weight / 2  # noqa: PLW2901
            model.get_parameter(f"{name}.weight").data.copy_(weight)

    sources = {name: numbers(2, 2) for name in "abc"}
    plan = check(load, sources, **{name: torch.zeros(2, 2) for name in "abc"})
    assert plan.ended.startswith("is_nonzero at") or plan.ended.startswith("local_scalar_dense at")
    assert plan.direct == ("a",)
    assert plan.fallbacks.keys() == {"b", "c"}
    assert plan.fallbacks["c"].sources == ("b", "c")


def test_loaders_may_switch_inference_mode():
    def load(model, weights):
        for name, weight in weights:
            param = model.get_parameter(f"{name}.weight")
            with torch.inference_mode():
                part = weight[1:].t()
                rows = part.reshape(2, -1).float() if name == "a" else part
            with torch.no_grad():
                param.copy_(rows[:, :2])

    sources = {"a": numbers(3, 2, dtype=torch.bfloat16), "b": numbers(4, 2)}
    plan = check(load, sources, a=torch.zeros(2, 2), b=torch.zeros(2, 2))
    assert plan.direct == ("a", "b")


def test_a_loader_that_keeps_its_tensor_falls_back():
    def keep(param, weight):
        torch.empty(2, 2, device="meta").copy_(weight)

    def load(model, weights):
        for name, weight in weights:
            param = model.get_parameter(f"{name}.weight")
            getattr(param, "weight_loader", torch.Tensor.copy_)(param, weight)

    model = Model(a=torch.zeros(2, 2), b=torch.zeros(2, 2))
    model.b.weight.weight_loader = keep
    sources = {"a": numbers(2, 2), "b": numbers(2, 2)}
    plan = record(model, functools.partial(load, model), manifest_of(sources))
    assert plan.fallbacks.keys() == {"b"}
    assert plan.fallbacks["b"].reasons[0].startswith("copied to a tensor that is no parameter")


def test_errors_of_the_model_are_its_own():
    def load(model, weights):
        for _, weight in weights:
            model.out.weight.data.copy_(weight.narrow(0, 3, 4))

    model = Model(out=torch.zeros(4, 3))
    with pytest.raises((RuntimeError, IndexError), match=r"length|exceeds"):
        record(model, functools.partial(load, model), manifest_of({"w": numbers(4, 3)}))

    def loader(param, weight):
        assert param.shape == weight.shape, "shapes"

    model.out.weight.weight_loader = loader
    with pytest.raises(AssertionError, match="shapes"):
        record(
            model,
            lambda weights: [
                model.out.weight.weight_loader(model.out.weight, w) for _, w in weights
            ],
            manifest_of({"w": numbers(5)}),
        )
    assert model.out.weight.weight_loader is loader


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("inference", [False, True])
def test_temporaries_fall_back_with_all_their_sources(device, inference):
    def load(model, weights):
        buffer = torch.empty(4, 3, device=device)
        for n, (_, weight) in enumerate(weights):
            buffer[2 * n : 2 * n + 2] = weight
        model.out.weight.data.copy_(buffer.clone() * 2)

    sources = {"a": numbers(2, 3), "b": numbers(2, 3)}
    with torch.inference_mode(inference):
        model = Model(out=torch.zeros(4, 3))
        plan = record(model, functools.partial(load, model), manifest_of(sources))
    assert plan.fallbacks.keys() == {"out"}
    assert plan.fallbacks["out"].sources == ("a", "b")


@pytest.mark.parametrize("inference", [False, True])
def test_a_constant_that_is_none_falls_back(inference):
    """A temporary that would hold a value of the checkpoint holds what was there before."""

    def load(model, weights):
        for _, weight in weights:
            scale = torch.zeros(())
            scale.copy_(weight)
            model.out.weight.data.fill_(scale)
            model.other.weight.data.fill_(torch.tensor(3.0))

    with torch.inference_mode(inference):
        model = Model("cpu", out=torch.zeros(3), other=torch.zeros(2))
        plan = record(model, functools.partial(load, model), manifest_of({"w": numbers()}))
    assert plan.fallbacks.keys() == {"out"}
    assert plan.fallbacks["out"].sources == ("w",)
    assert [fill.value for fill in plan.fills] == [3.0]


def test_what_goes_to_no_parameter_is_left_to_the_model():
    def load(model, weights):
        for name, weight in weights:
            if name == "scale":
                model.scale.copy_(weight)
            else:
                model.out.weight.data.copy_(weight)

    model = Model(out=torch.zeros(2))

    model.scale = torch.zeros(())  # neither parameter nor buffer
    sources = {"w": numbers(2), "scale": numbers()}
    plan = record(model, functools.partial(load, model), manifest_of(sources))
    assert plan.direct == ("out",)
    assert plan.fallbacks[""].sources == ("scale",)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_values_that_were_not_written_are_not_looked_at(device):
    """Neither those of a temporary nor those of a parameter, which stay as they are."""

    def by_temporary(model, weights):
        for _, weight in weights:
            buffer = torch.zeros(2, device=device)
            buffer.copy_(weight)
            if (buffer * 2).sum() > 0:
                model.out.weight.data.copy_(weight)

    def by_parameter(model, weights):
        for _, weight in weights:
            model.out.weight.data.copy_(weight)
            if model.out.weight.abs().sum().item() == 0:
                raise AssertionError("stale values")
            model.other.weight.data.copy_(weight)

    for load in (by_temporary, by_parameter):
        model = Model(device, out=torch.zeros(2), other=torch.zeros(2))
        plan = record(model, functools.partial(load, model), manifest_of({"w": numbers(2)}))
        assert plan.ended is not None
        assert plan.fallbacks["other"].sources == ("w",)


def test_nothing_of_the_sources_is_allocated():
    """A checkpoint of 8 TiB."""
    sizes = {f"w{n}": (2**20, 2**20) for n in range(4)}
    manifest = Manifest(
        tuple(
            meta_of(name, torch.empty(size, dtype=torch.bfloat16, device="meta"))
            for name, size in sizes.items()
        )
    )

    def load(model, weights):
        for name, weight in weights:
            assert weight.untyped_storage().nbytes() == 0 or weight.is_meta
            part = weight[:4].t().contiguous().float().clone()
            model.get_parameter(f"{name}.weight").data.copy_(part.reshape(-1)[:8] * 1.0)
            model.get_parameter(f"{name}.weight").data.copy_(part.reshape(-1)[:8])

    model = Model("cpu", **{name: torch.zeros(8) for name in sizes})
    plan = record(model, functools.partial(load, model), manifest)
    assert plan.fallbacks.keys() == sizes.keys()


# -- a model as vLLM's are: stacked and sharded parameters, each with its loader


class Layer(torch.nn.Module):
    def __init__(self, loaders, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            if name.startswith("buffer_"):
                self.register_buffer(name, tensor)
            else:
                setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))
            if loader := loaders.get(name):
                getattr(self, name).weight_loader = loader


class FakeModel(torch.nn.Module):
    """One of ``size`` ranks of a decoder with everything that loaders do."""

    HIDDEN, HEAD, HEADS, KV_HEADS, INTER, EXPERTS, VOCAB, PADDED = 8, 4, 4, 2, 12, 4, 11, 16

    def __init__(self, rank, size, device):
        super().__init__()
        self.rank, self.size = rank, size
        h, dtype = self.HIDDEN, torch.bfloat16
        self.heads, self.kv = self.HEADS // size, max(1, self.KV_HEADS // size)
        inter = self.INTER // size

        def new(*shape, dtype=dtype):
            return torch.full(shape, -1, dtype=dtype, device=device)

        self.embed = Layer({"weight": self._vocab}, weight=new(self.PADDED // size, h))
        self.head = torch.nn.Module()
        self.head.weight = self.embed.weight  # tied
        rows = (self.heads + 2 * self.kv) * self.HEAD
        qkv = Layer({"weight": self._qkv, "bias": self._qkv}, weight=new(rows, h), bias=new(rows))
        self.qkv = qkv
        self.o = Layer({"weight": self._row}, weight=new(h, self.heads * self.HEAD))
        self.gate_up = Layer({"weight": self._gate_up}, weight=new(2 * inter, h))
        self.down = Layer({"weight": self._row}, weight=new(h, inter))
        self.experts = Layer(
            {"w13": self._expert, "w2": self._expert},
            w13=new(self.EXPERTS, 2 * inter, h),
            w2=new(self.EXPERTS, h, inter),
        )
        self.norm = Layer({}, weight=new(h, dtype=torch.float32))
        self.conv = Layer({"weight": self._column}, weight=new(3 * h // size, h))
        self.fused = Layer({}, first=new(h, h), second=new(h, h))
        self.scaled = Layer({}, weight=new(h))
        self.router = Layer({}, weight=new(2, h), buffer_bias=new(4, dtype=torch.float32))
        self.scale = Layer({}, scale=new(3, dtype=torch.float32))
        self.interleaved = Layer({"weight": self._interleaved}, weight=new(3, h // size, h))

    def _vocab(self, param, weight):
        rows = self.PADDED // self.size
        first = min(self.rank * rows, self.VOCAB)
        part = weight.narrow(0, first, min(first + rows, self.VOCAB) - first)
        param[: part.shape[0]].data.copy_(part)
        param[part.shape[0] :].data.fill_(0)

    def _column(self, param, weight):
        size = param.shape[0]
        param.data.copy_(weight.narrow(0, self.rank * size, size))

    def _row(self, param, weight):
        size = param.shape[1]
        param.data.copy_(weight.narrow(1, self.rank * size, size))

    def _qkv(self, param, weight, shard):
        q, kv = self.heads * self.HEAD, self.kv * self.HEAD
        offset, size = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[shard]
        rank = self.rank if shard == "q" else self.rank // max(1, self.size // self.KV_HEADS)
        param.data.narrow(0, offset, size).copy_(weight.narrow(0, rank * size, size))

    def _gate_up(self, param, weight, shard):
        size = param.shape[0] // 2
        param.data.narrow(0, shard * size, size).copy_(weight.narrow(0, self.rank * size, size))

    def _expert(self, param, weight, expert, shard):
        data = param.data[expert]
        if shard == "w2":
            size = data.shape[1]
            data.copy_(weight.narrow(1, self.rank * size, size))
        else:
            size = data.shape[0] // 2
            part = weight.narrow(0, self.rank * size, size)
            data.narrow(0, 0 if shard == "w1" else size, size).copy_(part)

    def _interleaved(self, param, weight):
        """Rows of a head together in the checkpoint, those of one kind together here."""
        size = self.HIDDEN // self.size
        rows = weight.view(self.HIDDEN, 3, self.HIDDEN).permute(1, 0, 2).reshape(-1, self.HIDDEN)
        for n, part in enumerate(rows.chunk(3)):
            param.data[n] = part.narrow(0, self.rank * size, size)

    def load_weights(self, weights):
        for name, weight in weights:
            module, _, rest = name.partition(".")
            if module in {"q", "k", "v"}:
                param = getattr(self.qkv, rest)
                param.weight_loader(param, weight, module)
            elif module in {"gate", "up"}:
                param = self.gate_up.weight
                param.weight_loader(param, weight, 0 if module == "gate" else 1)
            elif module == "experts":
                expert, kind = rest.split(".")
                param = self.experts.w2 if kind == "w2" else self.experts.w13
                param.weight_loader(param, weight, int(expert), kind)
            elif module == "all_down":
                for expert, part in enumerate(weight.unbind()):
                    self.experts.w2.weight_loader(self.experts.w2, part, expert, "w2")
            elif module == "conv":
                self.conv.weight.weight_loader(self.conv.weight, weight.t())
            elif module == "fused":
                first, second = torch.chunk(weight, 2, dim=0)
                self.fused.first.data.copy_(first)
                self.fused.second.copy_(second)
            elif module == "scaled":
                self.scaled.weight.data.copy_(weight * 2)
            elif module == "rope":
                continue
            elif rest.startswith("buffer_"):
                self.get_buffer(name).copy_(weight.float())
            elif module == "scale":
                self.scale.scale.data[...] = weight
            else:
                param = self.get_parameter(name)
                copy = lambda param, weight: param.data.copy_(weight)  # noqa: E731
                getattr(param, "weight_loader", copy)(param, weight)

    @classmethod
    def checkpoint(cls):
        h, dtype = cls.HIDDEN, torch.bfloat16
        generator = torch.Generator().manual_seed(7)

        def new(*shape, dtype=dtype):
            return torch.randn(shape, generator=generator).to(dtype)

        kv = cls.KV_HEADS * cls.HEAD
        weights = {
            "embed.weight": new(cls.VOCAB, h),
            "q.weight": new(cls.HEADS * cls.HEAD, h),
            "k.weight": new(kv, h),
            "v.weight": new(kv, h),
            "q.bias": new(cls.HEADS * cls.HEAD),
            "k.bias": new(kv),
            "v.bias": new(kv),
            "o.weight": new(h, cls.HEADS * cls.HEAD),
            "gate.weight": new(cls.INTER, h),
            "up.weight": new(cls.INTER, h),
            "down.weight": new(h, cls.INTER),
            "all_down.weight": new(cls.EXPERTS, h, cls.INTER),
            "norm.weight": new(h),
            "conv.weight": new(h, 3 * h),
            "fused.weight": new(2 * h, h),
            "scaled.weight": new(h),
            "router.weight": new(2, h),
            "router.buffer_bias": new(4),
            "scale.scale": new(),
            "interleaved.weight": new(3 * h, h),
            "rope.inv_freq": new(4),
        }
        for expert in range(cls.EXPERTS):
            weights[f"experts.{expert}.w1"] = new(cls.INTER, h)
            weights[f"experts.{expert}.w3"] = new(cls.INTER, h)
        return weights


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_decoder_of_two_ranks(rank, device):
    checkpoint = FakeModel.checkpoint()
    model = FakeModel(rank, 2, device)
    plan = record(model, model.load_weights, manifest_of(checkpoint))

    assert list(plan.fallbacks) == ["scaled"]
    assert plan.fallbacks["scaled"].sources == ("scaled.weight",)
    assert plan.unused == ("rope.inv_freq",)
    assert plan.parameters["embed.weight"].aliases == ("head.weight",)
    rows = 8 if rank == 0 else 3
    embed = plan.parameters["embed.weight"]
    assert (embed.copied, embed.filled) == (rows * 8, (8 - rows) * 8)
    assert all(
        parameter.copied + parameter.filled == parameter.numel
        for parameter in plan.parameters.values()
    )
    # The experts of one tensor are one region.
    assert sum(copy.source == "all_down.weight" for copy in plan.copies) == 1

    expected = FakeModel(rank, 2, "cpu")
    got = {name: tensor.clone() for name, tensor in state_of(expected).items()}
    replay(plan, checkpoint, got)
    expected.load_weights(checkpoint.items())
    for name, tensor in state_of(expected).items():
        if name in plan.parameters:
            assert same_bits(tensor, got[name]), name
    assert state_of(expected).keys() - plan.parameters.keys() == {"scaled.weight"}


def test_a_module_that_shares_memory_with_a_fallback_is_one():
    def load(model, weights):
        for name, weight in weights:
            if name == "bias":
                model.head.bias.data.copy_(weight + 1)
            else:
                model.embed.weight.data.copy_(weight)

    model = Model(embed=torch.zeros(2, 2))
    model.head = torch.nn.Module()
    model.head.weight = model.embed.weight
    model.head.bias = torch.nn.Parameter(torch.zeros(2, device="meta"), requires_grad=False)
    sources = {"w": numbers(2, 2), "bias": numbers(2)}
    plan = record(model, functools.partial(load, model), manifest_of(sources))
    assert plan.fallbacks.keys() == {"head", "embed"}
    assert plan.fallbacks["embed"].sources == plan.fallbacks["head"].sources == ("w", "bias")


def test_a_view_that_another_module_keeps():
    """As Mamba's mixer keeps one of its convolution's weight. The loader writes to either."""

    def load(model, weights):
        for name, weight in weights:
            if name == "w":
                model.conv.weight.data.copy_(weight.unsqueeze(1))
            elif name == "v":
                model.mixer.view[1:].copy_(weight)
            else:
                model.mixer.a.data.copy_(weight.exp())

    model = Model(conv=torch.zeros(3, 1, 4))
    model.mixer = torch.nn.Module()
    model.mixer.register_buffer("view", model.conv.weight.data.view(3, 4), persistent=False)
    model.mixer.a = torch.nn.Parameter(torch.zeros(2, device="meta"), requires_grad=False)
    sources = {"w": numbers(3, 4), "v": numbers(4), "unused": numbers(2), "a": numbers(2)}
    plan = record(model, lambda weights: load(model, list(weights)[:2]), manifest_of(sources))
    assert plan.parameters["conv.weight"].aliases == ("mixer.view",)
    assert plan.direct == ("conv",)
    plan = record(model, functools.partial(load, model), manifest_of(sources))
    assert plan.fallbacks.keys() == {"conv", "mixer"}
    assert {"w", "v", "a"} <= set(plan.fallbacks["conv"].sources)
    assert {"w", "v", "a"} <= set(plan.fallbacks["mixer"].sources)


def test_parameters_in_one_memory():
    """Offsets count from each parameter's own first element."""

    def load(model, weights):
        for _, weight in weights:
            model.first.weight.data.copy_(weight)
            model.second.weight.data[1].copy_(weight[0])
            model.second.weight.data[0].fill_(5)

    sources = {"w": numbers(2, 3)}
    model = Model(first=torch.zeros(2, 3), second=torch.zeros(2, 3))
    both = torch.zeros(20, device="meta")
    model.first.weight = torch.nn.Parameter(both[3:9].view(2, 3), requires_grad=False)
    model.second.weight = torch.nn.Parameter(both[11:17].view(2, 3), requires_grad=False)
    plan = record(model, functools.partial(load, model), manifest_of(sources))
    assert plan.direct == ("first", "second")
    assert not plan.parameters["first.weight"].aliases
    got = {name: torch.zeros(2, 3) for name in plan.parameters}
    replay(plan, sources, got)
    assert torch.equal(got["first.weight"], sources["w"])
    assert torch.equal(got["second.weight"], torch.tensor([[5.0, 5, 5], [1, 2, 3]]))


# -- random programs


@st.composite
def steps(draw, shape):
    """One operation that a tensor of this shape takes: a function of the tensor."""
    ndim = len(shape)
    dims = st.integers(0, ndim - 1)
    kind = draw(st.sampled_from(_STEPS if ndim else ["unsqueeze", "cast", "clone", "expand"]))
    dim = draw(dims) if ndim else 0
    size = shape[dim] if ndim else 1
    if kind in {"narrow", "chunk", "step"}:
        start = draw(st.integers(0, size - 1))
        length = draw(st.integers(1, size - start))
        step = draw(st.integers(1, 3)) if kind == "step" else 1
        return lambda x: x[(slice(None),) * dim + (slice(start, start + length, step),)]
    if kind == "permute":
        order = draw(st.permutations(range(ndim)))
        return lambda x: x.permute(order)
    if kind == "reshape":
        numel = torch.Size(shape).numel()
        factors = [n for n in range(1, numel + 1) if numel % n == 0]
        rows = draw(st.sampled_from(factors))
        inner = draw(st.sampled_from([n for n in factors if (numel // rows) % n == 0]))
        return lambda x: x.reshape(rows, inner, numel // rows // inner)
    if kind == "flatten":
        return lambda x: x.flatten()
    if kind == "mask":
        mask = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
        mask[draw(st.integers(0, size - 1))] = True
        return lambda x: x[(slice(None),) * dim + (mask,)]
    if kind == "index":
        index = draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=5))
        return lambda x: x.index_select(dim, torch.tensor(index) % size)
    if kind == "cast":
        dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
        return lambda x: x.to(dtype)
    if kind == "bits":
        return lambda x: x.view({2: torch.int16, 4: torch.int32}[x.element_size()])
    if kind == "cat":
        at = draw(st.integers(0, size))
        return lambda x: torch.cat([x.narrow(dim, at, size - at), x.narrow(dim, 0, at)], dim)
    if kind == "select":
        at = draw(st.integers(0, size - 1))
        return lambda x: x.select(dim, at)
    if kind == "expand":
        return lambda x: x.unsqueeze(0).expand(2, *x.shape)
    if kind == "unsqueeze":
        return lambda x: x.unsqueeze(dim)
    if kind == "diagonal" and ndim > 1:
        other = (dim + 1) % ndim
        return lambda x: x.diagonal(dim1=dim, dim2=other)
    if kind == "unfold":
        length = draw(st.integers(1, size))
        step = draw(st.integers(1, 3))
        return lambda x: x.unfold(dim, length, step)
    return lambda x: x.clone(memory_format=torch.contiguous_format)


_STEPS = [
    "narrow", "step", "permute", "reshape", "flatten", "mask", "index", "cast", "bits", "cat",
    "select", "expand", "unsqueeze", "diagonal", "unfold", "clone",
]  # fmt: skip


@settings(max_examples=150, deadline=None, database=None)
@given(data=st.data())
def test_random_programs(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    sources = {name: (numbers(*shape) + n * 1000) / 7 for n, name in enumerate("ab")}
    writes = []
    for name in "ab":
        ops, value = [], sources[name]
        for _ in range(data.draw(st.integers(0, 6))):
            if value.numel() > 400:
                break
            op = data.draw(steps(tuple(value.shape)))
            ops.append(op)
            value = op(value)
        count = value.numel()
        dtype = data.draw(st.sampled_from([value.dtype, torch.float32]))
        pad = data.draw(st.integers(0, 3))
        back = data.draw(st.booleans())
        writes.append((name, ops, value.shape, count, dtype, pad, back))

    def load(model, weights):
        for (name, weight), (_, ops, shape, count, _, pad, back) in zip(
            weights, writes, strict=True
        ):
            for op in ops:
                weight = op(weight)  # noqa: PLW2901
            dest = model.get_parameter(f"{name}.weight").data
            dest[:pad].fill_(0)
            dest = dest[pad : pad + count]
            if back and len(shape) > 1:
                dest.view(shape[-1], *shape[:-1]).movedim(0, -1).copy_(weight)
            else:
                dest.view(shape)[...] = weight

    outs = {
        name: torch.full((pad + count + 1,), -1, dtype=dtype)
        for name, _, _, count, dtype, pad, _ in writes
    }
    plan = check(load, sources, **outs)
    assert not plan.fallbacks
