"""Worker processes of a script that netcl.torch runs import this as ``torch``: netcl takes its place."""

import sys

from netcl.torch import install

del sys.modules[__name__]
install()
