"""``vllm-wt bench round``: whole rounds of a sync into a real engine on the trainer's own device.

The trainer is this process. Engines run one after the other: vLLM's built-in ``ipc`` in the better of
its two modes, which is measured before any mapping is kept open, then ours, then one that loads the
same weights when it starts. All must compute the same, and hold the same bytes.

A round is over when its calls have returned: what vLLM's own leaves running on the device then is not
counted against it.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

from vllm_wt import registry
from vllm_wt.cli.bench_result import positive, report
from vllm_wt.cli.plan import require_vllm
from vllm_wt.errors import BackendUnavailable

_SETTINGS = ("bytes:none", "digest:auto")
_MODELS = ("1.7b", "8b", "tiny")


def add_parser(names: Any) -> None:
    parser = names.add_parser(
        "round",
        help="whole rounds into an engine on the same GPU, against vLLM's built-in ipc",
        description="A trainer and a real engine on one GPU: the time of a whole round against that of "
        "vLLM's built-in ipc, in engines one after the other that must end up alike.",
    )
    parser.add_argument("--backend", default="ipc", help="default: %(default)s")
    parser.add_argument(
        "--against",
        choices=("vllm", "none"),
        default="vllm",
        help="vLLM's built-in ipc, or ours alone (%(default)s)",
    )
    parser.add_argument(
        "--model", choices=_MODELS, default="1.7b", help="Qwen3 of this size (%(default)s)"
    )
    parser.add_argument(
        "--setting",
        action="append",
        type=_setting,
        metavar="VERIFY:STAGING",
        help="options of our sessions; of several the first is the main one "
        f"({', '.join(_SETTINGS)})",
    )
    parser.add_argument("--rounds", type=positive, default=9, help="default: %(default)s")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs instead of eager mode")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON object")
    parser.set_defaults(run=run)


def _setting(text: str) -> tuple[str, str]:
    from vllm_wt.info import Staging, Verify

    verify, _, staging = text.partition(":")
    if verify not in get_args(Verify) or staging not in get_args(Staging):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not one of {', '.join(get_args(Verify))}, a colon, and one of "
            f"{', '.join(get_args(Staging))}"
        )
    return verify, staging


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 when the bound is missed, or the engines do not end up alike.

    Raises:
        BackendUnavailable: The backend, vLLM or the device is not there.
        UnsupportedVllm: This release's built-in ipc cannot be driven.
        EngineError: An engine failed, or a round did not do what it said.
        Timeout: An engine did not get to its end.
    """
    registry.default().get(arguments.backend)
    require_vllm("What is measured is a sync into an engine of vLLM's")
    _require_device(arguments)
    from vllm_wt.cli.bench_round_engine import logged
    from vllm_wt.cli.bench_round_result import result

    with (
        tempfile.TemporaryDirectory(prefix="vllm-wt-bench-") as folder,
        logged(Path(folder) / "engines.log"),
    ):
        measured, facts = _measured(arguments, Path(folder))
    found = result(measured, arguments.model, facts)
    return report(found, _summary(found), json_only=arguments.json)


def _require_device(arguments: argparse.Namespace) -> None:
    """Before anything is started.

    Raises:
        BackendUnavailable: There is no such device, or vLLM's own does not take it.
    """
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable(
            "There is no CUDA device here",
            where="--device",
            cure="run it on a host with a GPU; or, to try it: --device cpu --against none "
            "--backend rdma --model tiny",
        )
    if arguments.against == "vllm" and arguments.device != "cuda":
        raise BackendUnavailable(
            "vLLM's built-in ipc moves CUDA memory only",
            where="--against vllm",
            expected="--device cuda",
            got=f"--device {arguments.device}",
            cure="measure ours alone, with --against none; or use a host with a GPU",
        )


def _measured(arguments: argparse.Namespace, folder: Path) -> tuple[Any, dict[str, Any]]:
    """What was measured, and what it depends on."""
    import torch
    from vllm import __version__ as release
    from vllm.config import WeightTransferConfig

    from vllm_wt.cli import bench_round_builtin as builtin
    from vllm_wt.cli.bench_round_engine import running_engine
    from vllm_wt.cli.bench_round_model import TrainerWeights, save_config
    from vllm_wt.cli.bench_round_result import Measured
    from vllm_wt.cli.bench_round_sides import Setting, builtin_sides, our_sides
    from vllm_wt.cli.bench_round_timing import copy_rate

    model, rounds, graphs = arguments.model, arguments.rounds, arguments.graphs
    device = torch.device(arguments.device)
    save_config(model, folder)
    rate = copy_rate(device)
    torch.cuda.empty_cache()  # so that the weights lie as they would have without this
    weights = TrainerWeights(folder, device)
    sides = {}
    if arguments.against == "vllm":
        builtin.trainer_send_weights()  # before a minute is spent on an engine
        with (
            builtin.pickles_allowed(),
            running_engine(
                model,
                folder,
                builtin.NAME,
                graphs=graphs,
                load_format="dummy",
                weight_transfer_config=WeightTransferConfig(backend=builtin.NAME),
            ) as engine,
        ):
            sides = builtin_sides(engine, weights, rounds, device)
    settings = [Setting(*each) for each in arguments.setting or map(_setting, _SETTINGS)]
    with running_engine(
        model, folder, arguments.backend, graphs=graphs, load_format="dummy"
    ) as engine:
        ours = our_sides(engine, weights, arguments.backend, settings, rounds, device)
        captured = engine.graphs
    measured = Measured(ours, sides, _fresh(arguments, weights), rate, weights.nbytes)
    return measured, {
        "backend": arguments.backend,
        "device": arguments.device,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "graphs": captured,
        "tensors": len(weights.state),
        "vllm": release,
        "torch": torch.__version__,
    }


def _fresh(arguments: argparse.Namespace, weights: Any) -> Any:
    """What an engine does that loads the weights when it starts; None without room for them on disk."""
    from vllm_wt.cli.bench_round_engine import running_engine
    from vllm_wt.cli.bench_round_model import room_for_checkpoint, save_checkpoint

    room = room_for_checkpoint(weights.nbytes)
    if room is None:
        return None
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-wt-bench-", dir=room))
        )
        save_checkpoint(arguments.model, weights.state, folder)
        engine = stack.enter_context(
            running_engine(arguments.model, folder, arguments.backend, graphs=arguments.graphs)
        )
        return engine.look()


def _summary(found: dict[str, Any]) -> str:
    details = found["details"]
    words = f"{details['megabytes']:.0f} MB in {details['tensors']} tensors"
    for setting, of in details["settings"].items():
        words += f"; {setting} {of['round_ms']:.1f} ms"
        if of["ratio"] is not None:
            words += f", {of['ratio']:.1f} times faster"
        if of["bound"] is not None:
            words += f" (at least {of['bound']:g})"
    if found["baseline"] is not None:
        words += f"; vLLM's own {found['baseline']:.1f} ms"
    words += f"; one flat copy {details['limit_ms']:.1f} ms; "
    words += "checked" if details["checked"] else f"NOT alike: {details['differences']}"
    if "fresh" not in details["differences"]:
        words += ", but not with an engine that loads a checkpoint: there is no room for one"
    return words
