"""Whether a source would yield what it did the last time, and what is sent where it would not."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vllm_wt.errors import ManifestMismatch, WeightTransferError
from vllm_wt.source import ModuleSource, PairsSource, StateDictSource

from .support.engines import InProcessEngine, Weights, assert_equal, connecting


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.down = nn.Linear(4, 3, bias=False)
        self.mix = nn.Parameter(torch.rand(3, 3))
        self.register_parameter("gate", None)
        self.register_buffer("steps", torch.zeros(2))


class Model(nn.Module):
    """Nested, with a frozen, a shared and a plain parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.rand(5))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(3, 4)
        self.head.weight = self.blocks[0].up.weight
        self.register_module("spare", None)
        self.head.bias.requires_grad_(False)


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def state():
    square = torch.arange(4.0).view(2, 2)
    return Weights(a=torch.arange(12.0).view(3, 4), b=torch.ones(6), c=torch.tensor(2.0), d=square)


def looked_at(source):
    """The source, after one look."""
    dict(source.at_hand())
    assert source.is_same()
    return source


@pytest.fixture
def connect(monkeypatch, transport_cls):
    with connecting(monkeypatch, transport_cls) as connect:
        yield connect


@pytest.fixture
def engine(transport_cls, loader):
    return InProcessEngine(transport_cls, loader)


def of(model):
    return {name: p.detach() for name, p in model.named_parameters()}


# -- nothing has changed ---------------------------------------------------------------------------


def test_nobody_has_looked_yet(model, state):
    assert not ModuleSource(model).is_same()
    assert not StateDictSource(state).is_same()


def test_the_same_again(model, state):
    for source in (ModuleSource(model), StateDictSource(state)):
        looked_at(source)
        assert source.is_same()
        source.manifest()
        list(source)
        assert source.made == frozenset()
        assert source.is_same()


def test_other_values_are_no_change(model, state):
    source, other = looked_at(ModuleSource(model)), looked_at(StateDictSource(state))
    with torch.no_grad():
        for tensor in (*model.parameters(), *state.values()):
            tensor.add_(1)
    model.train(False)
    model.head.requires_grad_(False)
    model.blocks[0].steps = torch.ones(2)
    model.head.weight.grad = torch.ones(4, 3)
    assert source.is_same()
    assert other.is_same()


def test_a_look_that_is_not_walked_is_none(model):
    source = ModuleSource(model)
    source.at_hand()
    assert not source.is_same()


# -- what a module may do --------------------------------------------------------------------------


def _same_values(parameter):
    return nn.Parameter(parameter.detach().clone())


def replace_parameter(model):
    model.blocks[1].down.weight = _same_values(model.blocks[1].down.weight)


def replace_root_parameter(model):
    model.scale = _same_values(model.scale)


def give_other_memory(model):
    model.blocks[0].down.weight.data = torch.randn(3, 4)


def give_memory_of_other_strides(model):
    model.blocks[0].down.weight.data = torch.randn(4, 3).t()


def give_the_same_memory_in_other_strides(model):
    """A square one: shape and place stay."""
    model.blocks[0].mix.data = model.blocks[0].mix.data.t()


def give_the_same_memory_to_another_parameter(model):
    """Writes to one are not counted by the other."""
    model.scale = nn.Parameter(model.scale.data)


def replace_module(model):
    model.blocks[1] = Block()


def replace_module_by_its_copy(model):
    other = Block()
    other.load_state_dict(model.blocks[0].state_dict())
    other.up.weight = model.blocks[0].up.weight
    model.blocks[0] = other


def untie(model):
    model.blocks[0].up.weight = _same_values(model.blocks[0].up.weight)


def swap_modules(model):
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


STILL_SENT = [
    replace_parameter,
    replace_root_parameter,
    give_other_memory,
    give_memory_of_other_strides,
    give_the_same_memory_in_other_strides,
    give_the_same_memory_to_another_parameter,
    replace_module,
    replace_module_by_its_copy,
]


@pytest.mark.parametrize("change", STILL_SENT, ids=lambda change: change.__name__)
def test_a_module_that_has_changed_is_sent_as_it_is(connect, engine, loader, model, change):
    sync = connect(engine, model)
    sync.push(1)
    sync.push(2)
    source = sync._trainer.source
    assert source.is_same()
    change(model)
    assert not source.is_same()
    sync.push(3)
    assert_equal(loader.weights, of(model))
    assert source.is_same()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    sync.push(4)
    assert_equal(loader.weights, of(model))


def add_parameter(model):
    model.extra = nn.Parameter(torch.ones(2))


def add_nested_parameter(model):
    model.blocks[1].down.bias = nn.Parameter(torch.ones(3))


def set_a_parameter_that_was_none(model):
    model.blocks[0].gate = nn.Parameter(torch.ones(2))


def remove_parameter(model):
    del model.scale


def unset_parameter(model):
    model.head.bias = None


def give_other_dtype(model):
    model.scale.data = model.scale.data.bfloat16()


def convert(model):
    model.bfloat16()


def give_other_shape(model):
    model.scale.data = torch.ones(5, 1)


def the_same_bytes_in_another_shape(model):
    model.blocks[1].down.weight.data = model.blocks[1].down.weight.data.view(4, 3)


def the_same_bytes_in_another_dtype(model):
    parameter = model.scale.requires_grad_(False)
    parameter.data = parameter.data.view(torch.int32)


def add_module(model):
    model.blocks.append(Block())


def set_a_module_that_was_none(model):
    model.spare = nn.Linear(1, 1)


def remove_module(model):
    del model.blocks[1]


def rename_module(model):
    model.top = model.head
    del model.head


def rename_parameter(model):
    model.factor = model.scale
    del model.scale


def rename_module_in_place(model):
    model._modules = {"top" if name == "head" else name: m for name, m in model._modules.items()}


def reorder(model):
    model._modules = dict(reversed(model._modules.items()))


REFUSED = [
    untie,
    swap_modules,
    add_parameter,
    add_nested_parameter,
    set_a_parameter_that_was_none,
    remove_parameter,
    unset_parameter,
    give_other_dtype,
    convert,
    give_other_shape,
    the_same_bytes_in_another_shape,
    the_same_bytes_in_another_dtype,
    add_module,
    set_a_module_that_was_none,
    remove_module,
    rename_module,
    rename_parameter,
    rename_module_in_place,
    reorder,
]


def _refused_or_sent(connect, engine, loader, model, change):
    sync = connect(engine, model)
    names = list(of(model))
    sync.push(1)
    before = dict(loader.weights)
    source = sync._trainer.source
    change(model)
    manifest = [(name, p.dtype, p.shape) for name, p in of(model).items()]
    if manifest == [(n, t.dtype, t.shape) for n, t in before.items()]:
        assert not source.is_same()
        sync.push(2)
        assert_equal(loader.weights, of(model))
        return
    for version in (2, 3):
        with pytest.raises(ManifestMismatch):
            sync.push(version)
        assert not source.is_same()
    assert_equal(loader.weights, before)
    assert list(loader.weights) == names


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_a_module_that_is_another_one_by_now_is_refused(connect, engine, loader, model, change):
    _refused_or_sent(connect, engine, loader, model, change)


class Pair(nn.Module):
    """Names that may have no tensor, and modules that may be one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(3))
        self.register_parameter("second", None)
        self.left = nn.Linear(2, 2)
        self.register_module("right", None)
        self.x = self.y = nn.Linear(4, 1)
        self.z = nn.Linear(4, 1)


def move_parameter(pair):
    pair.second, pair.first = pair.first, None


def move_module(pair):
    pair.right, pair.left = pair.left, None


def alias_another_module(pair):
    """The names of what comes first are those that count."""
    pair.y = pair.z


@pytest.mark.parametrize(
    "change",
    [move_parameter, move_module, alias_another_module],
    ids=lambda change: change.__name__,
)
def test_a_tensor_that_goes_by_another_name(connect, engine, loader, change):
    _refused_or_sent(connect, engine, loader, Pair(), change)


class Renaming(nn.Module):
    """As wrappers do that take prefixes off the names of what they wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.prefix = "a"

    def named_parameters(self, *args, **kwargs):
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield self.prefix + name, parameter


def test_a_module_that_gives_its_parameters_other_names(connect, engine, loader):
    model = Renaming()
    sync = connect(engine, model)
    sync.push(1)
    model.prefix = "b"
    with pytest.raises(ManifestMismatch):
        sync.push(2)


class Special(nn.Parameter):
    """Keeps what it likes elsewhere."""


def test_a_module_that_is_given_another_way_to_name_them(connect, engine, loader):
    model = nn.Linear(2, 2)
    sync = connect(engine, model)
    sync.push(1)
    model.named_parameters = lambda: ((f"x.{n}", p) for n, p in nn.Module.named_parameters(model))
    with pytest.raises(ManifestMismatch):
        sync.push(2)


def test_writes_to_another_object_of_the_same_memory_are_counted(
    connect, engine, loader, state, monkeypatch
):
    sync = connect(engine, state)
    sync.push(1)
    before = dict(loader.weights)
    state["b"] = state["b"].data
    update = engine.update_weights

    def training(info):
        update(info)
        if info["op"] == "open":
            state["b"].add_(1)

    monkeypatch.setattr(engine, "update_weights", training)
    with pytest.raises(ManifestMismatch, match="written to while"):
        sync.push(2)
    assert_equal(loader.weights, before)


def test_classes_of_ones_own_are_looked_at_each_time(connect, engine, loader, model):
    model.scale = Special(torch.ones(5))
    source = ModuleSource(model)
    dict(source.at_hand())
    assert not source.is_same()
    sync = connect(engine, model)
    for version in (1, 2):
        with torch.no_grad():
            model.scale.add_(1)
        sync.push(version)
        assert_equal(loader.weights, of(model))


class Renamed(ModuleSource):
    prefix = "x."

    def _items(self):
        return ((self.prefix + name, tensor) for name, tensor in super()._items())


class Filtered(StateDictSource):
    wanted = frozenset("ab")

    def _items(self):
        return ((name, tensor) for name, tensor in super()._items() if name in self.wanted)


def test_sources_that_go_by_something_else_are_looked_at_each_time(
    connect, engine, loader, model, state
):
    source = Filtered(state)
    dict(source.at_hand())
    assert not source.is_same()
    sync = connect(engine, source)
    sync.push(1)
    source.wanted = frozenset("abc")
    with pytest.raises(ManifestMismatch):
        sync.push(2)
    for other in (
        Renamed(model),
        PairsSource(list(state.items())),
        ModuleSource(model, buffers=True),
    ):
        dict(other.at_hand())
        assert not other.is_same()


def test_buffers_that_are_sent_are_looked_at_each_time(connect, engine, loader, model):
    sync = connect(engine, ModuleSource(model, buffers=True))
    sync.push(1)
    model.blocks[1].steps = torch.full((2,), 8.0)
    sync.push(2)
    assert loader.weights["blocks.1.steps"].tolist() == [8, 8]


# -- what a mapping may do -------------------------------------------------------------------------


def replaced(state):
    state["b"] = torch.full((6,), 4.0)


def replaced_by_an_equal_one(state):
    state["b"] = state["b"].clone()


def other_memory(state):
    state["b"].data = torch.full((6,), 4.0)


def other_strides(state):
    state["a"].data = torch.randn(4, 3).t()


def other_values_of_the_same_memory(state):
    state["c"] = state["a"].view(-1)[3]


def the_same_memory_in_other_strides(state):
    state["d"].data = state["d"].data.t()


def the_same_memory_again(state):
    state["b"] = state["b"].data


def swapped_forms(state):
    """As many tensors, other ones."""
    state["b"], state["e"] = torch.ones(2), state.pop("c")


@pytest.mark.parametrize(
    "change",
    [
        replaced,
        replaced_by_an_equal_one,
        other_memory,
        other_strides,
        other_values_of_the_same_memory,
        the_same_memory_in_other_strides,
        the_same_memory_again,
    ],
    ids=lambda change: change.__name__,
)
def test_a_mapping_that_has_changed_is_sent_as_it_is(connect, engine, loader, state, change):
    sync = connect(engine, state)
    sync.push(1)
    sync.push(2)
    source = sync._trainer.source
    assert source.is_same()
    change(state)
    assert not source.is_same()
    sync.push(3)
    assert_equal(loader.weights, state)
    assert source.is_same()
    for tensor in state.values():
        tensor.mul_(2)
    sync.push(4)
    assert_equal(loader.weights, state)


@pytest.mark.parametrize(
    "change",
    [
        swapped_forms,
        lambda state: state.update(e=torch.ones(1)),
        lambda state: state.pop("b"),
        lambda state: state.update(a=state.pop("a")),
        lambda state: state.update(e=state.pop("d")),
        lambda state: setattr(state["b"], "data", state["b"].data.view(2, 3)),
        lambda state: setattr(state["b"], "data", state["b"].data.view(torch.int32)),
        lambda state: state.update(b=state["b"].double()),
        lambda state: state["b"].resize_(3),
    ],
    ids=["forms", "added", "removed", "order", "renamed", "shape", "bits", "dtype", "resized"],
)
def test_a_mapping_that_is_another_one_by_now_is_refused(connect, engine, loader, state, change):
    sync = connect(engine, state)
    sync.push(1)
    before = dict(loader.weights)
    change(state)
    for version in (2, 3):
        with pytest.raises(ManifestMismatch):
            sync.push(version)
        assert not sync._trainer.source.is_same()
    assert_equal(loader.weights, before)


@pytest.mark.parametrize("value", [None, 3, "text", torch.ones(6).to_sparse()])
def test_what_is_no_tensor_any_more_is_refused(connect, engine, loader, state, value):
    sync = connect(engine, state)
    sync.push(1)
    state["b"] = value
    for version in (2, 3):
        with pytest.raises(WeightTransferError):
            sync.push(version)


class Twice(torch.Tensor):
    """A class of its own, which may look other each time."""


def test_tensors_of_a_class_of_their_own_are_looked_at_each_time(state):
    state["b"] = state["b"].as_subclass(Twice)
    source = StateDictSource(state)
    dict(source.at_hand())
    assert not source.is_same()


# -- a change that was refused ---------------------------------------------------------------------


def test_a_tensor_without_memory_is_refused_until_it_has_some(connect, engine, loader, state):
    sync = connect(engine, state)
    sync.push(1)
    state["b"] = torch.full((6,), 4.0)
    state["b"].untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(ManifestMismatch, match="freed or resized"):
            sync.push(2)
    state["b"].untyped_storage().resize_(24)
    state["b"].fill_(5)
    sync.push(2)
    assert_equal(loader.weights, state)


def test_tensors_of_two_devices_are_refused_until_they_are_of_one(
    connect, engine, loader, state, monkeypatch
):
    """By a stand-in: the second device."""
    sync = connect(engine, state)
    sync.push(1)

    def refuse(*arguments):
        raise ManifestMismatch("The tensors of one trainer rank are on several devices")

    state["b"] = torch.full((6,), 4.0)
    with monkeypatch.context() as patch:
        patch.setattr("vllm_wt.pull.trainer.require_one_device", refuse)
        for _ in range(2):
            with pytest.raises(ManifestMismatch, match="several devices"):
                sync.push(2)
    sync.push(2)
    assert_equal(loader.weights, state)


def test_a_push_after_one_that_failed_sends_what_is_there(
    connect, engine, loader, state, monkeypatch
):
    """Once: what failed was not the tensor's fault."""
    sync = connect(engine, state)
    sync.push(1)
    state["b"] = torch.full((6,), 4.0)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("vllm_wt.pull.trainer.require_one_device", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sync.push(2)
    sync.push(2)
    assert_equal(loader.weights, state)


# -- sharded tensors, on a mesh of one rank --------------------------------------------------------


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    if dist.is_initialized():
        pytest.skip("this process is a rank of another test's")
    from torch.distributed.device_mesh import init_device_mesh

    store = tmp_path_factory.mktemp("ranks") / "store"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), 1),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
    )
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", ["Shard", "Replicate"])
def test_dtensors_are_looked_at_each_time(connect, engine, loader, mesh, placement):
    from torch.distributed import tensor as tensors

    place = tensors.Shard(0) if placement == "Shard" else tensors.Replicate()
    state = {
        "a": tensors.distribute_tensor(torch.arange(6.0), mesh, [place]),
        "b": torch.ones(3),
    }
    source = StateDictSource(state)
    dict(source.at_hand())
    assert not source.is_same()
    sync = connect(engine, state)
    for version in (1, 2, 3):
        if version == 2:
            state["a"] = tensors.distribute_tensor(torch.full((6,), 7.0), mesh, [place])
        else:
            state["a"].to_local().add_(version)
        sync.push(version)
        assert torch.equal(loader.weights["a"], state["a"].full_tensor())


def test_modules_of_fsdp2_are_looked_at_each_time(connect, engine, loader, mesh, model):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    sync = connect(engine, model)
    for version in (1, 2, 3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(version)
        sync.push(version)
        assert not sync._trainer.source.is_same()
        full = {
            n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in of(model).items()
        }
        assert_equal(loader.weights, full)


def test_what_fsdp2_has_gathered_is_looked_at_each_time(mesh):
    """Plain parameters for now, whose memory it takes away again."""
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(nn.Sequential(nn.Linear(3, 3)), mesh=mesh, reshard_after_forward=False)
    net(torch.ones(1, 3))
    assert type(net[0].weight) is nn.Parameter
    source = ModuleSource(net)
    dict(source.at_hand())
    assert not source.is_same()


def test_a_module_that_is_sharded_later_is_noticed(mesh, model):
    from torch.distributed.fsdp import fully_shard

    source = looked_at(ModuleSource(model))
    fully_shard(model.blocks[1], mesh=mesh)
    assert not source.is_same()
    dict(source.at_hand())
    assert not source.is_same()


def test_a_plain_module_is_the_same_where_others_are_sharded(mesh, model):
    looked_at(ModuleSource(model))


@pytest.mark.parametrize("of", ["module", "state"])
def test_a_tensor_that_moves_while_it_is_asked_for(monkeypatch, of):
    """By another thread, between the look and the walk; and comes back to where it was."""
    module = nn.Linear(4, 4, bias=False)
    state = {"weight": torch.zeros(4, 4)}
    tensor = module.weight if of == "module" else state["weight"]
    source = ModuleSource(module) if of == "module" else StateDictSource(state)
    before, other = tensor.data, torch.ones(4, 4)
    original = type(source)._checked

    def moved(self):
        tensor.data = other
        return original(self)

    monkeypatch.setattr(type(source), "_checked", moved)
    yielded = dict(source.at_hand())["weight"]
    monkeypatch.undo()
    tensor.data = before
    assert yielded.data_ptr() == other.data_ptr()
    assert not source.is_same()
    looked_at(source)
