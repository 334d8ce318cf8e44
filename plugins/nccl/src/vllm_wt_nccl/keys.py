"""Under which names members leave at the rendezvous what is of one attempt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Keys:
    """What is left for one attempt, or round of the native form.

    Args:
        ticket: Its number.
    """

    ticket: int

    @property
    def here(self) -> str:
        """How many workers take part by now, all of whom are in `who`."""
        return f"{self.ticket}/here"

    @property
    def who(self) -> str:
        """Their numbers; none in the native form, where all take part."""
        return f"{self.ticket}/who"

    @property
    def call(self) -> str:
        """That broadcasts begin: a `vllm_wt_nccl.info.Call`, or nothing in the native form."""
        return f"{self.ticket}/call"

    @property
    def rows(self) -> str:
        """Of the native form, what is in each parcel, a line for each, for whoever finds one wrong."""
        return f"{self.ticket}/rows"

    @property
    def done(self) -> str:
        """How many workers have everything."""
        return f"{self.ticket}/done"

    @property
    def failed(self) -> str:
        """The facts of an error, once somebody has failed."""
        return f"{self.ticket}/failed"

    @property
    def all(self) -> tuple[str, ...]:
        return (self.here, self.who, self.call, self.rows, self.done, self.failed)
