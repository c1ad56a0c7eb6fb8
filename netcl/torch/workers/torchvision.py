"""Imported as ``torchvision`` by worker processes of a script that runs with netcl.torch: installs netcl in its place."""

import sys

from netcl.torch import install

del sys.modules[__name__]
install()
