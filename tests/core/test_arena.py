"""Pieces of segments: they never overlap, join again, and segments go after their pieces."""

import random
import threading

import pytest

from netcl.core.arena import MOST_PIECES, Arena


class Memory:
    """A buffer that knows where it lies and tells when it goes."""

    def __init__(self, of, begin, nbytes, gone):
        self.of, self.begin, self.size, self.gone = of, begin, nbytes, gone

    def get_sub_region(self, offset, nbytes):
        return Memory(id(self), offset, nbytes, self.gone)

    def __del__(self):
        self.gone.append((self.of, id(self)))


class Driver:
    def __init__(self, limit=1 << 60):
        self.held, self.gone, self.asked = 0, [], []
        self.arena = Arena(self.create, self.resized, limit)

    def create(self, nbytes, what):
        self.asked.append(nbytes)
        return Memory(None, 0, nbytes, self.gone)

    def resized(self, change):
        self.held += change


def root(piece):
    return id(piece) if piece.of is None else piece.of


def test_pieces_never_overlap():
    driver, rng, live = Driver(), random.Random(0), []
    for _ in range(3000):
        if rng.random() < 0.55:
            piece = driver.arena.take(rng.choice((3, 4, 7, 16, 40, rng.randrange(1, 60))))
            for other in live:
                apart = piece.begin + piece.size <= other.begin or other.begin + other.size <= piece.begin
                assert root(piece) != root(other) or apart
            live.append(piece)
        elif live:
            driver.arena.returned.append(live.pop(rng.randrange(len(live))))
        free = sum(n * count for n, count in driver.arena.stretches().items())
        assert driver.held == free + sum(piece.size for piece in live)
    while live:
        driver.arena.returned.append(live.pop())
    driver.arena.trim()
    assert driver.held == 0 and not driver.arena.stretches() and not driver.arena.buffers()


def test_the_smallest_stretch_that_holds_it_is_taken():
    arena = Driver().arena
    kept = [arena.take(n) for n in (5, 9, 7)]
    places = [id(piece) for piece in kept]
    while kept:
        arena.returned.append(kept.pop())
    assert [id(arena.take(n)) for n in (6, 9, 5)][1:] == [places[1], places[0]]


def test_memory_grows_by_what_is_missing():
    driver = Driver(limit=100)
    for piece in [driver.arena.take(n) for n in (30, 40, 50)]:
        driver.arena.returned.append(piece)
    driver.arena.take(80)
    assert (driver.asked[-1], driver.held) == (90, 120)  # of what was free 50 and 40 were joined
    driver.arena.take(100)
    assert driver.asked[-1] == 100  # with the 30 that are free it would be more than the driver allows
    assert (driver.arena.hits, driver.arena.misses) == (0, 5)


def test_segments_go_after_their_pieces_even_if_somebody_keeps_one():
    driver = Driver()
    known, other = driver.arena.take(10), driver.arena.take(6)
    driver.arena.returned.append(known)
    parts = [driver.arena.take(4), driver.arena.take(6)]
    known = None
    for part in (*parts, other):
        driver.arena.returned.append(part)
    del part, other
    parts.pop()
    driver.arena.trim()
    assert driver.held == 0
    segments = [at for at, (of, _) in enumerate(driver.gone) if of is None]
    assert len(segments) == 1  # the other's, which nobody knows
    parts.clear()
    driver.arena.take(1)
    driver.arena.returned.append(driver.arena.take(1))
    driver.arena.trim()
    order = [of for of, _ in driver.gone]
    assert order.count(None) >= 2
    for at, (of, me) in enumerate(driver.gone):
        if of is None:
            assert all(parent != me for parent, _ in driver.gone[at:] if parent is not None)


def test_ever_other_sizes_are_not_all_remembered():
    driver = Driver()
    driver.arena.returned.append(driver.arena.take(4 * MOST_PIECES))
    for n in range(1, 2 * MOST_PIECES):
        driver.arena.returned.append(driver.arena.take(n))
    assert len(driver.arena.buffers()) <= MOST_PIECES + 1 and driver.arena.misses == 1


@pytest.mark.parametrize("threads", [4])
def test_threads_share_it(threads):
    driver, wrong = Driver(), []

    def work(seed):
        rng, mine = random.Random(seed), []
        for _ in range(400):
            if rng.random() < 0.6:
                piece = driver.arena.take(rng.randrange(1, 50))
                piece.owner = seed
                mine.append(piece)
            elif mine:
                piece = mine.pop()
                if piece.owner != seed:
                    wrong.append(piece)
                driver.arena.returned.append(piece)
        for piece in mine:
            driver.arena.returned.append(piece)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    driver.arena.trim()
    assert not wrong and driver.held == 0
