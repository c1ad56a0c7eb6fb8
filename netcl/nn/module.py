"""Module: parameters, buffers and other modules by name, and the operations on all of them."""

from __future__ import annotations

import copy
import inspect
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

import netcl.autograd as ag
from netcl.core import dtype as dtypes
from netcl.core import notebook, recording
from netcl.core.device import queue_of
from netcl.core.errors import DtypeError, message
from netcl.core.next_list import NextList
from netcl.core.tensor import RemovableHandle, Tensor
from netcl.nn import factory, hooks
from netcl.nn.parameter import Buffer, constructor, here, is_parameter, peel, stand_on
from netcl.nn.pickling import to_stored
from netcl.nn.state import Stateful
from netcl.nn.summary import Summary, summarize

M = TypeVar("M", bound="Module")
_HOST_VALUES = (np.ndarray, list, float)


_SETTINGS = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType, MethodType, type)


def _holds_numbers(value: object) -> bool:
    """Whether a value is a number, or a list or tuple of such values at any depth."""
    return all(map(_holds_numbers, value)) if isinstance(value, list | tuple) else isinstance(value, int | float | np.generic | np.ndarray)


def _is_setting(value: Any) -> bool:
    """Whether a value is a number, a string, ``None``, a function or a type, or a tuple of such values."""
    return all(map(_is_setting, value)) if type(value) is tuple else isinstance(value, _SETTINGS)


class _Constructed(ABCMeta):
    """Metaclass of modules. Every constructor also takes a place (device and dtype), and the module stores its constructor arguments.

    The place is a leading queue or handle, ``queue=``, ``device=`` or ``dtype=``.
    """

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any):
        super().__init__(name, bases, namespace, **options)
        if "__init__" in namespace and cls.__module__.startswith("netcl."):  # subclasses may pass device and dtype on
            cls.__init__ = constructor(namespace["__init__"])  # type: ignore[misc]
        own = inspect.signature(cls.__init__)  # type: ignore[misc]
        cls.__signature__ = own.replace(parameters=list(own.parameters.values())[1:])

    if not TYPE_CHECKING:  # which then take the constructor's own parameters

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            args, kwargs, place = peel(cls.__signature__, tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args), kwargs)
            with place:
                module = super().__call__(*args, **kwargs)
            bound = cls.__signature__.bind(*args, **kwargs)
            bound.apply_defaults()
            module._made_with(bound.arguments)
            return module if place.queue is None else module.to(place.queue)


class _Computed:
    """A property that an attribute of the same name overrides: users' modules may have their own ``config`` or ``queue``."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, module: Any, owner: type) -> Any:
        return self if module is None else self.function(module)


def _conversion(dtype: str) -> Callable[[M], M]:
    def convert(self: M) -> M:
        return self.to(dtype)

    convert.__doc__ = f"Convert parameters and floating-point buffers to {dtype}; returns the module."
    return convert


_USE_A_LAYER = "use a layer (nn.ReLU() for relu), or call the function in forward"


class Module(Stateful, metaclass=_Constructed):
    """The base class of all layers and models.

    Assign parameters (:class:`~netcl.nn.parameter.Parameter`) and modules to attributes in ``__init__``: this registers them. Then define
    ``forward``. Every constructor also takes a device and a dtype: ``Linear(queue, 784, 256)``, ``Linear(784, 256, device="gpu")``,
    ``Linear(784, 256, dtype="float16")``. The default is the active device.

    >>> from netcl import nn
    >>> class Net(nn.Module):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.hidden = nn.Linear(4, width)
    ...         self.out = nn.Linear(width, 2)
    ...     def forward(self, x):
    ...         return self.out(self.hidden(x).relu())
    >>> net = Net(8)
    >>> net([[1.0, 2.0, 3.0, 4.0]]).shape
    (1, 2)
    >>> [name for name, _ in net.named_parameters()]
    ['hidden.weight', 'hidden.bias', 'out.weight', 'out.bias']
    >>> net
    Net(
      width=8
      (hidden): Linear(in_features=4, out_features=8, bias=True)
      (out): Linear(in_features=8, out_features=2, bias=True)
    )
    """

    training: bool
    saved_by = "decorate it with @netcl.nn.register_layer"  # the remedy if a class that is not registered must be written
    _takes_lists = True  # whether ``forward``, if it is netcl's, gets lists of numbers as tensors
    _holds_arguments = False  # whether the current child modules are the arguments of the constructor
    _roles: dict[str, str]
    _module_hooks: dict[str, dict[int, Callable[..., Any]]]
    _changed_names: set[str]
    _made_from: dict[str, Any]

    def __new__(cls: type[M], *args: Any, **kwargs: Any) -> M:
        module = super().__new__(cls)
        module.__dict__.update(training=True, _roles={}, _module_hooks={}, _changed_names=set())
        return module

    def __init__(self) -> None:
        pass

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output; every subclass must define it."""
        raise NotImplementedError(message(type(self).__name__, "forward must be defined by the subclass", "define forward(self, ...)"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for x in args:
            if type(x) is not Tensor and isinstance(x, _HOST_VALUES):
                args = self._on_device(args)
                break
        if recording.listening:
            self._report_to_recorder()
        if not self._module_hooks:
            return self.forward(*args, **kwargs)
        recording.host_work(f"hooks of a {type(self).__name__}")
        return hooks.call(self, args, kwargs)

    def _report_to_recorder(self) -> None:
        """Report to the recorder what a recorded step depends on: settings, tensors, submodules, names of attributes, hooks."""
        recorder = recording.active.recorder
        if recorder is not None:
            settings = [name for name, value in vars(self).items() if name[0] != "_" and _is_setting(value)]
            recorder.depends(self, settings, list(self._roles), (vars(self), self._module_hooks))

    def _on_device(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Convert arrays to tensors, on the device of the first tensor argument, else on the module's.

        A ``forward`` of netcl also gets floats and lists of numbers as tensors. One of the user's gets them unchanged, as in torch.
        """
        queue = next((x.queue for x in args if isinstance(x, Tensor)), None) or self.queue
        own = self._takes_lists and type(self).forward.__module__.startswith("netcl.")

        def is_converted(x: object) -> bool:
            return isinstance(x, np.ndarray) or (own and isinstance(x, list | float) and _holds_numbers(x))

        return tuple(Tensor.from_host(queue, x) if is_converted(x) else x for x in args)

    # ---- attributes

    if not TYPE_CHECKING:  # or no attribute would be checked

        def __getattr__(self, name: str) -> Any:
            """Return an attribute that :func:`getattr` has not found; code written for torch calls this method itself."""
            try:
                return vars(self)[name]
            except KeyError:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self) from None

    def __setattr__(self, name: str, value: Any) -> None:
        roles = self._roles
        if isinstance(value, Buffer):
            return self.register_buffer(name, value.data, value.persistent)
        if isinstance(value, Module):
            roles[name] = "module"
            self._changed_names.add(name)
        elif is_parameter(value):
            roles[name] = "parameter"
        elif roles.get(name) == "parameter" and value is not None and not (isinstance(value, Tensor) and value.persistent):
            remedy = "pass nn.Parameter(value); to change its values, use write()"
            what = f"{name!r} of {type(self).__name__} is a parameter and must be set to a parameter or None"
            raise TypeError(message("setattr", what, remedy, given=type(value).__name__))
        elif roles.get(name) in ("buffer", "scratch"):
            if value is not None and not isinstance(value, Tensor):
                what = f"{name!r} of {type(self).__name__} is a buffer and must be set to a tensor or None"
                raise TypeError(message("setattr", what, given=type(value).__name__))
        elif value is None and roles.get(name) == "module":
            return self.add_module(name, None)
        elif name in roles and (not isinstance(value, Tensor) or roles[name] in ("module", "none")):
            self._unregister(name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self._unregister(name)
        object.__delattr__(self, name)

    def _unregister(self, name: str) -> None:
        if self._roles.pop(name, None) == "module":
            self._changed_names.add(name)

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        """Register a tensor that is not learned; it moves with the module and, if ``persistent``, is in the state dict.

        The tensor may be ``None``, and the attribute may be set to ``None`` or a tensor later.
        """
        self._check_name(name, "register_buffer", "buffer", "scratch")
        if tensor is not None and not isinstance(tensor, Tensor):
            tensor = Tensor.from_host(here(), tensor)
        object.__setattr__(self, name, tensor)
        self._roles[name] = "buffer" if persistent else "scratch"
        if tensor is not None:
            tensor._mark(False, persistent=True)

    def register_parameter(self, name: str, tensor: Tensor | None) -> None:
        """Register a parameter, which may be ``None``: the attribute may be set to a parameter later, and keeps its place among them."""
        self._check_name(name, "register_parameter", "parameter")
        if tensor is not None and not is_parameter(tensor):
            what = f"{name!r} must be a parameter or None"
            raise TypeError(message("register_parameter", what, "pass nn.Parameter(value)", given=type(tensor).__name__))
        object.__setattr__(self, name, tensor)
        self._roles[name] = "parameter"

    def add_module(self, name: str, module: Module | None) -> None:
        """Register a module under ``name``, which need not be a Python identifier but must not contain dots."""
        self._check_name(name, "add_module", "module", "none")
        if module is not None and not isinstance(module, Module):
            raise TypeError(message("add_module", f"{name!r} must be a module", _USE_A_LAYER, given=type(module).__name__))
        if module is not None:
            return setattr(self, name, module)
        object.__setattr__(self, name, None)
        self._roles[name] = "none"  # keeps its place in a container
        self._changed_names.add(name)

    def _check_name(self, name: Any, op: str, *roles: str) -> None:
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(message(op, "name must be a nonempty string without dots", name=repr(name)))
        of_class = inspect.getattr_static(type(self), name, None)
        if self._roles.get(name) not in roles and (name in self.__dict__ or of_class is not None) and not isinstance(of_class, property):
            raise ValueError(message(op, f"name must be new, but {type(self).__name__} already has this attribute", name=repr(name)))

    # ---- walking the tree

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield the modules directly inside, with their names."""
        if recording.listening:
            self._report_to_recorder()
        for name, role in list(self._roles.items()):
            if role == "module":
                yield name, self.__dict__[name]

    def children(self) -> Iterator[Module]:
        """Yield the modules directly inside."""
        return (module for _, module in self.named_children())

    def named_modules(self, memo: set[Any] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, Module]]:
        """Yield this module and all modules inside it, each once, with dotted names."""
        seen = set() if memo is None else memo
        if not remove_duplicate or self not in seen:
            seen.add(self)
            yield prefix, self
            for name, child in self.named_children():
                yield from child.named_modules(seen, dotted_name(prefix, name), remove_duplicate)

    def modules(self) -> Iterator[Module]:
        """Yield this module and all modules inside it, each once."""
        return (module for _, module in self.named_modules())

    def get_submodule(self, path: str) -> Module:
        """Return the module with the dotted name ``path``; ``""`` is this module."""
        module: Any = self
        for name in filter(None, path.split(".")):
            if module._roles.get(name) != "module":
                there = [child for child, _ in module.named_children()]
                raise AttributeError(
                    message("get_submodule", f"path must name a module, got {path!r}", f"{type(module).__name__} has {there}")
                )
            module = module.__dict__[name]
        return module

    def _named_tensors(self, *wanted: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of the module's own attributes with the roles ``wanted``, such as ``parameter``."""
        for name, role in list(self._roles.items()):
            if role in wanted and (tensor := getattr(self, name)) is not None:
                yield name, tensor

    def _walk_tensors(self, *wanted: str, prefix: str = "", recurse: bool = True, once: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors with the roles ``wanted`` in this module and all modules inside it, with dotted names."""
        seen: set[int] = set()
        for path, module in self.named_modules(prefix=prefix, remove_duplicate=once) if recurse else [(prefix, self)]:
            for name, tensor in module._named_tensors(*wanted):
                if not once or id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield dotted_name(path, name), tensor

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter once, with its dotted name. A module's own parameters come before those of its submodules.

        ``remove_duplicate=False`` yields shared parameters under each of their names.
        """
        return self._walk_tensors("parameter", prefix=prefix, recurse=recurse, once=remove_duplicate)

    def parameters(self, recurse: bool = True) -> NextList[Tensor]:
        """List every parameter once, in the order of :meth:`named_parameters`; the list also supports ``next``."""
        return NextList(tensor for _, tensor in self.named_parameters(recurse=recurse))

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield every buffer once, with its dotted name."""
        return self._walk_tensors("buffer", "scratch", prefix=prefix, recurse=recurse)

    def buffers(self, recurse: bool = True) -> NextList[Tensor]:
        """List every buffer once; the list also supports ``next``."""
        return NextList(tensor for _, tensor in self.named_buffers(recurse=recurse))

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle: the attributes, with host values in place of tensors."""
        return to_stored(vars(self))

    def __copy__(self: M) -> M:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__, _roles={**self._roles}, _changed_names={*self._changed_names})
        return made

    def __deepcopy__(self: M, memo: dict[int, Any]) -> M:
        memo[id(self)] = made = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    # ---- operations on all modules

    def train(self: M, mode: bool = True) -> M:
        """Set training mode (dropout is active, batch norm uses the batch) or, with ``mode=False``, evaluation mode; returns the module."""
        self.__dict__["training"] = mode
        for child in self.children():
            child.train(mode)
        return self

    def eval(self: M) -> M:
        """Set evaluation mode; returns the module."""
        return self.train(False)

    def requires_grad_(self: M, flag: bool = True) -> M:
        """Set for all parameters whether gradients are computed; returns the module."""
        for parameter in self.parameters():
            parameter.requires_grad = flag
        return self

    def freeze(self: M) -> M:
        """Freeze all parameters: none requires a gradient. They remain parameters and stay in the state dict. Returns the module."""
        return self.requires_grad_(False)

    def unfreeze(self: M) -> M:
        """Unfreeze all parameters: each requires a gradient. Returns the module."""
        return self.requires_grad_(True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to ``None`` or, with ``set_to_none=False``, fill them with zeros in place."""
        for parameter in self.parameters():
            if set_to_none:
                parameter.zero_grad()
            elif parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()

    def apply(self: M, function: Callable[[Module], Any]) -> M:
        """Call a function with every module inside, and last with this one; returns the module."""
        for child in self.children():
            child.apply(function)
        function(self)
        return self

    def to(
        self: M, *targets: Any, device: Any = None, dtype: str | None = None, non_blocking: bool = False, memory_format: Any = None
    ) -> M:  # fmt: skip
        """Move to a device, convert floats to a dtype, or both: ``to("gpu")``, ``to(queue, dtype="bfloat16")``. Returns the module.

        The parameters stay the same objects, so existing optimizers keep working. Gradients move along. ``non_blocking=`` and
        ``memory_format=`` are ignored.
        """
        for target in targets:
            if isinstance(target, str) and (target in dtypes.DTYPES or target in dtypes.DTYPE_ALIASES):
                dtype = target
            else:
                device = target
        queue = None if device is None else queue_of(device)
        row = None if dtype is None else dtypes.lookup(dtype, "to")
        if row is not None and not row.is_float:
            raise DtypeError(message("to", "dtype must be a floating-point dtype", dtype=row.name))
        with ag.no_grad():
            return self._apply(partial(_at_target, queue=queue, dtype=None if row is None else row.name))

    def _apply(self: M, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> M:
        """Replace the memory of parameters, buffers and gradients by that of ``fn(tensor)``. :meth:`to` calls it for every submodule."""
        for child in self.children() if recurse else ():
            child._apply(fn)
        for _, tensor in self._named_tensors("parameter", "buffer", "scratch"):
            for each in (tensor,) if tensor.grad is None else (tensor, tensor.grad):
                made = fn(kept := each.detach())
                if made is not kept:
                    stand_on(each, made)
        return self

    def cuda(self: M, device: Any = None) -> M:
        """Move to ``device``, by default ``"gpu"``; returns the module."""
        return self.to("gpu" if device is None else device)

    def cpu(self: M) -> M:
        """Move to the NumPy backend; returns the module."""
        return self.to("cpu")

    half, bfloat16, float, double = map(_conversion, ("float16", "bfloat16", "float32", "float64"))

    @_Computed
    def queue(self) -> Any:
        """The queue of the module's first tensor; that of the active device if there are no tensors."""
        tensor = next((t for _, t in self._walk_tensors("parameter", "buffer", "scratch")), None)
        return here() if tensor is None else tensor.queue

    # ---- hooks

    register_load_state_dict_pre_hook = hooks.register_load_state_dict_pre_hook
    _register_load_state_dict_pre_hook = hooks.register_pre_hook_without_module
    register_load_state_dict_post_hook = hooks.register_load_state_dict_post_hook

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False) -> RemovableHandle:
        """Register ``hook(module, args)`` to run before each forward; its result, if any, replaces the arguments. Returns a handle.

        ``with_kwargs``: ``hook(module, args, kwargs)``, whose result is a pair of both. ``prepend``: the hook runs before earlier ones.
        """
        return hooks.add_hook(self._module_hooks, "forward_pre", hooks.with_keywords(hook, with_kwargs), prepend)

    def register_forward_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False, always_call: bool = False
    ) -> RemovableHandle:
        """Register ``hook(module, args, output)`` to run after each forward; its result, if any, replaces the output. Returns a handle.

        ``with_kwargs``: ``hook(module, args, kwargs, output)``. ``prepend``: the hook runs before earlier ones.
        """
        if always_call:
            raise NotImplementedError(message("register_forward_hook", "hooks do not run after errors", "leave always_call out"))
        return hooks.add_hook(self._module_hooks, "forward", hooks.with_keywords(hook, with_kwargs), prepend)

    def register_full_backward_pre_hook(self, hook: Callable[[Any, tuple[Any, ...]], Any]) -> RemovableHandle:
        """Register ``hook(module, grad_output)`` for backward; a result replaces ``grad_output``. Returns a handle."""
        return hooks.add_hook(self._module_hooks, "backward_pre", hook)

    def register_full_backward_hook(self, hook: Callable[[Any, tuple[Any, ...], tuple[Any, ...]], Any]) -> RemovableHandle:
        """Register ``hook(module, grad_input, grad_output)`` for backward; a result replaces ``grad_input``. Returns a handle."""
        return hooks.add_hook(self._module_hooks, "backward", hook)

    register_backward_hook = register_full_backward_hook

    # ---- torch's own names

    def get_parameter(self, target: str) -> Tensor:
        """Return the parameter with a dotted name."""
        return self._tensor_named(target, "parameter")

    def get_buffer(self, target: str) -> Tensor:
        """Return the buffer with a dotted name."""
        return self._tensor_named(target, "buffer")

    def _tensor_named(self, target: str, role: str) -> Tensor:
        path, _, name = target.rpartition(".")
        tensors = getattr(self.get_submodule(path), f"_{role}s")
        if name not in tensors:
            raise AttributeError(message(f"get_{role}", f"target must name a {role}, got {target!r}", there=[*tensors]))
        return tensors[name]

    def _get_name(self) -> str:
        return type(self).__name__

    def type(self: M, dst_type: Any) -> M:
        """Convert the floats of all parameters and buffers to a dtype; returns the module."""
        return self.to(dst_type)

    register_module = add_module
    _modules = property(lambda self: _Attributes(self, "module", "none"))
    _parameters = property(lambda self: _Attributes(self, "parameter"))
    _buffers = property(lambda self: _Attributes(self, "buffer", "scratch"))

    # ---- description

    @_Computed
    def config(self) -> dict[str, Any]:
        """The JSON description that rebuilds this module: see :func:`netcl.nn.factory.config_of`."""
        return factory.config_of(self)

    def _made_with(self, arguments: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_made_from", dict(arguments))
        for module in self.modules():
            module._changed_names.clear()

    def _constructor_arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and named arguments that rebuild this module."""
        kinds = {name: p.kind for name, p in type(self).__signature__.parameters.items()}
        rest = next((name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_POSITIONAL), None)
        positional: list[Any] = []
        named = dict(self._made_from)
        if rest is not None and named.get(rest):
            for name in list(kinds)[: list(kinds).index(rest)]:
                positional.append(named.pop(name))
            positional += named[rest]
        named.pop(rest or "", None)
        for name, kind in kinds.items():
            if kind is inspect.Parameter.VAR_KEYWORD:
                named |= named.pop(name)
        return positional, named

    def _changed_children(self) -> Iterator[tuple[str, Module | None]]:
        """Return the paths and modules that were set after construction; ``None`` for a module that was removed."""
        return self._changed_inside({id(module) for module in _modules_in(list(self._made_from.values()))})

    def _changed_inside(self, given: set[int]) -> Iterator[tuple[str, Module | None]]:
        for name in sorted(self._changed_names):
            yield name, self.__dict__.get(name) if self._roles.get(name) == "module" else None
        for name, child in self.named_children():
            if name in self._changed_names or id(child) in given:
                continue
            if child._holds_arguments and child._changed_names:
                yield name, child
            else:
                yield from ((f"{name}.{path}", module) for path, module in child._changed_inside(set()))

    def extra_repr(self) -> str:
        """Return the text that ``repr`` shows for this module besides its children."""
        if "_made_from" not in self.__dict__:  # still under construction
            return ""
        named = self._constructor_arguments()[1]
        shown = {name: value for name, value in named.items() if value is not None and not list(_modules_in(value))}
        return ", ".join(f"{name}={value.__name__ if isinstance(value, type) else repr(value)}" for name, value in shown.items())

    def __repr__(self) -> str:
        extra = self.extra_repr()
        lines = [f"({name}): {child!r}" for name, child in self.named_children()]
        if not lines:
            return f"{type(self).__name__}({extra})"
        body = "\n".join(lines if not extra else [extra, *lines])
        return f"{type(self).__name__}(\n  " + body.replace("\n", "\n  ") + "\n)"

    def _repr_html_(self) -> str:
        count = sum(p.size for p in self.parameters())
        rows = [(name or "(this)", type(part).__name__, part.extra_repr(), f"{sum(p.size for p in part.parameters()):,}")
                for name, part in self.named_modules()]  # fmt: skip
        return notebook.html_table(f"{type(self).__name__}, {count:,} parameters", ("name", "layer", "settings", "parameters"), rows)

    def flops(self, args: tuple[Any, ...], output: Any) -> int:
        """Return the floating-point operations of one call without the modules inside, two per multiply-add; 0 unless overridden."""
        del args, output
        return 0

    def summary(self, input_shape: Any, dtype: str = "float32") -> Summary:
        """Return a table of the layers: output shape, parameters and FLOPs of a forward pass over zeros of ``input_shape``.

        ``input_shape`` includes the batch; for several inputs, pass a list of shapes. Use ``dtype="int64"`` for models that take tokens.

        >>> from netcl import nn
        >>> print(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).summary((1, 4)))
        layer       output shape  parameters  FLOPs
        Sequential  (1, 2)                58    114
          0 Linear  (1, 8)                40     72
          1 ReLU    (1, 8)                 0      8
          2 Linear  (1, 2)                18     34
        58 parameters, 58 of them learned, 232 bytes; 114 FLOPs
        """
        return summarize(self, input_shape, dtype)


def dotted_name(prefix: str, name: str) -> str:
    """Join a prefix and a name by a dot; without a prefix, return the name."""
    return f"{prefix}.{name}" if prefix else name


def may_join(*modules: Module) -> bool:
    """Whether one op may compute several modules: none has hooks or an instance attribute ``forward``. A recorder gets all as called."""
    for module in modules:
        if recording.listening:
            module._report_to_recorder()
        if module._module_hooks or "forward" in vars(module):
            return False
    return True


class _Attributes(MutableMapping[str, Any]):
    """The attributes of a module with one of several roles, by name, as torch's ``_modules``; an assignment registers a new one."""

    def __init__(self, module: Module, *roles: str):
        self._module, self._held = module, roles

    def __getitem__(self, name: str) -> Any:
        if self._module._roles.get(name) not in self._held:
            raise KeyError(name)
        return vars(self._module)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._module._roles:
            setattr(self._module, name, value)
        elif self._held[0] == "buffer":
            self._module.register_buffer(name, value)
        else:
            (self._module.add_module if self._held[0] == "module" else self._module.register_parameter)(name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._module, name)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, role in self._module._roles.items() if role in self._held])

    def __len__(self) -> int:
        return len(list(iter(self)))


def _at_target(tensor: Tensor, queue: Any, dtype: str | None) -> Tensor:
    """Return a tensor on a queue, with floats converted to a dtype; the given tensor if nothing changes."""
    if dtype is not None and dtype != tensor.dtype and dtypes.DTYPES[tensor.dtype].is_float:
        tensor = tensor.to(dtype)
    return tensor if queue is None or queue == tensor.queue else tensor.to(queue)


def _modules_in(value: Any) -> Iterator[Module]:
    """Yield the modules in an argument, at any depth of lists, tuples and mappings."""
    if isinstance(value, Module):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _modules_in(part)
