"""Who waits for which memory: notes that are neither lost nor kept for ever."""

from __future__ import annotations

import threading

import netcl.autograd as ag
from netcl.core.tensor import Tensor
from netcl.ops import fusion


def test_weights_that_never_change_do_not_gather_notes(device):
    x, w = (Tensor.ones((3,), queue=device.queue) for _ in range(2))
    function = ag.jit_compile(lambda x: x * w)
    for _ in range(200):
        function(x)
    assert len(fusion._readers[id(fusion._memory(w))]) < 100


class Interrupted(dict):
    """Before the first entry goes, another thread has its turn, for as long as it is not kept waiting."""

    def __init__(self, entries: dict, turn: threading.Thread):
        super().__init__(entries)
        self.turn = turn

    def let_in(self) -> None:
        if self.turn.ident is None:
            self.turn.start()
            self.turn.join(0.2)

    def pop(self, *given):
        self.let_in()
        return super().pop(*given)

    def __delitem__(self, key) -> None:
        self.let_in()
        super().__delitem__(key)


def test_a_thread_that_tidies_up_loses_no_note_of_another(device, monkeypatch):
    x, left = Tensor.ones((3,), queue=device.queue), []

    def leave() -> None:
        with fusion.fusing():
            left.append(x * 2.0)

    turn = threading.Thread(target=leave)
    monkeypatch.setattr(fusion, "_readers", Interrupted({id(fusion._memory(x)): []}, turn))
    fusion._shrink()
    turn.join()
    x.fill_(5.0)
    assert left[0].tolist() == [2.0, 2.0, 2.0]


def test_an_op_that_was_computed_in_part_is_computed_from_what_it_read(device, monkeypatch):
    monkeypatch.setattr(fusion, "MOST_WAITING", 2)

    @ag.jit_compile
    def function(x):
        y = ag.std(x, axis=-1)
        x.fill_(7.0)
        return y

    x = ag.tensor([[1.0, 3.0], [2.0, 8.0]], queue=device.queue)
    want = ag.std(x, axis=-1).tolist()
    assert function(x).tolist() == want
