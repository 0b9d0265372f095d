"""How one patched function of vLLM is described, pinned and replaced.

Owns: locating a target's source without importing it, its hash, and the swap itself.
Must not know: what any patch is for.  A module of this package is one patch: it has the header that
`tests/patches` parses, a `SEAM`, and no side effect at import.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

from retire.core.errors import SeamError

MARK = "__retire_seam__"
UPSTREAM = ("vllm", "torch")
_swapped: dict[str, Any] = {}  # target -> what took its place


@dataclass(frozen=True)
class Seam:
    """One target of vLLM.

    `target`: "module:Qualified.name".  `build(original)` gives what takes its place; for an addition the original
    is None.  `relies_on`: upstream functions whose behaviour the patch leans on without touching them; pinned too.
    """

    target: str
    kind: Literal["wrap", "addition"]
    build: Callable[[Any], Callable[..., Any]]
    relies_on: tuple[str, ...] = field(default=())

    @property
    def pinned(self) -> tuple[str, ...]:
        """Targets whose source must be the one this was written against."""
        return self.relies_on if self.kind == "addition" else (self.target, *self.relies_on)


def _split(target: str) -> tuple[str, list[str]]:
    module, _, qualname = target.partition(":")
    return module, qualname.split(".")


@functools.cache
def _parsed(module: str) -> tuple[str, ast.Module]:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        raise SeamError(f"vLLM has no module {module}") from error
    if spec is None or spec.origin is None:
        raise SeamError(f"vLLM has no module {module}")
    source = Path(spec.origin).read_text(encoding="utf-8")
    return source, ast.parse(source)


def source_of(target: str) -> str:
    """Source text of the target, decorators included, read from the file (the module is not imported)."""
    module, path = _split(target)
    source, node = _parsed(module)
    body: list[ast.stmt] = node.body
    found: ast.stmt | None = None
    for name in path:
        found = next(
            (
                stmt
                for stmt in body
                if isinstance(stmt, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and stmt.name == name
            ),
            None,
        )
        if found is None:
            raise SeamError(f"vLLM has no {target}")
        body = getattr(found, "body", [])
    assert isinstance(found, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    first = min([found.lineno, *(d.lineno for d in found.decorator_list)])
    return "\n".join(source.splitlines()[first - 1 : found.end_lineno])


def digest(target: str) -> str:
    """SHA-256 of the target's source text, hex, first 32 digits."""
    return hashlib.sha256(source_of(target).encode()).hexdigest()[:32]


def _owner(target: str) -> tuple[Any, str]:
    module, path = _split(target)
    owner: Any = importlib.import_module(module)
    for name in path[:-1]:
        owner = getattr(owner, name)
    return owner, path[-1]


def check_untouched(seam: Seam) -> None:
    """Raise SeamError when somebody else has replaced the target, or already has what we add."""
    owner, name = _owner(seam.target)
    current = inspect.getattr_static(owner, name, None)
    if seam.kind == "addition":
        if current is not None:
            raise SeamError(f"{seam.target} exists already")
        return
    function = getattr(current, "__func__", current)
    module, path = _split(seam.target)
    while True:  # the function and what upstream's own decorators put around it, nothing else
        home = function.__globals__.get("__name__", "") if type(function) is FunctionType else type(function).__module__
        if type(function) is not FunctionType or home.partition(".")[0] not in UPSTREAM:
            raise SeamError(f"{seam.target} has been wrapped or replaced by another package ({home})")
        if not hasattr(function, "__wrapped__"):
            break
        function = function.__wrapped__
    if (function.__module__, function.__qualname__) != (module, ".".join(path)):
        raise SeamError(f"{seam.target} has been replaced by {function.__module__}:{function.__qualname__}")


def swap(seam: Seam) -> Callable[[], None]:
    """Put the replacement in place; returns what undoes it."""
    owner, name = _owner(seam.target)
    original = None if seam.kind == "addition" else inspect.getattr_static(owner, name)
    replacement = seam.build(original)
    if original is not None:
        functools.update_wrapper(replacement, original)
    setattr(replacement, MARK, seam.target)
    setattr(owner, name, replacement)
    _swapped[seam.target] = replacement

    def undo() -> None:
        del _swapped[seam.target]
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    return undo


def switch(seam: Seam, *, live: bool) -> None:
    """Put the replacement of an installed wrap in place, or what it replaced.

    Raises:
        SeamError: neither stands there, so that a third package's code would be lost.
    """
    owner, name = _owner(seam.target)
    replacement = _swapped[seam.target]
    original = replacement.__wrapped__
    if vars(owner).get(name) not in (replacement, original):
        raise SeamError(f"{seam.target} has been wrapped or replaced by another package since")
    setattr(owner, name, replacement if live else original)
