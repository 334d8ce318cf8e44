"""Errors carry their facts, through text as well."""

import ast
from pathlib import Path

import pytest

from vllm_wt import errors
from vllm_wt.errors import (
    EngineError,
    PeerDead,
    WeightTransferError,
    WrongOrder,
    from_text,
    to_text,
)


def _all_classes() -> list[type[WeightTransferError]]:
    return [getattr(errors, n) for n in errors.__all__ if isinstance(getattr(errors, n), type)]


def test_codes_are_distinct():
    codes = [cls.code for cls in _all_classes()]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("cls", _all_classes(), ids=lambda cls: cls.__name__)
def test_every_class_crosses_text(cls):
    error = cls(
        "It broke",
        where="seal",
        expected=[1],
        got={"a": 2},
        cure="mend it",
        backend="rdma",
        ranks={1: "no\nbytes"},
    )
    text = f"Worker failed with error '{to_text(error)}', please check the stack trace above"
    back = from_text(text, where="update_weights")
    assert type(back) is cls
    assert back.facts() == error.facts()
    assert back.ranks == {1: "no\nbytes"}


def test_message_names_every_fact():
    error = PeerDead(
        "Gone", where="read", expected="alive", got="dead", cure="restart", backend="x"
    )
    assert str(error) == (
        "Gone. Backend: x. Where: read. Expected: alive. Got: dead. Cure: restart."
    )


@pytest.mark.parametrize(
    "text", ["", "boom", "WT-E04 {not json", "WT-E04 [1]", 'WT-E04 {"ranks": {"x": 1}}']
)
def test_other_texts_are_engine_errors_with_the_words(text):
    error = from_text(text, where="finish")
    assert type(error) is EngineError
    assert error.where == "finish"
    assert error.got == text


def test_unknown_code_keeps_the_facts():
    error = from_text('WT-E99 {"code": "E99", "what": "new", "cure": "upgrade"}', where="x")
    assert type(error) is WeightTransferError
    assert (error.what, error.cure) == ("new", "upgrade")


def test_an_error_that_quotes_another_keeps_its_own_class():
    quoted = to_text(PeerDead("Gone"))
    error = from_text(to_text(WrongOrder(f"It failed: {quoted}", got=quoted)), where="x")
    assert type(error) is WrongOrder


def _raised_without_cure() -> list[str]:
    found = []
    root = Path(__file__).parents[2]
    names = {cls.__name__ for cls in _all_classes()}
    for path in [*root.glob("core/src/**/*.py"), *root.glob("plugins/*/src/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in names
                and not any(keyword.arg in {"cure", None} for keyword in node.keywords)
            ):
                found.append(f"{path.name}:{node.lineno}")
    return found


def test_every_error_names_a_cure():
    assert _raised_without_cure() == []
