"""Only one module prints: everything shown to a person goes through `cli/output.py`, which makes it fit for a
terminal.
"""

import ast
from pathlib import Path

from tests.support.of_all import of_all

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "compress").rglob("*.py"))
PRINTER = "compress/cli/output.py"
MAY_NAME_STREAMS = {
    "compress/ranks/group.py": "flushes both streams before a process ends without the interpreter's own end",
}
"""Files that may name `sys.stdout` and `sys.stderr`, and what they do with them other than write."""
PRINTING_CALLS = {
    "print",
    "pprint",
    "Console",
    "echo",
    "secho",
    "print_exception",
    "print_exc",
    "print_stack",
}
LOG_CALLS = {"basicConfig", "StreamHandler"}
STREAMS = {"stdout", "stderr", "__stdout__", "__stderr__"}

each_source = of_all(SOURCES, lambda path: path.relative_to(ROOT).as_posix())


def printing(tree: ast.AST) -> list[str]:
    """Return what writes to a stream without passing through the module that makes text printable."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if (
                name in PRINTING_CALLS | LOG_CALLS
            ):
                found.append(f"line {node.lineno}: {name}")
            case ast.Attribute(value=ast.Name(id="os"), attr="write"):
                found.append(f"line {node.lineno}: os.write")
            case ast.ImportFrom(module="sys") if {each.name for each in node.names} & STREAMS:
                found.append(f"line {node.lineno}: a stream")
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "rich":
                found.append(f"line {node.lineno}: rich")
            case ast.Import() if any(each.name.partition(".")[0] == "rich" for each in node.names):
                found.append(f"line {node.lineno}: rich")
    return found


def streams(tree: ast.AST) -> list[str]:
    """Return where `sys.stdout` or `sys.stderr` is named, which is how a stream gets another name."""
    return [
        f"line {node.lineno}: sys.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
        and node.attr in STREAMS
    ]


@each_source
def test_nothing_prints_but_the_printer(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    if name == PRINTER:
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert printing(tree) == []
    assert name in MAY_NAME_STREAMS or streams(tree) == []


def test_every_exception_is_needed() -> None:
    for name in MAY_NAME_STREAMS:
        assert streams(ast.parse((ROOT / name).read_text(encoding="utf-8"))) != []
    assert printing(ast.parse((ROOT / PRINTER).read_text(encoding="utf-8"))) != []


def test_the_checks_above_see_what_they_look_for() -> None:
    bad = (
        "import rich\nfrom rich.console import Console\nfrom sys import stderr\nprint(x)\n"
        "Console().print(x)\ntyper.echo(x)\ntraceback.print_exception(e)\nlogging.basicConfig()\n"
        "os.write(1, x)\n"
    )
    assert len(printing(ast.parse(bad))) == 10
    assert len(streams(ast.parse("sys.stdout.write(x)\nout = sys.stderr\n"))) == 2
    assert printing(ast.parse('def f():\n    """print(x)"""\n')) == []
