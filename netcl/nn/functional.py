"""Functions of ``torch.nn.functional`` under torch's names: ``import netcl.nn.functional as F``.

Every op of :mod:`netcl.autograd` can be called here. :data:`RENAMED` lists ops with another name in torch. :data:`COMPOSED` maps the names
of functions that wrap or combine ops to the modules that define them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

import netcl.autograd as ag
from netcl.autograd.in_place import overwrite
from netcl.core.tensor import Tensor
from netcl.nn import activation, composed, ctc, volume
from netcl.nn import attention as attentions
from netcl.nn import dropout as dropouts
from netcl.nn import embedding as embeddings
from netcl.nn import linear as linears

#: torch's names of ops that have another name here.
RENAMED = {
    "logsigmoid": "log_sigmoid", "hardsigmoid": "hard_sigmoid", "hardswish": "hard_swish", "hardtanh": "hard_tanh",
    "native_channel_shuffle": "channel_shuffle",
}  # fmt: skip
#: Functions that are composed of ops, and where they are.
_COMPOSED_IN = activation, attentions, composed, ctc, dropouts, embeddings, linears, volume
COMPOSED = {name: module for module in _COMPOSED_IN for name in module.FUNCTIONS}
#: Functions that torch has in a form that writes its result into the input.
WRITING = ("celu_", "elu_", "hardtanh_", "leaky_relu_", "relu_", "rrelu_", "selu_", "threshold_")
_POOLS = tuple(f"{kind}max_pool{axes}d" for kind in ("", "adaptive_") for axes in (1, 2, 3))


if TYPE_CHECKING:
    from netcl.nn.functional_names import *  # noqa: F403
else:

    def __getattr__(name: str) -> Callable[..., Any]:
        op = RENAMED.get(name, name)
        if name in WRITING:
            found = _writing(getattr(COMPOSED.get(name[:-1], ag), RENAMED.get(name[:-1], name[:-1])))
        elif name.removesuffix("_with_indices") in _POOLS and name not in _POOLS:
            found = partial(__getattr__(name.removesuffix("_with_indices")), return_indices=True)
        else:
            found = _in_place(op) if op in activation.IN_PLACE_LAYERS else getattr(COMPOSED.get(op, ag), op)
        if op in ag.LASTING or op in COMPOSED or name in WRITING:
            globals()[name] = found  # later calls find it without this function
        return found


def _writing(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the in-place form of ``function``, which writes the result into its input."""
    return wraps(function)(partial(overwrite, function))


@cache
def _in_place(name: str) -> Callable[..., Tensor]:
    """Return the activation ``name`` with torch's parameter ``inplace``."""
    op = getattr(ag, name)

    @wraps(op)
    def function(input: Tensor, *args: Any, inplace: bool = False, **kwargs: Any) -> Tensor:
        numbers = [value for value in args if not isinstance(value, bool)]
        return overwrite(op, input, *numbers, **kwargs) if inplace or True in args[len(numbers) :] else op(input, *numbers, **kwargs)

    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *COMPOSED, *RENAMED, *WRITING, *(f"{name}_with_indices" for name in _POOLS), *dir(ag)})
