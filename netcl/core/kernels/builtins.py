"""Declarations of OpenCL's built-in functions, for a driver that otherwise parses all of them for every program.

PoCL includes Clang's ``opencl-c.h`` (900 KB) in every program; parsing it takes most of the build time. A program that defines the
header's guard and declares only the functions that it calls compiles much faster. Small functions can also be defined: on ARM, PoCL does
not inline its own, and a loop that calls ``min`` is not vectorized.
"""

from __future__ import annotations

import re
from functools import lru_cache

GUARD = "-D_OPENCL_H_"  # of opencl-c.h; types and constants are in opencl-c-base.h, which PoCL 3 to 7 include separately
_TYPE_LANES = ("", "2", "3", "4", "8", "16")
_SIGNED, _UNSIGNED = ("char", "short", "int", "long"), ("uchar", "ushort", "uint", "ulong")
_FLOATS, _INTEGERS = ("float", "double", "half"), _SIGNED + _UNSIGNED
_COMPARISONS = {"float": "int", "double": "long", "half": "short"}
_LANES_OF = {"dot": ("", "2", "3", "4"), "shuffle": ("2", "4", "8", "16")}  # of functions that are not declared for all
_EXTENSIONS = {"double": "cl_khr_fp64", "half": "cl_khr_fp16"}
_SPACES = ("__global", "__local", "__private", "__constant")
_WORK_ITEM = "get_global_id|get_global_size|get_group_id|get_local_id|get_local_size|get_num_groups"
_UNARY = "exp(?:2|10|m1)?|log(?:2|10|1p)?|r?sqrt|cbrt|a?(?:sin|cos|tan)h?|sinpi|cospi|erfc?|lgamma|fabs|floor|ceil|round|rint|trunc|sign"

#: Names, the types for which they are declared, and the declaration. ``{t}`` is a type with its lanes (those in the name, else all),
#: ``{s}`` the type without, ``{m}`` the type of its comparisons, ``{u}`` the unsigned integer of its size, ``{a}`` an address space.
_FORMS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (_WORK_ITEM, ("",), "size_t CONST {f}(uint);"),
    ("barrier", ("",), "void CONVERGENT {f}(cl_mem_fence_flags);"),
    (_UNARY, _FLOATS, "{t} CONST {f}({t} x);"),
    ("native_(?:exp2?|log2?|r?sqrt|sin|cos)", ("float",), "{t} CONST {f}({t});"),
    ("atan2|copysign|fmod|hypot|powr?|remainder", _FLOATS, "{t} CONST {f}({t}, {t});"),
    ("fmax|fmin", _FLOATS, "{t} CONST {f}({t} x, {t} y); {t} CONST {f}({t} x, {s} y);"),
    ("min|max", _FLOATS + _INTEGERS, "{t} CONST {f}({t} x, {t} y); {t} CONST {f}({t} x, {s} y);"),
    ("clamp", _FLOATS + _INTEGERS, "{t} CONST {f}({t} x, {t} y, {t} z); {t} CONST {f}({t} x, {s} y, {s} z);"),
    ("fma|mad", _FLOATS, "{t} CONST {f}({t} x, {t} y, {t} z);"),
    ("dot", _FLOATS, "{s} CONST {f}({t}, {t});"),
    ("shuffle", _FLOATS + _INTEGERS, " ".join(f"{{s}}{n} CONST {{f}}({{t}}, {{u}}{n});" for n in (2, 4, 8, 16))),
    ("isnan|isinf|isfinite|signbit", _FLOATS, "{m} CONST {f}({t} x);"),
    ("any|all", _SIGNED, "int CONST {f}({t});"),
    ("mul_hi", _INTEGERS, "{t} CONST {f}({t}, {t});"),
    ("abs", _SIGNED, "u{t} CONST {f}({t}); u{t} CONST {f}(u{t});"),
    (r"convert_(?P<to>[a-z]+)(?P<n>\d*)(?:_sat)?(?:_rt[ezpn])?", _FLOATS + _INTEGERS, "{to}{n} CONST {f}({t});"),
    (r"vload(?P<n>\d+)", _FLOATS + _INTEGERS, "{t} PURE {f}(size_t i, const {a} {s}* p);"),
    (r"vstore(?P<n>\d+)", _FLOATS + _INTEGERS, "void OVERLOADED {f}({t} x, size_t i, {a} {s}* p);"),
    (r"vloada?_half(?P<n>\d*)", ("float",), "{t} PURE {f}(size_t, const {a} half*);"),
    (r"vstorea?_half(?P<n>\d*)(?:_rt[ezpn])?", ("float", "double"), "void OVERLOADED {f}({t}, size_t, {a} half*);"),
    ("atomic_cmpxchg", ("int", "uint"), "{s} OVERLOADED {f}(volatile {a} {s}*, {s}, {s});"),
)
_LOOSE = "typedef {t} loose __attribute__((aligned(sizeof({s})))); "
#: Definitions of small functions, for types that a program names; a scalar parameter of a vector's function is widened.
_BODIES = {
    "min": "return ({t})(y) < x ? ({t})(y) : x;", "max": "return x < ({t})(y) ? ({t})(y) : x;",
    "clamp": "return min(max(x, y), z);", "mad": "return x * y + z;", "isnan": "return x != x;",
    "fmax": "return (x < ({t})(y)) | (x != x) ? ({t})(y) : x;", "fmin": "return (({t})(y) < x) | (x != x) ? ({t})(y) : x;",
    "fabs": "return as_{t}(as_{u}{n}(x) & ({u}{n})(~({u})0 >> 1));",
    **{f"vload{n}": _LOOSE + f"return *(const {{a}} loose*)(p + {n} * i);" for n in (2, 4, 8, 16)},
    **{f"vstore{n}": _LOOSE + f"*({{a}} loose*)(p + {n} * i) = x;" for n in (2, 4, 8, 16)},
}  # fmt: skip
_INLINE = "static inline __attribute__((overloadable, always_inline))"
#: Beginnings that macros complete: ``convert_##type##8``.
_STEMS = {stem: [stem + n for n in _TYPE_LANES[1:]] for stem in ("vload", "vstore")}
_STEMS |= {f"convert_{scalar}": [f"convert_{scalar}{n}" for n in _TYPE_LANES] for scalar in ("uint", "ushort")}
_STEMS["convert_"] = [f"convert_{scalar}{n}" for scalar in ("float", "double", *_INTEGERS) for n in _TYPE_LANES]
_ATTRIBUTES = {"OVERLOADED": "overloadable", "CONST": "overloadable, const", "PURE": "overloadable, pure",
               "CONVERGENT": "overloadable, convergent"}  # fmt: skip
_IN_TABLE = re.compile(rf"(?:{re.sub(r'[?]P<[a-z]+>', '?:', '|'.join(pattern for pattern, _, _ in _FORMS))})")
_COMMENT = re.compile(r"//.*|/\*[\s\S]*?\*/")
_TYPE = re.compile(r"\b(u?(?:char|short|int|long)|float|double)(2|3|4|8|16)?\b")
_WORD = re.compile(r"\b([a-z]\w+)(\s*\()?")
#: Functions that are not in the table.
_OTHERS = re.compile(
    r"(?:\w+_fence|\w*(?:sub|work)_group_(?!size)\w+|ato(?:m|mic)_\w+|async_\w+|get_\w+|\w+_image\w+|(?:half|fast|native)_\w+|is[a-z]+|"
    r"a(?:cos|sin|tan|tan2)pi|tanpi|tgamma|lgamma_r|sincos|fdim|frexp|fract|ilogb|ldexp|logb|m(?:ax|in)mag|modf|nan|nextafter|pown|remquo|"
    r"rootn|select|bitselect|shuffle2|printf|prefetch|wait_group_events|vec_step|degrees|radians|mix|(?:smooth)?step|cross|dot_\w+|distance|"
    r"length|normalize|abs_diff|(?:add|sub|mad)_sat|r?hadd|mad_hi|mad24|mul24|clz|ctz|popcount|rotate|upsample|bit\w+|to_(?:global|local|private))"
)


def declarations(source: str, inline: bool = False) -> str | None:
    """Return declarations of the built-in functions that ``source`` uses, for a build with :data:`GUARD`; ``None`` if one is unknown.

    With ``inline``, small functions of the types that ``source`` names are defined.
    """
    names: set[str] = set()
    text = _COMMENT.sub("", source)
    for name, call in set(_WORD.findall(text)):
        if name in _STEMS or _IN_TABLE.fullmatch(name):
            names.update(_STEMS.get(name, (name,)))
        elif call and _OTHERS.fullmatch(name):
            return None
    if inline and "clamp" in names:
        names |= {"min", "max"}
    named = frozenset({"int", "ulong"}.union(*[(scalar, scalar + n) for scalar, n in _TYPE.findall(text)])) if inline else frozenset()
    ordered = [*sorted(names - {"clamp"}), *sorted(names & {"clamp"})]  # clamp calls min and max
    return "".join([_declared(name, named if name in _BODIES else frozenset()) for name in ordered])


@lru_cache(maxsize=4096)
def _declared(name: str, defined: frozenset[str]) -> str:
    """Return the declarations of a built-in function, one per argument type, vector width and address space.

    For the types ``defined``, they are definitions.
    """
    lines = []
    for pattern, types, form in _FORMS:
        if (match := re.fullmatch(pattern, name)) is None:
            continue
        parts = match.groupdict()
        heads = re.sub(" (?:CONST|PURE|OVERLOADED)", "", form).split(";")[:-1]
        bodies = [f"{_INLINE} {head} {{{{ {_BODIES[name]} }}}}" for head in heads] if defined else []
        for word, what in _ATTRIBUTES.items():
            form = re.sub(rf"\b{word}\b", f"__attribute__(({what}))", form)
        for scalar in types:
            lanes = (parts["n"],) if "n" in parts else _LANES_OF.get(name, _TYPE_LANES) if "{t}" in form else ("",)
            spaces = _SPACES[: 4 if "const {a}" in form else 3 - ("volatile" in form)] if "{a}" in form else ("",)
            same_size, needed = _COMPARISONS.get(scalar, scalar), 0
            for kind in (scalar, parts.get("to")):
                if kind in _EXTENSIONS:
                    lines.append(f"#ifdef {_EXTENSIONS[kind]}")
                    needed += 1
            for n in lanes:
                kinds = {"t": scalar + n, "s": scalar, "m": same_size + n if n else "int", "u": f"u{same_size.removeprefix('u')}", "n": n}
                forms = (bodies if n else bodies[:1]) if (scalar if "n" in parts else scalar + n) in defined else [form]
                for space in spaces:
                    for one in forms:
                        lines.append(one.format(f=name, a=space, **{**kinds, **parts}))
            lines += ["#endif"] * needed
    return "\n".join([*lines, ""])
