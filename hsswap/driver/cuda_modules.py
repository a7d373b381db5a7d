"""Kernels on a GPU: compiled, loaded once, and launched with one packed parameter struct."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hsswap import ptx
from hsswap.driver.cuda_context import Context
from hsswap.driver.cuda_errors import checked
from hsswap.driver.cuda_seam import Grid, Launch
from hsswap.driver.cuda_stream import PARAM_BYTES, StreamState
from hsswap.driver.nvrtc import Compiler
from hsswap.errors import DeviceError

PROGRAMMATIC = (9, 0)
"""Compute capability from which a kernel may begin before the one in front of it has ended."""

SHARED_BYTES = 48 << 10
"""Static and dynamic shared memory beyond this together has to be asked for."""

Key = tuple[str, tuple[tuple[str, int | str], ...]]


@dataclass(slots=True)
class _Function:
    handle: Any
    param_bytes: int
    shared_bytes: int  # as far as asked for


class Prepared:
    """A launch with all but its parameters: a call with a pointer to a list of their addresses."""

    __slots__ = ("_config", "_context", "_handle", "_name")

    def __init__(self, context: Context, name: str, config: Any, handle: Any) -> None:
        self._context, self._name, self._config, self._handle = context, name, config, handle

    def __call__(self, arguments: int) -> None:
        """Launch it. The stream's lock is held, the context current. Raises CudaError."""
        status = self._context.driver.cuLaunchKernelEx(self._config, self._handle, arguments, 0)
        if status[0]:
            checked(status, f"{self._context.name}: launch of {self._name}")


def key_of(kernel: str, constants: ptx.Constants) -> Key:
    """One kernel with one set of constants."""
    items = tuple(constants.items())
    return kernel, items if len(items) < 2 else _sorted(items)


@lru_cache(maxsize=4096)
def _sorted(items: tuple[tuple[str, int | str], ...]) -> tuple[tuple[str, int | str], ...]:
    return tuple(sorted(items))


class Modules:
    """The kernels of one device. Any thread may use it; the context must be current."""

    def __init__(self, context: Context, compiler: Compiler) -> None:
        self._context = context
        self._compiler = compiler
        self._lock = threading.Lock()
        self._functions: dict[Key, _Function] = {}
        self._modules: dict[Key, Any] = {}
        self._clusters: dict[tuple[Key, Grid, int, int], int] = {}

    def function(self, key: Key) -> _Function:
        """The loaded kernel; compiles it if this is the first use."""
        found = self._functions.get(key)
        if found is not None:
            return found
        self.load([key])
        return self._functions[key]

    def load(self, keys: list[Key]) -> None:
        """Compile and load kernels, those of one file and set of constants together; blocks.

        Raises DeviceError for the first that fails.
        """
        files: dict[Key, ptx.Kernel] = {}
        for name, constants in keys:
            kernel = ptx.KERNELS.get(name)
            if kernel is None:
                raise DeviceError(f"kernel {name!r} is unknown; known: {', '.join(ptx.KERNELS)}")
            if (kernel.file, constants) not in self._modules:
                files[kernel.file, constants] = kernel
        # Without the lock: what is loaded can be launched meanwhile, and the compiler lets go of
        # the interpreter.
        asked = [(kernel, dict(file[1])) for file, kernel in files.items()]
        cubins = dict(zip(files, self._compiler.compile_all(asked), strict=True))
        with self._lock, self._context.relaxed():
            for key in keys:
                if key not in self._functions:
                    self._functions[key] = self._load(key, cubins)

    def _load(self, key: Key, cubins: dict[Key, bytes]) -> _Function:
        kernel = ptx.KERNELS[key[0]]
        driver = self._context.driver
        what = f"{self._context.name}: loading kernel {key[0]}"
        module_key = (kernel.file, key[1])
        module = self._modules.get(module_key)
        if module is None:
            cubin = cubins[module_key]
            image = ctypes.create_string_buffer(cubin, len(cubin))
            module = checked(driver.cuModuleLoadData(ctypes.addressof(image)), what)
            self._modules[module_key] = module
        handle = checked(driver.cuModuleGetFunction(module, kernel.entry.encode()), what)
        if "CLUSTER" in dict(key[1]):  # of more than 8 blocks, where the GPU has them
            kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            driver.cuFuncSetAttribute(handle, kind, 1)
        # Else the driver may load it at its first launch, and wait for the GPU to do so.
        checked(driver.cuFuncLoad(handle), what)
        _, param_bytes = checked(driver.cuFuncGetParamInfo(handle, 0), what)
        kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        static_bytes = int(checked(driver.cuFuncGetAttribute(kind, handle), what))
        return _Function(handle, int(param_bytes), SHARED_BYTES - static_bytes)

    def launch(self, state: StreamState, launch: Launch) -> None:
        """See ``Launcher.launch``; the stream's lock is held."""
        kernel, constants, grid, block, shared_bytes, params, cluster, follows = launch
        if not (grid.x and grid.y and grid.z):
            return
        key = key_of(kernel, constants)
        function = self.function(key)
        if len(params) != function.param_bytes or len(params) > PARAM_BYTES:
            raise DeviceError(
                f"kernel {kernel} takes {function.param_bytes} bytes of parameters, "
                f"{len(params)} were packed; report this"
            )
        self._ask_for_shared(function, key, shared_bytes)
        ctypes.memmove(state.params, params, len(params))
        config = state.configs.get((cluster, follows))
        if config is None:
            config = self._config(state, cluster, follows)
            state.configs[cluster, follows] = config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared_bytes
        status = self._context.driver.cuLaunchKernelEx(
            config, function.handle, ctypes.addressof(state.param_list), 0
        )
        if status[0]:
            checked(status, f"{self._context.name}: launch of {kernel}")
        state.last_launch = launch

    def prepared(self, state: StreamState, launch: Launch) -> Prepared:
        """The launch, to be made again with other parameters."""
        key = key_of(launch.kernel, launch.constants)
        function = self.function(key)
        self._ask_for_shared(function, key, launch.shared_bytes)
        config = self._config(state, launch.cluster, launch.follows)
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes = launch.shared_bytes
        return Prepared(self._context, launch.kernel, config, function.handle)

    def _config(self, state: StreamState, cluster: int, follows: bool) -> Any:
        """Of launches on a stream, without grid and blocks."""
        config = self._context.driver.CUlaunchConfig()
        config.hStream = state.handle
        self._set_attributes(config, cluster, follows)
        return config

    def _ask_for_shared(self, function: _Function, key: Key, shared_bytes: int) -> None:
        if shared_bytes <= function.shared_bytes:
            return
        driver = self._context.driver
        kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        status = driver.cuFuncSetAttribute(function.handle, kind, shared_bytes)
        checked(status, f"{self._context.name}: {shared_bytes} bytes of shared memory for {key[0]}")
        function.shared_bytes = shared_bytes

    def _set_attributes(self, config: Any, cluster: int, follows: bool) -> None:
        driver, attributes = self._context.driver, []
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x = cluster
            attribute.value.clusterDim.y = 1
            attribute.value.clusterDim.z = 1
            attributes.append(attribute)
        if follows and self._context.compute_capability >= PROGRAMMATIC:
            kinds, attribute = driver.CUlaunchAttributeID, driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if attributes:
            config.attrs = attributes
            config.numAttrs = len(attributes)

    def max_active_clusters(self, launch: Launch) -> int:
        """See ``Launcher.max_active_clusters``."""
        key, block = key_of(launch.kernel, launch.constants), launch.block
        shared_bytes, cluster = launch.shared_bytes, launch.cluster
        asked = (key, block, shared_bytes, cluster)
        known = self._clusters.get(asked)
        if known is None:
            function = self.function(key)
            self._ask_for_shared(function, key, shared_bytes)
            driver = self._context.driver
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = block
            config.sharedMemBytes = shared_bytes
            self._set_attributes(config, cluster, False)
            result = driver.cuOccupancyMaxActiveClusters(function.handle, config)
            known = int(checked(result, f"{self._context.name}: cuOccupancyMaxActiveClusters"))
            self._clusters[asked] = known
        return known

    def close(self) -> None:
        """Unload everything; nothing may be in flight."""
        for module in self._modules.values():
            self._context.driver.cuModuleUnload(module)
        self._modules.clear()
        self._functions.clear()
