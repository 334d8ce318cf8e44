"""The control page: words in shared memory by which an owner says what may be read.

The word of a generation holds a number that is its alone for as long as it may be read. A reader looks
before and after it reads, so that what was revoked meanwhile is noticed without a word to the owner.
"""

from __future__ import annotations

import secrets

import torch

from vllm_wt.errors import TransportError
from vllm_wt_ipc import BACKEND, memory

PAGE = 4096
"""Bytes of the control page."""
SLOTS = PAGE // 8
"""Words on it."""


class ControlPage:
    """The owner's side.

    Attributes:
        descriptor: Of its memory.
    """

    def __init__(self) -> None:
        self._bytes = memory.make(PAGE)
        self._words = self._bytes.view(torch.int64)
        self._free = list(range(SLOTS))
        descriptor = memory.descriptor_of(self._bytes)
        assert descriptor is not None
        self.descriptor = descriptor

    def light(self) -> tuple[int, int]:
        """Take a slot; returns it and the word that it holds from now on.

        Raises:
            TransportError: All are taken.
        """
        if not self._free:
            raise TransportError(
                "Too many generations are exposed at once",
                backend=BACKEND,
                where="expose",
                expected=f"at most {SLOTS}",
                cure="revoke those that are not read any more",
            )
        slot = self._free.pop()
        word = secrets.randbelow(2**63 - 1) + 1
        self._words[slot] = word
        return slot, word

    def put_out(self, slot: int) -> None:
        """Give a slot back."""
        self._words[slot] = 0
        self._free.append(slot)


class ControlWord:
    """A reader's look at one word.

    Args:
        descriptor: Of the owner's control page.
        slot: Which word.
        word: What it must hold.
    """

    def __init__(self, descriptor: int, slot: int, word: int) -> None:
        page = memory.map_shared(descriptor, PAGE, where="open")
        self._place = page.view(torch.int64)[slot]
        self._word = word

    @property
    def lit(self) -> bool:
        """Whether the generation may be read."""
        return self._place.item() == self._word
