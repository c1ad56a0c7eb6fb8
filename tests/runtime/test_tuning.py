"""The store of measured configurations: versions, damage, many writers, what is shipped."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from netcl.core.capabilities import DeviceProfile
from netcl.core.kernel_selector import KernelConfig, KernelVariant
from netcl.runtime import tuning
from netcl.runtime.tuning import TuningStore

DEVICE = DeviceProfile("Some GPU", "Acme", "Acme CL", "OpenCL 3.0", "1.0", "gpu", local_mem_size=1 << 15, max_work_group_size=256)
CONFIG = KernelConfig(KernelVariant.MATMUL_TILED, tile_m=64, local_size_2d=(8, 4), extra={"tier": "simt", "KC": 512, "why": "large"})


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("NETCL_CACHE_DIR", str(tmp_path))
    return TuningStore(shipped=tmp_path / "none.json")


def test_a_configuration_survives_json():
    again = tuning.from_json(json.loads(json.dumps(tuning.to_json(CONFIG))))
    assert (again.tile_m, again.local_size_2d, again.extra) == (64, (8, 4), {"tier": "simt", "KC": 512})
    for nonsense in ({}, {"variant": "NO_SUCH"}, {"variant": "MATMUL_TILED", "colour": 3}):
        with pytest.raises(ValueError, match="data must be a kernel configuration"):
            tuning.from_json(nonsense)


def test_entries_belong_to_a_device_and_a_driver(store):
    assert store.put(DEVICE, "a", {"config": None}) and store.put(DEVICE, "b", {"seconds": 1.0})
    newer = DeviceProfile("Some GPU", "Acme", "Acme CL", "OpenCL 3.0", "2.0", "gpu", local_mem_size=1 << 15, max_work_group_size=256)
    assert TuningStore().entries(DEVICE) == {"a": {"config": None}, "b": {"seconds": 1.0}} and store.entries(newer) == {}
    assert store.info()["tuned problems"] == 2 and store.clear() == 1 and store.entries(DEVICE) == {}


@pytest.mark.parametrize(
    "damage",
    [b"", b'{"format": 1', b"[]", json.dumps({"format": tuning.FORMAT, "entries": {"a": 5}}).encode(), b"[" * 100_000],
    ids=["empty", "cut", "list", "entry", "brackets"],
)
@pytest.mark.fault("damaged file of measured configurations", "cut, emptied, deeply nested, of other kinds", "one warning; measured again")
def test_a_damaged_file_is_told_about_and_begun_anew(store, damage):
    store.put(DEVICE, "a", {"seconds": 1.0})
    store.path(DEVICE).write_bytes(damage)
    with pytest.warns(RuntimeWarning, match="will be measured again"):
        assert store.entries(DEVICE) == {}
    assert store.put(DEVICE, "b", {"seconds": 2.0}) and TuningStore().entries(DEVICE) == {"b": {"seconds": 2.0}}


def test_a_file_of_another_format_is_replaced_quietly(store):
    store.put(DEVICE, "a", {"seconds": 1.0})
    old = json.loads(store.path(DEVICE).read_text()) | {"format": tuning.FORMAT + 1}
    store.path(DEVICE).write_text(json.dumps(old))
    assert store.entries(DEVICE) == {}
    store.put(DEVICE, "b", {"seconds": 2.0})
    assert store.entries(DEVICE) == {"b": {"seconds": 2.0}}


def test_what_is_shipped_yields_to_what_was_measured(store, tmp_path):
    rows = [{"platform": "Acme CL", "device": "Some GPU", "entries": {"a": {"seconds": 5.0}, "b": {"seconds": 6.0}}}]
    file = tmp_path / "shipped.json"
    file.write_text(json.dumps({"devices": rows}))
    store = TuningStore(shipped=file)
    store.put(DEVICE, "a", {"seconds": 1.0})
    assert store.entries(DEVICE) == {"a": {"seconds": 1.0}, "b": {"seconds": 6.0}}


def test_the_shipped_file_is_sound():
    for row in json.loads(tuning.SHIPPED.read_text())["devices"]:
        assert {"platform", "device", "entries"} <= set(row)
        for key, entry in row["entries"].items():
            assert isinstance(json.loads(key), list) and (entry["config"] is None or tuning.from_json(entry["config"]))


def test_no_folder_is_no_error(monkeypatch, store):
    monkeypatch.setattr(TuningStore, "folder", lambda self: None)
    assert store.put(DEVICE, "a", {}) is False and store.entries(DEVICE) == {}


WRITER = """
import sys
from pathlib import Path
from netcl.core.capabilities import DeviceProfile
from netcl.runtime.tuning import TuningStore

device, store = DeviceProfile("Some GPU", "Acme", "Acme CL", "OpenCL 3.0", "1.0", "gpu"), TuningStore()
for i in range(20):
    assert store.put(device, f"{sys.argv[1]} {i}", {"seconds": float(i)})
"""


@pytest.mark.skipif(tuning.fcntl is None, reason="without file locks the last of two simultaneous writers wins")
def test_writers_do_not_lose_each_others_entries(store):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, name]) for name in ("one", "two", "three")]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert len(store.entries(DEVICE)) == 60


def test_what_was_measured_can_be_shipped():
    path = Path(__file__).parent.parent.parent / "tools/ship_tuning.py"
    spec = importlib.util.spec_from_file_location("ship_tuning", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    head = {"format": tuning.FORMAT, "platform": "P", "device": "D", "driver": "1"}
    entries = {"a": {"config": None, "seconds": 1.0, "complete": True}, "b": {"config": None, "complete": False}, "c": {"local": [4]}}
    shipped = tool.merge(
        {"devices": [{"platform": "P", "device": "D", "entries": {"old": {"config": None}}}]}, {**head, "entries": entries}
    )
    assert [sorted(row["entries"]) for row in shipped["devices"]] == [["a", "old"]]
    assert shipped["devices"][0]["entries"]["a"] == {"config": None, "complete": True}
