"""Which network devices UCX may use.

NIXL's own parameter for it (``device_list``) adds a port to each name, which TCP's devices have not; so
it goes by UCX's variable, for as long as it takes to make an agent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vllm_wt.errors import InvalidInfo, shown
from vllm_wt_rdma.environment import variable
from vllm_wt_rdma.nixl import BACKEND

VARIABLE = "UCX_NET_DEVICES"
_SYS_CLASS = Path("/sys/class")
_MOST = 64
"""UCX ends the process if there are more."""


def there(sys_class: Path = _SYS_CLASS) -> list[str]:
    """Devices of this host by UCX's names, ``mlx5_0:1`` or ``eth0``; none if the kernel shows none."""
    ports = sys_class.glob("infiniband/*/ports/*")
    interfaces = (sys_class / "net").glob("*")
    return sorted(f"{port.parts[-3]}:{port.name}" for port in ports) + sorted(
        path.name for path in interfaces if (path / "ifindex").exists()
    )


def parsed(value: object) -> str | None:
    """The option ``devices`` as UCX wants it; None for all.

    Args:
        value: None, a name, several with commas between them, or a sequence of names.

    Raises:
        InvalidInfo: It has another form, or names a device that is not there.
    """
    if value is None:
        return None
    names = value.split(",") if isinstance(value, str) else value
    found: list[str] = []
    if isinstance(names, Sequence) and all(isinstance(name, str) for name in names):
        found = list(dict.fromkeys(name.strip() for name in names))
    known = there()
    without_ports = {name.partition(":")[0] for name in known}
    # Where nothing is shown, all that is known is what no name has.
    wrong = [
        name
        for name in found
        if not name or (known and name not in known and name not in without_ports)
    ]
    if 0 < len(found) <= _MOST and not wrong:
        return ",".join(found)
    raise InvalidInfo(
        "There is no such network device" if wrong else "These are no names of network devices",
        backend=BACKEND,
        where="devices",
        expected=f"1 to {_MOST} of {', '.join(known) or 'the names that `ucx_info -d` shows'}",
        got=", ".join(map(shown, wrong)) if wrong else shown(value),
        cure="name devices of the trainer's host, or leave it out for those that UCX picks; "
        f"an engine's are named by {VARIABLE} in its environment",
    )


@contextmanager
def limited_to(devices: str | None) -> Iterator[None]:
    """Make agents in here with these devices alone; None leaves them to UCX and its variable."""
    if devices is None:
        yield
        return
    with variable(VARIABLE, devices):
        yield
