"""pytest plugin of the conformance kit: ``-p vllm_wt.testing.plugin``.

It is no ``pytest11`` entry point: core is installed beside vLLM in production, and would be loaded
into every pytest session there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.register_assert_rewrite("vllm_wt.testing.conformance.checks")

from vllm_wt import registry  # noqa: E402
from vllm_wt.backends import transport_named  # noqa: E402
from vllm_wt.errors import WeightTransferError  # noqa: E402
from vllm_wt.testing.conformance.known import read_known_failures  # noqa: E402
from vllm_wt.testing.conformance.report import Report, write  # noqa: E402
from vllm_wt.testing.conformance.suite import BackendConformance, transport_of  # noqa: E402

_PROPERTY = "vllm-wt check"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vllm-wt conformance")
    group.addoption("--wt-backend", metavar="NAME", help="backend that the kit is run on")
    group.addoption("--wt-transport", metavar="NAME", help="which of its transports [the default]")
    group.addoption("--wt-device", metavar="DEVICE", default="cpu", help="of all memory [cpu]")
    group.addoption(
        "--wt-known-failures",
        metavar="FILE",
        type=Path,
        help="checks that fail for now: `name  # reason` on a line; one that passes fails the run",
    )
    group.addoption("--wt-report", metavar="FILE", type=Path, help="write the report as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Reporter(config), "vllm-wt-reporter")


class _Reporter:
    """Keeps a report for each backend that is checked in this session."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        path = config.getoption("--wt-known-failures")
        self._known = read_known_failures(path) if path is not None else {}
        self._reports: dict[tuple[str, str], Report] = {}
        self._path: Path | None = config.getoption("--wt-report")
        if self._path is not None:
            _make_empty(self._path)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            cls = getattr(item, "cls", None)
            if cls is None or not issubclass(cls, BackendConformance):
                continue
            backend = cls.backend or self._config.getoption("--wt-backend")
            if backend:
                transport = transport_of(cls, self._config)
                self._require_installed(backend, transport)
                # It travels with the outcome, from another process too.
                item.user_properties.append((_PROPERTY, f"{backend} {transport} {item.name}"))
            if item.name in self._known:
                reason = self._known[item.name]
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _PROPERTY:
                backend, transport, check = str(value).split(" ", 2)
                self._report(backend, transport).add(check, report)

    def _require_installed(self, backend: str, transport: str) -> None:
        try:
            spec = registry.default().get(backend).spec
            if transport and transport not in spec.transports:
                transport_named(spec, transport)
        except WeightTransferError as error:
            raise pytest.UsageError(str(error)) from None

    def _report(self, backend: str, transport: str) -> Report:
        which = (backend, transport)
        if which not in self._reports:
            installed = registry.default().get(backend)
            device = self._config.getoption("--wt-device")
            self._reports[which] = Report(installed, device, transport)
        return self._reports[which]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for report in self._reports.values():
            terminalreporter.section("vllm-wt conformance")
            for line in report.lines():
                terminalreporter.write_line(line)
        if self._path is not None and self._reports:
            write(list(self._reports.values()), self._path)


def _make_empty(path: Path) -> None:
    """See that the report can be written, before the run; an earlier one is not to be taken for it."""
    try:
        path.open("w").close()
    except OSError as error:
        raise pytest.UsageError(f"the report cannot be written: {error}") from None
