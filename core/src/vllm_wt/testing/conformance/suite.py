"""All checks in one class, as a backend's own tests use them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import ClassVar

import pytest

from vllm_wt import registry
from vllm_wt.testing.conformance.checks.connecting import ConnectingChecks
from vllm_wt.testing.conformance.checks.failures import FailureChecks
from vllm_wt.testing.conformance.checks.hygiene import HygieneChecks, TransportHygieneChecks
from vllm_wt.testing.conformance.checks.infos import InfoChecks
from vllm_wt.testing.conformance.checks.many import ManyChecks
from vllm_wt.testing.conformance.checks.mapping import MappingChecks
from vllm_wt.testing.conformance.checks.memory import MemoryChecks
from vllm_wt.testing.conformance.checks.package import PackageChecks
from vllm_wt.testing.conformance.checks.passes import PassChecks
from vllm_wt.testing.conformance.checks.peers import PeerChecks
from vllm_wt.testing.conformance.checks.revoking import RevokingChecks
from vllm_wt.testing.conformance.checks.rounds import RoundChecks
from vllm_wt.testing.conformance.checks.tensors import TensorChecks
from vllm_wt.testing.conformance.gate import is_of_mapping, why_not
from vllm_wt.testing.conformance.harness import LONG_S, Harness
from vllm_wt.testing.conformance.process import Forker

_FORKER = pytest.StashKey[Forker]()
_MAPS = pytest.StashKey[dict[tuple[str, str], bool]]()


class BackendConformance(  # pytest runs the checks of the last one first
    TransportHygieneChecks,
    HygieneChecks,
    FailureChecks,
    RoundChecks,
    TensorChecks,
    InfoChecks,
    MappingChecks,
    ManyChecks,
    PeerChecks,
    RevokingChecks,
    PassChecks,
    ConnectingChecks,
    MemoryChecks,
    PackageChecks,
):
    """What `docs/contract.md` asks of a backend. A package's tests derive a class from it::

        class TestAcme(BackendConformance):
            backend = "acme"

    A check that does not apply to the backend's kind, or to what it claims, is skipped with the
    reason; the closing report lists it.
    """

    backend: ClassVar[str | None] = None
    """Name of the backend, as `vllm-wt list` shows it; ``--wt-backend`` if it is not given."""
    transport: ClassVar[str] = ""
    """Which of the backend's Transports; empty for the default."""
    harness_cls: ClassVar[type[Harness]] = Harness
    """Where the backend needs options or an environment of its own."""

    @pytest.fixture(autouse=True)
    def harness(self, request: pytest.FixtureRequest) -> Iterator[Harness]:
        """The processes of one check."""
        name = self.backend or request.config.getoption("--wt-backend", default=None)
        if not name:
            pytest.fail(f"set {type(self).__name__}.backend to the name of the backend")
        if not request.config.pluginmanager.has_plugin("vllm_wt.testing.plugin"):
            warnings.warn(
                'no closing report and no options: add `addopts = "-p vllm_wt.testing.plugin"`',
                stacklevel=1,
            )
        device = request.config.getoption("--wt-device", default=None) or "cpu"
        if reason := why_not(request.function, registry.default().get(name).spec):
            pytest.skip(reason)
        harness = self.harness_cls(name, _forker(request.config), device=device)
        harness.transport = transport_of(type(self), request.config)
        try:
            if is_of_mapping(request.function) and not _maps(request.config, harness):
                pytest.skip("its properties.maps is false: readers do not map an owner's memory")
            yield harness
        finally:
            harness.close()


def transport_of(cls: type[BackendConformance], config: pytest.Config) -> str:
    """The Transport that a class of checks is for: ``--wt-transport`` goes with ``--wt-backend``."""
    given = None if cls.backend else config.getoption("--wt-transport", default=None)
    return str(given or cls.transport)


def _maps(config: pytest.Config, harness: Harness) -> bool:
    """What the class of the Transport says; looked up once."""
    known = config.stash.setdefault(_MAPS, {})
    which = (harness.backend, harness.transport)
    if which not in known:
        known[which] = harness.package().maps(within=LONG_S)
    return known[which]


def _forker(config: pytest.Config) -> Forker:
    """One for the whole session: it takes seconds to start."""
    if _FORKER not in config.stash:
        config.stash[_FORKER] = Forker()
        config.add_cleanup(config.stash[_FORKER].close)
    return config.stash[_FORKER]
