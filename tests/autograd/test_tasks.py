"""Grad mode, anomaly mode and autocast across asyncio tasks and threads that run at the same time."""

import asyncio
import threading

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import amp
from netcl.core.tensor import Tensor


def modes():
    product = ag.matmul(Tensor.ones((2, 2), requires_grad=True), Tensor.ones((2, 2)))
    return ag.is_grad_enabled(), product.requires_grad, product.dtype, amp.get_autocast_dtype()


PLAIN = (True, True, "float32", None)
BLOCKS = {
    "no_grad": (ag.no_grad, (False, False, "float32", None)),
    "autocast": (lambda: amp.autocast(dtype="bfloat16"), (True, True, "bfloat16", "bfloat16")),
    "anomaly": (ag.detect_anomaly, PLAIN),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.fault("mode set in an asyncio task", "`no_grad`, `autocast`, `detect_anomaly` around an `await`", "other tasks do not see it")
def test_a_block_of_a_task_is_not_seen_by_others(device, name):
    block, inside = BLOCKS[name]

    async def main():
        entered, looked = asyncio.Event(), asyncio.Event()

        async def one():
            with block():
                entered.set()
                await looked.wait()
                child = asyncio.create_task(asyncio.sleep(0, modes()))
                return modes(), await child, modes()

        async def other():
            await entered.wait()
            seen = modes()
            with ag.enable_grad(), amp.autocast(enabled=False):
                looked.set()
                await asyncio.sleep(0)
            return seen, modes()

        return await asyncio.gather(one(), other())

    assert asyncio.run(main()) == [(inside, inside, inside), (PLAIN, PLAIN)]
    assert modes() == PLAIN


def test_a_child_task_inherits_the_modes_it_was_made_with(device):
    async def look():
        await asyncio.sleep(0)
        return modes()

    async def main():
        with ag.no_grad():
            child = asyncio.create_task(look())
        return await child, await asyncio.to_thread(modes)

    assert asyncio.run(main()) == ((False, False, "float32", None), PLAIN)


def test_a_decorator_keeps_the_modes_of_concurrent_calls_apart():
    inside, first_out = threading.Barrier(2), threading.Event()
    seen = {}

    @ag.no_grad()
    def both(name):
        inside.wait(30)
        if name == "second":
            first_out.wait(30)
        return ag.is_grad_enabled()

    def run(name, outside):
        with ag.set_grad_enabled(outside):
            was = both(name)
            first_out.set()
            seen[name] = was, ag.is_grad_enabled()

    threads = [threading.Thread(target=run, args=args) for args in (("first", True), ("second", False))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == {"first": (False, True), "second": (False, False)}


def test_gradients_of_concurrent_tasks_are_those_of_single_ones(device):
    async def train(scale):
        x = Tensor.from_host(np.full((2, 2), scale, np.float32), requires_grad=True)
        y = ag.sum(ag.matmul(x, x))
        await asyncio.sleep(0)
        y.backward()
        with ag.no_grad():
            await asyncio.sleep(0)
            return float((x.grad * 1).numpy()[0, 0])

    async def main():
        return await asyncio.gather(*(train(scale) for scale in (1.0, 2.0, 3.0)))

    assert asyncio.run(main()) == [4.0, 8.0, 12.0]
