"""Writes the tables of the docs that the code already knows, between ``<!-- table: name -->`` and ``<!-- end -->``.

``python tools/docs_tables.py`` rewrites them; ``--check`` changes nothing and fails if one is out of date.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from netcl.core import dtype, env, errors  # noqa: E402

TABLE = re.compile(r"(?<=<!-- table: )(?P<name>\w+)(?P<open> -->\n).*?(?=<!-- end -->)", re.S)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`" if text else "(empty)"


def environment() -> str:
    rows = ((_code(v.name), _code(v.default), v.legal, v.doc) for v in env.VARIABLES.values())
    return _table(("variable", "default", "legal values", "effect"), rows)


def error_classes() -> str:
    found = [c for c in vars(errors).values() if inspect.isclass(c) and c.__module__ == errors.__name__]
    return _table(("error", "is also a", "raised for"), ((_code(c.__name__), _code(c.__base__.__name__), c.__doc__ or "") for c in found))


def dtypes() -> str:
    aliases = {name: [a for a, target in dtype.DTYPE_ALIASES.items() if target == name] for name in dtype.DTYPES}
    rows = (
        (_code(d.name), ", ".join(map(_code, aliases[d.name])), str(d.itemsize), _code(d.c_storage), _code(d.c_compute), _code(d.host.name))
        for d in dtype.DTYPES.values()
    )
    return _table(("dtype", "aliases", "bytes", "stored as", "computed in", "`to_host()` gives"), rows)


def op_table() -> str:
    """One line per op; the dtypes are those the row's own samples pass with on the NumPy backend, not what someone wrote down."""
    from netcl import selftest
    from netcl.core.device import manager
    from netcl.engine.registry import ALIASES, REGISTRY, Pointwise, Reduction

    numpy = manager.default("cpu")
    assert numpy is not None
    taken: dict[str, list[str]] = {}
    for result in selftest.results(numpy):
        if result.check in selftest.TESTED_FLOATS and result.state == "ok":
            taken.setdefault(result.op, []).append(result.check)
    second = {name: [a for a, of in ALIASES.items() if of == name] for name in REGISTRY}
    rows = []
    for name, row in sorted(REGISTRY.items()):
        floats = "all" if len(taken.get(name, ())) == len(selftest.TESTED_FLOATS) else ", ".join(taken.get(name, ())) or "integers"
        fuses = "yes" if isinstance(row, Pointwise | Reduction) else ""
        doc = _markdown((row.doc.splitlines() or [""])[0])
        names = ", ".join(map(_code, [name, *second[name]]))
        rows.append((names, floats, "NumPy, OpenCL", "yes" if row.differentiable else "", fuses, row.amp, doc))
    return _table(("op", "float dtypes", "devices", "gradient", "fuses (JIT)", "autocast", "what it does"), rows)


def amp_policy() -> str:
    """Every op under what autocast does with it."""
    from netcl.engine.registry import REGISTRY

    meaning = {"half": "inputs become float16 or bfloat16", "float": "inputs become float32",
               "wide": "reads half inputs, returns float32", "keep": "takes what comes"}  # fmt: skip
    rows = ((_code(policy), text, ", ".join(_code(name) for name in sorted(REGISTRY) if REGISTRY[name].amp == policy))
            for policy, text in meaning.items())  # fmt: skip
    return _table(("policy", "inside `autocast`", "ops"), rows)


def onnx_operators() -> str:
    """The ONNX operators of the two-way table with their ops, those that functions import, and the ops that are exported as others."""
    from netcl.io.onnx import decompositions, exports, importer, imports, table  # noqa: F401 (importer adds all functions)

    def with_ops(kinds: Iterable[str]) -> str:
        return ", ".join(f"{_code(kind)} ({', '.join(_code(entry.op) for entry in entries[kind])})" for kind in sorted(kinds))

    entries = table.entries_by_operator()
    newer = {kind for kind, found in entries.items() if found[0].op in table.NEWER}
    rows = (
        ("import and export, by one table", with_ops(entries.keys() - newer)),
        ("import, by functions", ", ".join(map(_code, sorted(imports.operators() - entries.keys()))) + ", " + with_ops(newer)),
        (
            "export, by functions or as other ops",
            ", ".join(map(_code, sorted({*exports.EXPORTS, *decompositions.DECOMPOSITIONS} - {*table.STRUCTURED}))),
        ),
    )
    return _table(("", "ONNX operators (and their ops), or ops"), rows)


def onnx_node_cases() -> str:
    """How many node cases of the onnx package pass, and the others with their reasons, from the test that runs them."""
    source = ast.parse((ROOT / "tests/io/test_onnx_nodes.py").read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for node in source.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("FAILURES", "(TOTAL, RIGHT)"):
            found[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
    total, right = found["(TOTAL, RIGHT)"]
    names = {reason: sorted(cases.split()) for reason, cases in found["FAILURES"].items()}
    assert right + sum(map(len, names.values())) == total
    rows = [("right", f"{right:,}", f"of {total:,}")]
    rows += [(reason, str(len(cases)), ", ".join(_code(name.removeprefix("test_")) for name in cases)) for reason, cases in names.items()]
    return _table(("outcome", "number", "cases"), rows)


#: Functions and methods of torch's that are here under another name or in another place.
RENAMED = {
    "grid_sampler": "grid_sample", "grid_sampler_2d": "grid_sample", "lstm": "nn.LSTM", "gru": "nn.GRU", "rnn_tanh": "nn.RNN",
    "max_pool1d_with_indices": "max_pool1d", "constant_pad_nd": "pad",
    "from_dlpack": "tensor", "to_dlpack": "Tensor.__dlpack__", "set_printoptions": "numpy.set_printoptions", "is_anomaly_enabled":
    "autograd.detect_anomaly", "index": "Tensor.__getitem__", "storage": "Tensor.buffer", "data_ptr": "Tensor.buffer",
}  # fmt: skip


#: Why names are not here, and will not be.
LEFT_OUT = {
    "there are no sparse tensors": "SparseAdam",
    "needs torcharrow": "DFIterDataPipe",
    "inner machinery of torch": "_DatasetKind argument_validation runtime_validation runtime_validation_disabled Optional "
    "assert_int_or_pair boolean_dispatch handle_torch_function has_torch_function has_torch_function_unary has_torch_function_variadic",
    "products of 8-bit floats, which OpenCL has not": "grouped_mm scaled_grouped_mm scaled_mm",
    "an old name of Module": "Container",
    "an old form of LocalResponseNorm": "CrossMapLRN2d",
    "in netcl.distributed": "DataParallel SyncBatchNorm",
    "bases that nobody calls": "RNNBase RNNCellBase",
    "parameters of lazy layers do not exist before the first input": "UninitializedBuffer UninitializedParameter",
    "in torch 2.13 for the first time; functional.linear_cross_entropy is here": "LinearCrossEntropyLoss LinearCrossEntropyOptions",
    "pools of random windows, which few models have": "FractionalMaxPool2d FractionalMaxPool3d fractional_max_pool2d "
    "fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices",
}


LEFT_OUT_NAMES = {name for names in LEFT_OUT.values() for name in names.split()}


def torch_names(counts: bool = False) -> Any:
    """torch's public names as they are here: the same, under another name, missing. ``counts`` gives the numbers alone."""
    import netcl

    there = json.loads((ROOT / "tests/golden/torch_names.json").read_text(encoding="utf-8"))
    rows, numbers, lists = [], {}, ""
    for kind, names in there.items():
        owner = {"functions": netcl, "optimizers": netcl.optim, "schedules": netcl.optim.lr_scheduler, "layers": netcl.nn,
                 "functionals": netcl.nn.functional, "utils.data": netcl.utils.data}.get(kind, netcl.Tensor)  # fmt: skip
        same = [name for name in names if hasattr(owner, name)]
        renamed = {name: _renamed(owner, name) for name in names if name not in same}
        missing = [name for name, here in renamed.items() if not here]
        other = [f"{_code(name)}: {_code(here)}" for name, here in renamed.items() if here]
        numbers[kind] = len(same)
        rows.append((kind, *(str(len(group)) for group in (names, same, other, missing))))
        for title, text in (("under another name", ", ".join(other)), ("missing", _with_reasons(missing))):
            lists += f"\n\n<details><summary>{kind.capitalize()} {title}</summary>\n\n{text}\n\n</details>" if text else ""
    return numbers if counts else _table(("", "torch 2.13", "same name", "other name", "missing"), rows).rstrip("\n") + lists + "\n"


def _with_reasons(missing: list[str]) -> str:
    """Names, those without a reason to be left out first."""
    reason = {name: why for why, names in LEFT_OUT.items() for name in names.split()}
    groups = {why: [name for name in missing if reason.get(name, "") == why] for why in ("", *LEFT_OUT)}
    return "; ".join(", ".join(map(_code, names)) + (f" ({why})" if why else "") for why, names in groups.items() if names)


def _renamed(owner: object, name: str) -> str:
    """What stands here for a name that is missing: variants without views, or of one backend, are the ops themselves."""
    plain = re.sub(r"^(native|unsafe|mkldnn|cudnn|miopen)_|_copy$", "", name)
    return plain if plain != name and hasattr(owner, plain) else RENAMED.get(name, "")


REFERENCE = (
    "netcl", "netcl.core", "netcl.core.memory", "netcl.autograd", "netcl.nn", "netcl.nn.functional", "netcl.nn.init", "netcl.nn.utils",
    "netcl.nn.quantized", "netcl.optim", "netcl.amp", "netcl.data", "netcl.utils.data",
    "netcl.data.augment", "netcl.data.datasets", "netcl.data.filters", "netcl.data.tables", "netcl.vision.models", "netcl.vision.datasets",
    "netcl.vision.ops", "netcl.vision.functional", "netcl.vision.transforms", "netcl.vision.utils", "netcl.fft", "netcl.linalg",
    "netcl.testing", "netcl.distributions", "netcl.accelerator", "netcl.io", "netcl.models", "netcl.onnx", "netcl.serve", "netcl.trainer",
    "netcl.distributed",
    "netcl.profiling", "netcl.profiling.autotuner", "netcl.runtime.capture", "netcl.runtime.scheduler", "netcl.runtime.perf", "netcl.ops",
    "netcl.torch",
)  # fmt: skip

#: Functions without an underscore that modules share among themselves; not for users.
HELPERS = {
    "netcl.core.memory": "Shelf power_of_two shares_host live_buffers", "netcl.nn.init": "skipped layer_",
    "netcl.data.augment": "pixels_after bilinear inside", "netcl.data.datasets": "idx_arrays",
    "netcl.data.tables": "read_csv_rows read_numpy_arrays", "netcl.vision.datasets": "default_loader pil_loader",
    "netcl.vision.ops": "kept_boxes", "netcl.vision.functional": "pillow is_pil host_tensor pair", "netcl.vision.transforms": "rng",
    "netcl.profiling.autotuner": "problems_of search_automatically", "netcl.serve": "TextRequest run_server",
}  # fmt: skip


def public_names(with_ops: bool = False) -> dict[str, list[str]]:
    """The public names of every package of the reference; all ops are among the root's only ``with_ops``."""
    from netcl import ops

    there: dict[str, list[str]] = {}
    for name in REFERENCE:
        module = importlib.import_module(name)
        if name == "netcl":
            public = _root_names(module, with_ops)
        elif name == "netcl.nn.functional":
            torchs = json.loads((ROOT / "tests/golden/torch_names.json").read_text(encoding="utf-8"))["functionals"]
            public = sorted({*torchs, *module.COMPOSED, *module.RENAMED} - {*LEFT_OUT_NAMES})
        else:
            public = vars(module).get("__all__") or [n for n, value in vars(module).items() if _is_own(value, name) and n[0] != "_"]
        hidden = {*HELPERS.get(name, "").split(), *(ops.names() if name == "netcl.autograd" else ())}
        there[name] = [n for n in public if n not in hidden and not inspect.ismodule(getattr(module, n, None))]
    return there


def _root_names(module: Any, with_ops: bool) -> list[str]:
    """Names at the root: more resolve than a star imports."""
    from netcl import ops
    from netcl.autograd.creation import CREATION_FUNCTIONS

    names = {*module._SHORTCUTS, *module._RENAMED, *module._METHODS, *module._NUMBERS, *module._DTYPES, *CREATION_FUNCTIONS}
    return sorted(names | {*ops.names()} if with_ops else names - ({*ops.names()} - {*module._SHORTCUTS}))


def reference() -> str:
    """The public names of every package with their parameters and the first paragraph of their docstrings."""
    sections = []
    for name, public in public_names().items():
        found = {n: getattr(importlib.import_module(name), n) for n in public}
        rows = (
            (_code(n + _parameters(value)), _first_paragraph(value) if callable(value) else _constant(value)) for n, value in found.items()
        )
        sections.append(f"## {name}\n\n{_table(('name', 'what it is'), rows)}")
    return "\n" + "\n".join(sections) + "\n"


def _constant(value: object) -> str:
    if isinstance(value, dtype.dtype):
        return f"A dtype: {_code(str(value))}."
    return f"The {_code(type(value).__name__)} of the process." if " at 0x" in repr(value) else f"A constant: {_code(repr(value))}."


def _is_own(value: object, module: str) -> bool:
    return getattr(value, "__module__", None) == module and (inspect.isclass(value) or inspect.isfunction(value))


def _first_paragraph(value: object) -> str:
    documented = value.func if isinstance(value, partial) else value
    return _markdown(" ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split()))


def _markdown(text: str) -> str:
    """Roles and double backquotes of a docstring as Markdown."""
    return re.sub(r":\w+:`~?([^`<]+?)`", lambda role: _code(role[1].rpartition(".")[2]), text).replace("``", "`")


def _parameters(value: object) -> str:
    """``(a, b=1, *rest)``: names, and defaults that are plain. Pythons differ in what errors and enumerations take."""
    if not callable(value) or (inspect.isclass(value) and issubclass(value, BaseException | Enum)):
        return ""
    try:
        given = [_parameter(p) for p in inspect.signature(value).parameters.values()]
    except (TypeError, ValueError):
        return "(...)"
    return str(inspect.Signature(given)).replace("=Ellipsis", "=...")


def _parameter(parameter: inspect.Parameter) -> inspect.Parameter:
    """Without its type, and with three dots for a default that takes a program to write."""
    plain = isinstance(parameter.default, str | int | float | tuple | None) or parameter.default is parameter.empty
    return parameter.replace(annotation=parameter.empty, default=parameter.default if plain else ...)


def kernel_algorithms() -> str:
    """The table of algorithms, in the order in which they are asked."""
    from netcl import ops  # noqa: F401, fills the table
    from netcl.engine.algorithms import ALGORITHMS

    def measured(wins: str) -> str:
        file, _, case = wins.partition(": ")
        return f"[{case}]({Path(file).name if file.endswith('.md') else f'../../benchmarks/results/{file}'})" if wins else ""

    found = [a for table in ALGORITHMS.values() for a in table]
    places = ("; ".join(filter(None, (a.device, a.needs))) for a in found)
    names = ((a.family, _code(a.name), ", ".join(map(_code, a.kernels.split()))) for a in found)
    rows = ((*name, place, a.doc, measured(a.wins)) for a, name, place in zip(found, names, places, strict=True))
    return _table(("op", "algorithm", "kernels", "device", "for", "measured in"), rows)


def faults() -> str:
    """The faults that tests make, from their ``@pytest.mark.fault`` marks and the records of ``pytest --fault-records``."""
    records = json.loads((ROOT / "benchmarks" / "results" / "faults.json").read_text(encoding="utf-8"))
    rows = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if "mark.fault(" in text else ():
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    fault, how, outcome = (ast.literal_eval(word) for word in mark.args)
                    test = f"{path.relative_to(ROOT / 'tests').as_posix()}::{node.name}"
                    record = records.get(test, {"tried": "-", "bad": "-"})
                    rows.append((fault, how, outcome, str(record["tried"]), str(record["bad"]), _code(test)))
    return _table(("fault", "how it is made", "outcome", "tried", "bad", "test"), rows)


def model_family(name: str) -> str:
    return re.sub(r"(v?\d+)?(_.*)?$", "", name.removeprefix("wide_")).removesuffix("v")


def vision_models() -> str:
    """The models of the zoo by family: names, and millions of parameters; a test compares these numbers with the models."""
    from netcl.vision import models

    known = json.loads((ROOT / "tests/golden/vision_models.json").read_text(encoding="utf-8"))
    rows: dict[str, list[str]] = {}
    for name in models.list_models():
        rows.setdefault(model_family(name), []).append(f"`{name}` {known[name]['parameters'] / 1e6:.1f}")
    return _table(("family", "names, and millions of parameters"), ((family, ", ".join(found)) for family, found in sorted(rows.items())))


def _portability() -> dict[str, dict[str, Any]]:
    """The results of tools/portability.py for the rows that exist, by device."""
    from netcl import ops  # noqa: F401, fills the table
    from netcl.engine.registry import REGISTRY

    files = sorted((ROOT / "benchmarks" / "results").glob("portability_*.json"))
    found = {made["device"]: made for made in (json.loads(file.read_text(encoding="utf-8")) for file in files)}
    return {name: {**made, "rows": {op: of for op, of in made["rows"].items() if op in REGISTRY}} for name, made in found.items()}


def _row_state(checks: dict[str, str] | None) -> str:
    """One word for a row: the worst of its checks, and which they are unless all are the same."""
    if checks is None:
        return "-"
    words = {name: state.partition(":")[0] for name, state in checks.items()}
    worst = next((word for word in ("failed", "refused") if word in words.values()), "passed")
    where = [name for name, word in words.items() if word == worst]
    return worst if len(where) == len(words) else f"{worst}: {', '.join(where)}"


def portability_devices() -> str:
    rows = []
    for name, made in _portability().items():
        states = [_row_state(checks).partition(":")[0] for checks in made["rows"].values()]
        counts = ", ".join(f"{states.count(word)} {word}" for word in ("passed", "refused", "failed") if word in states)
        banned = ", ".join(made["quarantined"]) or "none"
        rows.append((name, made["platform"], made["machine"], made["driver"], counts, banned, made["date"], made["commit"]))
    return _table(("device", "platform", "machine", "driver", "rows", "quarantined kernels", "date", "commit"), rows)


def portability_exceptions() -> str:
    rows = []
    for name, made in _portability().items():
        reasons: dict[tuple[str, str], list[str]] = {}
        for op, checks in made["rows"].items():
            for check, state in checks.items():
                if state != "passed":
                    reason = re.sub(r"0x[0-9a-f]+", "...", state)
                    reasons.setdefault((check, re.sub(r"^(\w+): \[\w+\]", r"\1:", reason)), []).append(op)
        for (check, state), ops in sorted(reasons.items()):
            rows.append((name, check, state, errors.some(ops, 6)))
    return _table(("device", "check", "what", "rows"), rows)


def portability() -> str:
    found = _portability()
    ops = sorted({op for made in found.values() for op in made["rows"]})
    return _table(("op", *found), ((_code(op), *(_row_state(made["rows"].get(op)) for made in found.values())) for op in ops))


# Sizes that the makers of some models publish: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
# num_key_value_heads, vocab_size, head_dim, tie_word_embeddings.
PUBLISHED_SIZES = {
    "SmolLM2 135M": (576, 1536, 30, 9, 3, 49152, 64, True), "Qwen2.5 0.5B": (896, 4864, 24, 14, 2, 151936, 64, True),
    "LLaMA 3.2 1B": (2048, 8192, 16, 32, 8, 128256, 64, True), "LLaMA 3.2 3B": (3072, 8192, 28, 24, 8, 128256, 128, True),
    "Phi-3 mini": (3072, 8192, 32, 32, 32, 32064, 96, False), "Mistral 7B": (4096, 14336, 32, 32, 8, 32768, 128, False),
    "Qwen2.5 7B": (3584, 18944, 28, 28, 4, 152064, 128, False), "LLaMA 3.1 8B": (4096, 14336, 32, 32, 8, 128256, 128, False),
}  # fmt: skip


def model_bytes(sizes: tuple[Any, ...], bits: int) -> tuple[float, float]:
    """Bytes of a decoder's matrices in float16 or packed (embeddings stay float16), and those of a cached position in float16."""
    from netcl.ops.quantized.formats import BLOCK_TYPES

    width, inner, layers, heads, groups, vocabulary, size, tied = sizes
    each = 2.0 if bits == 16 else BLOCK_TYPES[f"Q{bits}_0"].nbytes / BLOCK_TYPES[f"Q{bits}_0"].block
    inside = layers * width * (size * (2 * heads + 2 * groups) + 3 * inner) + (0 if tied else vocabulary * width)
    return inside * each + 2 * vocabulary * width, 4 * layers * groups * size


def model_memory() -> str:
    rows = []
    for name, sizes in PUBLISHED_SIZES.items():
        weights = [f"{model_bytes(sizes, bits)[0] / 1e9:.2f}" for bits in (16, 8, 4)]
        position = model_bytes(sizes, 16)[1]
        rows.append(
            (name, *weights, *(f"{n * position / 1e9:.2f}" for n in (4096, 32768)), f"{32768 * position * (1 + 4 / sizes[6]) / 2e9:.2f}")
        )
    return _table(("model", "float16", "`bits=8`", "`bits=4`", "context 4,096", "context 32,768", "the same in int8"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "environment": environment,
    "error_classes": error_classes,
    "dtypes": dtypes,
    "ops": op_table,
    "amp_policy": amp_policy,
    "onnx_operators": onnx_operators,
    "onnx_node_cases": onnx_node_cases,
    "reference": reference,
    "algorithms": kernel_algorithms,
    "faults": faults,
    "portability_devices": portability_devices,
    "portability_exceptions": portability_exceptions,
    "portability": portability,
    "torch_names": torch_names,
    "vision_models": vision_models,
    "model_memory": model_memory,
}


def render(text: str) -> str:
    """A page with its tables as the code has them now."""
    return TABLE.sub(lambda found: f"{found['name']}{found['open']}{TABLES[found['name']]()}", text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is out of date")
    check = parser.parse_args(arguments).check
    stale = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := render(text)) != text:
            stale.append(page.relative_to(ROOT).as_posix())
            if not check:
                page.write_text(new, encoding="utf-8")
    if stale:
        print(("out of date, run `make docs-tables`: " if check else "rewritten: ") + ", ".join(stale))
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
