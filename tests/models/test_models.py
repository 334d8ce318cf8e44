"""vLLM's own models of many families, each updated from one checkpoint to another.

What vLLM itself loads from a checkpoint is the oracle. A rank is a plain process with a model and no
engine, which looks at its own memory (tests/support/wt_model_rank.py) and answers with what is
unlike; an engine that generates is in test_engines.py.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from zoo import COMMON, OTHERS

pytestmark = [
    pytest.mark.xdist_group("models"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for vLLM's CPU build"),
]

PACKED, UNPACKED = "packed", "unpacked"

REASONS = {
    "linear": "the CPU's kernel keeps a packed copy of the weight",
    "embedding": "the CPU's kernel keeps a packed copy of the weight",
    "RoutedExperts": (
        "UnquantizedFusedMoEMethod on cpu is not known to leave weights as they are loaded"
    ),
}
"""Why layers cannot be written directly, by what they are."""

CONSTANT = re.compile(
    r"(derived|tensors): .*("
    r"\._[kqv]_scale|\._prob_scale|\._[kv]_scale_cpu\.0"  # no such scales in these checkpoints
    r"|\.cos_sin_cache|\.inv_freq|\.original_inv_freq|\.normalizer|\.position_ids"
    r")"
)
"""What does not depend on the checkpoint."""


def _cases() -> list[Any]:
    return [
        pytest.param(
            (tp, weights, family),
            id=f"tp{tp}-{weights}-{family}",
            marks=[pytest.mark.slow] if family in OTHERS else [],
        )
        for tp, weights, family in itertools.product((1, 2), (PACKED, UNPACKED), [*COMMON, *OTHERS])
    ]


class Case:
    """What the ranks of a model have found."""

    def __init__(self, tp: int, weights: str, family: str, answers: list[dict[str, Any]]) -> None:
        self.tp = tp
        self.packed = weights == PACKED
        self.family = family
        self.answers = answers

    def each(self, *path: str) -> list[Any]:
        """One part of each rank's answer."""
        found: list[Any] = self.answers
        for step in path:
            found = [answer[step] for answer in found]
        return found


@pytest.fixture(scope="module", params=_cases())
def case(request, ranks, checkpoint) -> Case:
    tp, weights, family = request.param
    folders = [str(checkpoint(family, seed)) for seed in (0, 1)]
    pooling = (COMMON | OTHERS)[family].pooling
    return Case(*request.param, ranks(tp, weights == UNPACKED).ask(*folders, pooling))


def test_what_it_has_already_changes_nothing(case):
    """Three times over: what one load leaves behind, the next one may trip over."""
    assert case.each("identity") == [[]] * case.tp


def test_another_checkpoint_makes_the_model_that_vllm_loads_from_it(case):
    assert case.each("update") == [[]] * case.tp


@pytest.mark.parametrize("slices", ["exact", "aligned", "usual", "few"])
def test_what_a_rank_needs_is_enough(case, slices):
    found = case.each("slices", slices)
    assert [rank["identity"] for rank in found] == [[]] * case.tp
    assert [rank["update"] for rank in found] == [[]] * case.tp
    assert [rank["report"] for rank in found] == case.each("report")


@pytest.mark.parametrize("batches", ["each", "sliced", "some"])
def test_an_update_in_batches_does_the_same(case, batches):
    """On another thread, and the memory of a batch is written again after each."""
    found = case.each("batches", batches)
    assert [rank["identity"] for rank in found] == [[]] * case.tp
    assert [rank["update"] for rank in found] == [[]] * case.tp
    assert [rank["report"] for rank in found] == case.each("report")
    for rank in case.each("batches"):
        some, sliced, each = (rank[name]["batches"] for name in ("some", "sliced", "each"))
        assert 1 < some < sliced <= each  # a tensor that nobody takes is in no slice
        assert sliced >= 10  # two layers of five modules or more


def test_a_batch_that_fails_leaves_a_model_that_runs(case):
    """Whatever comes out: a whole update, in batches or at once, makes it right."""
    for rank in case.each("failed"):
        for found in rank:
            assert found["error"] in {"RuntimeError", "AssertionError"}
            assert (found["on meta"], found["armed"], found["identity"]) == ([], [], [])


@pytest.mark.parametrize("in_batches", ["", " in batches"])
@pytest.mark.parametrize("mode", ["layerwise", "reload"])
def test_slower_ways_do_the_same(case, mode, in_batches):
    found = case.each("modes", mode + in_batches)
    assert [rank["identity"] for rank in found] == [[]] * case.tp
    assert [rank["update"] for rank in found] == [[]] * case.tp
    for rank in found:
        assert rank["report"]["direct"] == []
        assert (rank["report"]["layerwise"] != {}) == (mode == "layerwise")
        assert (rank["report"]["whole"] is None) == (mode == "layerwise")
        assert (rank["batches"] > 1) == (mode == "layerwise" and in_batches != "")


def test_a_rank_reads_little_more_than_its_part(case):
    total = case.answers[0]["nbytes"]
    exact, aligned, usual, few = (
        [rank["nbytes"] for rank in case.each("slices", slices)]
        for slices in ("exact", "aligned", "usual", "few")
    )
    for wider in (aligned, usual, few):
        assert all(a <= b <= total for a, b in zip(exact, wider, strict=True))
    if case.family == "bert":  # embeddings are taken before its pooler
        assert sum(exact) < case.tp * total
    elif case.tp == 1:
        assert exact == [total]
    else:
        assert sum(exact) >= total  # nothing is missing: together they read everything
    if case.tp == 2 and case.family.startswith("llama"):
        assert max(exact) < 0.6 * total


def test_each_layer_is_loaded_the_fastest_way_that_is_right(case):
    for report, layers in zip(case.each("report"), case.each("layers"), strict=True):
        slow = ["RoutedExperts"] + case.packed * ["linear", "embedding"]
        layerwise = {name: REASONS[kind] for kind in slow for name in layers.get(kind, [])}
        made = {"tied", "experts", "MLAAttention"}  # of the weights of others
        direct = {name for kind in layers.keys() - {*slow, *made} for name in layers[kind]}
        assert report["layerwise"] == layerwise
        assert sorted(report["direct"]) == sorted(direct)
        assert report["fallback"] == {}
        assert report["whole"] is None


def test_the_comparison_would_see_a_difference(case):
    """Everything that has weights was compared, and is another in the other checkpoint."""
    for answer in case.answers:
        layers = answer["layers"]
        linear = [*layers["linear"], *layers.get("linear that is never packed", [])]
        embeddings = [*layers["embedding"], *layers.get("tied", [])]
        outputs = (
            [f"{name} (linear)" for name in linear]
            + [f"{name} ({kind})" for name in embeddings for kind in ("embedding", "head")]
            + [f"{name} (experts)" for name in layers.get("experts", [])]
        )
        assert answer["compared"]["outputs"] == sorted(outputs)
        assert len(linear) >= 6
        # Of a packed weight only an empty parameter is left; what it is shows in outputs alone.
        compared = answer["compared"]
        empty = {*compared["tensors"]} - {*compared["addresses"]}
        if case.packed:
            assert {f"{name}.weight" for name in layers["linear"]} <= empty
        else:
            assert empty == set()
    # A rank may have nothing but padding of a small embedding.
    alike = set.intersection(*(set(answer["alike"]) for answer in case.answers))
    assert [line for line in sorted(alike) if not CONSTANT.fullmatch(line)] == []
