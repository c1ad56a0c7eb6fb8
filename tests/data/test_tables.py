"""Arrays and tables of users that Python's own readers cannot open."""

from __future__ import annotations

import numpy as np
import pytest

from netcl.data.formats import FormatError
from netcl.data.tables import read_numpy_arrays


@pytest.mark.parametrize(("field", "value"), [(6, 0xFF), (8, 0x01)], ids=["later version", "encrypted"])
@pytest.mark.fault("NPZ file of a later ZIP version, or encrypted", "bytes of its directory", "`FormatError`")
def test_an_archive_that_python_cannot_open_is_refused(tmp_path, field, value):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.ones(3))
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + field] |= value
    data[data.index(b"PK\x03\x04") + field - 2] |= value
    path.write_bytes(bytes(data))
    with pytest.raises(FormatError, match="the file must be a complete NPY or NPZ file"):
        read_numpy_arrays(path, "from_npz")
