"""An update in batches: what may be cut, and that nothing is cut that belongs together."""

from __future__ import annotations

import functools
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from vllm_wt.errors import LoadError
from vllm_wt.loading.batches import batch_of, batches
from vllm_wt.loading.plan import Copy, Fallback, Fill, LoadPlan, Parameter, full_name
from vllm_wt.loading.recorder import record
from vllm_wt.loading.slices import sliced
from vllm_wt.manifest import Manifest, TensorMeta

# Where all caches are.
set_hypothesis_home_dir(Path(__file__).parents[2] / ".venv/cache/hypothesis")

ALL = 1 << 40


def plan_of(takes, sizes, *, aliases=None, fallbacks=()):
    """The plan of modules that take whole tensors, one after another, into their ``weight``.

    Args:
        takes: Names of tensors, by module.
        sizes: Bytes of each tensor, in the manifest's order.
        aliases: By module, others whose weight is the same memory.
        fallbacks: Modules that take their tensors by their own loaders.
    """
    copies, fills, parameters = [], [], {}
    for module, names in takes.items():
        if module in fallbacks:
            continue
        end = 0
        for name in names:
            size = sizes[name]
            copies.append(Copy(name, 0, (1,), (), module, "weight", end, (1,), "uint8", (size,)))
            end += size
        if not names:
            fills.append(Fill(module, "weight", 0, (1,), (1,), 0))
        shared = tuple(full_name(other, "weight") for other in (aliases or {}).get(module, ()))
        parameters[full_name(module, "weight")] = Parameter(
            module, "weight", shared, "uint8", (max(end, 1),), (1,), end, int(not names)
        )
    used = set(chain.from_iterable(takes.values()))
    return LoadPlan(
        manifest=Manifest(tuple(TensorMeta(n, "uint8", (size,)) for n, size in sizes.items())),
        copies=tuple(copies),
        fills=tuple(fills),
        parameters=parameters,
        fallbacks={m: Fallback(m, ("why",), tuple(takes[m])) for m in fallbacks},
        unused=tuple(name for name in sizes if name not in used),
    )


def of_one_byte(takes, order, **others):
    return plan_of(takes, dict.fromkeys(order.split(), 1), **others)


def cut(plan, nbytes=0):
    """Batches as words, apart by bars."""
    return " | ".join(" ".join(part) for part in batches(plan, nbytes))


DECODER = {
    "embed": ["e"],
    "qkv": ["q", "k", "v"],
    "o": ["o"],
    "mlp": ["gate", "up"],
    "down": ["down"],
}


def test_what_is_fused_stays_together():
    plan = of_one_byte(DECODER, "e q k v o gate up down")
    assert cut(plan) == "e | q k v | o | gate up | down"


def test_neighbours_are_joined_up_to_the_bytes():
    plan = of_one_byte(DECODER, "e q k v o gate up down")
    assert cut(plan, 3) == "e | q k v | o gate up | down"
    assert cut(plan, 4) == "e q k v | o gate up down"
    assert cut(plan, 8) == "e q k v o gate up down"


def test_what_lies_between_the_tensors_of_a_module_is_in_its_batch():
    plan = of_one_byte(DECODER, "gate e q up k down o v")
    assert cut(plan) == "gate e q up k down o v"
    plan = of_one_byte(DECODER, "gate e up down q o k v")
    assert cut(plan) == "gate e up | down | q o k v"


def test_modules_that_overlap_are_one_piece():
    plan = of_one_byte({"a": ["1", "3"], "b": ["2", "5"], "c": ["4"], "d": ["6"]}, "1 2 3 4 5 6")
    assert cut(plan) == "1 2 3 4 5 | 6"


def test_a_tensor_that_two_modules_take_holds_both_together():
    plan = of_one_byte({"a": ["1", "2"], "b": ["2", "3"], "c": ["4"]}, "1 2 3 4")
    assert cut(plan) == "1 2 3 | 4"


def test_the_experts_of_a_layer_are_one_piece():
    layers = {f"{n}.experts": [f"{n}.{i}.{w}" for i in (0, 1) for w in "gud"] for n in (0, 1)}
    plan = of_one_byte(layers, " ".join(chain.from_iterable(layers.values())))
    assert batches(plan, 4) == tuple(map(tuple, layers.values()))
    by_weight = [f"{n}.{i}.{w}" for n in (0, 1) for w in "gud" for i in (0, 1)]
    assert [set(part) for part in batches(of_one_byte(layers, " ".join(by_weight)), 4)] == [
        set(names) for names in layers.values()
    ]


def test_a_tied_head_that_is_sent_as_well_spans_everything():
    takes = {"embed": ["e"], "layer": ["l"], "head": ["h"]}
    for aliases in ({"embed": ["head"]}, {"head": ["embed"]}):
        assert cut(of_one_byte(takes, "e l h", aliases=aliases)) == "e l h"
    del takes["head"]  # not sent
    assert cut(of_one_byte(takes, "e l", aliases={"embed": ["head"]})) == "e | l"


def test_two_names_of_one_parameter_are_together():
    plan = of_one_byte({"a": ["scale", "old"], "b": ["w"]}, "scale w old")
    assert cut(plan) == "scale w old"


def test_memory_that_several_share_is_passed_on():
    takes = {"a": ["1"], "b": ["2"], "c": ["3"], "d": ["4"]}
    plan = of_one_byte(takes, "1 2 3 4", aliases={"a": ["x"], "c": ["x"]})
    assert cut(plan) == "1 2 3 | 4"  # nobody loads x, and both have its memory


def test_tensors_that_nobody_takes_are_cut_anywhere():
    plan = of_one_byte({"a": ["1", "2"]}, "x 1 y 2 z")
    assert cut(plan) == "x | 1 y 2 | z"


def test_what_a_fallback_takes_is_together():
    plan = of_one_byte({"a": ["1", "3"], "b": ["2"], "c": ["4"]}, "1 2 3 4", fallbacks=["a"])
    assert cut(plan) == "1 2 3 | 4"


def test_a_model_that_is_loaded_as_a_whole_is_one_batch():
    manifest = Manifest(tuple(TensorMeta(name, "uint8", (5,)) for name in "abc"))
    assert batches(LoadPlan.of_whole(manifest, "why"), 0) == (("a", "b", "c"),)


def test_empty_tensors_cost_nothing():
    plan = plan_of({"a": ["1"], "b": ["2"], "c": ["3"]}, {"1": 2, "2": 0, "3": 2})
    assert cut(plan, 2) == "1 2 | 3"


def test_the_size_is_that_of_the_slices():
    model = torch.nn.Module()
    for name in "ab":
        model.add_module(name, torch.nn.Linear(4, 1, bias=False, device="meta"))

    def load(weights):
        for name, tensor in weights:
            model.get_parameter(name).data.copy_(tensor[:1])

    tensors = tuple(TensorMeta(f"{name}.weight", "float32", (10, 4)) for name in "ab")
    plan = record(model, load, Manifest(tensors))
    assert len(batches(plan, 319)) == 2
    assert len(batches(sliced(plan, gap=0).plan, 32)) == 1
    assert len(batches(sliced(plan, gap=0).plan, 31)) == 2


@st.composite
def plans(draw):
    """Modules with a few tensors near each other, and others far apart."""
    count = draw(st.integers(1, 14))
    names = [f"t{n}" for n in range(count)]
    sizes = {name: draw(st.integers(0, 9)) for name in names}
    takes, aliases, fallbacks = {}, {}, []
    for module in range(draw(st.integers(0, 8))):
        near = draw(st.integers(0, count - 1))
        takes[f"m{module}"] = draw(
            st.lists(st.sampled_from(names[near : near + 3]), max_size=3, unique=True)
        )
        if draw(st.integers(0, 5)) == 0:
            fallbacks.append(f"m{module}")
        elif draw(st.integers(0, 5)) == 0:
            aliases[f"m{module}"] = [f"m{draw(st.integers(0, 9))}"]
    return plan_of(takes, sizes, aliases=aliases, fallbacks=fallbacks), takes, aliases


@settings(max_examples=300, deadline=None)
@given(plans(), st.integers(0, 40))
def test_any_plan(made, nbytes):
    plan, takes, aliases = made
    parts = batches(plan, nbytes)
    assert all(parts)
    assert list(chain.from_iterable(parts)) == [tensor.name for tensor in plan.manifest.tensors]
    number = {name: n for n, part in enumerate(parts) for name in part}
    found = batch_of(plan, parts)
    assert found.keys() >= takes.keys()
    for module, names in takes.items():
        assert {number[name] for name in names} <= {found[module]}
        assert all(found[other] == found[module] for other in aliases.get(module, ()))
    smallest = batches(plan, -1)  # not even what is empty is joined
    size = {tensor.name: tensor.nbytes for tensor in plan.manifest.tensors}
    assert all(sum(size[name] for name in part) <= nbytes or part in smallest for part in parts)
    first = {piece[0]: piece for piece in smallest}
    for part, following in pairwise(parts):
        assert sum(size[name] for name in (*part, *first[following[0]])) > nbytes
    # Each cut that there is not would divide something.
    for piece in smallest:
        for at in range(1, len(piece)):
            before, after = {*piece[:at]}, {*piece[at:]}
            assert any(
                before.intersection(names) and after.intersection(names)
                for names in together(takes, aliases)
            )


def together(takes, aliases):
    """The tensors of each group of modules, slowly."""
    groups = [({module}, {*names}) for module, names in takes.items()]
    groups += [({module, *others}, set()) for module, others in aliases.items()]
    return joined(groups)


def joined(groups):
    """Until no two have a module in common."""
    for one in groups:
        for other in groups:
            if one is not other and one[0] & other[0]:
                rest = [each for each in groups if each is not one and each is not other]
                return joined([*rest, (one[0] | other[0], one[1] | other[1])])
    return [names for _, names in groups]


def test_batches_of_another_plan_are_refused():
    plan = of_one_byte(DECODER, "e q k v o gate up down")
    for wrong in (
        [["e", "q", "k", "v"]],
        [["q", "k", "v", "e"], ["o", "gate", "up", "down"]],
        [["e"], *batches(plan, 0)],
    ):
        with pytest.raises(
            LoadError, match=r"not the tensors of the plan.*Expected: its 8 tensors"
        ):
            batch_of(plan, wrong)


def test_batches_that_divide_a_module_are_refused():
    plan = of_one_byte(DECODER, "e q k v o gate up down")
    with pytest.raises(LoadError, match=r"Where: qkv\..*Got: batches \[0, 1\]"):
        batch_of(plan, [["e", "q", "k"], ["v", "o", "gate", "up", "down"]])
    whole = LoadPlan.of_whole(plan.manifest, "why")
    with pytest.raises(LoadError, match=r"Where: the model as a whole"):
        batch_of(whole, batches(plan, 0))


def test_a_module_of_constants_goes_with_what_it_shares_memory_with():
    takes = {"a": ["1"], "b": ["2"], "padding": []}
    plan = of_one_byte(takes, "1 2", aliases={"padding": ["b"]})
    assert batch_of(plan, batches(plan, 0)) == {"a": 0, "b": 1, "padding": 1}
    plan = of_one_byte(takes, "1 2")
    assert batch_of(plan, batches(plan, 0))["padding"] == 0


def test_a_large_plan_takes_steps_in_proportion(monkeypatch):
    """Counted, not timed: how often the plan is asked for a module's tensors."""
    asked = 0
    sources = LoadPlan.sources

    @functools.wraps(sources)
    def counted(self, module):
        nonlocal asked
        asked += 1
        return sources(self, module)

    monkeypatch.setattr(LoadPlan, "sources", counted)
    names = [f"t{n}" for n in range(20_000)]
    takes = {f"m{n}": names[2 * n : 2 * n + 2] for n in range(10_000)}
    shared = {f"m{n}": [f"m{n + 1}"] for n in range(0, 10_000, 2)}
    plan = plan_of(takes, dict.fromkeys(names, 1), aliases=shared)
    parts = batches(plan, 40)
    assert [len(part) for part in parts] == [40] * 500
    assert asked == 10_000
