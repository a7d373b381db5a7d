"""How the graph of an IF node is put together, against a driver that only listens."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cuda.bindings import driver as bindings

from hsswap.driver.cuda_context import Context
from hsswap.driver.cuda_errors import CudaError
from hsswap.driver.cuda_modules import Modules, key_of
from hsswap.driver.cuda_skipping import conditional
from hsswap.driver.round_operations import RunningWork
from hsswap.driver.tensor import Tensor

GRAPH, HANDLE, KERNEL, CONDITION, CAPTURED, FUNCTION, CONTEXT = 11, 22, 33, 44, 55, 66, 77


class Listening:
    """The bindings' own records and enums; functions that note their calls, one of which fails."""

    def __init__(self, failing: str = "") -> None:
        self._failing = failing
        self.calls: list[str] = []
        self.params = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(bindings, name)

    def _done(self, name: str, *result: object) -> tuple[Any, ...]:
        self.calls.append(name)
        failed = name == self._failing
        codes = bindings.CUresult
        return (codes.CUDA_ERROR_NOT_SUPPORTED if failed else codes.CUDA_SUCCESS, *result)

    def cuGraphCreate(self, flags: int) -> tuple[Any, ...]:
        assert flags == 0
        return self._done("create", GRAPH)

    def cuGraphDestroy(self, graph: int) -> tuple[Any, ...]:
        assert graph == GRAPH
        return self._done("destroy")

    def cuGraphConditionalHandleCreate(
        self, graph: int, context: Any, value: int, flags: int
    ) -> tuple[Any, ...]:
        assert (graph, int(context), value, flags) == (GRAPH, CONTEXT, 0, 0)
        return self._done("handle", bindings.CUgraphConditionalHandle(HANDLE))

    def cuGraphAddKernelNode(
        self, graph: int, before: list[Any], count: int, node: Any
    ) -> tuple[Any, ...]:
        assert (graph, before, count) == (GRAPH, [], 0)
        assert int(node.func) == FUNCTION
        assert (node.gridDimX, node.blockDimX) == (1, 32)
        first = ctypes.c_void_p.from_address(int(node.kernelParams)).value
        assert first is not None
        self.params = ctypes.string_at(first, 48)
        return self._done("kernel", bindings.CUgraphNode(KERNEL))

    def cuGraphAddNode(
        self, graph: int, before: list[Any], data: None, count: int, node: Any
    ) -> tuple[Any, ...]:
        assert (graph, [int(b) for b in before], data, count) == (GRAPH, [KERNEL], None, 1)
        kinds = bindings.CUgraphConditionalNodeType
        assert int(node.conditional.handle) == HANDLE
        assert node.conditional.type == kinds.CU_GRAPH_COND_TYPE_IF
        assert node.conditional.size == 1
        assert int(node.conditional.ctx) == CONTEXT
        return self._done("condition", bindings.CUgraphNode(CONDITION))

    def cuGraphAddChildGraphNode(
        self, body: Any, before: list[Any], count: int, child: Any
    ) -> tuple[Any, ...]:
        assert isinstance(body, bindings.CUgraph)  # which the driver fills in
        assert (before, count, int(child)) == ([], 0, CAPTURED)
        return self._done("child", bindings.CUgraphNode(1))


def made(driver: Listening) -> Any:
    """``conditional`` on that driver."""
    context = SimpleNamespace(driver=driver, name="cuda:0", handle=bindings.CUcontext(CONTEXT))
    asked: list[object] = []

    def function(key: object) -> Any:
        asked.append(key)
        return SimpleNamespace(handle=bindings.CUfunction(FUNCTION))

    modules = SimpleNamespace(function=function)
    words = [Tensor(100 + i, (5,), (4,), "u32", True, None) for i in range(4)]
    work = RunningWork(*words)
    graph = conditional(cast(Context, context), cast(Modules, modules), CAPTURED, work)
    assert asked == [key_of("running", {})]
    return graph


def test_a_kernel_then_a_node_with_the_captured_graph() -> None:
    driver = Listening()
    assert made(driver) == GRAPH
    assert driver.calls == ["create", "handle", "kernel", "condition", "child"]
    assert struct.unpack("<QQQQQii", driver.params) == (HANDLE, 100, 101, 102, 103, 5, 0)


@pytest.mark.parametrize("failing", ["handle", "kernel", "condition", "child"])
def test_what_the_driver_refuses_leaves_no_graph(failing: str) -> None:
    driver = Listening(failing)
    with pytest.raises(CudaError, match=r"cuda:0.*NOT_SUPPORTED|not supported"):
        made(driver)
    assert driver.calls[-1] == "destroy"
