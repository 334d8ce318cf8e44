"""What a mutant is: a broken backend, and the check of the kit that must catch it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

C = TypeVar("C", bound=type)

_MARK = "_caught_by"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One backend.

    Args:
        name: Of the backend.
        check: Name of the check that must catch it.
        says: What the failure's traceback must match.
        transport: Path of the class, for kind TRANSPORT.
        worker: Path of the class, for kind ENGINE.
        trainer: Path of the class, for kind ENGINE.
        capabilities: That it claims.
        imports: What its entry point imports.
        sound: The backend that it was made from, if not that of its kind.
    """

    name: str
    check: str
    says: str
    transport: str | None = None
    worker: str | None = None
    trainer: str | None = None
    capabilities: tuple[str, ...] = ("cpu", "many-readers", "many-owners", "zero-copy")
    imports: str = ""
    sound: str = ""

    @property
    def kind(self) -> str:
        return "transport" if self.transport else "engine"


def caught_by(check: str, says: str) -> Callable[[C], C]:
    """A class that the check must catch, with a failure whose traceback matches ``says``."""

    def mark(cls: C) -> C:
        setattr(cls, _MARK, {"check": check, "says": says})
        return cls

    return mark


def mutants_of(module: ModuleType, **roles: Any) -> list[Mutant]:
    """Those of a module, in its order.

    Args:
        module: Where classes are marked.
        roles: For each role the base of its classes and the paths of its partners.
    """
    found = []
    for cls in vars(module).values():
        if getattr(cls, "__module__", None) != module.__name__ or _MARK not in vars(cls):
            continue
        role, partners = next((r, p) for r, (base, p) in roles.items() if issubclass(cls, base))
        paths = {**partners, role: f"{module.__name__}:{cls.__name__}"}
        found.append(Mutant(name=_name(cls.__name__), **vars(cls)[_MARK], **paths))
    return found


def _name(title: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", title).lower()
