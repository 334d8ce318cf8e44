"""How modules are loaded that vLLM's own models have rarely, on small ones with its reload."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.reload import layerwise, record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from vllm_wt.bridge import arming, compat
from vllm_wt.bridge.loader import ModelWeights
from vllm_wt.errors import InvalidInfo, LoadError, WrongOrder
from vllm_wt.loading.batches import batches
from vllm_wt.loading.slices import sliced
from vllm_wt.manifest import Manifest
from vllm_wt.packing import meta_of

Load = Callable[[Any, str, torch.Tensor], None]
DEVICE = torch.device("cpu")


class Model(torch.nn.Module):
    """Linear layers by name, loaded by ``load(model, name, tensor)``."""

    def __init__(self, load: Load, *names: str) -> None:
        super().__init__()
        self.load = load
        self.loads = 0
        for name in names:
            self.add_module(name, torch.nn.Linear(3, 2, bias=False))

    def load_weights(self, weights: Any) -> None:
        self.loads += 1
        for name, tensor in weights:
            self.load(self, name, tensor)


class Attention(torch.nn.Module, AttentionLayerBase):
    """Keeps something of its submodules."""

    processed = 0

    def __init__(self, *parts: torch.nn.Module) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.processed += 1
        self.seen = torch.get_default_dtype()
        self.kept = [part.weight.clone() for part in self.parts]

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        raise NotImplementedError


def by_name(model: Any, name: str, tensor: torch.Tensor) -> None:
    """What most loaders do."""
    parameter = model.get_parameter(name)
    getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


def made(load: Load, *names: str) -> tuple[Model, ModelWeights]:
    model = Model(load, *names)
    record_metadata_for_reloading(model)
    return model, ModelWeights(model, VllmConfig(), DEVICE)


def weights_of(*names: str) -> list[tuple[str, torch.Tensor]]:
    return [(f"{name}.weight", torch.rand(2, 3)) for name in names]


def connect(
    loader: ModelWeights, weights: list[tuple[str, torch.Tensor]], batch_bytes: int | None = None
) -> list[tuple[str, ...]]:
    """Get ready for updates, in batches if these have a size; the names of each."""
    plan = loader.rehearse(Manifest(tuple(meta_of(*each) for each in weights)))
    parts = None if batch_bytes is None else batches(plan, batch_bytes)
    loader.use(plan, parts)
    return list(parts or ())


def sync(loader: ModelWeights, weights: list[tuple[str, torch.Tensor]]) -> None:
    loader.check(weights)
    loader.apply(weights)


def load_batch(
    loader: ModelWeights,
    weights: list[tuple[str, torch.Tensor]],
    parts: list[tuple[str, ...]],
    number: int,
) -> None:
    """Hand a batch over; nothing may keep its memory."""
    handed = [(name, dict(weights)[name].clone()) for name in parts[number]]
    loader.apply_batch(number, handed)
    for _, tensor in handed:
        tensor.fill_(torch.nan)


def assert_whole(model: Model) -> None:
    """No module is armed, and none has anything on meta."""
    assert not any(layerwise.get_layerwise_info(m).can_load() for m in model.modules())
    assert not any(p.is_meta for p in model.parameters())


def test_a_module_of_which_nothing_is_made_is_written_in_place():
    model, loader = made(by_name, "a", "b")
    places = [parameter.data_ptr() for parameter in model.parameters()]
    weights = weights_of("a", "b")
    connect(loader, weights)
    sync(loader, weights)
    assert loader.report() == {
        "direct": ["a", "b"],
        "layerwise": {},
        "fallback": {},
        "whole": None,
    }
    assert model.loads == 1  # the rehearsal
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in weights)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert_whole(model)


def test_what_is_no_region_takes_its_own_loader_and_nothing_else_does():
    """Two modules take of one tensor: one of them computes with it."""

    def load(model: Any, name: str, tensor: torch.Tensor) -> None:
        by_name(model, "plain.weight", tensor)
        by_name(model, "made.weight", -tensor.exp())

    model, loader = made(load, "plain", "made")
    weights = weights_of("both")
    connect(loader, weights)
    report = loader.report()
    assert report["direct"] == ["plain"]
    assert list(report["fallback"]) == ["made"]
    assert report["fallback"]["made"][0].startswith("neg at ")
    places = [parameter.data_ptr() for parameter in model.parameters()]
    for _ in range(3):
        weights = weights_of("both")
        sync(loader, weights)
        tensor = weights[0][1]
        assert torch.equal(model.plain.weight, tensor)
        assert torch.equal(model.made.weight, -tensor.exp())
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        assert_whole(model)


def test_what_attention_keeps_of_other_weights_is_made_anew():
    """As latent attention does, of a projection that is its submodule; another keeps nothing."""
    model = Model(by_name, "a")
    model.keeps, model.keeps_nothing = Attention(model.a), Attention()
    record_metadata_for_reloading(model)
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.float64)
    loader = ModelWeights(model, config, DEVICE)
    weights = weights_of("a")
    connect(loader, weights)
    sync(loader, weights)
    assert model.keeps.seen == torch.float64  # as at the first load
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(model.keeps.kept[0], weights[0][1])
    assert (model.keeps.processed, model.keeps_nothing.processed) == (1, 0)


def test_a_loader_that_asks_for_a_value_makes_it_a_reload_of_the_whole():
    def load(model: Any, name: str, tensor: torch.Tensor) -> None:
        if tensor.max().item() > 0:
            by_name(model, name, tensor)

    model, loader = made(load, "a")
    connect(loader, weights_of("a"))
    assert loader.report()["whole"].startswith("item at ")
    weights = weights_of("a")
    sync(loader, weights)
    assert torch.equal(model.a.weight, weights[0][1])
    assert_whole(model)


def test_a_loader_that_cannot_be_followed_makes_it_a_reload_of_the_whole():
    def load(model: Any, name: str, tensor: torch.Tensor) -> None:
        if type(tensor) is not torch.Tensor:
            raise TypeError("a plain tensor, please")
        by_name(model, name, tensor)

    model, loader = made(load, "a")
    connect(loader, weights_of("a"))
    assert "a plain tensor, please" in loader.report()["whole"]
    weights = weights_of("a")
    sync(loader, weights)
    assert torch.equal(model.a.weight, weights[0][1])
    assert_whole(model)


def test_a_loader_that_refuses_is_heard():
    def load(model: Any, name: str, tensor: torch.Tensor) -> None:
        raise KeyError(name)

    model, loader = made(load, "a")
    with pytest.raises(LoadError, match=r"refuses 'a.weight'"):
        connect(loader, weights_of("a"))
    assert_whole(model)


def test_complex_values_are_not_made_real():
    model, loader = made(by_name, "a")
    with pytest.raises(LoadError, match=r"'a.weight' is complex"):
        connect(loader, [("a.weight", torch.rand(2, 3, dtype=torch.complex64))])
    assert_whole(model)


def test_two_tensors_of_one_parameter_must_be_equal():
    model = Model(by_name, "embed", "head")
    model.head.weight = model.embed.weight
    record_metadata_for_reloading(model)
    loader = ModelWeights(model, VllmConfig(), DEVICE)
    first, second = weights_of("embed", "head")
    connect(loader, [first, second])
    before = model.embed.weight.clone()
    with pytest.raises(LoadError, match=r"'embed.weight' and 'head.weight' differ"):
        loader.check([first, second])
    assert torch.equal(model.embed.weight, before)
    sync(loader, [first, (second[0], first[1].clone())])
    assert torch.equal(model.embed.weight, first[1])
    assert model.head.weight is model.embed.weight


def test_a_tied_parameter_is_covered_by_either_name():
    model = Model(by_name, "embed", "head")
    model.head.weight = model.embed.weight
    record_metadata_for_reloading(model)
    loader = ModelWeights(model, VllmConfig(), DEVICE)
    weights = weights_of("head")
    connect(loader, weights)
    sync(loader, weights)
    assert torch.equal(model.embed.weight, weights[0][1])


def test_parameters_that_have_moved_are_found_again():
    model, loader = made(by_name, "a")
    connect(loader, weights_of("a"))
    model.a.weight.data = torch.zeros(2, 3)
    weights = weights_of("a")
    sync(loader, weights)
    assert torch.equal(model.a.weight, weights[0][1])


def test_a_parameter_that_has_another_layout_by_now_is_made_anew():
    """As after a kernel was chosen that packs: the shape of the checkpoint is gone."""
    model, loader = made(by_name, "a")
    connect(loader, weights_of("a"))
    model.a.weight.data = torch.zeros(2, 3).t().contiguous().t()
    weights = weights_of("a")
    loader.check(weights)
    assert loader.report()["layerwise"] == {"a": "the kernel has its weight in another layout"}
    loader.apply(weights)
    assert torch.equal(model.a.weight, weights[0][1])
    assert model.a.weight.stride() == (1, 2)
    assert_whole(model)


def test_a_module_that_fails_in_the_middle_is_given_its_tensors_back(monkeypatch):
    monkeypatch.setenv("VLLM_WT_APPLY", "layerwise")
    model, loader = made(by_name, "a", "b")
    weights = weights_of("a", "b")
    connect(loader, weights)
    kept = dict(model.named_parameters())
    model.a.kernel = "the old one"

    def fail(module: Any, *args: Any) -> None:
        module.kernel = "half a new one"
        raise RuntimeError("no memory")

    monkeypatch.setattr(layerwise, "materialize_layer", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        loader.apply(weights)
    assert all(parameter is kept[name] for name, parameter in model.named_parameters())
    assert model.a.kernel == "the old one"
    assert_whole(model)
    monkeypatch.undo()
    loader.apply(weights)
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in weights)


def test_a_reload_of_the_whole_that_fails_leaves_loaders_that_load(monkeypatch):
    monkeypatch.setenv("VLLM_WT_APPLY", "reload")
    model, loader = made(by_name, "a", "b")
    model.a.bias = torch.nn.Parameter(torch.zeros(2), requires_grad=False)  # which vLLM never arms
    weights = [*weights_of("a"), ("a.bias", torch.rand(2)), *weights_of("b")]
    connect(loader, weights)

    def fail(model: Any, name: str, tensor: torch.Tensor) -> None:
        raise RuntimeError("no memory")

    model.load = fail
    with pytest.raises(RuntimeError, match="no memory"):
        loader.apply(weights)
    assert_whole(model)
    loaders = [getattr(p, "weight_loader", default_weight_loader) for p in model.parameters()]
    assert {each.__name__ for each in loaders} == {"default_weight_loader"}
    model.load = by_name
    loader.apply(weights)
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in weights)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("layerwise", {"layerwise": {"a": "VLLM_WT_APPLY=layerwise"}}),
        ("reload", {"whole": "VLLM_WT_APPLY=reload"}),
    ],
)
def test_ways_can_be_switched_off(monkeypatch, mode, reason):
    monkeypatch.setenv("VLLM_WT_APPLY", mode)
    model, loader = made(by_name, "a")
    weights = weights_of("a")
    connect(loader, weights)
    assert loader.report().items() >= reason.items()
    place = model.a.weight.data_ptr()
    sync(loader, weights)
    assert torch.equal(model.a.weight, weights[0][1])
    assert model.a.weight.data_ptr() == place
    assert_whole(model)


def test_a_way_that_there_is_not_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_WT_APPLY", "quick")
    _, loader = made(by_name, "a")
    with pytest.raises(InvalidInfo, match="Expected: direct or layerwise or reload"):
        connect(loader, weights_of("a"))


def test_experts_that_move_are_refused():
    model = Model(by_name, "a")
    record_metadata_for_reloading(model)
    config = VllmConfig()
    config.parallel_config.enable_eplb = True
    loader = ModelWeights(model, config, DEVICE)
    with pytest.raises(LoadError, match=r"\(EPLB\).*Cure: start the engine without --enable-eplb"):
        connect(loader, weights_of("a"))
    assert model.loads == 0


def test_buffers_are_loaded_too():
    model, loader = made(by_name, "a")
    model.a.register_buffer("scale", torch.zeros(2))
    record_metadata_for_reloading(model)

    def load(model: Any, name: str, tensor: torch.Tensor) -> None:
        if name == "scale":
            model.a.scale.copy_(tensor)
        else:
            by_name(model, name, tensor)

    model.load = load
    for mode in ("direct", "layerwise"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_WT_APPLY", mode)
            weights = [*weights_of("a"), ("scale", torch.rand(2))]
            connect(loader, weights)
            sync(loader, weights)
        assert torch.equal(model.a.scale, weights[1][1]), mode
        assert torch.equal(model.a.weight, weights[0][1]), mode
        assert_whole(model)


# In batches


def is_in(model: Model, weights: list[tuple[str, torch.Tensor]]) -> list[bool]:
    """Of each weight, whether the model has it."""
    return [torch.equal(model.get_parameter(name), tensor) for name, tensor in weights]


@pytest.mark.parametrize("mode", ["direct", "layerwise"])
def test_batches_go_in_one_by_one(monkeypatch, mode):
    monkeypatch.setenv("VLLM_WT_APPLY", mode)
    model, loader = made(by_name, "a", "b", "c")
    weights = weights_of("a", "b", "c")
    parts = connect(loader, weights, 0)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    for _ in range(2):
        weights = weights_of("a", "b", "c")
        for number in range(3):
            assert is_in(model, weights) == [n < number for n in range(3)]
            load_batch(loader, weights, parts, number)
            assert_whole(model)
        assert is_in(model, weights) == [True] * 3
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_batches_come_in_order_and_once():
    model, loader = made(by_name, "a", "b", "c")
    weights = weights_of("a", "b", "c")
    parts = connect(loader, weights, 0)
    for before, wrong in (([], 1), ([0], 2), ([0, 1], 1), ([0, 1, 2], 2), ([0, 1, 2], 3), ([], -1)):
        for number in before:
            load_batch(loader, weights, parts, number)
        there = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(WrongOrder, match=f"Batch {wrong} is not the next one"):
            loader.apply_batch(wrong, weights_of("a", "b", "c")[wrong:][:1])
        assert all(map(torch.equal, model.parameters(), there))
    for number in (0, 1, 0, 1, 2):  # an update may be begun anew
        load_batch(loader, weights, parts, number)
    assert is_in(model, weights) == [True] * 3


def test_what_was_looked_at_ahead_is_where_the_parameters_are():
    model, loader = made(by_name, "a", "b")
    weights = weights_of("a", "b")
    connect(loader, weights, 1 << 20)
    model.a.weight.data = torch.zeros(2, 3)
    loader.look()
    loader.apply_batch(0, weights, looked=True)
    assert is_in(model, weights) == [True] * 2


def test_an_update_that_was_begun_is_ended_by_one_at_once():
    model, loader = made(by_name, "a", "b")
    weights = weights_of("a", "b")
    parts = connect(loader, weights, 0)
    load_batch(loader, weights, parts, 0)
    weights = weights_of("a", "b")
    sync(loader, weights)
    assert is_in(model, weights) == [True] * 2
    with pytest.raises(WrongOrder, match="Expected: batch 0, which begins an update"):
        load_batch(loader, weights, parts, 1)


@pytest.mark.parametrize("names", [["a"], ["b", "a"], ["a", "b", "c"], ["a", "x"], []])
def test_other_tensors_than_those_of_the_batch_are_refused(names):
    model, loader = made(by_name, "a", "b", "c")
    weights = weights_of("a", "b", "c")
    parts = connect(loader, weights, 48)
    assert parts == [("a.weight", "b.weight"), ("c.weight",)]
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(LoadError, match="not the tensors of the batch"):
        loader.apply_batch(0, weights_of(*names))
    assert all(map(torch.equal, model.parameters(), before))


def negated(model: Any, name: str, tensor: torch.Tensor) -> None:
    """A loader that no plan can replace."""
    by_name(model, name, -tensor)


@pytest.mark.parametrize("way", ["direct", "layerwise", "fallback"])
def test_a_batch_that_fails_leaves_a_model_that_runs(monkeypatch, way):
    """What came before it is in, nothing after it is, and a whole update makes it right."""
    monkeypatch.setenv("VLLM_WT_APPLY", way if way == "layerwise" else "direct")
    load, sign = (negated, -1) if way == "fallback" else (by_name, 1)
    model, loader = made(load, "a", "b", "c")
    parts = connect(loader, weights_of("a", "b", "c"), 0)
    assert list(loader.report()[way]) == ["a", "b", "c"]
    places = [parameter.data_ptr() for parameter in model.parameters()]

    def of_model(weights: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        return [(name, sign * tensor) for name, tensor in weights]

    for again in ("in batches", "at once"):
        old = [(name, tensor.clone()) for name, tensor in model.named_parameters()]
        weights = weights_of("a", "b", "c")
        load_batch(loader, weights, parts, 0)
        with pytest.raises((RuntimeError, AssertionError)):
            loader.apply_batch(1, [("b.weight", torch.rand(5))])
        assert_whole(model)
        assert is_in(model, of_model(weights)) == [True, False, False]
        assert is_in(model, old) == [False, True, True]
        assert all(layer(torch.rand(3)).isfinite().all() for layer in model.children())
        with pytest.raises(WrongOrder, match="which begins an update"):
            load_batch(loader, weights, parts, 2)
        weights = weights_of("a", "b", "c")
        if again == "at once":
            sync(loader, weights)
        else:
            for number in range(3):
                load_batch(loader, weights, parts, number)
        assert is_in(model, of_model(weights)) == [True] * 3
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        assert_whole(model)


def test_loaders_get_the_tensors_of_their_batch(monkeypatch):
    """Those of modules that are written by the plan are not loaded a second time."""
    given: list[list[str]] = []
    processed: list[int] = []
    finalize = arming.finalize

    def noting(modules: arming.Armed, model_config: Any) -> None:
        processed.append(len(list(modules.modules())))
        finalize(modules, model_config)

    monkeypatch.setattr(arming, "finalize", noting)

    class Noting(Model):
        def load_weights(self, weights: Any) -> None:
            taken = list(weights)
            given.append([name for name, _ in taken])
            super().load_weights(taken)

    def load(model: Any, name: str, tensor: torch.Tensor) -> None:
        (by_name if name.startswith("plain") else negated)(model, name, tensor)

    names = ("made1", "plain1", "made2", "made3", "plain2")
    model = Noting(load, *names)
    record_metadata_for_reloading(model)
    loader = ModelWeights(model, VllmConfig(), DEVICE)
    weights = weights_of(*names)
    parts = connect(loader, weights, 48)
    assert [len(part) for part in parts] == [2, 2, 1]
    given.clear()
    for number in range(3):
        load_batch(loader, weights, parts, number)
    assert given == [["made1.weight"], ["made2.weight", "made3.weight"]]
    assert processed == [1, 2]
    right = [(name, t if name.startswith("plain") else -t) for name, t in weights]
    assert is_in(model, right) == [True] * 5


def test_two_tensors_of_one_parameter_are_in_one_batch_and_equal():
    model = Model(by_name, "embed", "layer", "head", "last")
    model.head.weight = model.embed.weight
    record_metadata_for_reloading(model)
    loader = ModelWeights(model, VllmConfig(), DEVICE)
    weights = weights_of("embed", "layer", "head", "last")
    parts = connect(loader, weights, 0)
    assert parts == [("embed.weight", "layer.weight", "head.weight"), ("last.weight",)]
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(LoadError, match=r"'embed.weight' and 'head.weight' differ"):
        load_batch(loader, weights, parts, 0)
    assert all(map(torch.equal, model.parameters(), before))
    weights[2] = (weights[2][0], weights[0][1])
    for number in range(2):
        load_batch(loader, weights, parts, number)
    assert is_in(model, weights) == [True] * 4


def test_batches_that_divide_a_parameter_of_two_are_refused():
    model = Model(by_name, "embed", "head")
    model.head.weight = model.embed.weight
    record_metadata_for_reloading(model)
    loader = ModelWeights(model, VllmConfig(), DEVICE)
    weights = weights_of("embed", "head")
    plan = loader.rehearse(Manifest(tuple(meta_of(*each) for each in weights)))
    with pytest.raises(LoadError, match="What is loaded together is not in one batch"):
        loader.use(plan, [["embed.weight"], ["head.weight"]])


def test_what_modules_keep_of_others_is_made_anew_after_the_last_batch(monkeypatch):
    refreshed = []

    def refresh(model: Any, device: torch.device) -> None:
        refreshed.append(is_in(model, weights))

    monkeypatch.setattr("vllm_wt.bridge.derived.refresh", refresh)  # which has its own tests
    model, loader = made(by_name, "a", "b")
    weights = weights_of("a", "b")
    parts = connect(loader, weights, 0)
    load_batch(loader, weights, parts, 0)
    assert is_in(model, weights) == [True, False]
    assert refreshed == []
    load_batch(loader, weights, parts, 1)
    assert refreshed == [[True, True]]


def test_attention_is_processed_after_the_last_batch():
    model = Model(by_name, "a", "b", "c")
    model.attention = Attention(model.b)
    record_metadata_for_reloading(model)
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.float64)
    loader = ModelWeights(model, config, DEVICE)
    weights = weights_of("a", "b", "c")
    parts = connect(loader, weights, 0)
    for number in range(3):
        assert model.attention.processed == 0
        load_batch(loader, weights, parts, number)
    assert torch.equal(model.attention.kept[0], weights[1][1])
    assert model.attention.processed == 1


def test_the_device_is_waited_for_before_the_first_batch_and_after_each(monkeypatch):
    """A stand-in for a GPU: its memory is read, and written, some time after the call."""
    seen: list[list[bool]] = []
    model, loader = made(by_name, "a", "b")
    weights = weights_of("a", "b")
    parts = connect(loader, weights, 0)
    monkeypatch.setattr(compat, "synchronize", lambda device: seen.append(is_in(model, weights)))
    for number in range(2):
        load_batch(loader, weights, parts, number)
    assert seen == [[False, False], [True, False], [True, True]]


def test_parameters_that_have_moved_before_the_first_batch_are_found_again():
    model, loader = made(by_name, "a", "b")
    weights = weights_of("a", "b")
    parts = connect(loader, weights, 0)
    model.b.weight.data = torch.zeros(2, 3)
    for number in range(2):
        load_batch(loader, weights, parts, number)
    assert is_in(model, weights) == [True, True]
    load_batch(loader, weights, parts, 0)
    model.b.weight.data = torch.zeros(2, 3)
    with pytest.raises(LoadError, match="replaced in the middle of an update"):
        load_batch(loader, weights, parts, 1)
    assert not model.b.weight.any()


def test_a_reload_of_the_whole_is_one_batch(monkeypatch):
    monkeypatch.setenv("VLLM_WT_APPLY", "reload")
    model, loader = made(by_name, "a", "b")
    weights = weights_of("a", "b")
    parts = connect(loader, weights, 0)
    assert parts == [("a.weight", "b.weight")]
    load_batch(loader, weights, parts, 0)
    assert is_in(model, weights) == [True, True]
    assert_whole(model)
    plan = loader.rehearse(Manifest(tuple(meta_of(*each) for each in weights)))
    with pytest.raises(LoadError, match=r"in batches.*Got: 2 batches; VLLM_WT_APPLY=reload"):
        loader.use(plan, [["a.weight"], ["b.weight"]])


def test_a_reload_of_the_whole_needs_full_tensors(monkeypatch):
    """Whatever was recorded of its loaders, nothing is cut out of them."""
    monkeypatch.setenv("VLLM_WT_APPLY", "reload")

    def load(model: Any, name: str, tensor: torch.Tensor) -> None:
        by_name(model, name, tensor[:2])  # as tensor parallelism does

    model, loader = made(load, "a")
    weights = [("a.weight", torch.rand(4, 3))]
    plan = loader.rehearse(Manifest(tuple(meta_of(*each) for each in weights)))
    slices = sliced(plan, gap=0)
    assert slices.nbytes == 48
    loader.use(slices.plan)
    sync(loader, weights)
    assert torch.equal(model.a.weight, weights[0][1][:2])
