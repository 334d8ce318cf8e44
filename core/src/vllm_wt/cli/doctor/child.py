"""Runs a check in a process of its own, so that it may hang or crash.

The function yields findings, and each is written down at once: what was found before a hang stays.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_wt.cli.doctor.finding import Finding

_MAIN = "from vllm_wt.cli.doctor.child import main; main()"
_TAIL = 600
"""Most characters that are shown of what a crashed check printed."""


_running: set[int] = set()
"""Children under way, each the leader of a process group."""


def end_all() -> None:
    """Kill what still runs, so that whoever waits for it goes on."""
    for pid in list(_running):
        _kill(pid)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def examine(check: str, function: str, *arguments: str, deadline_s: float) -> list[Finding]:
    """Findings of ``"package.module:function"``, and a problem if it did not come to its end.

    Args:
        check: The id of that problem.
        function: Called with ``arguments``; an iterable of findings.
        arguments: Texts.
        deadline_s: The child and its children are killed then.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-wt-doctor-") as folder:
        results, log = Path(folder, "results"), Path(folder, "log")
        with log.open("wb") as output:  # a file: a pipe would be kept open by a grandchild
            process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(results), function, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )
            hangs = False
            _running.add(process.pid)
            try:
                process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                hangs = True
            finally:
                _kill(process.pid)
                _running.discard(process.pid)
                # A process stuck in a driver can't be killed; the report does not wait for it.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
        findings, end = _read(results)
        printed = log.read_text(errors="replace").strip()[-_TAIL:]
    if end == {"done": True}:
        return findings
    if hangs:
        what = f"it has not ended within {deadline_s:g} s"
        cure = "look at what it printed last; give it longer with --deadline"
    elif "error" in end:
        what, cure = f"the check itself failed: {end['error']}", "report it with what it printed"
    else:
        what = f"its process ended early, {_ending(process.returncode)}"
        cure = "look at what it printed; reinstall the library that crashed"
    if findings:
        what += f"; the last thing it found: {findings[-1].id}"
    if printed:
        what += f"; it printed: {' | '.join(printed.splitlines())}"
    return [*findings, Finding(check, "problem", what, cure)]


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"


def _read(results: Path) -> tuple[list[Finding], dict[str, Any]]:
    findings: list[Finding] = []
    if results.exists():
        for line in results.read_text().splitlines():
            with suppress(ValueError):  # a line that was cut when the process was killed
                message = json.loads(line)
                if "id" not in message:
                    return findings, message
                findings.append(Finding(**message))
    return findings, {}


def main() -> None:
    """In the child: ``sys.argv`` is the file for results, the function and its arguments."""
    if sys.path[0] == "":  # before Python 3.11; this folder's files are not to be imported
        del sys.path[0]
    path, function, *arguments = sys.argv[1:]
    with open(path, "w") as results:
        try:
            for finding in _findings(function, arguments):
                print(json.dumps(asdict(finding)), file=results, flush=True)
            end: dict[str, Any] = {"done": True}
        except (Exception, SystemExit) as error:
            end = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(end), file=results, flush=True)
    # All has been said; libraries that crash or hang on the way out don't matter here.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _findings(function: str, arguments: list[str]) -> Iterable[Finding]:
    module, _, name = function.partition(":")
    return checked(function, getattr(importlib.import_module(module), name)(*arguments))


def checked(function: str, found: Any) -> Iterable[Finding]:
    """Pass on findings.

    Raises:
        TypeError: Something else came.
    """
    if not isinstance(found, Iterable):
        raise TypeError(f"{function} must yield Finding objects, got {found!r:.200}")
    for finding in found:
        if not isinstance(finding, Finding):
            raise TypeError(f"{function} must yield Finding objects, got {finding!r:.200}")
        yield finding
