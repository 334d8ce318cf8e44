"""The trainer's side of the native form: two functions, as vLLM's own backend has them."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import InvalidInfo, WeightTransferError
from vllm_wt_nccl.keys import Keys
from vllm_wt_nccl.native_args import NCCLTrainerSendWeightsArgs, Place
from vllm_wt_nccl.native_group import Group
from vllm_wt_nccl.native_keys import OVER, ROUND, SESSION
from vllm_wt_nccl.native_meeting import (
    gathered,
    let_hear,
    made_together,
    told,
    watching,
)
from vllm_wt_nccl.native_members import Member
from vllm_wt_nccl.native_sending import Sending
from vllm_wt_nccl.rendezvous import Rendezvous

logger = logging.getLogger(__name__)


def trainer_init(init_info: Any) -> Group:
    """Wait for all workers, and make a group with them.

    Args:
        init_info: ``master_address``, ``master_port`` and ``world_size``, in a dictionary or an object;
            ``deadline_s``, 60 by default.

    Raises:
        InvalidInfo: A field is wrong, the port is taken, or the workers' numbers don't fit.
        Timeout: Not all workers have come.
        WeightTransferError: A worker has failed, or cannot be reached.
    """
    place = Place.checked(init_info)
    deadline = Deadline(place.deadline_s)
    rendezvous = _hosted(place, deadline)
    try:
        return _grouped(rendezvous, place, deadline)
    except BaseException as error:
        let_hear(rendezvous, told(error, "The trainer"), deadline.remaining())
        rendezvous.close()  # whoever keeps the error does not keep the port
        raise


def trainer_send_weights(iterator: Iterable[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
    """Send tensors to all workers, which one ``update_weights`` of each engine announces.

    Returns when every worker has everything. Tensors stay as they are until then.

    Args:
        iterator: Names and tensors, in the order of update_info. One parcel's are held at a time.
        trainer_args: An `NCCLTrainerSendWeightsArgs`, or a dictionary of its fields.

    Raises:
        InvalidInfo, ManifestMismatch: Something cannot be sent, or is not what update_info says.
        WrongOrder: The group is no more.
        WeightTransferError: A worker has failed or gone, or the deadline has passed. If the sending
            had begun, the group is no more.
    """
    args = NCCLTrainerSendWeightsArgs.checked(trainer_args)
    group: Group = args.group
    deadline = Deadline(args.deadline_s)
    with _stream(args.stream):
        _send(group, _made(iterator, args.post_iter_func), args, deadline)


def _hosted(place: Place, deadline: Deadline) -> Rendezvous:
    """A store at the first of the name's addresses that is one of this host."""
    try:
        found = socket.getaddrinfo(place.address.strip("[]"), place.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidInfo(
            f"The trainer cannot be met at this address: {error}",
            where="master_address",
            expected="a name or an address of this host",
            got=place.address,
            cure="give one that this host has and the engines' hosts reach",
        ) from error
    refused: WeightTransferError | None = None
    for *_, target in found:
        try:
            return Rendezvous.host(SESSION, str(target[0]), place.port, deadline)
        except InvalidInfo as error:
            refused = refused or InvalidInfo(
                error.what,
                where="master_address, master_port",
                expected="an address of this host, and a port that nobody listens at",
                got=f"{place.address}, port {place.port}",
                cure="take a port that is free; if it is an earlier trainer's or group's, end or "
                "close() that first",
            )
    assert refused is not None  # a name that is found has an address
    raise refused


def _grouped(rendezvous: Rendezvous, place: Place, deadline: Deadline) -> Group:
    trainer = Member(rank=0, world_size=place.world_size, first=0, workers=1, device="any")
    workers = gathered(rendezvous, trainer, deadline)
    device = _device(workers[0])
    address = rendezvous.address
    communicator = made_together(rendezvous, trainer, 0, address, device, deadline)
    logger.info("vllm-wt: group of %d ranks on %s", place.world_size, device)
    return Group(rendezvous, communicator, rank=0, world_size=place.world_size, device=device)


def _device(worker: Member) -> torch.device:
    """That of the trainer's end, which the workers' is the kind of."""
    if worker.device == "cpu":
        return torch.device("cpu")
    if worker.device == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    raise InvalidInfo(
        "The trainer has no device of the kind that the workers have",
        where="device",
        expected=f"{worker.device}, as {worker}",
        got="no such device in the trainer's process",
        cure="run the trainer on a host with GPUs that its torch sees",
    )


def _send(
    group: Group,
    tensors: Iterator[tuple[str, torch.Tensor]],
    args: NCCLTrainerSendWeightsArgs,
    deadline: Deadline,
) -> None:
    group.require_whole(deadline)
    rendezvous = group.rendezvous
    ticket = group.last = rendezvous.add(ROUND, 1, deadline)
    keys = Keys(ticket)
    failed = watching(rendezvous, keys.failed, deadline)
    over = watching(rendezvous, OVER, deadline)
    has_begun = False

    def watch() -> None:
        failed()
        over()

    try:
        # Late workers may still look at that of the round before.
        group.forget(ticket - 2, deadline)
        _until(group, keys.here, "Not all workers take part in time", deadline, watch)
        has_begun = True
        rendezvous.put(keys.call, "", deadline)
        Sending(group, args.packing, ticket, deadline, watch).run(tensors)
        _until(group, keys.done, "Not all workers have everything in time", deadline, watch)
    except BaseException as error:
        first = group.fail(keys, error, whose="The trainer", has_begun=has_begun)
        if first is error:
            raise
        raise first from error


def _until(
    group: Group, key: str, what: str, deadline: Deadline, watch: Callable[[], None]
) -> None:
    """Until all workers are counted under a key."""
    workers = group.world_size - 1
    group.rendezvous.reached(
        key, workers, deadline, what, watch, lambda count: f"{count} of {workers} workers"
    )


def _made(
    iterator: Iterable[tuple[str, torch.Tensor]],
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor] | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    for item in iterator:
        yield item if post_iter_func is None else (item[0], post_iter_func(item))


def _stream(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
