/* A stand-in for libcuda.so.1: enough of the driver for kvikio and hsswap, without a GPU.
 *
 * Device memory is a memfd mapped twice. Its "device address" is mapped without any permission, so
 * that a processor that touches it faults, as with the real thing; copies go through the second
 * mapping, the shadow. Everything runs at once: a stream is a number.
 *
 * What it is strict about: copies, streams and pinned memory need a current context on the calling
 * thread; freeing what is not there, or copying beyond an allocation, is an error.
 *
 * For tests: fake_cuda_count(name) counts calls and what is live; fake_cuda_fail(name, n, code) lets
 * the n-th next call of that name fail.
 *
 *   cc -shared -fPIC -O1 -pthread -Wl,-soname,libcuda.so.1 -o libcuda.so.1 cuda.c
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SUCCESS 0
#define INVALID_VALUE 1
#define OUT_OF_MEMORY 2
#define NOT_INITIALIZED 3
#define INVALID_DEVICE 101
#define INVALID_CONTEXT 201
#define NOT_FOUND 500

#define DRIVER_VERSION 13000
#define MEMORY_HOST 1
#define MEMORY_DEVICE 2
#define MEMORY_POOLED 3 /* device memory that belongs to no context */
#define ALLOCATIONS 4096
#define PAGE 4096u

typedef int result;
typedef uintptr_t deviceptr;
typedef void *handle;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialized;
static int primary_references;
static int primary; /* its address is the context */
static __thread handle stack[16];
static __thread int depth;

/* kind 0: free. */
static struct { uintptr_t base; size_t bytes; char *shadow; int kind; } allocations[ALLOCATIONS];
static struct { const char *name; long count; } counters[64];
static struct { char name[48]; int left; result code; } fault;

static long *counter(const char *name)
{
    for (int i = 0; i < 64; i++) {
        if (!counters[i].name) counters[i].name = name;
        if (!strcmp(counters[i].name, name)) return &counters[i].count;
    }
    abort();
}

static result begin(const char *name)
{
    result code = SUCCESS;
    pthread_mutex_lock(&lock);
    ++*counter(name);
    if (fault.left > 0 && !strcmp(fault.name, name) && --fault.left == 0) code = fault.code;
    pthread_mutex_unlock(&lock);
    return code;
}

/* Counts the call; leaves it when a fault is due, without cuInit, or without a context. */
#define BEGIN() do { result code_ = begin(__func__); if (code_) return code_; } while (0)
#define BEGIN_READY() do { BEGIN(); if (!initialized) return NOT_INITIALIZED; } while (0)
#define BEGIN_CURRENT() \
    do { BEGIN_READY(); if (!depth || !stack[depth - 1]) return INVALID_CONTEXT; } while (0)

static int find(uintptr_t address)
{
    for (int i = 0; i < ALLOCATIONS; i++)
        if (allocations[i].kind && address - allocations[i].base < allocations[i].bytes) return i;
    return -1;
}

static result add(uintptr_t base, size_t bytes, char *shadow, int kind)
{
    result code = OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < ALLOCATIONS && code; i++) {
        if (allocations[i].kind) continue;
        allocations[i].base = base;
        allocations[i].bytes = bytes;
        allocations[i].shadow = shadow;
        allocations[i].kind = kind;
        ++*counter(kind == MEMORY_HOST ? "live host" : "live device");
        code = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static result take(uintptr_t base, int kind, size_t *bytes, char **shadow)
{
    result code = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    int i = find(base);
    if (i >= 0 && allocations[i].base == base && allocations[i].kind == kind) {
        *bytes = allocations[i].bytes;
        *shadow = allocations[i].shadow;
        allocations[i].kind = 0;
        --*counter(kind == MEMORY_HOST ? "live host" : "live device");
        code = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* Where a processor may touch `bytes` bytes at an address; NULL beyond an allocation. */
static char *reachable(uintptr_t address, size_t bytes)
{
    char *place = (char *)address;
    pthread_mutex_lock(&lock);
    int i = find(address);
    if (i >= 0) {
        size_t offset = address - allocations[i].base;
        place = bytes <= allocations[i].bytes - offset ? allocations[i].shadow + offset : NULL;
    }
    pthread_mutex_unlock(&lock);
    return place;
}

static result copy(uintptr_t to, uintptr_t from, size_t bytes)
{
    char *target = reachable(to, bytes), *source = reachable(from, bytes);
    if (!target || !source) return INVALID_VALUE;
    memmove(target, source, bytes);
    return SUCCESS;
}

/* For tests, and for the stand-in of cuFile. */

long fake_cuda_count(const char *name)
{
    long count = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 64 && counters[i].name; i++)
        if (!strcmp(counters[i].name, name)) count = counters[i].count;
    pthread_mutex_unlock(&lock);
    return count;
}

void fake_cuda_fail(const char *name, int nth, int code)
{
    pthread_mutex_lock(&lock);
    strncpy(fault.name, name, sizeof fault.name - 1);
    fault.left = nth;
    fault.code = code;
    pthread_mutex_unlock(&lock);
}

char *fake_cuda_reachable(uintptr_t address, size_t bytes) { return reachable(address, bytes); }

int fake_cuda_is_device(uintptr_t address)
{
    pthread_mutex_lock(&lock);
    int i = find(address), found = i >= 0 && allocations[i].kind != MEMORY_HOST;
    pthread_mutex_unlock(&lock);
    return found;
}

/* Start and devices. */

result cuInit(unsigned flags)
{
    BEGIN();
    initialized = 1;
    return flags ? INVALID_VALUE : SUCCESS;
}
result cuDriverGetVersion(int *version) { BEGIN(); *version = DRIVER_VERSION; return SUCCESS; }
result cuDeviceGet(int *device, int ordinal)
{
    BEGIN_READY();
    *device = 0;
    return ordinal ? INVALID_DEVICE : SUCCESS;
}
result cuDeviceGetCount(int *count) { BEGIN_READY(); *count = 1; return SUCCESS; }
result cuDeviceGetAttribute(int *value, int attribute, int device)
{
    BEGIN_READY();
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 1; /* compute capability 9.0 */
    return device ? INVALID_DEVICE : SUCCESS;
}
result cuDeviceGetName(char *name, int bytes, int device)
{
    BEGIN_READY();
    strncpy(name, "stand-in", bytes);
    return device ? INVALID_DEVICE : SUCCESS;
}
result cuDeviceTotalMem(size_t *bytes, int device)
{
    BEGIN_READY();
    *bytes = (size_t)1 << 30;
    return device ? INVALID_DEVICE : SUCCESS;
}
result cuDeviceTotalMem_v2(size_t *bytes, int device) { return cuDeviceTotalMem(bytes, device); }

/* Contexts. There is one, the primary. */

result cuDevicePrimaryCtxRetain(handle *context, int device)
{
    BEGIN_READY();
    if (device) return INVALID_DEVICE;
    __atomic_add_fetch(&primary_references, 1, __ATOMIC_SEQ_CST);
    *context = &primary;
    return SUCCESS;
}
result cuDevicePrimaryCtxRelease(int device)
{
    BEGIN_READY();
    if (device || __atomic_sub_fetch(&primary_references, 1, __ATOMIC_SEQ_CST) < 0)
        return INVALID_CONTEXT;
    return SUCCESS;
}
result cuDevicePrimaryCtxRelease_v2(int device) { return cuDevicePrimaryCtxRelease(device); }
result cuCtxPushCurrent(handle context)
{
    BEGIN_READY();
    if (depth == 16) return INVALID_VALUE;
    stack[depth++] = context;
    return SUCCESS;
}
result cuCtxPushCurrent_v2(handle context) { return cuCtxPushCurrent(context); }
result cuCtxPopCurrent(handle *context)
{
    BEGIN_READY();
    if (!depth) return INVALID_CONTEXT;
    handle top = stack[--depth];
    if (context) *context = top;
    return SUCCESS;
}
result cuCtxPopCurrent_v2(handle *context) { return cuCtxPopCurrent(context); }
result cuCtxSetCurrent(handle context)
{
    BEGIN_READY();
    if (!depth) depth = 1;
    stack[depth - 1] = context;
    return SUCCESS;
}
result cuCtxGetCurrent(handle *context)
{
    BEGIN_READY();
    *context = depth ? stack[depth - 1] : NULL;
    return SUCCESS;
}
result cuCtxGetDevice(int *device) { BEGIN_CURRENT(); *device = 0; return SUCCESS; }
result cuCtxSynchronize(void) { BEGIN_CURRENT(); return SUCCESS; }

/* Memory. */

static result allocate(deviceptr *address, size_t bytes, int kind)
{
    if (!bytes) return INVALID_VALUE;
    bytes = (bytes + PAGE - 1) & ~(size_t)(PAGE - 1);
    int file = memfd_create("fake_cuda", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, bytes)) return OUT_OF_MEMORY;
    void *device = mmap(NULL, bytes, PROT_NONE, MAP_SHARED, file, 0);
    char *shadow = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (device == MAP_FAILED || shadow == MAP_FAILED) return OUT_OF_MEMORY;
    *address = (deviceptr)device;
    return add(*address, bytes, shadow, kind);
}
static result release(deviceptr address, int kind)
{
    size_t bytes;
    char *shadow;
    result code = take(address, kind, &bytes, &shadow);
    if (code) return code;
    munmap((void *)address, bytes);
    munmap(shadow, bytes);
    return SUCCESS;
}
result cuMemAlloc(deviceptr *address, size_t bytes)
{
    BEGIN_CURRENT();
    return allocate(address, bytes, MEMORY_DEVICE);
}
result cuMemAlloc_v2(deviceptr *address, size_t bytes) { return cuMemAlloc(address, bytes); }
result cuMemFree(deviceptr address)
{
    BEGIN_CURRENT();
    return release(address, MEMORY_DEVICE);
}
result cuMemFree_v2(deviceptr address) { return cuMemFree(address); }
result cuMemAllocAsync(deviceptr *address, size_t bytes, handle stream)
{
    (void)stream;
    BEGIN_CURRENT();
    return allocate(address, bytes, MEMORY_POOLED);
}
result cuMemFreeAsync(deviceptr address, handle stream)
{
    (void)stream;
    BEGIN_CURRENT();
    return release(address, MEMORY_POOLED);
}
result cuMemHostAlloc(void **address, size_t bytes, unsigned flags)
{
    (void)flags;
    BEGIN_CURRENT();
    if (posix_memalign(address, PAGE, bytes)) return OUT_OF_MEMORY;
    return add((uintptr_t)*address, bytes, *address, MEMORY_HOST);
}
result cuMemFreeHost(void *address)
{
    size_t bytes;
    char *shadow;
    BEGIN_CURRENT();
    result code = take((uintptr_t)address, MEMORY_HOST, &bytes, &shadow);
    if (!code) free(address);
    return code;
}
result cuMemHostRegister(void *address, size_t bytes, unsigned flags)
{
    (void)flags;
    BEGIN_CURRENT();
    return add((uintptr_t)address, bytes, address, MEMORY_HOST);
}
result cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags)
{
    return cuMemHostRegister(address, bytes, flags);
}
result cuMemHostUnregister(void *address)
{
    size_t bytes;
    char *shadow;
    BEGIN_CURRENT();
    return take((uintptr_t)address, MEMORY_HOST, &bytes, &shadow);
}
result cuMemGetAddressRange(deviceptr *base, size_t *bytes, deviceptr address)
{
    BEGIN_CURRENT();
    pthread_mutex_lock(&lock);
    int i = find(address);
    if (i >= 0 && base) *base = allocations[i].base;
    if (i >= 0 && bytes) *bytes = allocations[i].bytes;
    pthread_mutex_unlock(&lock);
    return i >= 0 ? SUCCESS : NOT_FOUND;
}
result cuMemGetAddressRange_v2(deviceptr *base, size_t *bytes, deviceptr address)
{
    return cuMemGetAddressRange(base, bytes, address);
}

/* CUpointer_attribute: 1 context, 2 memory type, 3 device pointer, 9 device, 11 start, 12 size. */
static result attribute(void *value, int which, deviceptr address)
{
    pthread_mutex_lock(&lock);
    int i = find(address);
    uintptr_t base = i < 0 ? 0 : allocations[i].base;
    size_t bytes = i < 0 ? 0 : allocations[i].bytes;
    int kind = i < 0 ? 0 : allocations[i].kind;
    pthread_mutex_unlock(&lock);
    switch (which) {
    case 1: *(handle *)value = kind && kind != MEMORY_POOLED ? &primary : NULL; break;
    case 2: *(unsigned *)value = kind == MEMORY_POOLED ? MEMORY_DEVICE : kind; break;
    case 3: *(deviceptr *)value = kind ? address : 0; break;
    case 8: *(unsigned char *)value = 0; break;
    case 9: *(int *)value = kind ? 0 : -2; break;
    case 11: *(deviceptr *)value = base; break;
    case 12: *(size_t *)value = bytes; break;
    default: return INVALID_VALUE;
    }
    return kind ? SUCCESS : INVALID_VALUE;
}
result cuPointerGetAttribute(void *value, int which, deviceptr address)
{
    BEGIN_READY();
    return attribute(value, which, address);
}
result cuPointerGetAttributes(unsigned count, int *which, void **values, deviceptr address)
{
    BEGIN_READY();
    for (unsigned i = 0; i < count; i++) attribute(values[i], which[i], address);
    return SUCCESS; /* unknown pointers too: their values are null */
}

/* Copies and streams. */

result cuMemcpyHtoD(deviceptr to, const void *from, size_t bytes)
{
    BEGIN_CURRENT();
    return copy(to, (uintptr_t)from, bytes);
}
result cuMemcpyHtoD_v2(deviceptr to, const void *from, size_t bytes)
{
    return cuMemcpyHtoD(to, from, bytes);
}
result cuMemcpyDtoH(void *to, deviceptr from, size_t bytes)
{
    BEGIN_CURRENT();
    return copy((uintptr_t)to, from, bytes);
}
result cuMemcpyDtoH_v2(void *to, deviceptr from, size_t bytes)
{
    return cuMemcpyDtoH(to, from, bytes);
}
result cuMemcpyHtoDAsync(deviceptr to, const void *from, size_t bytes, handle stream)
{
    (void)stream;
    BEGIN_CURRENT();
    return copy(to, (uintptr_t)from, bytes);
}
result cuMemcpyHtoDAsync_v2(deviceptr to, const void *from, size_t bytes, handle stream)
{
    return cuMemcpyHtoDAsync(to, from, bytes, stream);
}
result cuMemcpyDtoHAsync(void *to, deviceptr from, size_t bytes, handle stream)
{
    (void)stream;
    BEGIN_CURRENT();
    return copy((uintptr_t)to, from, bytes);
}
result cuMemcpyDtoHAsync_v2(void *to, deviceptr from, size_t bytes, handle stream)
{
    return cuMemcpyDtoHAsync(to, from, bytes, stream);
}
result cuMemcpyAsync(deviceptr to, deviceptr from, size_t bytes, handle stream)
{
    (void)stream;
    BEGIN_CURRENT();
    return copy(to, from, bytes);
}
result cuMemcpyBatchAsync_v2(deviceptr *to, deviceptr *from, size_t *bytes, size_t count,
                             void *attributes, size_t *indices, size_t kinds, handle stream)
{
    (void)attributes, (void)indices, (void)kinds;
    BEGIN_CURRENT();
    if (!stream) return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        result code = copy(to[i], from[i], bytes[i]);
        if (code) return code;
    }
    return SUCCESS;
}
result cuMemcpyBatchAsync(deviceptr *to, deviceptr *from, size_t *bytes, size_t count,
                          void *attributes, size_t *indices, size_t kinds, size_t *failed,
                          handle stream)
{
    if (failed) *failed = SIZE_MAX;
    return cuMemcpyBatchAsync_v2(to, from, bytes, count, attributes, indices, kinds, stream);
}
result cuStreamCreate(handle *stream, unsigned flags)
{
    (void)flags;
    BEGIN_CURRENT();
    *stream = malloc(1);
    return SUCCESS;
}
result cuStreamDestroy(handle stream) { BEGIN(); free(stream); return SUCCESS; }
result cuStreamDestroy_v2(handle stream) { return cuStreamDestroy(stream); }
result cuStreamSynchronize(handle stream)
{
    BEGIN_CURRENT();
    if (!stream) begin("default stream synchronised");
    return SUCCESS;
}

/* How cuda.bindings finds the rest. */

result cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *why)
{
    char newer[80];
    void *self = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
    (void)flags;
    strncpy(newer, name, 70);
    newer[70] = 0;
    *found = version >= 13000 ? dlsym(self, strcat(newer, "_v2")) : NULL;
    if (!*found) *found = dlsym(self, name);
    if (why) *why = *found ? 0 : 1;
    dlclose(self);
    return *found ? SUCCESS : NOT_FOUND;
}
result cuGetProcAddress(const char *name, void **found, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, found, version, flags, NULL);
}

/* Words. */

result cuGetErrorName(result code, const char **text)
{
    *text = code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_STAND_IN";
    return SUCCESS;
}
result cuGetErrorString(result code, const char **text)
{
    *text = code == INVALID_CONTEXT ? "no context is current" : "made up by the stand-in";
    return SUCCESS;
}
