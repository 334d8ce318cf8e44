"""WT-29 to WT-31: the data that crosses between trainer and workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from vllm_wt.errors import InvalidInfo, WeightTransferError
from vllm_wt.testing.conformance.harness import LONG_S, SHORT_S, Harness, Sync

_DAMAGES = 12


class InfoChecks:
    def test_the_infos_are_dataclasses_that_survive_json(self, harness: Harness) -> None:
        """WT-29"""
        sync = harness.sync()
        sync.publish()
        classes = sync.worker.info_classes()
        assert classes["init"]["good"], "init_info_cls is no frozen dataclass derived from InitInfo"
        assert classes["update"]["good"], (
            "update_info_cls is no frozen dataclass derived from UpdateInfo"
        )
        assert sync.trainer.survives_json(None), "an init info is another one after JSON"
        for op in ("open", "poll", "seal", "all", "abort", "confirm"):
            assert sync.trainer.survives_json(op), f"an info for {op} is another one after JSON"

    def test_an_init_info_of_another_form_is_refused(self, harness: Harness) -> None:
        """WT-30"""
        sync = harness.sync()
        good = sync.trainer.describe(SHORT_S)
        required = sync.worker.info_classes()["init"]["required"]
        sync.trainer.serve()  # one that is taken after all connects
        _require_refused(harness, good, required, sync.worker.init)
        sync.trainer.pause()
        sync.connect()
        _require_push_works(sync)

    def test_an_update_info_of_another_form_is_refused(self, harness: Harness) -> None:
        """WT-30"""
        sync = harness.sync()
        sync.publish()
        good = sync.trainer.update_info("open", LONG_S, 0)
        required = sync.worker.info_classes()["update"]["required"]
        _require_refused(harness, good, required, sync.worker.update)
        _require_push_works(sync)

    def test_an_init_info_of_damaged_values_is_survived(self, harness: Harness) -> None:
        """WT-30"""
        sync = harness.sync()
        good = sync.trainer.describe(SHORT_S)
        own = sync.worker.info_classes()["init"]["own"]
        for field in own:
            for value in _damaged(good[field]):
                with suppress(WeightTransferError):
                    sync.worker.init({**good, field: value}, within=SHORT_S + LONG_S)
        sync.connect()
        _require_push_works(sync)

    def test_an_unknown_option_is_refused(self, harness: Harness) -> None:
        """WT-31"""
        with pytest.raises(InvalidInfo, match="no_such_option"):
            harness.trainer(no_such_option=1).ready()


def _require_refused(
    harness: Harness, good: dict[str, Any], required: list[str], call: Callable[..., Any]
) -> None:
    wrong: list[tuple[str, Any]] = [("no_such_field", {**good, "no_such_field": 1})]
    wrong += [
        (field, {name: value for name, value in good.items() if name != field})
        for field in required
    ]
    wrong += [(field, {**good, field: object_of_other_type(good[field])}) for field in good]
    wrong += [
        (field, {**good, field: str(value)})
        for field, value in good.items()
        if isinstance(value, (int, float))
    ]
    for field, info in wrong:
        with pytest.raises(InvalidInfo) as refused:
            call(info)
        assert field in str(refused.value), "the error does not name the field"
        assert refused.value.backend == harness.spec.name, "the error does not name the backend"


def object_of_other_type(value: Any) -> Any:
    """JSON data that no field takes that takes ``value``."""
    return 1.5 if isinstance(value, (str, dict, list)) or value is None else {"odd": []}


def _damaged(value: Any) -> Iterator[Any]:
    """Values of the same form with one leaf changed."""
    leaves = list(_leaves(value))
    draw = random.Random(30)
    for path in draw.sample(leaves, min(_DAMAGES, len(leaves))):
        yield _with_leaf_changed(value, path, draw)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _leaves(one, (*path, index))
    else:
        yield path


def _with_leaf_changed(value: Any, path: tuple[Any, ...], draw: random.Random) -> Any:
    if path:
        key, *rest = path
        copy = dict(value) if isinstance(value, dict) else list(value)
        copy[key] = _with_leaf_changed(value[key], tuple(rest), draw)
        return copy
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return value + draw.choice((1, 1 << 40))
    if value:
        at = draw.randrange(len(value))
        return value[:at] + ("A" if value[at] != "A" else "B") + value[at + 1 :]
    return "A"


def _require_push_works(sync: Sync) -> None:
    sync.push()
    assert sync.wrong(1) is None
