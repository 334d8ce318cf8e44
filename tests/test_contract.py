"""docs/contract.md and the conformance kit say the same."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import FunctionType

import pytest

from vllm_wt.engine import TrainerWeightTransferEngine, WeightTransferEngine
from vllm_wt.spec import CONTRACT_VERSION, Capability
from vllm_wt.testing.conformance import BackendConformance
from vllm_wt.testing.conformance.gate import CHECK, UNCHECKED
from vllm_wt.transport import MappingTransport, Transport, TransportProperties

CONTRACT = (Path(__file__).parent.parent / "docs" / "contract.md").read_text()
CLAUSES = re.findall(r"^\*\*(WT-\d\d) [^*]+\*\*(.*?)(?=^\*\*WT|^#|\Z)", CONTRACT, re.M | re.S)
NAMES = [name for name, _ in CLAUSES]
CHECKS = {
    name: inspect.getdoc(getattr(BackendConformance, name)) or ""
    for name in dir(BackendConformance)
    if name.startswith(CHECK)
}
CHECKED = {clause for text in CHECKS.values() for clause in re.findall(r"WT-\d\d", text)}


def test_clauses_are_numbered_through():
    assert [f"WT-{number:02}" for number in range(1, len(NAMES) + 1)] == sorted(NAMES)


def test_every_clause_has_a_check_and_every_check_a_clause():
    unchecked = {
        name
        for name, text in CLAUSES
        if "not checked" in text and any(f"Capability.{c.name}" in text for c in UNCHECKED)
    }
    assert len(unchecked) == len(UNCHECKED)
    assert CHECKED | unchecked == set(NAMES)
    assert not CHECKED & unchecked


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_begins_with_its_clause(check):
    assert re.match(r"WT-\d\d", CHECKS[check])


def test_every_name_in_it_exists():
    for capability in Capability:
        assert f"Capability.{capability.name}" in CONTRACT
    assert f"contract\nversion {CONTRACT_VERSION} " in CONTRACT
    for contract in (
        Transport,
        MappingTransport,
        WeightTransferEngine,
        TrainerWeightTransferEngine,
    ):
        for name, method in vars(contract).items():
            if isinstance(method, (FunctionType, property, staticmethod)) and name[0] != "_":
                assert f"`{name}`" in CONTRACT, name
    for name in re.findall(r"`properties\.(\w+)", CONTRACT):
        assert name in TransportProperties.__dataclass_fields__
