"""Tensors that come again, the same object with the same memory: nothing is found out twice."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from vllm_wt.errors import CorruptTransfer, ManifestMismatch
from vllm_wt.loading import staging as staging_module
from vllm_wt.loading.apply import DirectWrites, Kept
from vllm_wt.loading.plan import Copy, LoadPlan
from vllm_wt.loading.recorder import record
from vllm_wt.loading.slices import sliced
from vllm_wt.loading.staging import Intake, Known, Staging, Streaming
from vllm_wt.manifest import Manifest
from vllm_wt.packing import as_bytes, meta_of

from .support.replaying import cut

# Where all caches are.
set_hypothesis_home_dir(Path(__file__).parents[2] / ".venv/cache/hypothesis")


def manifest_of(sources):
    return Manifest(tuple(meta_of(name, tensor) for name, tensor in sources.items()))


def plan_of(write, sources, **parameters):
    """The plan of a load that does ``write(name, tensor, **parameters)`` for each tensor."""
    model = torch.nn.Module()
    for name, tensor in parameters.items():
        model.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))

    def load(weights):
        for name, weight in weights:
            write(name, weight, **{each: getattr(model, each).data for each in parameters})

    plan = record(model, load, manifest_of(sources))
    assert not plan.fallbacks, plan.fallbacks
    return plan


def by_the_plain_loop(plan, sources, parameters):
    """What a run gives for tensors that never come again."""
    fresh = {name: tensor.clone() for name, tensor in parameters.items()}
    DirectWrites(plan, fresh).run(dict(sources))
    return fresh


def fill_anew(sources, seed):
    """Other bits in the same memory."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in sources.values():
        if tensor.is_contiguous() and tensor.numel():
            data = as_bytes(tensor)
            data.copy_(torch.randint(0, 64, data.shape, generator=generator, dtype=torch.uint8))


def assert_same_bits(first, second):
    for name, tensor in second.items():
        assert torch.equal(as_bytes(first[name].contiguous()), as_bytes(tensor.contiguous())), name


def run_again_and_again(plan, sources, parameters, *, rounds=4):
    """Kept runs, each held against the plain loop; returns the writes."""
    writes = DirectWrites(plan, parameters)
    for number in range(rounds):
        fill_anew(sources, number)
        before = {name: tensor.clone() for name, tensor in parameters.items()}
        expected = by_the_plain_loop(plan, sources, before)
        writes.run(sources, kept=True)
        assert_same_bits(parameters, expected)
        assert (writes.prepared is None) == (number == 0)
    return writes


# -- direct writes ---------------------------------------------------------------------------------


def test_what_comes_again_is_one_copy():
    sources = {"v": torch.zeros(3, 4), "w": torch.zeros(5)}
    parameters = {"a": torch.zeros(6, 4), "b": torch.zeros(5)}

    def write(name, tensor, a, b):
        (a[2:5] if name == "v" else b).copy_(tensor)

    writes = run_again_and_again(plan_of(write, sources, **parameters), sources, parameters)
    assert writes._others == []
    assert writes.prepared.nbytes == 4 * (12 + 5)
    prepared = writes.prepared
    writes.run(sources, kept=True)
    assert writes.prepared is prepared


@pytest.mark.parametrize("narrowed", [False, True], ids=["full tensors", "slices"])
def test_slices_of_tensor_parallelism(narrowed):
    full = {"qkv": torch.randn(12, 8), "down": torch.randn(6, 16), "bias": torch.randn(12)}
    parameters = {
        "rows": torch.zeros(6, 8),
        "columns": torch.zeros(6, 8),
        "turned": torch.zeros(8, 3),
        "bias": torch.zeros(6),
    }

    def write(name, tensor, rows, columns, turned, bias):
        if name == "qkv":
            rows[:2].copy_(tensor[2:4])
            rows[2:4].copy_(tensor[6:8])
            rows[4:].copy_(tensor[10:])
            turned.copy_(tensor[1::4].t())
        elif name == "down":
            columns.copy_(tensor[:, 8:])
        else:
            bias.copy_(tensor[6:])

    plan = plan_of(write, full, **parameters)
    if not narrowed:
        writes = run_again_and_again(plan, full, parameters)
        assert writes._others == []
        return
    slices = sliced(plan, gap=0)
    sources = cut(slices, full)
    run_again_and_again(slices.plan, sources, parameters)


def test_fills_are_done_each_time_and_come_first():
    sources = {"w": torch.zeros(3)}
    parameters = {"a": torch.zeros(5)}

    def write(name, tensor, a):
        a.fill_(7)
        a[:3].copy_(tensor)

    plan = plan_of(write, sources, **parameters)
    writes = run_again_and_again(plan, sources, parameters)
    parameters["a"].zero_()
    writes.run(sources, kept=True)
    assert parameters["a"].tolist() == [*sources["w"].tolist(), 7, 7]


@pytest.mark.parametrize(
    ("source", "to"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float8_e4m3fn),
        (torch.int32, torch.int64),
        (torch.uint8, torch.bool),
    ],
)
def test_casts_follow_the_values(source, to):
    sources = {"w": torch.zeros(4, 6, dtype=source)}
    parameters = {"a": torch.zeros(4, 6, dtype=to), "b": torch.zeros(6, 2, dtype=to)}

    def write(name, tensor, a, b):
        a.copy_(tensor)
        b.copy_(tensor[:2].t())

    run_again_and_again(plan_of(write, sources, **parameters), sources, parameters)


def test_a_cast_on_the_way_is_made_anew_each_time():
    sources = {"w": torch.zeros(5)}
    parameters = {"a": torch.zeros(5), "b": torch.zeros(5)}

    def write(name, tensor, a, b):
        a.copy_(tensor.to(torch.bfloat16))
        b.copy_(tensor)

    writes = run_again_and_again(plan_of(write, sources, **parameters), sources, parameters)
    assert [each.copy.parameter for each in writes._others] == ["a"]


def test_bits_that_are_taken_for_another_dtype():
    sources = {"w": torch.zeros(4, 8, dtype=torch.uint8), "v": torch.zeros(3)}
    parameters = {
        "a": torch.zeros(4, 8, dtype=torch.float8_e4m3fn),
        "b": torch.zeros(3, dtype=torch.int32),
    }

    def write(name, tensor, a, b):
        if name == "w":
            a.copy_(tensor.view(torch.float8_e4m3fn))
        else:
            b.copy_(tensor.view(torch.int32))

    writes = run_again_and_again(plan_of(write, sources, **parameters), sources, parameters)
    assert writes._others == []


@pytest.mark.parametrize("second", ["half", "all", "within"])
def test_of_two_writes_to_one_element_the_later_one_counts(second):
    """Twins are such, too: two tensors for the same parameter."""
    sources = {"v": torch.zeros(6), "w": torch.zeros(6), "x": torch.zeros(6)}
    parameters = {"a": torch.zeros(6), "b": torch.zeros(6)}
    part = {"half": slice(3, 6), "all": slice(0, 6), "within": slice(2, 4)}[second]

    def write(name, tensor, a, b):
        if name == "v":
            a.copy_(tensor)
        elif name == "w":
            a[part].copy_(tensor[part])
        else:
            b.copy_(tensor)

    plan = plan_of(write, sources, **parameters)
    writes = run_again_and_again(plan, sources, parameters)
    assert torch.equal(parameters["a"][part], sources["w"][part])
    prepared = {each.copy.source for each in writes._writes} - {
        each.copy.source for each in writes._others
    }
    assert "x" in prepared


@pytest.mark.parametrize("order", ["vw", "wv"])
def test_parameters_that_share_memory_are_written_in_order(order):
    """A plan knows of aliases by name alone; here it is the memory that counts."""
    sources = {name: torch.zeros(4) for name in order}
    parameters = {"a": torch.zeros(4), "b": torch.zeros(4)}
    plan = plan_of(lambda name, w, a, b: (a if name == "v" else b).copy_(w), sources, **parameters)
    memory = torch.zeros(6)
    shared = {"a": memory[:4], "b": memory[2:]}
    writes = DirectWrites(plan, shared)
    oracle = torch.zeros(6)
    plain = DirectWrites(plan, {"a": oracle[:4], "b": oracle[2:]})
    for number in range(3):
        fill_anew(sources, number)
        writes.run(sources, kept=True)
        plain.run(dict(sources))
        assert torch.equal(memory, oracle)
    assert len(writes._others) == 2


def test_interleaved_columns_are_right():
    sources = {"v": torch.zeros(4, 3), "w": torch.zeros(4, 3)}
    parameters = {"a": torch.zeros(4, 6)}
    plan = plan_of(
        lambda name, w, a: a[:, 0 if name == "v" else 1 :: 2].copy_(w), sources, **parameters
    )
    run_again_and_again(plan, sources, parameters)


def test_tensors_without_elements_and_without_dimensions():
    sources = {"scalar": torch.zeros(()), "empty": torch.zeros(0, 3), "w": torch.zeros(2)}
    parameters = {"a": torch.zeros(()), "c": torch.zeros(3)}

    def write(name, tensor, a, c):
        if name == "scalar":
            a.copy_(tensor)
            c[2].copy_(tensor)
        elif name == "w":
            c[:2].copy_(tensor)

    plan = plan_of(write, sources, **parameters)
    nothing = Copy("empty", 0, (1,), (), "", "c", 1, (1,), "float32", (0,))
    plan = replace(plan, copies=(*plan.copies, nothing))
    run_again_and_again(plan, sources, parameters)


def test_a_strided_source_is_read_anew_each_time():
    """What makes it contiguous is a copy of what it held then."""
    sources = {"w": torch.zeros(3, 4).t()}
    parameters = {"a": torch.zeros(4, 3), "b": torch.zeros(2, 3)}

    def write(name, tensor, a, b):
        a.copy_(tensor)
        b.copy_(tensor[1:3])

    plan = plan_of(write, {"w": torch.zeros(4, 3)}, **parameters)
    writes = DirectWrites(plan, parameters)
    for number in range(4):
        sources["w"].fill_(number)
        writes.run(sources, kept=True)
        assert {parameters["a"].sum().item(), 2 * parameters["b"].sum().item()} == {12.0 * number}


def test_one_source_to_many_places_and_one_element_to_many():
    sources = {"w": torch.zeros(2, 3)}
    parameters = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3), "c": torch.zeros(5, 3)}

    def write(name, tensor, a, b, c):
        a.copy_(tensor)
        b.copy_(tensor)
        c.copy_(tensor[1])

    run_again_and_again(plan_of(write, sources, **parameters), sources, parameters)


def test_parameters_of_inference_mode():
    with torch.inference_mode():
        sources = {"w": torch.zeros(4)}
        parameters = {"a": torch.zeros(4)}
    plan = plan_of(lambda name, w, a: a.copy_(w), sources, a=torch.zeros(4))
    writes = DirectWrites(plan, parameters)
    for number in range(3):
        with torch.inference_mode():
            sources["w"].fill_(number + 1)
            writes.run(sources, kept=True)
        assert parameters["a"].tolist() == [number + 1] * 4


@pytest.fixture
def simple():
    """A plan, its parameter, and writes to it."""
    sources = {"w": torch.arange(4.0)}
    plan = plan_of(lambda name, w, a: a.copy_(w), sources, a=torch.zeros(4))
    parameter = torch.zeros(4)
    return parameter, DirectWrites(plan, {"a": parameter})


def test_another_object_is_not_taken_for_the_one_before(simple):
    parameter, writes = simple
    first, second = ({"w": torch.full((4,), value)} for value in (1.0, 2.0))
    for sources, value in ((first, 1), (first, 1), (second, 2), (second, 2), (first, 1)):
        writes.run(sources, kept=True)
        assert parameter.tolist() == [value] * 4
    assert writes.prepared is None  # what came before the last one is forgotten
    writes.run(dict(first), kept=True)
    assert writes.prepared is None


def test_an_equal_object_is_another_one(simple):
    _, writes = simple
    tensor = torch.ones(4)
    for _ in range(3):
        writes.run({"w": tensor}, kept=True)
        assert writes.prepared is None


@pytest.mark.parametrize("rounds", [1, 3])
def test_what_is_kept_is_held_until_it_is_forgotten(simple, rounds):
    parameter, writes = simple
    sources = {"w": torch.full((4,), 3.0)}
    for _ in range(rounds):
        writes.run(sources, kept=True)
    ref = weakref.ref(sources["w"])
    del sources
    assert ref() is not None
    writes.forget()
    gc.collect()
    assert ref() is None
    for value in (5.0, 6.0):
        writes.run({"w": torch.full((4,), value)}, kept=True)
        assert parameter.tolist() == [value] * 4


@pytest.mark.parametrize("rounds_before", [0, 1, 3])
def test_what_is_not_kept_is_not_held(simple, rounds_before):
    parameter, writes = simple
    kept = {"w": torch.ones(4)}
    for _ in range(rounds_before):
        writes.run(kept, kept=True)
    held = weakref.ref(kept["w"])
    del kept
    sources = {"w": torch.full((4,), 3.0)}
    for _ in range(2):
        writes.run(sources)
        assert writes.prepared is None
    own = weakref.ref(sources["w"])
    del sources
    gc.collect()
    assert (held(), own()) == (None, None)
    assert parameter.tolist() == [3.0] * 4


def test_memory_of_a_parameter_that_was_taken_away_is_not_written_to(simple):
    parameter, writes = simple
    sources = {"w": torch.ones(4)}
    for _ in range(2):
        writes.run(sources, kept=True)
    parameter.untyped_storage().resize_(0)
    with pytest.raises(ManifestMismatch, match="freed or resized"):
        writes.run(sources, kept=True)


_SHAPE = (6, 4)
_DTYPES = [torch.float32, torch.bfloat16, torch.int32]


def _span(draw, size):
    first = draw(st.integers(0, size - 1))
    return first, draw(st.integers(1, size - first))


@st.composite
def loads(draw):
    """Sources, parameters and what is done: rows, columns, casts, bits, fills, in any order."""
    sources = {
        f"w{n}": torch.zeros(_SHAPE, dtype=draw(st.sampled_from(_DTYPES)))
        for n in range(draw(st.integers(1, 4)))
    }
    parameters = {
        f"p{n}": torch.zeros(_SHAPE, dtype=draw(st.sampled_from(_DTYPES)))
        for n in range(draw(st.integers(1, 3)))
    }
    steps = {name: [] for name in sources}
    for _ in range(draw(st.integers(1, 7))):
        dim = draw(st.integers(0, 1))
        first, count = _span(draw, _SHAPE[dim])
        steps[draw(st.sampled_from(list(sources)))].append(
            (
                draw(st.sampled_from(list(parameters))),
                draw(st.sampled_from(["copy", "copy", "cast", "bits", "repeat"])),
                dim,
                first,
                draw(st.integers(0, _SHAPE[dim] - count)),
                count,
            )
        )
    return sources, parameters, steps


def _done(steps, name, tensor, parameters):
    for parameter, kind, dim, first, to, count in steps[name]:
        value = tensor.narrow(dim, first, count)
        dest = parameters[parameter].narrow(dim, to, count)
        if kind == "cast":
            value = value.to(torch.bfloat16)
        elif kind == "bits" and tensor.dtype.itemsize == 4:
            value = tensor.view(torch.float32).narrow(dim, first, count)
        elif kind == "repeat":
            value = tensor.narrow(dim, first, 1).expand_as(dest)
        dest.copy_(value)


@settings(deadline=None, max_examples=120)
@given(load=loads(), fill=st.booleans())
def test_kept_runs_do_what_the_plain_loop_does(load, fill):
    sources, parameters, steps = load
    model = torch.nn.Module()
    for name, tensor in parameters.items():
        model.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))

    def load_weights(weights):
        own = {name: getattr(model, name).data for name in parameters}
        if fill:
            for tensor in own.values():
                tensor[1:3].fill_(3)
        for name, tensor in weights:
            _done(steps, name, tensor, own)

    plan = record(model, load_weights, manifest_of(sources))
    written = {name: parameters[name] for name in plan.parameters}
    writes = DirectWrites(plan, written)
    oracle = {name: tensor.clone() for name, tensor in written.items()}
    plain = DirectWrites(plan, oracle)
    for number in range(3):
        fill_anew(sources, number)
        writes.run(sources, kept=True)
        plain.run(dict(sources))
        assert_same_bits(written, oracle)
    assert writes.prepared is not None


# -- what takes tensors in -------------------------------------------------------------------------

WEIGHTS = {"a": torch.ones(2), "b": torch.full((3,), 2.0)}
MANIFEST = manifest_of(WEIGHTS)


@pytest.fixture
def looks(monkeypatch):
    """Names of the tensors that were looked at."""
    names = []

    def noting(name, tensor):
        names.append(name)
        return meta_of(name, tensor)

    monkeypatch.setattr(staging_module, "meta_of", noting)
    return names


def kept(**changes):
    return Kept((WEIGHTS | changes).items())


def test_kept_tensors_are_looked_at_once(looks):
    known, weights = Known(), kept()
    for number in range(3):
        staging = Staging(MANIFEST, known)
        staging(weights)
        staging.require_complete()
        assert staging.weights() is weights
        assert looks == (["a", "b"] if number == 0 else [])
        looks.clear()


@pytest.mark.parametrize(
    "other",
    [kept, lambda: list(WEIGHTS.items()), lambda: tuple(WEIGHTS.items()), WEIGHTS.items],
    ids=["kept", "list", "tuple", "items"],
)
def test_anything_else_is_looked_at(looks, other):
    known, weights = Known(), kept()
    Staging(MANIFEST, known)(weights)
    looks.clear()
    staging, held = Staging(MANIFEST, known), other()
    staging(held)
    staging.require_complete()
    assert looks == ["a", "b"]
    assert dict(staging.weights()).keys() == WEIGHTS.keys()


def test_what_the_engine_has_let_go_of_is_not_held_until_the_commit():
    staging = Staging(MANIFEST, Known())
    weights = kept()
    staging(weights)
    staging.require_complete()
    assert staging.weights() is weights
    gone = weakref.ref(weights)
    del weights
    assert gone() is None
    with pytest.raises(CorruptTransfer, match="has let go of"):
        staging.weights()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (kept(a=torch.ones(3)), "in another form"),
        (kept(a=torch.ones(2, dtype=torch.int32)), "in another form"),
        (kept(c=torch.ones(1)), "not announced"),
    ],
    ids=["shape", "dtype", "more"],
)
def test_kept_tensors_that_are_wrong_are_refused_each_time(weights, message):
    known = Known()
    Staging(MANIFEST, known)(kept())
    for _ in range(2):
        with pytest.raises(ManifestMismatch, match=message):
            Staging(MANIFEST, known)(weights)


def test_only_the_engine_holds_what_is_kept_between_rounds():
    known, weights = Known(), kept()
    for _ in range(2):
        staging = Staging(MANIFEST, known)
        staging(weights)
        staging.require_complete()
    ref = weakref.ref(weights)
    del staging, weights
    gc.collect()
    assert ref() is None
    assert not known


def test_kept_tensors_are_a_sequence_that_equals_itself_alone():
    weights = kept()
    assert len(weights) == 2
    assert weights[0][0] == "a"
    assert [name for name, _ in weights[:1]] == ["a"]
    assert dict(weights).keys() == WEIGHTS.keys()
    assert weights == weights  # noqa: PLR0124
    assert weights != kept()
    assert len({weights, kept()}) == 2


def test_kept_tensors_that_are_not_all_are_not_known_for_it():
    known, weights = Known(), Kept(list(WEIGHTS.items())[:1])
    for _ in range(2):
        staging = Staging(MANIFEST, known)
        staging(weights)
        with pytest.raises(CorruptTransfer, match=r"first missing \['b'\]"):
            staging.require_complete()
        staging([("b", WEIGHTS["b"])])
        staging.require_complete()
        assert [name for name, _ in staging.weights()] == ["a", "b"]


def test_kept_tensors_in_another_order_are_put_in_order():
    known, weights = Known(), Kept(reversed(WEIGHTS.items()))
    for _ in range(2):
        staging = Staging(MANIFEST, known)
        staging(weights)
        staging.require_complete()
        assert [name for name, _ in staging.weights()] == ["a", "b"]


@pytest.mark.parametrize("first_known", [False, True])
@pytest.mark.parametrize("again", ["the same", "a part"])
def test_kept_tensors_come_once_a_round(first_known, again):
    known, weights = Known(), kept()
    if first_known:
        Staging(MANIFEST, known)(weights)
    staging = Staging(MANIFEST, known)
    staging(weights)
    with pytest.raises(ManifestMismatch, match="'a', which was received already"):
        staging(weights if again == "the same" else [("a", WEIGHTS["a"])])


class BatchLoader:
    def __init__(self):
        self.loaded = []

    def apply_batch(self, number, weights, *, looked):
        self.loaded.append((number, weights))


def streaming(loader, known, batches=(("a",), ("b",))):
    plan = LoadPlan.of_whole(MANIFEST, "all of it")
    return Streaming(Intake(plan, batches), loader, lambda: None, known)


def test_kept_batches_are_looked_at_once(looks):
    known, loader = Known(), BatchLoader()
    parts = [Kept([item]) for item in WEIGHTS.items()]
    for number in range(3):
        stream = streaming(loader, known)
        for part in parts:
            stream(part)
        stream.require_complete()
        assert looks == (["a", "b"] if number == 0 else [])
        looks.clear()
    assert [number for number, _ in loader.loaded] == [0, 1] * 3
    assert all(weights is parts[number] for number, weights in loader.loaded)


def test_batches_that_are_not_kept_are_looked_at_each_time(looks):
    known, loader = Known(), BatchLoader()
    for _ in range(2):
        stream = streaming(loader, known)
        for item in WEIGHTS.items():
            stream([item])
        assert looks == ["a", "b"]
        looks.clear()
    assert not known


def test_a_kept_batch_is_known_in_its_own_turn_only():
    known, loader = Known(), BatchLoader()
    parts = [Kept([item]) for item in WEIGHTS.items()]
    stream = streaming(loader, known)
    for part in parts:
        stream(part)
    stream = streaming(loader, known)
    with pytest.raises(ManifestMismatch, match="batch 0"):
        stream(parts[1])
    assert len(loader.loaded) == 2


def test_a_kept_batch_that_fails_is_looked_at_before_the_model_is_touched():
    known, loader = Known(), BatchLoader()
    touched = []
    plan = LoadPlan.of_whole(MANIFEST, "all of it")
    stream = Streaming(Intake(plan, (("a", "b"),)), loader, lambda: touched.append(1), known)
    with pytest.raises(ManifestMismatch):
        stream(kept(a=torch.ones(3)))
    assert (touched, loader.loaded, len(known)) == ([], [], 0)
