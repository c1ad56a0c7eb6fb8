"""Worker processes of a script that netcl.torch runs import this file as ``torchvision``; it installs netcl instead."""

import sys

from netcl.torch import install

del sys.modules[__name__]
install()
