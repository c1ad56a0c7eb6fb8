"""What netcl keeps on a queue: one object, with parts that are made once and that a command list shares."""

import pytest

import netcl
from netcl import ops
from netcl.core import memory
from netcl.core.commands import NotPlannable
from netcl.core.device import CPUQueue
from netcl.core.kernels import program
from netcl.core.queue_state import queue_state
from netcl.core.tensor import Tensor
from netcl.engine.plan import command_list
from netcl.ops.random import stream_of


def test_a_queue_gets_one_attribute(cl_device):
    x = Tensor.ones((4,), queue=cl_device.queue)
    netcl.synchronize(cl_device)
    assert (ops.add(x, x).tolist(), [name for name in vars(cl_device.queue) if "netcl" in name]) == ([2.0] * 4, ["netcl"])


def test_queues_of_a_context_share_its_programs_but_no_plans(cl_device):
    cl = pytest.importorskip("pyopencl")
    queues = [cl.CommandQueue(cl_device.context) for _ in range(2)]
    for queue in queues:
        x = Tensor.ones((3, 5), queue=queue)
        assert ops.add(x, x).tolist() == [[2.0] * 5] * 3
    first, second = map(queue_state, queues)
    assert first.context is second.context and first.plans.keys() == second.plans.keys()
    assert all(first.plans[key] is not second.plans[key] for key in first.plans) and first.plans
    program.forget("plans")
    assert first.plans == second.plans == {}


def test_a_part_is_made_once():
    state, made = CPUQueue().netcl, []
    assert [state.part("random", lambda queue: made.append(queue) or len(made)) for _ in range(2)] == [1, 1]
    assert made == [state.queue] and state.context is None


def test_a_command_list_shares_all_but_its_backend_plans_and_random_numbers(cl_device):
    x = Tensor.ones((4,), queue=cl_device.queue)
    commands, own = command_list(x.queue, [x]), x.queue.netcl
    assert commands.netcl.backend is commands and commands.netcl.plans == {}
    assert commands.netcl.context is own.context and commands.netcl.queue is x.queue
    assert memory.get_persistent_pool(commands) is own.pool
    with pytest.raises(NotPlannable):
        stream_of(commands)
