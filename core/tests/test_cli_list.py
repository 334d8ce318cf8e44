"""``vllm-wt list``, over packages that the tests install."""

import json
import sys

import pytest

from vllm_wt.cli import main
from vllm_wt.registry import ALLOW_LIST

from .support.installed import forget, good_source, install

BACKEND_KEYS = {
    "name",
    "vllm_name",
    "kind",
    "native",
    "transports",
    "distribution",
    "version",
    "capabilities",
    "unsupported",
    "summary",
}
FAILURE_KEYS = {"name", "distribution", "version", "error", "cure"}
BROKEN = {
    "name": "t_bad",
    "distribution": "dist-t_bad",
    "version": "0.9",
    "error": "ModuleNotFoundError: No module named 'no_such_library'",
    "cure": "install what dist-t_bad misses, or pip uninstall dist-t_bad",
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on ``sys.path``, in an environment without vLLM and other backends."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(ALLOW_LIST, "t_one,t_two,t_bad")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(sys.modules, "vllm", None)
    yield tmp_path
    forget(tmp_path)


def test_json(site, capsys):
    install(site, "t_two", good_source("t_two"))
    install(site, "t_one", good_source("t_one", "reads [fast]"), version="2.3")
    assert main(["list", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said) == {"backends", "failures"}
    assert said["failures"] == []
    one, two = said["backends"]
    assert set(one) == set(two) == BACKEND_KEYS
    assert two["name"] == "t_two"
    assert one == {
        "name": "t_one",
        "vllm_name": None,
        "kind": "transport",
        "native": False,
        "transports": [],
        "distribution": "dist-t_one",
        "version": "2.3",
        "capabilities": ["cpu", "zero-copy"],
        "unsupported": {"cuda": "host memory only"},
        "summary": "reads [fast]",
    }


def test_json_of_a_broken_package(site, capsys):
    install(site, "t_bad", "import no_such_library", version="0.9")
    install(site, "t_one", good_source("t_one"))
    assert main(["list", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert [backend["name"] for backend in said["backends"]] == ["t_one"]
    [failure] = said["failures"]
    assert set(failure) == FAILURE_KEYS
    assert failure == BROKEN


def test_json_of_nothing(site, capsys):
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"backends": [], "failures": []}


def test_text(site, capsys):
    install(site, "t_two", good_source("t_two", "writes"))
    install(site, "t_one", good_source("t_one", "reads"), version="2.3")
    assert main(["list"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    rows = [line.split() for line in said.out.splitlines()]
    assert rows == [
        ["backend", "in", "vLLM", "kind", "distribution", "summary"],
        ["t_one", "(vLLM", "not", "installed)", "transport", "dist-t_one", "2.3", "reads"],
        ["t_two", "(vLLM", "not", "installed)", "transport", "dist-t_two", "1.0", "writes"],
    ]


def test_a_backend_with_an_engine_in_vllms_own_form(site, capsys):
    both = good_source("t_one").replace("summary=", 'native="some_package.own:Engine", summary=')
    alone = both.replace("TRANSPORT", "NATIVE").replace("t_one", "t_two")
    alone = alone.replace('transport="some_package.transport:Transport",', "")
    install(site, "t_one", both)
    install(site, "t_two", alone)
    assert main(["list"]) == 0
    _, one, two = capsys.readouterr().out.splitlines()
    assert one.split()[4] == "transport+native"
    assert two.split()[4] == "native"
    assert main(["list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["backends"]
    assert [(row["kind"], row["native"]) for row in told] == [("transport", True), ("native", True)]


def test_a_backend_with_several_transports(site, capsys):
    path = '"some_package.transport:Transport"'
    several = f'transports={{"one": {path}, "two": "some_package.two:Two"}}, summary='
    install(site, "t_one", good_source("t_one").replace("summary=", several))
    assert main(["list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[4] == "transport(one,two)"
    assert main(["list", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["backends"]
    assert told["transports"] == ["one", "two"]


def test_text_of_a_broken_package_has_the_cure(site, capsys):
    install(site, "t_bad", "import no_such_library", version="0.9")
    install(site, "t_one", good_source("t_one"))
    assert main(["list"]) == 1
    said = capsys.readouterr().out
    assert "t_one" in said.splitlines()[1]
    assert said.endswith(
        f"t_bad (dist-t_bad 0.9): {BROKEN['error']}\n  Cure: {BROKEN['cure']}\n",
    )


def test_text_of_a_failure_is_shown_as_it_is(site, capsys):
    install(site, "t_bad", "raise ValueError('[red]dtype[/] not in [int8]')")
    assert main(["list"]) == 1
    assert "ValueError: [red]dtype[/] not in [int8]\n" in capsys.readouterr().out


def test_text_of_nothing(site, capsys):
    assert main(["list"]) == 0
    assert capsys.readouterr().out == "No backends installed. Cure: pip install vllm-wt-rdma\n"


def test_text_shows_a_summary_as_it_is(site, capsys):
    install(site, "t_one", good_source("t_one", "reads [fast]"))
    assert main(["list"]) == 0
    assert "reads [fast]" in capsys.readouterr().out


def test_text_that_is_piped_is_not_cut(site, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    summary = "one-sided reads over InfiniBand, RoCE, and shared memory"
    install(site, "t_one", good_source("t_one", summary))
    assert main(["list"]) == 0
    assert summary in capsys.readouterr().out


def test_no_command(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "the following arguments are required: COMMAND" in capsys.readouterr().err


def test_unknown_option(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["list", "--yaml"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --yaml" in capsys.readouterr().err
