"""The command ``vllm-wt``."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import metadata

from vllm_wt.cli import bench, check, demo, doctor, listing, plan
from vllm_wt.errors import WeightTransferError


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; its exit code, or 1 with the message of a typed error."""
    parser = argparse.ArgumentParser(
        prog="vllm-wt", description="Weight-transfer backends for vLLM."
    )
    parser.add_argument("--version", action="version", version=f"vllm-wt {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (listing, doctor, check, demo, plan):
        module.add_parser(commands)
    words = sys.argv[1:] if argv is None else argv
    # Other commands load no package before they are asked to.
    bench.add_parser(commands, of_packages=words[:1] == ["bench"])
    arguments = parser.parse_args(words)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except WeightTransferError as error:
        print(f"vllm-wt: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has gone; nothing is to be flushed to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _version() -> str:
    try:
        return metadata.version("vllm-wt")
    except metadata.PackageNotFoundError:
        return "of a source tree that is not installed"
