"""Pages of the public names: signature, parameters, docstring and an example with the output of its run.

`docs/conf.py` writes them into ``docs/api`` when the site is built. An example is the one in ``reference_examples.txt``, else the session
in the docstring, else for an op a call made from the samples of its row. ``python tools/reference_pages.py [NAME ...]`` prints sessions.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import doctest
import importlib
import inspect
import io
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import docs_tables  # noqa: E402

import netcl  # noqa: E402
from netcl import ops, selftest  # noqa: E402
from netcl.autograd.ops import signature  # noqa: E402
from netcl.core import platforms  # noqa: E402
from netcl.engine.registry import ALIASES, REGISTRY, Reduction  # noqa: E402

EXAMPLES = Path(__file__).with_name("reference_examples.txt")
NEEDS_OPENCL = re.compile(r'(default|device)\("(cl|gpu)')
FEW = 18  # numbers that an example shows; of larger results it shows the shape
#: How names that need no explanation are imported.
IMPORTS = {"np": "import numpy as np", "netcl": "import netcl", "F": "import netcl.nn.functional as F", "ag": "import netcl.autograd as ag"}
IMPORTS |= {"Tensor": "from netcl import Tensor"}
IMPORTS |= {package: f"from netcl import {package}" for package in netcl._PACKAGES}


@dataclass
class Symbol:
    """A public name, the page it is on, and every other public name of the same object."""

    name: str
    value: Any
    page: str
    others: list[str] = field(default_factory=list)

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def op(self) -> str:
        """The name of its row, or nothing."""
        plain = ALIASES.get(self.short, self.short)
        return plain if self.name == f"netcl.{self.short}" and self.short in {*ops.names()} else ""


@cache
def symbols() -> dict[str, Symbol]:
    """Every public name. Names of one object share a page; so do constants, and the models of one family."""
    found: dict[str, Symbol] = {}
    by_object: dict[tuple[int, str], Symbol] = {}
    for module, names in docs_tables.public_names(with_ops=True).items():
        for short in names:
            value = getattr(importlib.import_module(module), short)
            known = by_object.get((id(inspect.unwrap(value)) if callable(value) else 0, short))
            if known is None:
                known = Symbol(f"{module}.{short}", value, _page(module, short, value))
                if callable(value):
                    by_object[id(inspect.unwrap(value)), short] = known
            else:
                known.others.append(f"{module}.{short}")
            found[f"{module}.{short}"] = known
    return found


def _page(module: str, short: str, value: Any) -> str:
    if module == "netcl" and not callable(value):
        return "netcl.constants"
    if module == "netcl.vision.models" and inspect.isfunction(value) and short not in ("get_model", "get_transforms", "list_models"):
        return "netcl.vision.models." + docs_tables.model_family(short)
    full = f"{module}.{short}"
    return full if short.islower() or short.lower() not in dir(importlib.import_module(module)) else full + "-class"


# ---- examples


@cache
def written() -> dict[str, str]:
    """The examples of the file: by full name, with ``{name}`` replaced."""
    found, module, names = {}, "", []
    for line in EXAMPLES.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            names = [f"{module}.{name}" for name in line[3:].split()]
            found |= dict.fromkeys(names, "")
        elif line.startswith("# "):
            module, names = line[2:], []
        else:
            for name in names:
                found[name] += line.replace("{name}", name.rpartition(".")[2]) + "\n"
    return found


def example(symbol: Symbol) -> str:
    """The code of a symbol's example, with the imports it needs; empty if there is none."""
    names = [symbol.name, *symbol.others]
    code = next((written()[name] for name in names if name in written()), "")
    module: Any = importlib.import_module(symbol.name.rpartition(".")[0])
    if not code:
        code = re.sub(r"  # doctest:.*", "", "".join(part.source for part in _session(symbol.value))).replace(
            "from netcl.core.tensor import Tensor\n", ""
        )
        code = "" if symbol.op and "netcl.ops" in with_imports(code, inspect.getmodule(inspect.unwrap(symbol.value))) else code
        module = inspect.getmodule(inspect.unwrap(symbol.value)) or module
    if not code and symbol.page.startswith("netcl.vision.models.") and symbol.page != symbol.name:
        small = json.loads((ROOT / "tests/golden/vision_models.json").read_text(encoding="utf-8"))[symbol.short]["parameters"] < 3e6
        made = f"sum(p.numel() for p in models.{symbol.short}(num_classes=10).parameters())"
        code = "from netcl.vision import models\n" + (made if small else f'models.get_transforms("{symbol.short}")') + "\n"
    if not code and not callable(symbol.value):
        code = f"{symbol.name}\n"
    if not code and symbol.op:
        return op_example(symbol)
    return with_imports(code, module) if code else ""


def _session(value: Any) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(value) or "") if callable(value) else []


def with_imports(code: str, module: Any) -> str:
    """Code with an import for every name that it uses and does not define; such names are those of ``module``."""
    tree = ast.parse(code)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound |= {
        (a.asname or a.name).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for a in node.names
    }
    bound |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    bound |= {*vars(builtins)} - own
    free = {node.id for node in names if node.id not in bound}
    return "".join(sorted({_import(name, module) + "\n" for name in free}, key=lambda line: (line.startswith("from"), line))) + code


def _import(name: str, module: Any) -> str:
    if name == "Tensor" or (name in IMPORTS and inspect.ismodule(getattr(module, name, netcl))):
        return IMPORTS[name]
    value = getattr(module, name)
    if inspect.ismodule(value):
        parent, _, last = value.__name__.rpartition(".")
        plain = f"from {parent} import {last}" if parent else f"import {last}"
        return plain if last == name else f"import {value.__name__} as {name}"
    places = [known for known, symbol in symbols().items() if symbol.value is value and known.endswith(f".{name}")]
    place = places[0].rpartition(".")[0] if places else module.__name__
    return f"from {place} import {name}"


def op_example(symbol: Symbol) -> str:
    """A call of an op with inputs of its row's own samples: in full if they are few, else drawn."""
    row = REGISTRY[symbol.op]
    if isinstance(row, Reduction):
        cases = [selftest.OpCall("", (selftest._uniform_values(row, (2, 3), "float32", 0),), {"axis": 1, **row.params})]
    else:
        cases = [case for case in selftest.cases(row, "float32", (3,)) if all(_count([value]) for value in case.inputs)]
    if not cases:
        return ""
    case = min(cases, key=lambda one: (_count(one.inputs) < 3, _count(one.inputs)))
    drawn = _count(case.inputs) > FEW
    lines = ["import netcl"] + ["import numpy as np", "rng = np.random.default_rng(0)"] * drawn
    words, arguments = [*_inputs(row, case.inputs)], []
    for word, value in zip(words, case.inputs, strict=True):
        held = isinstance(value, np.ndarray | list) and _count([value])
        lines += [f"{word} = {_literal(value, drawn)}"] if held else []
        arguments.append(word if held else _literal(value, drawn))
    shown, defaults = signature(symbol.op)[1], signature(symbol.op)[0].parameters
    for key, value in case.kwargs.items():
        word = shown.get(key, key)
        if not (word in defaults and np.ndim(value) == 0 and defaults[word].default == value):
            arguments.append(f"{word}={_literal(value, drawn)}")
    call = f"{symbol.name}({', '.join(arguments)})"
    namespace: dict[str, Any] = {}
    exec("\n".join(lines), namespace)
    results = eval(call, namespace)
    if isinstance(results, tuple | list):
        return "\n".join([*lines, call if _count(results) <= FEW else f"[part.shape for part in {call}]"]) + "\n"
    return "\n".join([*lines, call if _count([results]) <= FEW else f"{call}.shape"]) + "\n"


def _inputs(row: Any, given: tuple[Any, ...]) -> Iterator[str]:
    """A word per input: the row's, numbered beyond them."""
    for k in range(len(given)):
        yield row.inputs[k] if k < len(row.inputs) else f"x{k}"


def _count(values: Any) -> int:
    return sum(_count(v) if isinstance(v, list | tuple) else int(np.prod(v.shape)) if hasattr(v, "shape") else 1 for v in values)


def _literal(value: Any, drawn: bool) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_literal(part, drawn) for part in value)}]"
    if isinstance(value, tuple):
        return f"({', '.join(_literal(part, drawn) for part in value)}{',' * (len(value) == 1)})"
    if not isinstance(value, np.ndarray):
        return repr(value.item() if isinstance(value, np.generic) else value)
    kind = "" if value.dtype.name in ("float32", "int64", "bool") else f', dtype="{value.dtype.name}"'
    if drawn and value.size > 6 and value.dtype.kind == "b":
        return f"netcl.tensor(rng.random({value.shape}) < 0.5)"
    if drawn and value.size > 6:
        draw = "uniform" if value.dtype.kind == "f" else "integers"
        low, high = np.floor(2 * float(value.min())) / 2, np.ceil(2 * float(value.max())) / 2
        low, high = (low, high) if draw == "uniform" else (int(low), int(high) + 1)
        return f"netcl.tensor(rng.{draw}({low}, {high}, {value.shape}){kind})"
    text = str(np.round(value.astype(np.float64), 2).tolist() if value.dtype.kind == "f" else value.tolist())
    text = re.sub(r"nan|inf", lambda found: f"netcl.{found[0]}", text)
    return f"netcl.tensor({text}{kind})"


def needs_opencl(code: str) -> bool:
    return bool(NEEDS_OPENCL.search(code))


def run(code: str, raises: bool = False) -> str:
    """The code as a session with what it prints, run in an empty namespace and an empty folder. ``raises``: its end may be an error."""
    out, namespace, lines = io.StringIO(), {"__name__": "__example__"}, []
    source = code.splitlines()
    tree = ast.parse(code)
    with _workplace(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        for node in tree.body:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            text = source[first - 1 : node.end_lineno]
            lines += [f"{'... ' if k else '>>> '}{line}".rstrip() for k, line in enumerate(text)]
            lines += ["..."] * (len(text) > 1 and hasattr(node, "body"))
            module = ast.Interactive([node]) if isinstance(node, ast.Expr) else ast.Module([node], [])
            try:
                exec(compile(module, "<example>", "single" if isinstance(node, ast.Expr) else "exec"), namespace)
            except ImportError:
                raise
            except Exception as error:
                if not raises:
                    raise RuntimeError(f"the example fails: {type(error).__name__}: {error}\n{code}") from error
                lines += ["Traceback (most recent call last):", "    ...", f"{type(error).__name__}: {error}"]
            lines += out.getvalue().rstrip("\n").splitlines()
            out.seek(0)
            out.truncate()
    return "\n".join(lines)


@contextlib.contextmanager
def _workplace() -> Iterator[None]:
    """An empty folder, and the state that examples may change: seed, display of values, warnings."""
    before, hook = os.getcwd(), sys.displayhook
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, warnings.catch_warnings(), np.printoptions():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        sys.displayhook = lambda value: None if value is None else print(repr(value))
        try:
            netcl.manual_seed(0)
            yield
        finally:
            sys.displayhook = hook
            os.chdir(before)


def session(symbol: Symbol) -> str:
    """A symbol's example with its output."""
    code = example(symbol)
    return run(code, raises=any(part.exc_msg for part in _session(symbol.value)))


# ---- pages


def prose(doc: str) -> str:
    """A docstring as Markdown, without its sessions; words that would be markup are escaped."""
    blocks = []
    for block in re.split(r"\n\s*\n", doc):
        if block.lstrip().startswith(">>> "):
            continue
        if block.startswith("    "):
            blocks.append("```text\n" + inspect.cleandoc(block) + "\n```")
            continue
        block = re.split(r"^\s*>>> ", block, maxsplit=1, flags=re.M)[0].rstrip()
        block = re.sub(r"::$", ":", block)
        parts = re.split(r"(`[^`]+`|\*\*[\w, ]+\*\*)", docs_tables._markdown(block))
        blocks.append("".join(part if k % 2 else re.sub(r"([*_<\[\]$#|{}])", r"\\\1", part) for k, part in enumerate(parts)))
    return "\n\n".join(blocks)


def _parameters(value: Any) -> str:
    """A table of parameters: name, type and default."""
    try:
        given = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return ""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    rows = []
    for p in given:
        kind = "" if p.annotation is p.empty else p.annotation if isinstance(p.annotation, str) else inspect.formatannotation(p.annotation)
        default = "" if p.default is p.empty else docs_tables._code(repr(docs_tables._parameter(p).default).replace("Ellipsis", "..."))
        rows.append((f"`{stars.get(p.kind, '')}{p.name}`", f"`{kind.replace('typing.', '')}`" if kind else "", default))
    kinds = any(row[1] for row in rows)
    head, rows = (("parameter", "type", "default"), rows) if kinds else (("parameter", "default"), [(a, c) for a, _, c in rows])
    return docs_tables._table(head, rows) if rows else ""


def _members(value: Any) -> str:
    """A table of a class's own public methods and properties."""
    rows = []
    for name, member in vars(value).items():
        text = docs_tables._first_paragraph(member) if not isinstance(member, str | int | float | tuple | type(None)) else ""
        if name[0] != "_" and isinstance(member, property | classmethod | staticmethod) | inspect.isfunction(member) and text:
            shown = name + (docs_tables._parameters(getattr(value, name)) if not isinstance(member, property) else "")
            rows.append((docs_tables._code(shown.replace("(self, ", "(").replace("(self)", "()")), prose(text)))
    return docs_tables._table(("member", "what it is"), rows) if rows else ""


def _op_facts(symbol: Symbol) -> str:
    row = REGISTRY[symbol.op]
    second = [name for name, of in ALIASES.items() if of == symbol.op] if symbol.short == symbol.op else [symbol.op]
    facts = [f"gradient: {'yes' if row.differentiable else 'no'}", f"inside `autocast`: `{row.amp}`"]
    facts += [f"also named {', '.join(f'`{name}`' for name in second)}"] * bool(second)
    return "An op of the [op table](../ops.md); " + "; ".join(facts) + "."


def section(symbol: Symbol, opencl: bool) -> str:
    """The body of a symbol's page."""
    value, parts = symbol.value, []
    if callable(value):
        parts.append(f"```python\n{symbol.name}{docs_tables._parameters(value)}\n```")
        parts += [prose(inspect.getdoc(value) or ""), _op_facts(symbol) if symbol.op else "", _parameters(value)]
    same = [name for name in symbol.others if name != symbol.name]
    parts += [f"The same object: {', '.join(f'`{name}`' for name in same)}."] if same else []
    parts.append(_shown_example(symbol, opencl))
    parts.append(_members(value) if inspect.isclass(value) else "")
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _shown_example(symbol: Symbol, opencl: bool) -> str:
    """The example with its output; without one where the machine that builds the site lacks what it needs, which the page says."""
    code = example(symbol)
    lack = "an OpenCL device" if needs_opencl(code) and not opencl else ""
    try:
        text = "" if lack else session(symbol)
    except ImportError as error:
        lack = f"`{error.name}`" if error.name else "a package that is not installed"
    return f"It needs {lack}:\n\n```python\n{code.rstrip()}\n```" if lack else f"```pycon\n{text}\n```"


def pages(packages: str = "") -> Iterator[tuple[str, str]]:
    """Every page, or those of some packages: its name and its text."""
    opencl, grouped = platforms.available() and bool(netcl.core.manager.default("cl")), {}
    for symbol in unique():
        if not packages or symbol.name.rpartition(".")[0] in packages.split(","):
            grouped.setdefault(symbol.page, []).append(symbol)
    for page, members in grouped.items():
        package = members[0].name.rpartition(".")[0]
        title = members[0].name if len(members) == 1 else page
        text = f"---\norphan: true\n---\n\n# {title}\n\n[{package}](../reference.md#{package.replace('.', '')})\n\n"
        if len(members) == 1:
            text += section(members[0], opencl)
        else:
            text += "\n".join(f"## {member.short}\n\n{section(member, opencl)}" for member in members)
        yield page, text


def unique() -> list[Symbol]:
    """Every symbol once."""
    return list({id(symbol): symbol for symbol in symbols().values()}.values())


def write(folder: Path, packages: str = "") -> int:
    """Write the pages that changed, remove those that are gone; returns how many there are."""
    folder.mkdir(exist_ok=True)
    made = {f"{page}.md": text for page, text in pages(packages)}
    for path in folder.glob("*.md"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    return len(made)


def linked(text: str, folder: Path) -> str:
    """The tables of the reference or of the ops, with a link from every name to its page in a folder."""
    module = ""

    def link(line: str) -> str:
        nonlocal module
        if line.startswith("## "):
            module = line[3:] if line.startswith("## netcl") else ""
        found = re.match(r"\| `(\w+)([^`]*)`(.*)", line)
        symbol = symbols().get(f"{module or 'netcl'}.{found[1]}") if found else None
        if found is None or symbol is None or not (folder / f"{symbol.page}.md").exists():
            return line
        return f"| [`{found[1]}`](api/{symbol.page}.md){found[3]}"

    return "\n".join(map(link, text.split("\n")))


def main() -> int:
    chosen = sys.argv[1:]
    for symbol in unique():
        if not chosen or symbol.name in chosen:
            sys.stdout.write(f"--- {symbol.name}\n{session(symbol)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
