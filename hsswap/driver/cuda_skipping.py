"""A graph as the body of an IF node: a captured round that runs while a sequence does.

::

    kernel "running" -> IF node { child graph: what was captured }

Its condition is set by the kernel, through a function of the device runtime that the cubin leaves
to the driver's loader: NVRTC compiles it, and no library has to be linked.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from hsswap.driver.cuda_context import Context
from hsswap.driver.cuda_errors import checked
from hsswap.driver.cuda_modules import Modules, key_of
from hsswap.driver.round_operations import RunningWork

THREADS = 32


def conditional(context: Context, modules: Modules, captured: int, work: RunningWork) -> Any:
    """A raw graph of the raw graph ``captured`` behind the condition. The context is current.

    Raises CudaError where the driver takes no such body.
    """
    driver, name = context.driver, context.name
    graph = checked(driver.cuGraphCreate(0), f"{name}: cuGraphCreate")
    try:
        what = f"{name}: cuGraphConditionalHandleCreate"
        handle = checked(driver.cuGraphConditionalHandleCreate(graph, context.handle, 0, 0), what)
        condition = _condition(context, modules, graph, handle, work)
        node = driver.CUgraphNodeParams()
        node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle = handle
        node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
        node.conditional.size = 1
        node.conditional.ctx = context.handle
        what = f"{name}: cuGraphAddNode"
        checked(driver.cuGraphAddNode(graph, [condition], None, 1, node), what)
        body = node.conditional.phGraph_out[0]
        what = f"{name}: cuGraphAddChildGraphNode"
        checked(driver.cuGraphAddChildGraphNode(body, [], 0, driver.CUgraph(captured)), what)
    except BaseException:
        driver.cuGraphDestroy(graph)
        raise
    return graph


def _condition(
    context: Context, modules: Modules, graph: Any, handle: Any, work: RunningWork
) -> Any:
    """The node of the kernel that sets the handle."""
    driver = context.driver
    params = struct.pack(
        "<QQQQQii",
        int(handle),
        work.flags.address,
        work.pos.address,
        work.pend.address,
        work.capacity.address,
        work.flags.shape[0],
        0,
    )
    packed = ctypes.create_string_buffer(params, len(params))  # copied into the node
    addresses = (ctypes.c_void_p * 1)(ctypes.addressof(packed))
    node = driver.CUDA_KERNEL_NODE_PARAMS()
    node.func = modules.function(key_of("running", {})).handle
    node.gridDimX = node.gridDimY = node.gridDimZ = 1
    node.blockDimX, node.blockDimY, node.blockDimZ = THREADS, 1, 1
    node.kernelParams = ctypes.addressof(addresses)
    what = f"{context.name}: cuGraphAddKernelNode"
    return checked(driver.cuGraphAddKernelNode(graph, [], 0, node), what)
