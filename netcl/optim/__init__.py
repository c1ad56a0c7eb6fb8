"""Optimizers, learning-rate schedules, gradient clipping, averages of weights.

Most optimizers update all parameters of a model in few launches. Numbers such as the learning rate are kernel arguments, so changing
them needs no compilation. Optimizers that torch also has load the ``state_dict`` of torch's.
"""

import sys

from netcl.amp.grad_scaler import GradScaler as AMPGradScaler
from netcl.autograd.clipping import clip_grad_norm, clip_grad_norm_device, clip_grad_value
from netcl.optim import formula
from netcl.optim import schedule as lr_scheduler
from netcl.optim.ema import ModelEMA
from netcl.optim.formula import *  # noqa: F403
from netcl.optim.layerwise import LAMB, LARS, Adafactor, Muon
from netcl.optim.lbfgs import LBFGS
from netcl.optim.optimizer import Optimizer
from netcl.optim.schedule import *  # noqa: F403

sys.modules[f"{__name__}.lr_scheduler"] = lr_scheduler  # torch's name, also for import statements

__all__ = [
    "LAMB", "LARS", "LBFGS", "AMPGradScaler", "Adafactor", "ModelEMA", "Muon", "Optimizer", "clip_grad_norm", "clip_grad_norm_device",
    "clip_grad_value", "lr_scheduler",
]  # fmt: skip
__all__ += formula.__all__
__all__ += lr_scheduler.__all__
