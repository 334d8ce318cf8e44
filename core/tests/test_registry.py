"""Backends are found one by one: a broken package is reported and takes nobody down."""

import sys

import pytest

from vllm_wt import registry
from vllm_wt.errors import BackendUnavailable, PluginError
from vllm_wt.registry import ALLOW_LIST, Failure, load
from vllm_wt.spec import Capability, Kind

from .support.installed import entry_points, good_source, install

HOOK = "from vllm_wt.hookspecs import hookimpl\n"
UPGRADE = "pip install --upgrade dist-bad, or pip uninstall dist-bad"
MISSES = "install what dist-bad misses, or pip uninstall dist-bad"
ONE_SPEC = "TypeError: vllm_wt_backend() must return one BackendSpec, got "

# Source of a plugin; all that its failure must say; the cure.
BROKEN = {
    "import error": (
        "import no_such_library",
        ["ModuleNotFoundError: No module named 'no_such_library'"],
        MISSES,
    ),
    "no module": (None, ["ModuleNotFoundError: No module named 'dist_bad_plugin'"], MISSES),
    "raises at import": (
        "raise RuntimeError('no device')",
        ["RuntimeError: no device"],
        UPGRADE,
    ),
    "does not parse": ("def", ["SyntaxError: ", "dist_bad_plugin.py"], UPGRADE),
    "hook raises": (
        HOOK + "@hookimpl\ndef vllm_wt_backend():\n    raise OSError('no fabric')",
        ["OSError: no fabric"],
        UPGRADE,
    ),
    "wrong signature": (
        HOOK + "@hookimpl\ndef vllm_wt_backend(device): ...",
        ["PluginValidationError: ", "vllm_wt_backend(device)", "Argument(s) {'device'}"],
        UPGRADE,
    ),
    "unknown hook": (
        good_source("bad") + "\n@hookimpl\ndef vllm_wt_round_ended(): ...",
        ["PluginValidationError: unknown hook 'vllm_wt_round_ended'", "dist_bad_plugin"],
        UPGRADE,
    ),
    "unknown hook and wrong signature": (
        HOOK
        + "@hookimpl\ndef vllm_wt_aaa(): ...\n"
        + "@hookimpl\ndef vllm_wt_backend(device): ...",
        ["PluginValidationError: ", "Argument(s) {'device'}"],
        UPGRADE,
    ),
    "no hook": ("", [ONE_SPEC + "[]"], UPGRADE),
    "hook without marker": ("def vllm_wt_backend(): ...", [ONE_SPEC + "[]"], UPGRADE),
    "no spec": (
        HOOK + "@hookimpl\ndef vllm_wt_backend():\n    return {'name': 'bad'}",
        [ONE_SPEC + "[{'name': 'bad'}]"],
        UPGRADE,
    ),
    "other name": (
        good_source("other"),
        ["ValueError: entry point 'bad' describes a backend called 'other'"],
        UPGRADE,
    ),
    "other contract": (
        good_source("bad").replace("name='bad',", "name='bad', contract=2,"),
        [
            "ValueError: backend 'bad' was written against contract 2, this vllm-wt has 1; "
            "install a matching release of it"
        ],
        UPGRADE,
    ),
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on ``sys.path``; what was imported from it is forgotten afterwards."""
    monkeypatch.delenv(ALLOW_LIST, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def _load(site):
    return load(entry_points(site))


def test_good_backend(site):
    install(site, "fast", good_source("fast"), dist="vllm-wt-fast", version="2.3")
    found = _load(site)
    assert found.failures == []
    assert list(found.backends) == ["fast"]
    backend = found.get("fast")
    assert (backend.distribution, backend.version) == ("vllm-wt-fast", "2.3")
    assert (backend.spec.name, backend.spec.kind) == ("fast", Kind.TRANSPORT)
    assert backend.spec.transport == "some_package.transport:Transport"
    assert backend.spec.capabilities == {Capability.CPU, Capability.ZERO_COPY}


def test_nothing_installed(site):
    found = _load(site)
    assert (found.backends, found.failures) == ({}, [])


def test_without_argument_the_environment_is_read(site, monkeypatch):
    install(site, "here", good_source("here"))
    monkeypatch.setenv(ALLOW_LIST, "here")
    assert list(load().backends) == ["here"]


@pytest.mark.parametrize("case", BROKEN)
def test_broken_package_is_reported_and_the_others_work(site, case):
    source, said, cure = BROKEN[case]
    install(site, "bad", source, version="0.9")
    for name in ("aaa", "zzz"):  # loaded before it and after it
        install(site, name, good_source(name))
    found = _load(site)
    assert sorted(found.backends) == ["aaa", "zzz"]
    [failure] = found.failures
    assert (failure.name, failure.distribution, failure.version) == ("bad", "dist-bad", "0.9")
    assert [part for part in said if part not in failure.error] == []
    assert failure.error.startswith(said[0])
    assert failure.cure == cure


def test_broken_package_hears_no_hooks(site):
    observer = "\nheard = []\n@hookimpl\ndef vllm_wt_round_started(version): heard.append(version)"
    install(site, "good", good_source("good") + observer)
    install(site, "bad", good_source("other") + observer)
    found = _load(site)
    found.hooks.hook.vllm_wt_round_started(version=7)
    assert sys.modules["dist_good_plugin"].heard == [7]
    assert sys.modules["dist_bad_plugin"].heard == []


def test_package_that_exits_is_reported(site):
    install(site, "bad", "import sys\nsys.exit('no licence')")
    assert _load(site).failures[0].error == "SystemExit: no licence"


def test_one_module_for_two_names(site):
    install(site, "one", good_source("one"), module="shared")
    install(site, "two", None, module="shared")
    found = _load(site)
    assert list(found.backends) == ["one"]
    [failure] = found.failures
    assert failure.distribution == "dist-two"
    assert failure.error == "ValueError: it is the same module as the entry point 'one'"
    assert found.hooks.has_plugin("one")


def test_duplicate_name(site):
    install(site, "dup", good_source("dup"), dist="b-dist")
    install(site, "dup", good_source("dup"), dist="a-dist", version="3.0")
    install(site, "fine", good_source("fine"))
    found = _load(site)
    assert list(found.backends) == ["fine"]
    error = "the name 'dup' is claimed by a-dist and b-dist"
    cure = "uninstall all but one of a-dist, b-dist"
    assert sorted(found.failures, key=lambda failure: failure.distribution) == [
        Failure("dup", "a-dist", "3.0", error, cure),
        Failure("dup", "b-dist", "1.0", error, cure),
    ]
    assert not {"a_dist_plugin", "b_dist_plugin"} & set(sys.modules)
    with pytest.raises(PluginError, match="claimed by a-dist and b-dist"):
        found.get("dup")


@pytest.mark.parametrize(
    ("allowed", "loaded"),
    [
        (None, ["one", "two"]),
        ("", []),
        ("two", ["two"]),
        (" one , two ", ["one", "two"]),
        ("on", []),
        ("one,three", ["one"]),
    ],
)
def test_allow_list(site, monkeypatch, allowed, loaded):
    if allowed is not None:
        monkeypatch.setenv(ALLOW_LIST, allowed)
    install(site, "one", good_source("one"))
    install(site, "two", good_source("two"))
    assert sorted(_load(site).backends) == loaded


def test_allow_list_keeps_the_others_from_being_imported(site, monkeypatch):
    monkeypatch.setenv(ALLOW_LIST, "good")
    install(site, "good", good_source("good"))
    module = install(site, "bad", "raise RuntimeError('imported')")
    found = _load(site)
    assert list(found.backends) == ["good"]
    assert found.failures == []
    assert module not in sys.modules


def test_allow_list_settles_a_duplicate_name_of_others(site, monkeypatch):
    monkeypatch.setenv(ALLOW_LIST, "good")
    install(site, "good", good_source("good"))
    for dist in ("a-dist", "b-dist"):
        install(site, "dup", good_source("dup"), dist=dist)
    assert _load(site).failures == []


# -- get -----------------------------------------------------------------------------------------


def test_get_takes_the_name_in_vllm(site):
    install(site, "fast", good_source("fast"))
    found = _load(site)
    assert found.get("wt_fast") is found.get("fast")


def test_a_name_that_is_vllms_spelling_of_another(site):
    install(site, "fast", good_source("fast"))
    install(site, "wt_fast", good_source("wt_fast"))
    found = _load(site)
    assert found.get("wt_fast").spec.name == "fast"
    [failure] = found.failures
    assert failure.name == "wt_fast"
    assert "wt_ is how vLLM spells our names" in failure.error


def test_get_of_a_backend_that_the_allow_list_leaves_out(site, monkeypatch):
    install(site, "fast", good_source("fast"))
    monkeypatch.setenv("VLLM_WT_PLUGINS", "other")
    with pytest.raises(BackendUnavailable) as caught:
        _load(site).get("fast")
    assert caught.value.cure == "name it in VLLM_WT_PLUGINS, or unset that"


@pytest.mark.parametrize("name", ["slow", "wt_slow"])
def test_get_of_an_unknown_name(site, name):
    for backend in ("fast", "exact"):
        install(site, backend, good_source(backend))
    with pytest.raises(BackendUnavailable) as caught:
        _load(site).get(name)
    assert str(caught.value) == (
        "There is no backend 'slow'. Backend: slow. Expected: one of ['exact', 'fast']. "
        "Cure: `vllm-wt list` shows what is installed; each backend comes in a package of its own, "
        "this project's as vllm-wt-<name>."
    )


@pytest.mark.parametrize("name", ["bad", "wt_bad"])
def test_get_of_a_broken_package(site, name):
    install(site, "bad", "import no_such_library", version="0.9")
    with pytest.raises(PluginError) as caught:
        _load(site).get(name)
    assert str(caught.value) == (
        "Backend 'bad' of dist-bad 0.9 cannot be used: ModuleNotFoundError: No module named "
        "'no_such_library'. Backend: bad. "
        "Cure: install what dist-bad misses, or pip uninstall dist-bad."
    )


# -- resolve -------------------------------------------------------------------------------------


def test_resolve(site):
    (site / "wt_code.py").write_text("class Transport: ...")
    assert registry.resolve("wt_code:Transport", backend="x") is sys.modules["wt_code"].Transport


def test_resolve_without_its_library(site):
    (site / "wt_code.py").write_text("import no_such_library")
    with pytest.raises(BackendUnavailable) as caught:
        registry.resolve("wt_code:Transport", backend="fast")
    assert str(caught.value) == (
        "The code of backend 'fast' cannot be imported: No module named 'no_such_library'. "
        "Backend: fast. Where: wt_code. "
        "Cure: pip install vllm-wt-fast (with the dependency named above)."
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_resolve_where_the_import_fails_otherwise(site):
    (site / "wt_code.py").write_text("raise OSError('libfabric.so.1: cannot open')")
    with pytest.raises(BackendUnavailable, match=r"libfabric.so.1: cannot open"):
        registry.resolve("wt_code:Transport", backend="fast")


def test_resolve_of_a_missing_class(site):
    (site / "wt_code.py").write_text("class Other: ...")
    with pytest.raises(PluginError) as caught:
        registry.resolve("wt_code:Transport", backend="fast")
    assert str(caught.value) == (
        "Backend 'fast' names a class that does not exist. Backend: fast. "
        "Expected: wt_code:Transport. Cure: install a fixed release of the package."
    )
