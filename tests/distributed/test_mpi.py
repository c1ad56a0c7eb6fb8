"""Ranks under mpiexec: the run of one process, whatever their number; faults end the job in time and name the rank."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from netcl.distributed.launch import mpiexec
from tests.distributed import job
from tests.distributed.test_data_parallel import assert_same, saved, single

JOB = Path(job.__file__)
ROOT = JOB.parents[2]

pytest.importorskip("mpi4py")


def environment(**more: str) -> dict[str, str]:
    few = {"NETCL_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NETCL_COMM_TIMEOUT": "60"}
    return {**os.environ, **few, "PYTHONPATH": str(ROOT), **more}


def run(ranks: int, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [mpiexec(), "-n", str(ranks), sys.executable, str(JOB), *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**more), timeout=200, check=False)


@pytest.fixture(scope="module")
def runs_of_two_ranks(tmp_path_factory) -> tuple[dict[str, list[np.ndarray]], str]:
    """What several runs of one job of two ranks end with, by name, and what the job printed: ranks take a second to start."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {
        "gpt": ["gpt", "--zero"],
        "resnet": ["resnet", "--steps", "4"],
        "clipped": ["mlp", "--max-norm", "0.1", "--zero"],
        "mlp": ["mlp", "--steps", "15"],
    }
    words = [word for name, (kind, *options) in runs.items() for word in ("and", kind, str(folder / f"{name}.npz"), *options)]
    done = run(2, *words[1:])
    assert done.returncode == 0, done.stderr
    return {name: saved(folder / f"{name}.npz") for name in runs}, done.stdout


@pytest.mark.parametrize(("kind", "steps"), [("gpt", 20), ("resnet", 4), ("mlp", 15)])
def test_ranks_train_as_one(runs_of_two_ranks, kind, steps):
    """Two ranks; four are in test_a_killed_rank_is_named_and_fewer_ranks_go_on."""
    assert_same(runs_of_two_ranks[0][kind], single(kind, steps))


@pytest.mark.skipif(sys.platform == "win32", reason="MS-MPI installs its mpiexec for the machine")
def test_mpiexec_beside_this_python_is_preferred(tmp_path, monkeypatch):
    """It belongs to the library that mpi4py loads; one of another version in PATH fails now and then."""
    for folder in ("environment", "path"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpiexec").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment" / "python"))
    assert mpiexec() == str(tmp_path / "environment" / "mpiexec")
    (tmp_path / "environment" / "mpiexec").unlink()
    assert mpiexec() == str(tmp_path / "path" / "mpiexec")


def test_collectives_agree_with_numpy(full):
    """On eight ranks with --full: on two cores most of their time is waiting for each other."""
    ranks = 8 if full else 3
    command = [mpiexec(), "-n", str(ranks), sys.executable, str(JOB.with_name("collective_ranks.py"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=200, check=False)
    assert done.returncode == 0 and f"{ranks} ranks agree with NumPy" in done.stdout, done.stderr


def test_clipping_sees_all_gradients(tmp_path, runs_of_two_ranks):
    done = run(1, "mlp", str(tmp_path / "one.npz"), "--max-norm", "0.1")  # one rank under mpiexec is a job as well
    assert done.returncode == 0, done.stderr
    assert_same(runs_of_two_ranks[0]["clipped"], saved(tmp_path / "one.npz"))


def test_bytes_on_the_wire(runs_of_two_ranks):
    """Twice the gradients times (n - 1) / n, a flag per parameter, and the loss; nothing else grows with the steps."""
    sent = [int(count) for count in re.findall(r"bytes ([\d ]+)", runs_of_two_ranks[1])[-1].split()]
    gradients = 6 * 16 + 16 + 16 * 4 + 4
    per_step = (sent[14] - sent[4]) / 10
    told = 2 * len('["mean", [], "float64", null, false]')  # the comparison before the all-reduce of the loss, at its longest
    assert 4 * (gradients + 4) <= per_step <= 4 * (gradients + 4) + 2 * 8 + told


@pytest.mark.fault("rank is killed", "SIGKILL in step 7", "named; job ends; fewer ranks resume")
def test_a_killed_rank_is_named_and_fewer_ranks_go_on(tmp_path):
    folder, out = tmp_path / "checkpoints", tmp_path / "out.npz"
    start = time.monotonic()
    faulty = [str(JOB), "mlp", str(out), "--checkpoints", str(folder), "--fault", "kill", "--fault-at", "7"]
    command = [sys.executable, "-m", "netcl.distributed.replica", "-n", "4", "--devices", "cpu", *faulty]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(NETCL_COMM_TIMEOUT="150"), timeout=200, check=False)
    assert done.returncode != 0
    assert time.monotonic() - start < 120  # by the death of the rank, not by the time limit of the ranks that wait
    assert "netcl: rank 1 (pid" in done.stdout + done.stderr
    assert "was ended by SIGKILL" in done.stdout + done.stderr
    assert run(2, "mlp", str(out), "--checkpoints", str(folder)).returncode == 0
    assert_same(saved(out)[1:], single("mlp")[1:])
    assert len(saved(out)[0]) == 13  # steps 8 to 20


@pytest.mark.fault("rank killed under plain mpiexec", "SIGKILL", "the job ends in time")
def test_a_killed_rank_ends_a_plain_mpiexec_too(tmp_path):
    start = time.monotonic()
    assert run(2, "mlp", str(tmp_path / "out.npz"), "--fault", "kill", "--fault-at", "2", NETCL_COMM_TIMEOUT="150").returncode != 0
    assert time.monotonic() - start < 120


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("late", r"\[\w+\] rank 1 did not arrive within 6 s; world=3, waiting=rank [02], processes=\[rank 1 is pid \d+"),
        ("shape", r"all ranks must agree on the model's parameters: rank 1 has"),
        ("raise", r"netcl: rank 1 ends the job: this rank has had enough"),
    ],
)
@pytest.mark.fault("rank is late, unlike or raises", "one rank of three", "named in time")
def test_a_faulty_rank_is_named_in_time(tmp_path, fault, words):
    start = time.monotonic()
    done = run(3, "mlp", str(tmp_path / "out.npz"), "--fault", fault, "--fault-at", "2", NETCL_COMM_TIMEOUT="6")
    assert done.returncode != 0
    assert time.monotonic() - start < 60
    assert re.search(words, done.stderr + done.stdout), done.stderr


@pytest.mark.fault("rank fails alone and swallows it", "one rank of three", "`LostRankError` with its name")
def test_a_rank_that_fails_alone_is_told_to_those_who_wait(tmp_path):
    start = time.monotonic()
    done = run(3, "mlp", str(tmp_path / "out.npz"), "--fault", "swallow", "--fault-at", "2", NETCL_COMM_TIMEOUT="150")
    assert done.returncode != 0
    assert time.monotonic() - start < 120
    words = r"netcl: rank [02] ends the job: \[\w+\] rank 1 failed: ValueError: this rank has had enough; waiting=rank [02], world=3"
    assert re.search(words, done.stderr), done.stderr


@pytest.mark.fault("rank 0 cannot write", "a folder in place of the log", "the job ends, file named")
def test_a_rank_of_netcl_train_that_cannot_write_ends_the_job(tmp_path):
    (tmp_path / "log.csv").mkdir()
    words = ["-m", "netcl", "train", "--model", "mlp", "--run", str(tmp_path), "--device", "cpu", "--epochs", "2", "--distributed", "2"]
    start, more = time.monotonic(), environment(NETCL_COMM_TIMEOUT="150")
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=more, timeout=200, check=False)
    assert done.returncode != 0
    assert time.monotonic() - start < 120
    assert "[save] the path must not be a folder or a device; path=" in done.stderr and "rank 0 failed: FileExistsError" in done.stderr


def test_one_process_needs_neither_mpiexec_nor_mpi4py(tmp_path):
    script = f"import sys; sys.modules['mpi4py'] = None; sys.argv = ['job', 'mlp', {str(tmp_path / 'out.npz')!r}]; import runpy; " + (
        f"runpy.run_path({str(JOB)!r}, run_name='__main__')"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=environment(), timeout=100)
    assert_same(saved(tmp_path / "out.npz"), single("mlp"))


def test_replica_starts_one_process_per_device(tmp_path):
    program = tmp_path / "say.py"
    program.write_text(
        "import sys\nfrom netcl.core.device import get_active_device\nfrom netcl.distributed import world\n"
        "w = world()\nsys.stdout.write(f'{w.rank}/{w.size} {get_active_device().device_name} {sys.argv[1:]}\\n')\n"
    )
    command = [sys.executable, "-m", "netcl.distributed.replica", "--devices", "cpu,cpu", str(program), "--flag", "7"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=100, check=True)
    assert sorted(done.stdout.split("\n")[:-1]) == [f"{rank}/2 NumPy ['--flag', '7']" for rank in range(2)]


def test_netcl_train_on_two_ranks_goes_on_alone(tmp_path):
    from netcl.io import load_model

    words = ["-m", "netcl", "train", "--data", "digits", "--model", "mlp", "--run", str(tmp_path / "run"), "--device", "cpu"]
    for more in (["--epochs", "1", "--distributed", "2"], ["--epochs", "2", "--resume"]):
        done = subprocess.run([sys.executable, *words, *more], capture_output=True, text=True, env=environment(), timeout=200, check=False)
        assert done.returncode == 0, done.stderr
    assert "epoch 1" not in done.stdout + done.stderr
    assert load_model(tmp_path / "run" / "model.netcl")(np.zeros((1, 1, 8, 8), np.float32)).shape == (1, 10)
    assert len((tmp_path / "run" / "log.csv").read_text().splitlines()) == 3


RUNS = """
import json, sys
from pathlib import Path
from netcl.core.device import manager
from netcl.distributed import world
from netcl.ops import random
from netcl.trainer.recipe import Recipe
from netcl.trainer.run import train_run

options = {"model": "mlp", "model_options": {"dropout": 0.5}, "schedule": "constant", "seed": 5}
cpu, streams = manager.default("cpu"), {}
for name, parts in (("straight", [2]), ("cut", [1, 2])):
    for epochs in parts:
        train_run(Recipe(epochs=epochs, **options), Path(sys.argv[1]) / name, cpu, resume=True)
    streams[name] = world().all_gather_object(random.get_state(cpu.queue).as_dict())
if world().rank == 0:
    sys.stdout.write(json.dumps(streams))
"""


def test_ranks_drop_out_differently_and_go_on_with_their_own_numbers(tmp_path):
    from netcl.io import load_model

    program = tmp_path / "runs.py"
    program.write_text(RUNS)
    command = [mpiexec(), "-n", "2", sys.executable, str(program), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(NETCL_PROGRESS="off"), timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    streams = json.loads(done.stdout)
    assert streams["cut"] == streams["straight"]
    assert streams["cut"][0]["seed"] != streams["cut"][1]["seed"]
    straight, cut = (load_model(tmp_path / name / "model.netcl").parameters() for name in ("straight", "cut"))
    for ours, theirs in zip(cut, straight, strict=True):
        np.testing.assert_array_equal(ours.to_host(), theirs.to_host())


@pytest.mark.fault("Ctrl-C to a job", "SIGINT to the process group", "checkpoint, status 130")
def test_ctrl_c_lets_the_ranks_save(tmp_path):
    """It reaches the launcher, mpiexec, the guards and the ranks at once; those above a rank must wait for it, without a word."""
    words = ["-m", "netcl", "train", "--data", "digits", "--model", "mlp", "--run", str(tmp_path), "--epochs", "500", "--distributed", "2"]
    command = [sys.executable, *words]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), start_new_session=True)
    assert job.stdout is not None
    said = []
    while not any("epoch 1/500  loss" in line for line in said):
        said.append(job.stdout.readline())
        assert said[-1], said
    os.killpg(job.pid, signal.SIGINT)
    rest = job.communicate(timeout=60)[0]
    assert job.returncode == 130 and "Traceback" not in rest, rest
    (step,) = re.findall(r"interrupted after step (\d+)", rest)
    assert (tmp_path / "checkpoints" / f"step-{int(step):06d}.netcl").exists()


FAULTS_AT_START = {
    "killed": "os.kill(os.getpid(), 9)",
    "leaves": "os._exit(3)",
    "hangs": "time.sleep(600)",
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("fault", ["hangs", "killed", pytest.param("leaves", marks=pytest.mark.matrix)])
@pytest.mark.fault("rank lost before MPI starts", "killed, leaves or hangs at start", "the job ends in time, rank named")
def test_a_rank_lost_before_mpi_starts_ends_the_job(tmp_path, fault):
    """mpiexec alone waits for it forever, at full load."""
    is_one = "'1' in (os.environ.get('PMI_RANK'), os.environ.get('OMPI_COMM_WORLD_RANK'))"
    as_rank = f"{is_one} and b'--rank' in open('/proc/self/cmdline', 'rb').read().split(b'\\0')"
    (tmp_path / "sitecustomize.py").write_text(f"import os, time\nif {as_rank}:\n    {FAULTS_AT_START[fault]}\n")
    command = [sys.executable, "-m", "netcl.distributed.replica", "-n", "3", "--devices", "cpu", str(JOB), "mlp", str(tmp_path / "out.npz")]
    limit = "4" if fault == "hangs" else "150"
    more = environment(NETCL_COMM_TIMEOUT=limit, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=more, timeout=150, check=False)
    assert done.returncode != 0
    assert time.monotonic() - start < 100
    expected = {"killed": r"rank 1 \(pid", "hangs": r"rank (0, )?1(, 2)? did not start within 4 s"}.get(fault, "")
    assert re.search(expected, done.stderr), done.stderr


@pytest.mark.fault("SIGTERM to a job", "sent to the launcher", "checkpoint, status 143, no process left")
def test_sigterm_lets_the_ranks_save_and_leaves_no_process(tmp_path):
    words = ["-m", "netcl", "train", "--data", "digits", "--model", "mlp", "--run", str(tmp_path), "--epochs", "500", "--distributed", "2"]
    job = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    assert job.stdout is not None
    while "epoch 1/500  loss" not in (line := job.stdout.readline()):
        assert line
    job.terminate()
    rest = job.communicate(timeout=100)[0]  # the pipe is closed when the last process of the job has ended
    assert job.returncode == 128 + signal.SIGTERM and "Traceback" not in rest, rest
    (step,) = re.findall(r"interrupted after step (\d+)", rest)
    assert (tmp_path / "checkpoints" / f"step-{int(step):06d}.netcl").exists()


KILLED_ONCE = """
import os
from pathlib import Path
if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")) and not Path({marker!r}).exists():
    from netcl.trainer import callbacks
    def end(self, batch, logs):
        if self.trainer.epoch == 1:  # the second: the first has left a checkpoint
            Path({marker!r}).touch()
            os.kill(os.getpid(), 9)
    callbacks.NaNGuard.on_train_batch_end = end
"""


def _train(tmp_path, name, *words, fault=""):
    (tmp_path / "sitecustomize.py").write_text(fault)
    options = ["--model", "mlp", "--epochs", "2", "--device", "cpu", "--distributed", "2", "--run", str(tmp_path / name), *words]
    more = environment(NETCL_PROGRESS="off", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    return subprocess.run(
        [sys.executable, "-m", "netcl", "train", *options], capture_output=True, text=True, env=more, timeout=150, check=False
    )


@pytest.mark.fault("rank killed with `--max-restarts`", "SIGKILL once, in the second epoch", "restarted by itself; equal to the bit")
def test_a_job_whose_rank_is_killed_restarts_from_its_last_checkpoint(tmp_path):
    from netcl.io import load_model

    marker = tmp_path / "killed"
    done = _train(tmp_path, "cut", "--max-restarts", "2", fault=KILLED_ONCE.format(marker=str(marker)))
    assert done.returncode == 0 and marker.exists(), done.stderr
    assert len(re.findall(r"netcl: the job ended with status \d+; restart 1 of 2, from its last checkpoint", done.stderr)) == 1, done.stderr
    assert "restart 2" not in done.stderr and "was ended by SIGKILL" in done.stderr
    straight = _train(tmp_path, "straight")
    assert straight.returncode == 0, straight.stderr
    straight, cut = (load_model(tmp_path / name / "model.netcl").parameters() for name in ("straight", "cut"))
    for ours, theirs in zip(cut, straight, strict=True):
        np.testing.assert_array_equal(ours.to_host(), theirs.to_host())


def _descendants(root: int) -> list[int]:
    """Processes that a process has started, directly or not."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.fault(
    "process of a job killed",
    "SIGKILL to any process of a job, at random moments, its start among them",
    "all end in time and resume to the bit",
)
def test_ten_jobs_killed_at_random_moments_end_and_resume_to_the_bit(tmp_path, tried):
    from netcl.io import load_model

    start = time.monotonic()
    straight = _train(tmp_path, "straight")
    assert straight.returncode == 0, straight.stderr
    usual = time.monotonic() - start
    chance, killed = random.Random(11), 0
    for number in range(30):
        if killed == 10:
            break
        words = ["--model", "mlp", "--epochs", "2", "--device", "cpu", "--distributed", "2", "--run", str(tmp_path / f"cut{number}")]
        more = environment(NETCL_PROGRESS="off", NETCL_COMM_TIMEOUT="20")
        with open(tmp_path / "said", "w+") as said:
            job = subprocess.Popen([sys.executable, "-m", "netcl", "train", *words], stdout=said, stderr=said, env=more)
            time.sleep(usual * chance.random() if number > 1 else 0)  # the first two are killed as they start
            while not (victims := _descendants(job.pid)) and job.poll() is None:
                time.sleep(0.001)
            if victims and job.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(victims), signal.SIGKILL)
                    killed += 1
            status = job.wait(timeout=150)
        if status:
            done = _train(tmp_path, f"cut{number}", "--resume")
            assert done.returncode == 0, done.stderr
        straight, cut = (load_model(tmp_path / name / "model.netcl").parameters() for name in ("straight", f"cut{number}"))
        for ours, theirs in zip(cut, straight, strict=True):
            np.testing.assert_array_equal(ours.to_host(), theirs.to_host())
    tried(killed)
    assert killed == 10


@pytest.mark.parametrize(("status", "starts"), [(0, 1), (130, 1), (143, 1), (1, 4), (137, 4)])
def test_only_a_job_that_failed_is_restarted(monkeypatch, tmp_path, status, starts):
    from netcl import cli
    from netcl.distributed import launch

    started = []
    monkeypatch.setattr(launch, "launch", lambda program, ranks, devices: started.append(program) or status)
    words = ["train", "--model", "mlp", "--run", str(tmp_path), "--distributed=2", "--device=cpu", "--overwrite", "--max-restarts", "3"]
    assert cli.main(words) == status
    plain = ["-m", "netcl", "train", "--model", "mlp", "--run", str(tmp_path)]
    assert started == [[*plain, "--overwrite"], *[[*plain, "--resume"]] * (starts - 1)]


@pytest.mark.fault("restart in a used folder", "checkpoints of another run", "refused before the first start")
def test_a_restart_never_resumes_another_run(monkeypatch, tmp_path, capsys):
    from netcl import cli

    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-000003.netcl").write_bytes(b"")
    assert cli.main(["train", "--model", "mlp", "--run", str(tmp_path), "--distributed", "2", "--max-restarts", "1"]) == 1
    assert "the folder of a new run must not hold the checkpoints of another run" in capsys.readouterr().err
    assert cli.main(["train", "--model", "mlp", "--run", str(tmp_path), "--max-restarts", "1"]) == 1
    assert "add --distributed RANKS" in capsys.readouterr().err


def test_positions_are_those_of_the_whole_batch():
    from netcl.data import TensorDataset
    from netcl.distributed import ShardedLoader, thread_worlds
    from netcl.distributed.comm import World

    data = TensorDataset(np.arange(22))
    whole = ShardedLoader(data, 8, shuffle=True, seed=3, world=World())
    parts = []
    for world in thread_worlds(2):
        world.agree = lambda *_: None  # one thread plays both ranks
        parts.append(ShardedLoader(data, 8, shuffle=True, seed=3, world=world))
    batches = [np.concatenate(pair) for pair in zip(*parts, strict=True)]
    for a, b in zip(batches, whole, strict=True):
        np.testing.assert_array_equal(a, b)
    assert parts[0].state_dict() == whole.state_dict()
    with pytest.raises(ValueError, match=r"\[ShardedLoader\] batch_size must be a multiple of the number of ranks.*batch_size=8, ranks=3"):
        ShardedLoader(data, 8, shuffle=True, seed=3, world=thread_worlds(3)[0])


def namespaces_can_be_made() -> bool:
    if os.name != "posix" or os.geteuid() or not shutil.which("ip"):
        return False
    made = subprocess.run(["ip", "netns", "add", "netcl-probe"], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", "netcl-probe"], capture_output=True, check=False)
    return made


def in_namespaces(fault: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "namespaces.py"), "-n", "2", "--fault", fault, str(JOB), "mlp", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**more), timeout=280, check=False)


@pytest.mark.soak
@pytest.mark.skipif(not namespaces_can_be_made(), reason="network namespaces need Linux, root and ip")
@pytest.mark.parametrize("fault", ["outage", "delay", "loss"])
@pytest.mark.fault(
    "network fails for a while",
    "an outage of 2 s; delay and loss by `tc` (netem, or a queue of a slow and short tbf where the kernel has no netem)",
    "the job ends with the same parameters",
)
def test_ranks_survive_a_bad_network(tmp_path, fault):
    done = in_namespaces(fault, str(tmp_path / "out.npz"), "--steps", "300" if fault == "outage" else "20")
    assert done.returncode == 0, done.stderr
    assert fault != "loss" or json.loads(done.stdout.strip().splitlines()[-1])["packets lost"] > 0, done.stdout
    assert_same(saved(tmp_path / "out.npz"), single("mlp", 300 if fault == "outage" else 20))


@pytest.mark.soak
@pytest.mark.skipif(not namespaces_can_be_made(), reason="network namespaces need Linux, root and ip")
@pytest.mark.fault("network cable is cut", "the link of one rank goes down", "all ranks end in time and name the other; resumed")
def test_ranks_that_a_cut_cable_parts_end_and_resume(tmp_path):
    folder, out = str(tmp_path / "checkpoints"), tmp_path / "out.npz"
    done = in_namespaces("cut", str(out), "--steps", "3000", "--checkpoints", folder, NETCL_COMM_TIMEOUT="8")
    assert done.returncode != 0 and re.search(r"rank [01] (did not arrive within 8 s|failed|ends the job)", done.stderr), done.stderr
    assert not out.exists()
    last = max(int(number) for path in Path(folder).iterdir() for number in re.findall(r"\d+", path.name))
    done = run(2, "mlp", str(out), "--steps", str(last + 3), "--checkpoints", folder)
    assert done.returncode == 0, done.stderr
    assert_same(saved(out)[1:], single("mlp", last + 3)[1:])


@pytest.mark.skipif(not namespaces_can_be_made(), reason="network namespaces need Linux, root and ip")
def test_ranks_with_addresses_of_their_own(tmp_path):
    """Two namespaces with a cable between them; what the cable carried is more than what the ranks had to say to each other."""
    out = tmp_path / "out.npz"
    command = [sys.executable, str(ROOT / "tools" / "namespaces.py"), "-n", "2", str(JOB), "mlp", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert_same(saved(out), single("mlp"))
    sent = int(re.search(r"bytes [\d ]*?(\d+)$", done.stdout, re.M)[1])
    assert json.loads(done.stdout.strip().splitlines()[-1])["bytes on the cable"]["rank 0"] > sent
