/* A stand-in for libcufile.so.0 over the stand-in for libcuda: what GPUDirect looks like to kvikio.
 *
 * FAKE_CUFILE in the environment says what the host can do:
 *   "gds"    the true path works
 *   "none"   opening works only while compatibility is allowed (as without nvidia-fs)
 *   "abort"  opening ends the process (as seen in containers and virtual machines)
 * It allows compatibility unless told otherwise, as the usual cufile.json does, and writes a
 * cufile.log into the current directory unless CUFILE_LOGFILE_PATH says where.
 *
 * For tests: fake_cufile_count(name).
 *
 *   cc -shared -fPIC -O1 -Wl,-soname,libcufile.so.0 -o libcufile.so.0 cufile.c libcuda.so.1
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BASE 5000
#define DRIVER_ALREADY_OPEN (BASE + 26)
#define DIO_NOT_SET (BASE + 20)
#define INVALID_VALUE (BASE + 22)
#define MEMORY_ALREADY_REGISTERED (BASE + 23)
#define MEMORY_NOT_REGISTERED (BASE + 24)
#define CUDA_POINTER_INVALID (BASE + 12)
#define INVALID_CONTEXT (BASE + 47)
#define NVFS_SETUP_ERROR (BASE + 33)

#define ALLOW_COMPAT_MODE 1
#define BUFFERS 64

typedef struct { int err; int cu_err; } status;
typedef struct { int type; union { int fd; void *handle; } handle; const void *ops; } descriptor;
struct file { int fd; };
typedef struct {
    struct {
        unsigned major, minor;
        size_t poll, direct;
        unsigned status, control;
    } nvfs;
    unsigned features, cache, per_buffer, pinned, batch, timeout;
} properties;

char *fake_cuda_reachable(uintptr_t address, size_t bytes);
int fake_cuda_is_device(uintptr_t address);
int cuCtxGetCurrent(void **context);

static bool flags[32] = {[ALLOW_COMPAT_MODE] = true};
static int open_count;
static const void *buffers[BUFFERS];
static long reads, writes, registrations, live_registrations, live_files, early_closes;

static status answer(int code) { status made = {code, 0}; return made; }
static bool host_is(const char *what)
{
    const char *found = getenv("FAKE_CUFILE");
    return !strcmp(found ? found : "none", what);
}

long fake_cufile_count(const char *name)
{
    if (!strcmp(name, "reads")) return reads;
    if (!strcmp(name, "writes")) return writes;
    if (!strcmp(name, "registrations")) return registrations;
    if (!strcmp(name, "live registrations")) return live_registrations;
    if (!strcmp(name, "live files")) return live_files;
    if (!strcmp(name, "early closes")) return early_closes; /* with files or memory registered */
    if (!strcmp(name, "open")) return open_count;
    return -1;
}

status cuFileDriverOpen(void)
{
    const char *path = getenv("CUFILE_LOGFILE_PATH");
    if (open_count) { open_count++; return answer(0); }
    if (host_is("abort")) abort();
    FILE *log = fopen(path ? path : "cufile.log", "a");
    if (log) fputs(" 30-11-2026 [pid=1] ERROR  stand-in:1 made up\n", log), fclose(log);
    if (!host_is("gds") && !flags[ALLOW_COMPAT_MODE]) return answer(NVFS_SETUP_ERROR);
    open_count = 1;
    return answer(0);
}
static status close_driver(void)
{
    if (open_count) open_count--;
    if (live_files || live_registrations) early_closes++;
    return answer(0);
}
status cuFileDriverClose(void) { return close_driver(); }
status cuFileDriverClose_v2(void) { return close_driver(); }
long cuFileUseCount(void) { return open_count; }
status cuFileGetVersion(int *version) { *version = 1150; return answer(0); }
status cuFileDriverGetProperties(properties *found)
{
    memset(found, 0, sizeof *found);
    found->nvfs.major = host_is("gds") ? 2 : 0;
    found->nvfs.control = flags[ALLOW_COMPAT_MODE] << 1;
    return answer(0);
}
status cuFileDriverSetPollMode(bool poll, size_t kib) { (void)poll, (void)kib; return answer(0); }
status cuFileDriverSetMaxCacheSize(size_t kib) { (void)kib; return answer(0); }
status cuFileDriverSetMaxPinnedMemSize(size_t kib) { (void)kib; return answer(0); }
status cuFileGetParameterBool(int which, bool *value)
{
    if (which < 0 || which >= 32) return answer(INVALID_VALUE);
    *value = flags[which];
    return answer(0);
}
status cuFileSetParameterBool(int which, bool value)
{
    if (open_count) return answer(DRIVER_ALREADY_OPEN);
    if (which < 0 || which >= 32) return answer(INVALID_VALUE);
    flags[which] = value;
    return answer(0);
}

status cuFileHandleRegister(void **made, descriptor *what)
{
    if (!open_count) {
        status code = cuFileDriverOpen();
        if (code.err) return code;
    }
    if (!(fcntl(what->handle.fd, F_GETFL) & O_DIRECT)) return answer(DIO_NOT_SET);
    struct file *file = malloc(sizeof *file);
    file->fd = what->handle.fd;
    *made = file;
    __atomic_add_fetch(&live_files, 1, __ATOMIC_SEQ_CST);
    return answer(0);
}
void cuFileHandleDeregister(void *file)
{
    __atomic_sub_fetch(&live_files, 1, __ATOMIC_SEQ_CST);
    free(file);
}
status cuFileBufRegister(const void *base, size_t bytes, int unused)
{
    (void)bytes, (void)unused;
    for (int i = 0; i < BUFFERS; i++)
        if (buffers[i] == base) return answer(MEMORY_ALREADY_REGISTERED);
    for (int i = 0; i < BUFFERS; i++)
        if (!buffers[i]) {
            buffers[i] = base;
            registrations++;
            live_registrations++;
            return answer(0);
        }
    return answer(INVALID_VALUE);
}
status cuFileBufDeregister(const void *base)
{
    for (int i = 0; i < BUFFERS; i++)
        if (buffers[i] == base) {
            buffers[i] = NULL;
            live_registrations--;
            return answer(0);
        }
    return answer(MEMORY_NOT_REGISTERED);
}

static char *place(void *base, size_t bytes, off_t offset, ssize_t *problem)
{
    void *context = NULL;
    uintptr_t address = (uintptr_t)base + offset;
    cuCtxGetCurrent(&context);
    *problem = !context ? -INVALID_CONTEXT : -CUDA_POINTER_INVALID;
    return context && fake_cuda_is_device(address) ? fake_cuda_reachable(address, bytes) : NULL;
}
ssize_t cuFileRead(void *file, void *base, size_t bytes, off_t at, off_t offset)
{
    ssize_t problem;
    char *to = place(base, bytes, offset, &problem);
    __atomic_add_fetch(&reads, 1, __ATOMIC_SEQ_CST);
    return to ? pread(((struct file *)file)->fd, to, bytes, at) : problem;
}
ssize_t cuFileWrite(void *file, const void *base, size_t bytes, off_t at, off_t offset)
{
    ssize_t problem;
    char *from = place((void *)base, bytes, offset, &problem);
    __atomic_add_fetch(&writes, 1, __ATOMIC_SEQ_CST);
    return from ? pwrite(((struct file *)file)->fd, from, bytes, at) : problem;
}

/* Not used by hsswap; kvikio wants to find them. */
#define UNUSED(name) status name(void) { return answer(INVALID_VALUE); }
UNUSED(cuFileBatchIOSetUp)
UNUSED(cuFileBatchIOSubmit)
UNUSED(cuFileBatchIOGetStatus)
UNUSED(cuFileBatchIOCancel)
void cuFileBatchIODestroy(void *batch) { (void)batch; }
UNUSED(cuFileReadAsync)
UNUSED(cuFileWriteAsync)
UNUSED(cuFileStreamRegister)
UNUSED(cuFileStreamDeregister)
