"""The stub of the client for asyncio: `spark_pgqueue/client/asynchronous.pyi`.

`AsyncClient` makes its methods of those of `Client` when it is imported, which no type checker
sees. The stub has them: with the same arguments, awaited.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spark_pgqueue.client import asynchronous
from spark_pgqueue.client.client import Client
from spark_pgqueue.client.groups import Group
from spark_pgqueue.client.messages import Claim

FILE = Path(asynchronous.__file__).with_suffix(".pyi")

# What stands for what in the types.
_OURS = {
    "Claim": "AsyncClaim",
    "Client": "AsyncClient",
    "Group": "AsyncGroup",
    "Iterator": "AsyncIterator",
}

_TOP = '''"""The client for asyncio, for type checkers. Written by: make docs."""
'''


def stub() -> str:
    """The stub."""
    module = ast.parse(inspect.getsource(asynchronous))
    written = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    imports: dict[str, set[str]] = {}
    body: list[ast.stmt] = []
    for node in module.body:
        if isinstance(node, ast.AsyncFunctionDef):
            _note(imports, node, asynchronous)
            body.append(_declared(node))
    attributes = ast.parse("claim_id: int\nmessages: tuple[Message, ...]").body
    imports.setdefault("spark_pgqueue.client.messages", set()).add("Message")
    claim = [*attributes, *_methods(Claim, imports, {}, awaited=_all)]
    client = _methods(Client, imports, _own(written["AsyncClient"]), awaited=_all)
    group = _methods(Group, imports, {}, awaited=lambda name: name != "stop")
    for name, members in (("AsyncClaim", claim), ("AsyncClient", client), ("AsyncGroup", group)):
        described = ast.get_docstring(written[name], clean=True) or ""
        body.append(_class(name, described, members))
        for member in members:
            _note(imports, member, None)
    text = _TOP + _imports(imports) + _unparsed(body)
    return _formatted(text)


def _unparsed(body: list[ast.stmt]) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Module(body, [])))


def _all(name: str) -> bool:
    return True


def _own(node: ast.ClassDef) -> dict[str, ast.stmt]:
    """The public methods that are written in AsyncClient itself."""
    return {
        each.name: each
        for each in node.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and (not each.name.startswith("_") or each.name in ("__init__", "__aenter__", "__aexit__"))
    }


def _methods(
    kind: type,
    imports: dict[str, set[str]],
    own: dict[str, ast.stmt],
    awaited: Callable[[str], bool],
) -> list[ast.stmt]:
    """The public methods of a class as those of its counterpart."""
    found: list[ast.stmt] = []
    for each in own.values():
        assert isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        _note(imports, each, asynchronous)
        if each.decorator_list:  # a generator, which no type checker sees without its body
            each = ast.FunctionDef(**dict(ast.iter_fields(each)))
        found.append(_declared(each))
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") or name in own:
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
        assert isinstance(node, ast.FunctionDef)
        module = inspect.getmodule(method)
        _note(imports, node, module)
        iterates = isinstance(node.returns, ast.Subscript) and "Iterator" in ast.unparse(
            node.returns
        )
        if awaited(name) and not iterates:
            node = ast.AsyncFunctionDef(**dict(ast.iter_fields(node)))
        declared = _declared(node)
        found.append(_Renamed().visit(declared))
    return found


def _declared(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Any:
    """A function with the first paragraph of its docstring, and without what it does."""
    text = (ast.get_docstring(node, clean=True) or "").split("\n\n")[0]
    node.body = [ast.Expr(ast.Constant(text or ...))]
    given = node.args
    given.defaults = [_default(each) for each in given.defaults]
    given.kw_defaults = [None if each is None else _default(each) for each in given.kw_defaults]
    for each in (*given.args, *given.kwonlyargs):
        if each.arg.startswith("_"):
            raise LookupError(f"{node.name} has the argument {each.arg}")
    return node


def _default(value: ast.expr) -> ast.expr:
    return value if isinstance(value, ast.Constant) else ast.Constant(...)


class _Renamed(ast.NodeTransformer):
    """Types of the client as those of the client for asyncio."""

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(_OURS.get(node.id, node.id), node.ctx)


def _class(name: str, text: str, members: list[ast.stmt]) -> ast.ClassDef:
    body = [ast.Expr(ast.Constant(text)), *members]
    (node,) = ast.parse(f"class {name}: ...").body
    assert isinstance(node, ast.ClassDef)
    node.body = body
    return node


def _note(imports: dict[str, set[str]], node: ast.AST, module: Any) -> None:
    """Note where the names of the types of a function are imported from."""
    if module is None:
        return
    known = {
        alias.asname or alias.name: each.module
        for each in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(each, ast.ImportFrom) and each.module
        for alias in each.names
    }
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ours = set(_OURS.values())
    types = [each.annotation for each in (*node.args.args, *node.args.kwonlyargs)]
    for each in (*types, node.returns, *node.decorator_list):
        for name in ast.walk(each) if each is not None else ():
            if isinstance(name, ast.Name):
                used = _OURS.get(name.id, name.id)
                if used == "AsyncIterator":
                    imports.setdefault("collections.abc", set()).add(used)
                elif name.id in known and used not in ours:
                    imports.setdefault(known[name.id], set()).add(name.id)
                elif name.id not in known and hasattr(module, name.id) and used not in ours:
                    imports.setdefault(module.__name__, set()).add(name.id)


def _imports(imports: dict[str, set[str]]) -> str:
    lines = [
        f"from {module} import {', '.join(sorted(names))}" for module, names in imports.items()
    ]
    return "\n".join(sorted(lines)) + "\n\n"


def _formatted(text: str) -> str:
    """As ruff has it."""
    for command in (["check", "--select", "I", "--fix-only", "--quiet"], ["format", "--quiet"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(FILE), "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        )
        text = done.stdout
    return text
