"""All mutants."""

from __future__ import annotations

import engines
import mappings
import transports
from mutant import Mutant, mutants_of

from vllm_wt.engine import TrainerWeightTransferEngine, WeightTransferEngine
from vllm_wt_echo.transport import EchoTransport
from vllm_wt_ipc.transport import IpcTransport

SOUND_TRANSPORT = "echo"
SOUND_ENGINE = "sound-engine"
SOUND_MAPPING = "ipc"
EAGER_TRANSPORT = "looks-at-submit"
WORKER = "engines:SoundEngine"
TRAINER = "engines:SoundTrainer"

SOUND = [
    Mutant(name=SOUND_ENGINE, check="", says="", worker=WORKER, trainer=TRAINER),
    Mutant(name=EAGER_TRANSPORT, check="", says="", transport="transports:LooksAtSubmit"),
]
"""Backends that are as they must be, and not quite like echo."""

_ENGINES = ("cpu", "many-readers")

MUTANTS = [
    *mutants_of(transports, transport=(EchoTransport, {})),
    *mutants_of(mappings, transport=(IpcTransport, {"sound": SOUND_MAPPING})),
    *mutants_of(
        engines,
        worker=(WeightTransferEngine, {"trainer": TRAINER, "capabilities": _ENGINES}),
        trainer=(TrainerWeightTransferEngine, {"worker": WORKER, "capabilities": _ENGINES}),
    ),
    Mutant(
        name="imports-torch",
        check="test_the_entry_point_imports_nothing_heavy",
        says="importing mutants_plugin_imports_torch imports",
        transport="transports:EchoTransport",
        imports="torch",
    ),
    Mutant(
        name="names-no-class",
        check="test_the_classes_exist_and_have_the_methods",
        says="names a class that does not exist",
        transport="transports:NoSuchTransport",
    ),
    Mutant(
        name="names-no-module",
        check="test_the_classes_exist_and_have_the_methods",
        says="cannot be imported",
        worker="no_such_module:Engine",
        trainer=TRAINER,
    ),
    Mutant(
        name="claims-cuda",
        check="test_the_capabilities_are_those_of_the_class",
        says="claims .'cpu', 'cuda'",
        transport="transports:EchoTransport",
        capabilities=("cpu", "cuda"),
    ),
    Mutant(
        name="claims-nothing",
        check="test_the_capabilities_are_those_of_the_class",
        says="claim Capability.CPU or CUDA",
        worker=WORKER,
        trainer=TRAINER,
        capabilities=(),
    ),
]
