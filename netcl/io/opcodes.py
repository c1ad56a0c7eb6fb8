"""The stack language torch writes its state dicts in, read by an interpreter that can build containers and nothing else.

A file may *name* any function; here a name is looked up in a table the caller gives and refused if it is not in it. No import,
attribute lookup or call happens on behalf of a file. Opcodes that torch does not write are refused by name.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_MARK = object()
FREE_STEPS = 1_000_000  # of a program: bare containers take a byte in a file, and a microsecond and 64 bytes when they are read
TENSOR_STEPS = 1000  # more for each tensor of the file
#: Opcodes of the language that are understood only to name them.
_REFUSED = {
    b"I": "INT", b"L": "LONG", b"S": "STRING", b"V": "UNICODE", b"F": "FLOAT", b"P": "PERSID", b"i": "INST", b"o": "OBJ", b"d": "DICT",
    b"g": "GET", b"p": "PUT", b"0": "POP", b"1": "POP_MARK", b"2": "DUP", b"l": "LIST", b"T": "BINSTRING", b"\x82": "EXT1", b"\x83": "EXT2",
    b"\x84": "EXT4", b"\x91": "FROZENSET", b"\x92": "NEWOBJ_EX", b"\x96": "BYTEARRAY8", b"\x97": "NEXT_BUFFER", b"\x98": "READONLY_BUFFER",
    b"\x81": "NEWOBJ", b"\x8b": "LONG4", b"\x8f": "EMPTY_SET", b"\x90": "ADDITEMS",
}  # fmt: skip


class Refused(ValueError):
    """A program that does something other than building containers of allowed things."""


class Allowed(str):
    """A name a program may use: ``make(*args)`` when it is called; ``None`` if it is only ever a value."""

    make: Callable[..., Any] | None
    value: str

    def __new__(cls, name: str, make: Callable[..., Any] | None = None, value: str = "") -> Allowed:
        self = super().__new__(cls, name)
        self.make, self.value = make, value
        return self


class Attributes(OrderedDict[Any, Any]):
    """An ordered dictionary whose attributes the program set; they are not kept."""


def run(
    data: bytes, names: Mapping[str, Allowed], persistent: Callable[[Any], Any], start: int = 0, most: int = FREE_STEPS
) -> tuple[Any, int]:
    """Run a program of at most so many steps; the value it leaves and the position after it. ``persistent`` resolves references to
    storages."""
    machine = _Machine(data, names, persistent, start)
    for _ in range(most):
        at, opcode = machine.at, machine.take(1)
        if opcode == b".":
            break
        step = _STEPS.get(opcode)
        if step is None:
            raise Refused(f"opcode {_REFUSED.get(opcode, opcode.hex())} at byte {at} is not one that torch writes")
        step(machine)
    else:
        raise Refused(f"the program has more than {most} steps, which no state dict of this size has; if you trust it, pass max_bytes=")
    if len(machine.stack) != 1 or machine.stack[0] is _MARK:
        raise Refused(f"the program ends with {len(machine.stack)} values")
    return machine.stack[0], machine.at


class _Machine:
    def __init__(self, data: bytes, names: Mapping[str, Allowed], persistent: Callable[[Any], Any], start: int):
        self.data, self.names, self.persistent, self.at = data, names, persistent, start
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise Refused("the program is cut off")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise Refused("the program is cut off")
        text = self.data[self.at : end].decode("utf-8")
        self.at = end + 1
        return text

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise Refused("the program takes more than it has put down")
        return self.stack.pop()

    def marked(self) -> list[Any]:
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is _MARK:
                items = self.stack[i + 1 :]
                del self.stack[i:]
                return items
        raise Refused("the program has no mark where it needs one")

    def top(self, *kinds: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kinds):
            raise Refused(f"the program adds to something that is not a {kinds[0].__name__}")
        return self.stack[-1]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise Refused(f"the program recalls number {index}, which it never stored")
        self.push(self.memo[index])

    def put(self, index: int) -> None:
        if not self.stack or self.stack[-1] is _MARK:
            raise Refused("the program stores what it does not have")
        self.memo[index] = self.stack[-1]

    def name(self, module: Any, attribute: Any) -> None:
        known = self.names.get(f"{module}.{attribute}") if isinstance(module, str) and isinstance(attribute, str) else None
        if known is None and not isinstance(module, str):
            raise Refused("the file asks for something that is not a name")
        if known is None:
            raise Refused(f"the file asks for {module}.{attribute}, which is not on the list of what a state dict may hold")
        self.push(known)

    def call(self) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, Allowed) or function.make is None or not isinstance(arguments, tuple):
            called = function if isinstance(function, Allowed) else f"a {type(function).__name__}"
            raise Refused(f"the file calls {called}, which is not a function it may call")
        self.push(function.make(*arguments))

    def build(self) -> None:
        """Attributes of an object: torch sets them on the ordered dictionaries of ``state_dict()``; they hold version numbers."""
        self.pop()
        self.top(Attributes)

    def set_items(self, items: Sequence[Any]) -> None:
        if len(items) % 2:
            raise Refused("a key without a value")
        self.top(dict).update(checked(zip(items[::2], items[1::2], strict=True)))

    def long(self) -> int:
        return int.from_bytes(self.take(self.number("<B")), "little", signed=True)

    def utf8(self, form: str) -> str:
        return self.take(self.number(form)).decode("utf-8", "surrogatepass")

    def proto(self) -> None:
        version = self.number("<B")
        if version > 5:
            raise Refused(f"protocol {version} is not known")


def checked(pairs: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Items of a dictionary. Keys are plain and short: a tuple of tuples of ... that share their parts takes for ever to hash."""
    found = []
    for key, value in pairs:
        parts = key if type(key) is tuple else (key,)
        if len(parts) > 64 or not all(part is None or isinstance(part, str | int | float | bytes) for part in parts):
            raise Refused(f"a key is a {type(key).__name__}")
        found.append((key, value))
    return found


def _tuple(m: _Machine, count: int) -> None:
    items = tuple(reversed([m.pop() for _ in range(count)]))
    m.push(items)


_STEPS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _Machine.proto,
    b"\x95": lambda m: m.number("<Q"),  # a frame's length, which says nothing the opcodes do not
    b"(": lambda m: m.push(_MARK),
    b"}": lambda m: m.push({}),
    b"]": lambda m: m.push([]),
    b")": lambda m: m.push(()),
    b"t": lambda m: m.push(tuple(m.marked())),
    b"\x85": lambda m: _tuple(m, 1),
    b"\x86": lambda m: _tuple(m, 2),
    b"\x87": lambda m: _tuple(m, 3),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.push(m.number("<B")),
    b"M": lambda m: m.push(m.number("<H")),
    b"J": lambda m: m.push(m.number("<i")),
    b"\x8a": lambda m: m.push(m.long()),
    b"G": lambda m: m.push(m.number(">d")),
    b"X": lambda m: m.push(m.utf8("<I")),
    b"\x8c": lambda m: m.push(m.utf8("<B")),
    b"\x8d": lambda m: m.push(m.utf8("<Q")),
    b"U": lambda m: m.push(m.take(m.number("<B")).decode("latin1")),
    b"C": lambda m: m.push(m.take(m.number("<B"))),
    b"B": lambda m: m.push(m.take(m.number("<I"))),
    b"q": lambda m: m.put(m.number("<B")),
    b"r": lambda m: m.put(m.number("<I")),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"h": lambda m: m.get(m.number("<B")),
    b"j": lambda m: m.get(m.number("<I")),
    b"a": lambda m: _append(m, [m.pop()]),
    b"e": lambda m: _append(m, m.marked()),
    b"s": lambda m: _set_item(m),
    b"u": lambda m: m.set_items(m.marked()),
    b"c": lambda m: m.name(m.line(), m.line()),
    b"\x93": lambda m: m.name(*reversed([m.pop(), m.pop()])),
    b"R": _Machine.call,
    b"b": _Machine.build,
    b"Q": lambda m: m.push(m.persistent(m.pop())),
}


def _append(m: _Machine, items: list[Any]) -> None:
    m.top(list).extend(items)


def _set_item(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    m.set_items([key, value])


# ---- writing


class Writer:
    """Writes programs of protocol 2, as torch does."""

    def __init__(self) -> None:
        self.parts: list[bytes] = [b"\x80\x02"]

    def add(self, *parts: bytes) -> None:
        self.parts.extend(parts)

    def text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self.add(b"X", struct.pack("<I", len(data)), data)

    def integer(self, value: int) -> None:
        if 0 <= value < 256:
            self.add(b"K", struct.pack("<B", value))
        elif -(2**31) <= value < 2**31:
            self.add(b"J", struct.pack("<i", value))
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.add(b"\x8a", struct.pack("<B", len(data)), data)

    def name(self, module: str, attribute: str) -> None:
        self.add(b"c", f"{module}\n{attribute}\n".encode("ascii"))

    def integers(self, values: Sequence[int]) -> None:
        self.add(b"(")
        for value in values:
            self.integer(value)
        self.add(b"t")

    def plain(self, value: Any) -> bool:
        """Write a number, a text or nothing; whether it was one."""
        if value is None or isinstance(value, bool):
            self.add({None: b"N", True: b"\x88", False: b"\x89"}[value])
        elif isinstance(value, int):
            self.integer(value)
        elif isinstance(value, float):
            self.add(b"G", struct.pack(">d", value))
        elif isinstance(value, str):
            self.text(value)
        else:
            return False
        return True

    def finish(self) -> bytes:
        self.add(b".")
        return b"".join(self.parts)
