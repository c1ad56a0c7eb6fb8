"""``netcl bench`` and ``netcl tune``."""

from __future__ import annotations

import pytest

from netcl import bench
from netcl.bench.problems import groups
from netcl.cli import main
from netcl.core.errors import OutOfMemoryError


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NETCL_CACHE_DIR", str(tmp_path))


def test_bench_says_which_device_to_use(capsys):
    assert main(["bench", "--device", "cpu", "--cases", r"^sum 2\^1\d", "--repeats", "1"]) == 0
    out = capsys.readouterr().out
    assert "sum 2^16" in out and "sums: NumPy for all of them" in out and "matmul" not in out


def test_bench_without_torch_reports_only_our_figures(capsys, monkeypatch):
    """A time of NumPy, the reference of a case, is not torch's."""
    usual = bench.setting
    monkeypatch.setattr(bench, "setting", lambda *given: usual(*given, with_torch=False))
    monkeypatch.setattr(bench, "interleave", lambda ways, repeats: dict.fromkeys(ways, 2.0))
    assert main(["bench", "--device", "cpu", "--cases", r"^sum 2\^10"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "torch is not installed: only netcl's devices are timed"
    assert "torch" not in "\n".join(rest) and "2 s" in "\n".join(rest)


def test_bench_goes_on_after_a_failure_and_tells_it(capsys, monkeypatch):
    usual = bench.interleave
    results = iter([{"ours": "its result differs from numpy's"}, {}])

    def interleave(ways, repeats):
        if "ours" in ways:
            raise OutOfMemoryError("planted")
        return usual(ways, repeats)

    monkeypatch.setattr(bench, "interleave", interleave)
    monkeypatch.setattr(bench, "wrong_results", lambda ways, tolerance: next(results))
    assert main(["bench", "--device", "cpu", "--cases", r"^sum 2\^1\d", "--repeats", "1"]) == 1
    out = capsys.readouterr().out
    assert "sum 2^10 on NumPy: ours: its result differs" in out and "sum 2^16 failed on NumPy: planted" in out


@pytest.mark.parametrize("group", ["matrix products", "convolutions", "elementwise chains", "sums", "softmax", "training an MLP"])
def test_bench_problems_agree_in_all_their_ways(group, device):
    where = bench.Setting(device)
    ways = next(iter(groups()[group].values()))(where)
    assert bench.wrong_results({name: way for name, way in ways.items() if not way.missing}, 1e-3) == {}


def test_bench_without_a_case_is_told(capsys):
    assert main(["bench", "--device", "cpu", "--cases", "summ"]) == 1
    assert capsys.readouterr().err.startswith("[bench] --cases must match the name of a case; cases=summ; for instance 'matmul 32'")
    with pytest.raises(SystemExit):
        main(["bench", "--cases", "["])
    assert "must be a regular expression, got '['" in capsys.readouterr().err


def test_tune_keeps_what_it_measured(cl_device, capsys, request, monkeypatch):
    selector = request.node.callspec.params["cl_device"].selector
    assert main(["tune", "matmul", "8", "16", "32", "--device", selector, "--budget", "0"]) == 0
    out = capsys.readouterr().out
    assert "matmul             8x16x32" in out and "1 problem in" in out
    assert main(["tune"]) == 0 and "tuned problems  1" in capsys.readouterr().out
    assert main(["tune", "--forget"]) == 0 and "measurements of 1 devices" in capsys.readouterr().out
    monkeypatch.setenv("NETCL_CACHE_DIR", __file__)  # no folder
    assert main(["tune", "matmul", "8", "16", "32", "--device", selector, "--budget", "0"]) == 1
    assert "a file to store it in; not_stored=1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, told",
    [
        (["resnet19"], "known: mlp, lenet"),
        (["matmul", "3"], "netcl tune matmul M N K"),
        (["matmul", "0", "1", "1"], "sizes=(0, 1, 1)"),
        (["mlp", "3"], "[tune] sizes and dtype must not be given for models; model=mlp, sizes=[3]"),
        (["mlp", "--dtype", "float16"], "dtype=float16; pass --batch N"),
        (["matmul", "1", "1", "1", "--batch", "2"], "[tune] --batch is for models; batch=2"),
    ],
)
def test_tune_tells_what_it_takes(cl_device, capsys, words, told):
    assert main(["tune", *words, "--device", "cl"]) == 1
    assert told in capsys.readouterr().err
