"""Claims about who may import whom (ARCHITECTURE.md); the contracts themselves are in pyproject.toml."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parents[1]

MAY_IMPORT_VLLM = (
    "retire/engine/",
    "vllm_patches/",
    "retire/server/",  # request schemas and the error body are vLLM's: imported inside functions
    "retire/plugin.py",  # implements vLLM's plugin interface
    "retire/seal.py",  # compares the version before any patch is installed
)
MAY_IMPORT_PATCHES = ("vllm_patches/", "retire/plugin.py", "retire/seal.py")
ONLY_LAZILY = ("retire/server/", "retire/seal.py", "retire/plugin.py")  # loaded by tools that run without vLLM


def sources(*packages: str) -> list[Path]:
    return [file for package in packages for file in sorted((ROOT / package).rglob("*.py"))]


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Top-level package names that a file imports, also inside functions, with the line.  Relative ones stay inside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0], node.lineno


def module_level(tree: ast.Module) -> ast.Module:
    """The statements that run at import: functions and `if TYPE_CHECKING:` blocks are left out."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, _node):
            return None

        visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast's names

        def visit_If(self, node):
            return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)

    return Strip().visit(tree)


def offenders(package: str, allowed: tuple[str, ...], *, lazily: bool = False) -> list[str]:
    found = []
    for file in sources("retire", "vllm_patches", "harness", "traces"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if lazily:
            tree = module_level(tree)
        if not relative(file).startswith(allowed):
            found += [f"{relative(file)}:{line}" for name, line in imports(tree) if name == package]
    return found


def test_the_import_contracts_hold(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    code = lint_imports(no_cache=True, no_logo=True)
    assert code == 0, capsys.readouterr().out


def test_only_the_engine_side_imports_vllm():
    assert offenders("vllm", (*MAY_IMPORT_VLLM, "harness/")) == []


def test_server_seal_and_plugin_import_vllm_only_when_called():
    allowed = tuple(place for place in MAY_IMPORT_VLLM if place not in ONLY_LAZILY)
    assert offenders("vllm", (*allowed, "harness/"), lazily=True) == []


def test_only_plugin_and_seal_import_the_patches():
    assert [place for place in offenders("vllm_patches", MAY_IMPORT_PATCHES) if place.startswith("retire/")] == []


def test_nobody_but_the_command_line_imports_experiments_and_traces():
    for package in ("harness", "traces"):
        places = offenders(package, ("harness/", "traces/", "retire/cli.py"))
        assert places == []


@pytest.mark.parametrize("module", ["retire.core", "retire.cli", "retire.client", "retire.plugin", "traces"])
def test_importing_loads_neither_vllm_nor_torch(module):
    code = (
        f"import importlib, pkgutil, sys; package = importlib.import_module('{module}');"
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(getattr(package, '__path__', []),"
        " package.__name__ + '.')];"
        "print([m for m in ('vllm', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr
