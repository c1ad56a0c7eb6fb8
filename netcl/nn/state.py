"""State dicts of modules: parameters and buffers by name, returned and loaded by methods that submodules may override, as in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import numpy as np

from netcl.core.errors import DtypeError, ShapeError, message, some
from netcl.core.tensor import Tensor
from netcl.nn import hooks
from netcl.nn.parameter import stand_on

_EXTRA = "_extra_state"
_Match = tuple[str, Any, Any]  # a name, the tensor or the setter of extra state, and the given value


class StateDictError(ValueError, RuntimeError):
    """Raised when the names of a state dict do not match those of a module."""


class IncompatibleKeys(NamedTuple):
    """The names that ``load_state_dict(strict=False)`` could not match."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Stateful:
    """Base class of modules: the methods for state dicts."""

    _roles: dict[str, str]
    _named_tensors: Callable[..., Iterator[tuple[str, Tensor]]]
    named_children: Callable[..., Iterator[tuple[str, Stateful]]]
    modules: Callable[..., Iterator[Stateful]]

    def _own_state(self) -> dict[str, Tensor]:
        return dict(sorted(self._named_tensors("parameter", "buffer"), key=lambda item: self._roles[item[0]] == "buffer"))

    def state_dict(self, destination: dict[str, Tensor] | None = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by torch's dotted names after ``prefix``. The tensors share the module's memory.

        The entries are added to ``destination`` if it is given. ``keep_vars`` returns the parameters themselves. Submodules may override
        ``state_dict``, ``_save_to_state_dict``, or ``get_extra_state`` and ``set_extra_state``.
        """
        found = {} if destination is None else destination
        self._save_to_state_dict(found, prefix, keep_vars)
        for name, child in self.named_children():
            child.state_dict(destination=found, prefix=f"{prefix}{name}.", keep_vars=keep_vars)
        return found

    def _save_to_state_dict(self, destination: MutableMapping[str, Tensor], prefix: str, keep_vars: bool) -> None:
        """Add the module's own parameters, then its own persistent buffers, to ``destination``."""
        for name, tensor in self._own_state().items():
            destination[prefix + name] = tensor if keep_vars else tensor.detach()
        if hasattr(self, "get_extra_state"):
            destination[prefix + _EXTRA] = self.get_extra_state()

    def load_state_dict(self, state: Mapping[str, object], strict: bool = True, assign: bool = False) -> IncompatibleKeys:
        """Overwrite parameters and buffers with the values of a state dict: tensors, NumPy arrays or torch tensors.

        Names, shapes and dtypes are checked before values are written; ``strict=False`` returns mismatched names instead of raising. Values
        are converted to the dtypes of the module; ``assign=True`` shares the memory of given tensors instead. Submodules may override
        ``_load_from_state_dict``.

        >>> from netcl import nn
        >>> layer = nn.Linear(2, 1)
        >>> layer.load_state_dict({"weight": [[1.0, 2.0]], "bias": [3.0]})
        IncompatibleKeys(missing_keys=[], unexpected_keys=[])
        >>> layer([[1.0, 1.0]]).tolist()
        [[6.0]]
        """
        keys, errors, found = IncompatibleKeys([], []), list[str](), list[_Match]()
        metadata = {"found": found, **({"assign_to_params_buffers": True} if assign else {})}

        def load(module: Stateful, part: dict[str, object], prefix: str) -> None:
            settings = getattr(state, "_metadata", {}).get(prefix[:-1], {}) | metadata
            module._load_from_state_dict(part, prefix, settings, True, *keys, errors)
            for name, child in list(module.named_children()):
                path = f"{prefix}{name}."
                load(child, {key: value for key, value in part.items() if key.startswith(path)}, path)

        load(self, dict(state), "")
        if errors:
            raise StateDictError(message("load_state_dict", f"a hook reports: {'; '.join(errors)}"))
        if strict and (keys.missing_keys or keys.unexpected_keys):
            what = f"the state dict must have exactly the parameters and buffers of this {type(self).__name__}"
            parts = {name: f"[{some(names)}]" for name, names in zip(("missing", "unexpected"), keys, strict=True) if names}
            raise StateDictError(message("load_state_dict", what, "pass strict=False to load the matching ones", **parts))
        _write(found, assign)
        for module in self.modules():
            module._after_loading()
            hooks.call_loading_hooks(module, "after", keys)
        return keys

    def _load_from_state_dict(
        self, state_dict: dict[str, object], prefix: str, local_metadata: Mapping[str, Any], strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Match own parameters and buffers with a state dict. ``load_state_dict`` writes the values once those of all modules match."""
        hooks.call_loading_hooks(self, "before", state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        children, own = dict(self.named_children()), dict[str, object](self._own_state())
        if hasattr(self, "set_extra_state"):
            own[_EXTRA] = self.set_extra_state
        if strict:  # torch added the counter of batch norms in 0.4.1
            missing_keys += [prefix + name for name in own if prefix + name not in state_dict and name != "num_batches_tracked"]
            inside = ((key, key[len(prefix) :].partition(".")) for key in state_dict if key.startswith(prefix))
            unexpected_keys += [key for key, (name, dot, _) in inside if name not in (children if dot else own)]
        found = [(prefix + name, target, state_dict[prefix + name]) for name, target in own.items() if prefix + name in state_dict]
        if "found" in local_metadata:
            local_metadata["found"].extend(found)
        else:  # not called by load_state_dict
            _write(found, local_metadata.get("assign_to_params_buffers", False))

    def _after_loading(self) -> None:
        """Do nothing: a hook for subclasses, called after a state dict was loaded."""


def _write(found: list[_Match], assign: bool) -> None:
    """Check shapes and dtypes of all values, then write them."""
    values = [(name, own, value) for name, own, value in found if isinstance(own, Tensor) and own is not value]
    values = [(name, own, v if isinstance(v, Tensor) else np.asarray(v)) for name, own, v in values]
    wrong = [f"{name} is {tuple(v.shape)}, expected {own.shape}" for name, own, v in values if tuple(v.shape) != own.shape]
    if wrong:
        raise ShapeError(message("load_state_dict", "each tensor must have the shape that the module expects", shapes=f"[{some(wrong)}]"))
    arrays = {name: v.dtype for name, _, v in values if not isinstance(v, Tensor)}
    odd = [f"{name} is {dtype}" for name, dtype in arrays.items() if dtype.kind not in "biuf" and dtype.name != "bfloat16"]
    if odd:
        raise DtypeError(message("load_state_dict", "values must be numbers", dtypes=f"[{some(odd)}]"))
    for _, own, value in values:
        if assign and isinstance(value, Tensor):
            stand_on(own, value.detach())
        else:
            own.write(value)
    for _, target, value in found:
        if not isinstance(target, Tensor):
            target(value)
