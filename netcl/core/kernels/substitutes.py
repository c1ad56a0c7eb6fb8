"""Replacements in OpenCL C for code that a driver miscompiles: conversions of half, and comparisons of converted integers.

Mesa 22.3's rusticl on llvmpipe aborts at a load of halves, or wrongly compares the halves instead of the loaded floats. For a 32-bit
``i``, it evaluates ``(long)i < constant`` as false and ``>`` as true. The replacements compute with the bits in 32-bit integers.
"""

from __future__ import annotations

import re
from functools import lru_cache

_OVERLOADED = "__attribute__((overloadable))"
_LONG_CAST = re.compile(r"\(long\)\s*(?=\()|\bconvert_long(?=\s*\()")
_HALF_CALL = re.compile(r"\bv(?:load|store)a?_half")


def substituted(source: str) -> str:
    """Replace loads and stores of half and scalar casts to long in ``source``."""
    if _HALF_CALL.search(source):
        source = f"{_half_functions()}{source}"
    if _LONG_CAST.search(source):
        source = f"{_LONGS}{_LONG_CAST.sub('netcl_long', source)}"
    return source


_LONGS = f"long {_OVERLOADED} netcl_long(int x) {{ return as_long((int2)(x, x >> 31)); }}\n" + "".join(
    f"long {_OVERLOADED} netcl_long({kind} x) {{ return {'netcl_long((int)x)' if narrow else '(long)x'}; }}\n"
    for narrow, kinds in ((True, "char uchar short ushort"), (False, "uint long ulong float")) for kind in kinds.split()
)  # fmt: skip


@lru_cache(maxsize=1)
def _half_functions() -> str:
    """Return OpenCL C for ``vload_half`` and ``vstore_half`` of 1, 2, 4, 8 and 16 lanes, with macros that replace the driver's."""
    lines = []
    for n in ("", "2", "4", "8", "16"):
        f, u = f"float{n}", f"uint{n}"
        lines.append(f"""
{f} {_OVERLOADED} netcl_of_half({u} bits) {{
  const {u} rest = (bits & 0x7fffu) << 13;
  const {u} finite = rest < 0x00800000u ? as_{u}(convert_{f}(rest) * 0x1p-37f) : rest + 0x38000000u;
  return as_{f}((rest >= 0x0f800000u ? rest | 0x7f800000u : finite) | ((bits & 0x8000u) << 16));
}}
ushort{n} {_OVERLOADED} netcl_to_half({f} x) {{
  const {u} sign = as_{u}(x) & 0x80000000u, bits = as_{u}(x) ^ sign;
  const {u} normal = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const {u} small = as_{u}(as_{f}(bits) + 0.5f) - 0x3f000000u;
  const {u} large = bits > 0x7f800000u ? ({u})(0x7e00u) : ({u})(0x7c00u);
  const {u} value = bits >= 0x47800000u ? large : bits < 0x38800000u ? small : normal;
  return convert_ushort{n}(value | (sign >> 16));
}}""")
        for space in ("__global", "__local", "__private"):
            p = f"({space} ushort*)p"
            loaded, stored = (f"vload{n}(i, {p})", f"vstore{n}(h, i, {p})") if n else (f"({p})[i]", f"({p})[i] = h")
            load = f"netcl_load_half{n}(size_t i, const {space} half* p) {{ return netcl_of_half(convert_{u}({loaded})); }}"
            store = f"netcl_store_half{n}({f} x, size_t i, {space} half* p) {{ const ushort{n} h = netcl_to_half(x); {stored}; }}"
            lines += [f"{f} {_OVERLOADED} {load}", f"void {_OVERLOADED} {store}"]
        lines += [f"#define vload{a}_half{n} netcl_load_half{n}" for a in ("", "a")]
        lines += [f"#define vstore{a}_half{n}{r} netcl_store_half{n}" for a in ("", "a") for r in ("", "_rte")]
    return "\n".join([*lines, ""])
