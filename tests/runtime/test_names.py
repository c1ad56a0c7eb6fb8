"""The names that a compiled function is guarded by are those in its code, whatever the version of Python."""

from __future__ import annotations

from netcl.replay.names import ANY, FIRST, names_in


def method(self, x):
    import a.b  # noqa: F401

    from .c import d  # noqa: F401

    self.q = self.model.inner(x) + g.h.k  # noqa: F821
    x.loose.y = 3
    clip, rate = getattr(self, "clip", None), getattr(self.opt, "lr")  # noqa: B009
    super().step(x)  # type: ignore[misc]
    return [self.items[i].r for i in x], lambda: self.deep.er, f"{clip} {rate}"


def rebinds(self, name):
    global counted
    counted = getattr(self, name)
    self = name.other
    return self.value


def test_chains_that_begin_at_a_name():
    found = names_in(method.__code__)
    chains = {(FIRST, "deep", "er"), (FIRST, "items"), (FIRST, "model", "inner"), (FIRST, "opt"), (FIRST,), ("g", "h", "k")}
    assert found.paths - {("getattr",), ("super",)} == chains and found.stores == {(FIRST, "q")}


def test_attributes_of_values_without_a_name():
    found = names_in(method.__code__)
    assert found.loose == {"loose", "r", "step"} and found.loose_stores == {"y"}
    assert found.optional == {"clip", "lr"} and found.imports == {("a.b", 0, ""), ("c", 1, ""), ("c", 1, "d")}


def test_an_argument_that_is_set_is_a_local_variable():
    found = names_in(rebinds.__code__)
    assert found.loose == {"other", "value"} and found.optional == {ANY} and found.stores == {("counted",)}
