"""The mapping is written by one function, and read by nothing that could tear a word."""

import ast
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[2] / "retire" / "authority").glob("*.py"))


def _names(tree: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names |= {alias.name for node in imports for alias in node.names}
    return names | {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}


def _item_stores(tree: ast.AST, function: str = "") -> list[tuple[str, int]]:
    """(innermost function, line) of every item that is assigned, deleted or bound in `tree`."""
    found = []
    for node in ast.iter_child_nodes(tree):
        name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found.append((name, node.lineno))
        found += _item_stores(node, name)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_stores_by_bytes(file: Path) -> None:
    assert not _names(ast.parse(file.read_text())) & {"pack_into", "unpack_from", "struct", "ctypes", "from_buffer"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_only_the_table_has_a_view_of_the_mapping(file: Path) -> None:
    reaches_in = _names(ast.parse(file.read_text())) & {"mmap", "memoryview", "cast", "_words", "_map", "_store"}
    assert file.name == "table.py" or not reaches_in


def test_the_one_store_function_is_the_only_one() -> None:
    (table,) = (file for file in FILES if file.name == "table.py")
    assert {function for function, _ in _item_stores(ast.parse(table.read_text()))} == {"_store"}


def test_the_lint_sees_what_it_forbids() -> None:
    hidden = "def f(w):\n    w[0] = 1\n    w[1] += 1\n    for w[2] in (): pass\n    def _store(w): w[3], x = 1, 2\n"
    assert _item_stores(ast.parse(hidden)) == [("f", 2), ("f", 3), ("f", 4), ("_store", 5)]
    assert "pack_into" in _names(ast.parse("from struct import pack_into"))
