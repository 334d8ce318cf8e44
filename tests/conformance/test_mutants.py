"""The conformance kit catches broken backends, each by the check that is meant for it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from catalogue import EAGER_TRANSPORT, MUTANTS, SOUND_ENGINE, SOUND_TRANSPORT
from mutant import Mutant

from vllm_wt import registry
from vllm_wt.errors import WeightTransferError
from vllm_wt.testing.conformance.gate import why_not
from vllm_wt.testing.conformance.harness import Harness
from vllm_wt.testing.conformance.process import Forker
from vllm_wt.testing.conformance.suite import BackendConformance

pytestmark = pytest.mark.xdist_group("mutants")  # they start together

Outcomes = Callable[[str, str], str | None]

_AT_A_TIME = 4
"""Checks that run; most of the time they wait."""
_AT_SUBMIT = ("dies", "revoke", "stop", "cancel", "given_up", "unregistered", "pass")
"""Words of the checks in which a submit may fail, or a pass be done at once."""
_FAILURES = (AssertionError, WeightTransferError, pytest.fail.Exception)


def _sound() -> Iterator[tuple[str, str]]:
    """Each check that is to catch something, with the sound backend of its mutants' kind."""
    sound = {"transport": SOUND_TRANSPORT, "engine": SOUND_ENGINE}
    yield from sorted({(mutant.check, mutant.sound or sound[mutant.kind]) for mutant in MUTANTS})
    of_echo = (mutant for mutant in MUTANTS if mutant.kind == "transport" and not mutant.sound)
    for check in sorted({mutant.check for mutant in of_echo}):
        if any(word in check for word in _AT_SUBMIT):
            yield check, EAGER_TRANSPORT


@pytest.fixture(scope="session")
def failure_of(request: pytest.FixtureRequest, forker: Forker) -> Iterator[Outcomes]:
    """How a backend fails a check, None if it does not; all that are asked for run from now on."""
    wanted = [item.callspec.params for item in request.session.items if _is_ours(item)]
    cases = [(p["mutant"].check, p["mutant"].name) for p in wanted if "mutant" in p]
    cases += [(p["check"], p["backend"]) for p in wanted if "check" in p]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        running: dict[tuple[str, str], Future[str | None]] = {
            case: pool.submit(_failure_of, *case, forker) for case in cases
        }
        yield lambda check, backend: running[check, backend].result()
        pool.shutdown(cancel_futures=True)


def _is_ours(item: pytest.Item) -> bool:
    return item.path.samefile(__file__) and hasattr(item, "callspec")


def _failure_of(check: str, backend: str, forker: Forker) -> str | None:
    spec = registry.default().get(backend).spec
    assert why_not(getattr(BackendConformance, check), spec) is None
    harness = Harness(backend, forker)
    try:
        getattr(BackendConformance(), check)(harness)
    except _FAILURES as failure:
        return "".join(traceback.format_exception(failure))
    finally:
        harness.close()
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_is_caught(mutant: Mutant, failure_of: Outcomes) -> None:
    failure = failure_of(mutant.check, mutant.name)
    assert failure is not None, f"{mutant.check} passes"
    assert re.search(mutant.says, failure), f"caught for another reason:\n{failure}"


@pytest.mark.parametrize(("check", "backend"), list(_sound()))
def test_what_is_sound_passes(check: str, backend: str, failure_of: Outcomes) -> None:
    failure = failure_of(check, backend)
    assert failure is None, failure


def test_the_catalogue_is_worth_it() -> None:
    assert len(MUTANTS) >= 25
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert callable(getattr(BackendConformance, mutant.check, None)), mutant.check
