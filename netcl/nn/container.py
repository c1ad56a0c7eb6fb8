"""Containers of modules or parameters, modules that combine others, and :class:`Identity`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import netcl.autograd as ag
from netcl.core import recording
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.engine.modes import deferral
from netcl.nn.activation import ReLU, Sigmoid, Tanh
from netcl.nn.linear import Linear
from netcl.nn.module import Module, may_join
from netcl.nn.parameter import Parameter, is_parameter


class _Container(Module):
    """Base class of containers. To rebuild a container, its constructor is called with the current entries."""

    _holds_arguments = True
    _kept = "module"  # the role of its entries

    def _changed_children(self) -> Iterator[tuple[str, Module | None]]:
        return iter(())

    def _names(self) -> list[str]:
        """Return the names of the entries. While a step is recorded, also report the container: a ``ModuleList`` is never called."""
        if recording.listening:
            self._report_to_recorder()
        return [name for name, role in self._roles.items() if role in (self._kept, "none", "module")]

    def _put(self, name: str, value: Any) -> None:
        self.add_module(name, value)

    def __len__(self) -> int:
        return len(self._names())

    def extra_repr(self) -> str:
        return ""


class _Ordered(_Container):
    """Base class of ordered containers, whose entries are named 0, 1, 2, ..., or as the caller named them."""

    def __iter__(self) -> Iterator[Any]:
        return iter([*map(self.__dict__.__getitem__, self._names())])

    def _name(self, index: int) -> str:
        names = self._names()
        if not -len(names) <= index < len(names):
            raise IndexError(message(type(self).__name__, "index must be in [-length, length)", index=index, length=len(names)))
        return names[index]

    def __getitem__(self, index: Any) -> Any:
        return self._of(list(self)[index]) if isinstance(index, slice) else self.__dict__[self._name(index)]

    def __setitem__(self, index: int, module: Module) -> None:
        self._put(self._name(index), module)

    def __delitem__(self, index: int | slice) -> None:
        kept = list(self)
        del kept[index]
        self._become(kept)

    def _of(self, modules: list[Module]) -> Any:
        """Return a new container of this class with ``modules``."""
        return type(self)(*modules)

    def _become(self, modules: list[Module]) -> None:
        """Replace the contents by ``modules``, named by index."""
        for name in self._names():
            delattr(self, name)
        self._changed_names.clear()
        for module in modules:
            self.append(module)
        self._changed_names.add("")

    def append(self, module: Module) -> Any:
        """Add an entry at the end; returns the container."""
        self._put(str(len(self)), module)
        return self

    def extend(self, modules: Iterable[Module]) -> Any:
        """Add modules at the end; returns the container."""
        for module in modules:
            self.append(module)
        return self

    __iadd__ = extend

    def __add__(self, modules: Iterable[Module]) -> Any:
        return self._of([*self, *modules])

    def insert(self, index: int, module: Module) -> Any:
        """Insert a module before ``index`` and rename all entries by index; returns the container."""
        kept = list(self)
        kept.insert(index, module)
        self._become(kept)
        return self

    def pop(self, index: int = -1) -> Module:
        """Remove a module and return it."""
        module = self[index]
        del self[index]
        return module


class Sequential(_Ordered):
    """Modules applied one after the other: ``y = f_n(... f_1(x))``.

    - **layers**: modules, or one mapping of names to modules. A leading queue or handle moves them to its device.

    Index, slice, iterate, ``append``, ``insert``, ``extend`` and ``pop`` as with a list. A ``Linear`` and a ``ReLU``, ``Tanh`` or
    ``Sigmoid`` after it run as one op, unless one of them has hooks; at most the last bit of the result differs.

    >>> from netcl import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> model([[1.0, 2.0, 3.0, 4.0]]).shape
    (1, 2)
    >>> model[1]
    ReLU()
    """

    _takes_lists = False  # its first module decides

    def __init__(self, *layers: Any):
        super().__init__()
        first = layers[0] if len(layers) == 1 else None
        if isinstance(first, Mapping):
            for name, layer in first.items():
                self.add_module(name, layer)
        elif isinstance(first, list | tuple):
            self.extend(first)
        else:
            self.extend(layers)

    def _constructor_arguments(self) -> tuple[list[Any], dict[str, Any]]:
        numbered = list(self._roles) == [str(i) for i in range(len(self))]
        return (list(self) if numbered else [dict(self.named_children())]), {}

    def forward(self, x: Any) -> Any:
        layers, joined = [*iter(self), None], False  # without iter(), it would ask for the length first
        for layer, after in pairwise(layers):
            if joined:
                joined = False
                continue
            activation = ""
            if type(layer) is Linear and type(x) is Tensor and after is not None:
                activation = _JOINED.get((type(after), type(after).forward, Linear.forward), "")
            # in ag.jit_compile they stay two ops, which fuse with the ops around them
            joined = activation != "" and deferral.mode is None and may_join(layer, after)
            x = ag.affine_activated(x, layer.weight, layer.bias, activation=activation) if joined else layer(x)
        return x


# Activations that a Linear runs in its own kernel, and whose gradient reads the result alone; by class and ``forward``.
_JOINED = {(kind, kind.forward, Linear.forward): name for kind, name in ((ReLU, "relu"), (Tanh, "tanh"), (Sigmoid, "sigmoid"))}


class ModuleList(_Ordered):
    """A list of modules that is registered with the module holding it.

    >>> from netcl import nn
    >>> layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    >>> len(layers), len(layers.parameters())
    (3, 6)
    """

    def __init__(self, modules: Iterable[Module] = ()):
        super().__init__()
        self.extend(modules)

    def _of(self, modules: list[Module]) -> Any:
        return type(self)(modules)

    def _constructor_arguments(self) -> tuple[list[Any], dict[str, Any]]:
        return [list(self)], {}


class _Parameters(_Container):
    """Base class of parameter containers; modules stay, other values are converted to parameters."""

    _kept = "parameter"

    def _put(self, name: str, value: Any) -> None:
        if isinstance(value, Module):
            return self.add_module(name, value)
        self.register_parameter(name, value if is_parameter(value) else Parameter(value))

    def extra_repr(self) -> str:
        return ", ".join(f"({name}): {self.__dict__[name].shape}" for name in self._names() if isinstance(self.__dict__[name], Tensor))


class ParameterList(_Parameters, ModuleList):
    """A list of parameters that is registered with the module holding it; the state dict names them by index.

    >>> from netcl import nn, ones
    >>> kept = nn.ParameterList([nn.Parameter(ones((2, 3))), ones(4)])
    >>> len(kept), kept[1].requires_grad, list(kept.state_dict())
    (2, True, ['0', '1'])
    """

    def __init__(self, values: Iterable[Any] = ()):
        super().__init__(values)


class _Mapping(_Container):
    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None):
        super().__init__()
        self.update(values or ())

    def update(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Add values; a new value replaces one of the same name."""
        for name, value in dict(values).items():
            self[name] = value

    def __getitem__(self, name: str) -> Any:
        if name not in self._names():
            what = f"there is no {self._kept} of this name"
            raise KeyError(message(type(self).__name__, what, f"there are {self._names()}", name=repr(name)))
        return self.__dict__[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._put(name, value)

    def __delitem__(self, name: str) -> None:
        self.__getitem__(name)
        delattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def keys(self) -> list[str]:
        """Return the names."""
        return self._names()

    def values(self) -> list[Any]:
        """Return the values."""
        return [self.__dict__[name] for name in self._names()]

    def items(self) -> list[tuple[str, Any]]:
        """Return pairs of name and value."""
        return [(name, self.__dict__[name]) for name in self._names()]

    def pop(self, name: str) -> Any:
        """Remove a value and return it."""
        value = self[name]
        del self[name]
        return value

    def _constructor_arguments(self) -> tuple[list[Any], dict[str, Any]]:
        return [dict(self.items())], {}


class ModuleDict(_Mapping):
    """A mapping of names to modules that is registered with the module holding it.

    >>> from netcl import nn
    >>> heads = nn.ModuleDict({"cat": nn.Linear(2, 1), "dog": nn.Linear(2, 1)})
    >>> list(heads), heads["dog"]([[1.0, 1.0]]).shape
    (['cat', 'dog'], (1, 1))
    """


class ParameterDict(_Parameters, _Mapping):
    """A mapping of names to parameters that is registered with the module holding it.

    >>> from netcl import nn, ones
    >>> kept = nn.ParameterDict({"scale": ones(2)})
    >>> kept["shift"] = ones(3)
    >>> list(kept), kept["shift"].requires_grad
    (['scale', 'shift'], True)
    """


class Identity(Module):
    """Returns its input; constructor arguments are ignored, so that it can replace a layer with one input.

    >>> from netcl import nn
    >>> nn.Identity(54, unused=True)([1.0]).tolist()
    [1.0]
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()

    def forward(self, x: Any) -> Any:
        return x

    def _constructor_arguments(self) -> tuple[list[Any], dict[str, Any]]:
        return [], {}


class Concat(_Ordered):
    """Applies branches to the same input and concatenates their results: ``y = cat(f_1(x), ..., f_n(x))``.

    - **branches**: modules whose results differ at most in the size of the axis ``dim``.
    - **dim**: the axis along which the results are joined.

    >>> from netcl import nn
    >>> nn.Concat(nn.Identity(), nn.Linear(3, 5))([[1.0, 2.0, 3.0]]).shape
    (1, 8)
    """

    def __init__(self, *branches: Module, dim: int = 1):
        super().__init__()
        self.dim = dim
        self.extend(branches)

    def _of(self, modules: list[Module]) -> Any:
        return type(self)(*modules, dim=self.dim)

    def _constructor_arguments(self) -> tuple[list[Any], dict[str, Any]]:
        return list(self), {"dim": self.dim}

    def forward(self, x: Any) -> Any:
        return ag.cat([branch(x) for branch in self], axis=self.dim)


class Residual(Module):
    """A branch added to its input: ``y = activation(shortcut(x) + body(x))``.

    - **body**: the branch.
    - **shortcut**: a module applied to the input; by default none.
    - **activation**: a module applied to the sum; by default none.

    >>> from netcl import nn
    >>> nn.Residual(nn.ReLU())([1.0, -1.0]).tolist()
    [2.0, -1.0]
    """

    def __init__(self, body: Module, shortcut: Module | None = None, activation: Module | None = None):
        super().__init__()
        self.body, self.shortcut, self.activation = body, shortcut, activation

    def forward(self, x: Any) -> Any:
        kept = x if self.shortcut is None else self.shortcut(x)
        out = ag.add(kept, self.body(x))
        return out if self.activation is None else self.activation(out)
