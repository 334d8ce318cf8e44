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

from vllm_wt.bridge.loader import ModelWeights
from vllm_wt.errors import InvalidInfo, LoadError
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


def connect(loader: ModelWeights, weights: list[tuple[str, torch.Tensor]]) -> None:
    loader.use(loader.rehearse(Manifest(tuple(meta_of(*each) for each in weights))))


def sync(loader: ModelWeights, weights: list[tuple[str, torch.Tensor]]) -> None:
    loader.check(weights)
    loader.apply(weights)


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

    class Attention(torch.nn.Module, AttentionLayerBase):
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
