"""What test_loader.py runs in a process of its own: a loader whose workers meet the trouble that the command line names."""

import os
import random
import resource
import signal
import sys
import threading
import time

import numpy as np

from netcl.data import DataLoader, Dataset, WorkerError


class Numbered(Dataset):
    """Samples of which one is bad."""

    def __init__(self, trouble=""):
        self.trouble = trouble

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 33:
            getattr(self, self.trouble, lambda: None)()
        if (index, self.trouble) == (33, "unpicklable"):
            return np.full(4, index, np.float32), threading.Lock()
        return np.full(12 if (index, self.trouble) == (33, "shape") else 4, index, np.float32), index

    def raises(self):
        raise KeyError("no such picture")

    def killed(self):
        os.kill(os.getpid(), 9)

    def hangs(self):
        time.sleep(1000)

    def leaves(self):
        sys.exit(3)


def noisy(x, rng):
    return x + rng.standard_normal(x.shape, np.float32)


def made(trouble="", **more):
    arguments = {"batch_size": 6, "num_workers": 2, "seed": 1, "shuffle": False} | more
    loader = DataLoader(Numbered(trouble), **arguments)
    loader.timeout = 1.5 if trouble else 30.0
    return loader


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def trouble(*kinds):
    """Each kind of trouble ends the iteration, and no worker is left; then the loader goes on with good samples."""
    for kind in kinds:
        loader = made(kind)
        got, pids, began = 0, [], time.monotonic()
        try:
            for _ in loader:
                got, pids, began = got + 1, pids or loader.worker_pids(), time.monotonic()
        except WorkerError as error:
            say(f"{kind}: {got} batches, {time.monotonic() - began:.1f} s: {str(error).splitlines()[0]}")
        assert loader.worker_pids() == [] and not any(alive(pid) for pid in pids), pids
    loader.dataset.trouble = ""
    assert len(list(loader)) == 7


def moments(seed, count, *kinds):
    """Workers are killed or stopped at random moments: all batches arrive, or an error names the worker, and then the loader works."""
    chance = random.Random(int(seed))
    loader, wanted = made(), [x for x, _ in made(num_workers=0)]
    for _ in range(int(count)):
        kind, victim, late = chance.choice(kinds), chance.randrange(2), chance.choice((0, 0.001, 0.01))
        at = chance.randrange(6)  # 0: while the workers start
        loader.timeout = 2.0 if kind == "SIGSTOP" else 30.0
        got, outcome, hit = [], "whole", threading.Event()

        def attack(victim=victim, kind=kind, late=late, hit=hit):
            while not (pids := loader.worker_pids()) and not hit.wait(0.001):
                pass
            time.sleep(late)
            if pids:
                os.kill(pids[victim], getattr(signal, kind))

        thread = threading.Thread(target=attack)
        try:
            if at == 0:
                thread.start()
            for x, _ in loader:
                got.append(x)
                if len(got) == at:
                    thread.start()
        except WorkerError as error:
            outcome = "told"
            assert f"worker {victim}" in str(error), error
        hit.set()
        thread.join()
        assert all(np.array_equal(a, b) for a, b in zip(got, wanted, strict=False)) and (outcome == "told" or len(got) == 7)
        loader.close()
        say(f"{kind} before batch {at}: {outcome}")
    loader.timeout = 30.0
    assert len(list(loader)) == 7
    loader.close()


def full_shared_memory():
    """/dev/shm, which containers keep small, is full."""
    file, room = os.open("/dev/shm/filling", os.O_CREAT | os.O_WRONLY), 0
    try:
        while True:
            room += os.write(file, bytes(4096))
    except OSError:
        os.close(file)
    assert 0 < room < 1 << 20
    assert len(list(made(batch_size=6))) == 7
    say("whole")


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def agree():
    """Any number of workers gives the same batches, epoch after epoch, with the same workers."""
    wanted = [batch for loader in [made(num_workers=0, transforms=noisy)] for _ in range(2) for batch in loader]
    for workers in (1, 3):
        with made(num_workers=workers, transforms=noisy) as loader:
            first = list(loader)
            pids = loader.worker_pids()
            held = iter(loader)  # left with a batch out, and not dropped
            next(held)
            loader.load_state_dict({**loader.state_dict(), "epoch": 1, "batch": 0})
            got = [*first, *loader]
            assert pids == loader.worker_pids() and len(pids) == workers
            assert all(np.array_equal(a, b) for one, other in zip(got, wanted, strict=True) for a, b in zip(one, other, strict=True))
    sizes = {"batch_size": 1, "batch_sampler": [[0], [1, 2, 3], [4, 5, 6, 7, 8], [9]], "shuffle": False}
    for one, other in zip(*(list(made(num_workers=workers, transforms=noisy, **sizes)) for workers in (0, 2)), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    say("agreed")


class Drawn(Dataset):
    """Samples of three sources of random numbers that are not the loader's."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        import netcl

        return np.array([random.random(), np.random.rand(), netcl.rand(1, device="cpu").item()])


def draws():
    """The draws of workers are repeatable, and differ by worker and by epoch."""

    def epochs(**more):
        with DataLoader(Drawn(), num_workers=2, seed=3, **more) as loader:
            return [np.concatenate(list(loader)) for _ in range(2)]

    for options in ({}, {"persistent_workers": False}):
        first, second = epochs(**options), epochs(**options)
        assert np.array_equal(first, second)
        assert all(len(set(column)) == 8 for column in np.concatenate(first).T), first
    say("drawn")


def context(selector, order):
    """A context before the workers, or after: batches reach the device and kernels run."""
    from netcl.core.device import manager

    loader = made(transforms=noisy)
    if order == "workers-first":
        next(iter(loader))
    handle = manager.default(selector)
    loader.device_queue = handle
    total = sum(float((x * 0 + 1).sum().item()) for _ in range(2) for x, _ in loader)
    assert total == 2 * 40 * 4, total
    loader.close()
    say("trained")


def no_memory():
    """No file may be larger than four kilobytes, shared memory included."""
    sys.dont_write_bytecode = True  # it would be cut too, and fail in other processes
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    loader = made(batch_size=1000)
    try:
        next(iter(loader))
    except MemoryError as error:
        say(error)
    assert loader.worker_pids() == []


def lambda_transform():
    try:
        next(iter(made(transforms=lambda x: x)))
    except WorkerError as error:
        say(error)


def wait_to_be_killed():
    loader = made(batch_size=1)
    iterator = iter(loader)
    next(iterator)
    say(" ".join(map(str, loader.worker_pids())))
    time.sleep(100)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
