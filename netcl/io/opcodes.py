"""An interpreter for the pickle programs of torch's state dicts: it builds containers and calls only functions of a given table.

``pickletools.genops`` reads the opcodes and their arguments, and executes nothing.

A file may *name* any function, but a name that is not in the caller's table raises. Nothing is imported and no attribute is looked up
on behalf of a file. Opcodes that are not supported raise an error with their name.
"""

from __future__ import annotations

import io
import pickletools
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

_STACK_MARK = object()
FREE_STEPS = 1_000_000  # of a program: bare containers take a byte in a file, and a microsecond and 64 bytes when they are read
TENSOR_STEPS = 1000  # more for each tensor of the file


class Refused(ValueError):
    """Raised for a pickle that is malformed, too long, or contains more than containers of allowed values."""


class Allowed(str):
    """A name that a pickle may use. A call in the pickle returns ``make(*args)``; with ``make=None``, the name is only a value."""

    make: Callable[..., Any] | None
    value: str

    def __new__(cls, name: str, make: Callable[..., Any] | None = None, value: str = "") -> Allowed:
        self = super().__new__(cls, name)
        self.make, self.value = make, value
        return self


class Attributes(OrderedDict[Any, Any]):
    """An ordered dictionary that drops the attributes that a pickle sets on it."""

    def build(self, state: Any) -> None:
        """Receive the attributes that the pickle sets; a subclass may keep them."""


def run_program(
    data: bytes, names: Mapping[str, Allowed], persistent: Callable[[Any], Any], start: int = 0, most: int = FREE_STEPS
) -> tuple[Any, int]:
    """Execute a pickle of at most ``most`` opcodes; returns its value and end offset. ``persistent`` resolves references to storages."""
    machine = _Machine(names, persistent)
    stream = io.BytesIO(data)
    stream.seek(start)
    for count, (name, argument, at) in enumerate(_opcodes(stream)):
        step = _STEPS.get(name)
        if step is None:
            raise Refused(f"every opcode must be one that torch writes, got {name} at byte {at}")
        if count == most:
            raise Refused(f"the pickle must have at most {most} opcodes for a file of this size; if you trust it, pass max_bytes=")
        step(machine, argument)
    if len(machine.stack) != 1 or machine.stack[0] is _STACK_MARK:
        raise Refused(f"the pickle must end with one value and no mark, got {len(machine.stack)} items")
    return machine.stack[0], stream.tell()


def _opcodes(stream: io.BytesIO) -> Iterator[tuple[str, Any, int | None]]:
    try:
        for opcode, argument, at in pickletools.genops(stream):
            yield opcode.name, argument, at
    except (ValueError, OverflowError) as error:
        raise Refused(f"the pickle must be complete and valid: {error}") from None


class _Machine:
    def __init__(self, names: Mapping[str, Allowed], persistent: Callable[[Any], Any]):
        self.names, self.persistent = names, persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _STACK_MARK:
            raise Refused("the pickle must not pop more values than it has pushed")
        return self.stack.pop()

    def marked(self) -> list[Any]:
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is _STACK_MARK:
                items = self.stack[i + 1 :]
                del self.stack[i:]
                return items
        raise Refused("the pickle must push a mark before it pops to one")

    def top(self, *kinds: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kinds):
            raise Refused(f"the pickle must add items to a {kinds[0].__name__}")
        return self.stack[-1]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise Refused(f"the pickle must put memo entry {index} before it gets that entry")
        self.push(self.memo[index])

    def put(self, index: int) -> None:
        if not self.stack or self.stack[-1] is _STACK_MARK:
            raise Refused("the pickle must push a value before it puts one into the memo")
        self.memo[index] = self.stack[-1]

    def name(self, module: Any, attribute: Any) -> None:
        known = self.names.get(f"{module}.{attribute}") if isinstance(module, str) and isinstance(attribute, str) else None
        if known is None and not isinstance(module, str):
            raise Refused("the file must refer to classes and functions by name")
        if known is None:
            raise Refused(f"the file refers to {module}.{attribute}, which a state dict may not contain")
        self.push(known)

    def call(self) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, Allowed) or function.make is None or not isinstance(arguments, tuple):
            called = function if isinstance(function, Allowed) else f"a {type(function).__name__}"
            raise Refused(f"the file calls {called} with a {type(arguments).__name__}; it may call only known functions, with a tuple")
        self.push(function.make(*arguments))

    def build(self) -> None:
        """Set attributes of an object: torch sets version numbers on the ordered dictionaries of ``state_dict()``."""
        state = self.pop()
        self.top(Attributes).build(state)

    def extend(self, items: list[Any]) -> None:
        self.top(list).extend(items)

    def set_items(self, items: Sequence[Any]) -> None:
        if len(items) % 2:
            raise Refused("every key of a dictionary in the pickle must have a value")
        self.top(dict).update(checked_items(zip(items[::2], items[1::2], strict=True)))


def checked_items(pairs: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Check and return items of a dictionary. Keys must not be nested: nested tuples that share parts take exponential time to hash."""
    found = []
    for key, value in pairs:
        parts = key if type(key) is tuple else (key,)
        if len(parts) > 64 or not all(part is None or isinstance(part, str | int | float | bytes) for part in parts):
            raise Refused(f"a key must be a string, a number, bytes, None or a tuple of up to 64 of these, got a {type(key).__name__}")
        found.append((key, value))
    return found


def _protocol(m: _Machine, version: int) -> None:
    if version > 5:
        raise Refused(f"the pickle protocol must be at most 5, got {version}")


_VALUE_OPCODES = (
    "BININT1 BININT2 BININT LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 SHORT_BINSTRING BINSTRING SHORT_BINBYTES BINBYTES"
)
#: What an opcode does, given its argument.
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(_VALUE_OPCODES.split(), _Machine.push),
    "PROTO": _protocol,
    **dict.fromkeys(("FRAME", "STOP"), lambda m, _: None),  # the length of a frame says nothing that the opcodes do not
    "MARK": lambda m, _: m.push(_STACK_MARK),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "TUPLE": lambda m, _: m.push(tuple(m.marked())),
    **{f"TUPLE{count}": lambda m, _, count=count: m.push(tuple([m.pop() for _ in range(count)][::-1])) for count in (1, 2, 3)},  # type: ignore[misc]
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    "MEMOIZE": lambda m, _: m.put(len(m.memo)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    "APPEND": lambda m, _: m.extend([m.pop()]),
    "APPENDS": lambda m, _: m.extend(m.marked()),
    "SETITEM": lambda m, _: m.set_items([m.pop(), m.pop()][::-1]),
    "SETITEMS": lambda m, _: m.set_items(m.marked()),
    "GLOBAL": lambda m, names: m.name(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.name(*[m.pop(), m.pop()][::-1]),
    "REDUCE": lambda m, _: m.call(),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.push(m.persistent(m.pop())),
}


class Writer:
    """Writes pickles of protocol 2, as torch does."""

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
            if (size := value.bit_length() // 8 + 1) > 255:
                raise Refused(f"an integer must have at most 255 bytes, got {size}")
            data = value.to_bytes(size, "little", signed=True)
            self.add(b"\x8a", struct.pack("<B", len(data)), data)

    def name(self, module: str, attribute: str) -> None:
        self.add(b"c", f"{module}\n{attribute}\n".encode("ascii"))

    def integers(self, values: Sequence[int]) -> None:
        self.add(b"(")
        for value in values:
            self.integer(value)
        self.add(b"t")

    def plain(self, value: Any) -> bool:
        """Write a number, a string or None; returns False for any other value."""
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
