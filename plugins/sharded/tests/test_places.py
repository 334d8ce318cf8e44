"""How far ranks are from each other, and the order of layers."""

from vllm_wt.manifest import TensorMeta
from vllm_wt_sharded.layers import layer_order
from vllm_wt_sharded.places import Place, Places


def test_distances():
    places = Places(
        sources={
            0: Place("h0", "gpu0", 0),
            1: Place("h0", "gpu1", 1),
            2: Place("h1", "gpu0", 0),
            3: Place("h1", None, None),
        },
        workers={0: Place("h0", "gpu0", 0), 1: Place("h1"), 2: Place("h2", "gpu0", 1)},
    )
    assert places.distances(5, [0, 1, 2, 3]).tolist() == [
        [0, 1, 2, 3, 3],
        [3, 3, 1, 1, 3],
        [3, 2, 3, 3, 3],
        [3, 3, 3, 3, 3],
    ]


def order(*names):
    places = layer_order([TensorMeta(name, "int8", ()) for name in names]).tolist()
    return [names[places.index(i)] for i in range(len(names))]


def test_layers_come_by_number_and_not_by_letter():
    names = ["embed", "model.layers.10.a", "model.layers.2.b.7", "model.layers.2.a", "norm"]
    assert order(*names) == [
        "embed",
        "model.layers.2.b.7",
        "model.layers.2.a",
        "norm",
        "model.layers.10.a",
    ]


def test_a_number_is_a_whole_part_of_a_name():
    names = ["h.1.w", "h.0.9bit.w", "h.0.w"]
    assert order(*names) == ["h.0.9bit.w", "h.0.w", "h.1.w"]
    assert order("h.2.w", "9bit.h.1.w") == ["9bit.h.1.w", "h.2.w"]


def test_names_without_a_number_stay_where_they_are():
    names = ["wte", "h.0.w", "h.1.w", "norm.weight", "lm_head2.weight"]
    assert order(*names) == names
