/* The plain reader that `hsswap bench io` measures itself against: random O_DIRECT reads (or
 * overwrites) of whole blocks at a fixed depth, and nothing else: no checksums, no loop, no queue.
 *
 *   reader ENGINE OPERATION BLOCK_BYTES DEPTH BLOCKS FILE...
 *
 * ENGINE: "threads" (DEPTH threads in pread), "threads-sum" (the same, and each adds up what it read:
 * a drive that is another program's copy is slower at memory that somebody looks at) or "uring" (one
 * io_uring of DEPTH entries with registered buffers). OPERATION: "read" or "write". BLOCKS: how many
 * blocks of memory are used in turn, a multiple of DEPTH: what fits into a cache comes quicker. For each
 * line on stdin, a number of milliseconds, it works that long and prints "operations seconds
 * cpu_seconds". Ends with stdin.
 * hsswap compiles it with: cc -O3 -pthread reader.c
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_FILES 4096

static int files[MAX_FILES], file_count, writing, summing, depth;
static long blocks;
static uint64_t file_blocks[MAX_FILES], block_bytes;
static char *memory;
static double deadline;

static void die(const char *what, int number)
{
	fprintf(stderr, "reader: %s: %s\n", what, strerror(number));
	exit(1);
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + 1e-9 * t.tv_nsec;
}

static double cpu(void)
{
	struct rusage u;
	getrusage(RUSAGE_SELF, &u);
	return u.ru_utime.tv_sec + u.ru_stime.tv_sec + 1e-6 * (u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

/* xorshift64 (Marsaglia): where the next block is. */
static uint64_t next(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

/* One of DEPTH that work side by side has every DEPTH-th block of the memory, in turn. */
static char *memory_of(long *block)
{
	*block = (*block + depth) % blocks;
	return memory + *block * block_bytes;
}

static int somewhere(uint64_t *state, uint64_t *offset)
{
	uint64_t r = next(state);
	int file = r % file_count;
	*offset = (r >> 16) % file_blocks[file] * block_bytes;
	return files[file];
}

/* Threads. */

static uint64_t sum(const char *block)
{
	const uint64_t *words = (const uint64_t *)block;
	uint64_t total[8] = {0};
	for (uint64_t i = 0; i < block_bytes / 8; i += 8)
		for (int lane = 0; lane < 8; lane++)
			total[lane] += words[i + lane];
	return total[0] + total[1] + total[2] + total[3] + total[4] + total[5] + total[6] + total[7];
}

static volatile uint64_t sums[4096];

static pthread_barrier_t barrier;
static long counts[4096];

static void *work(void *argument)
{
	long number = (long)argument;
	uint64_t state = 0x9E3779B97F4A7C15ull * (number + 1);
	long place = number;
	for (;;) {
		pthread_barrier_wait(&barrier); /* begin */
		counts[number] = 0;
		do { /* one at least, however late it got its turn */
			uint64_t offset;
			int file = somewhere(&state, &offset);
			char *block = memory_of(&place);
			ssize_t moved = writing ? pwrite(file, block, block_bytes, offset)
						: pread(file, block, block_bytes, offset);
			if (moved != (ssize_t)block_bytes)
				die("a short or failed transfer", moved < 0 ? errno : EIO);
			if (summing)
				sums[number] += sum(block);
			counts[number]++;
		} while (now() < deadline);
		pthread_barrier_wait(&barrier); /* end */
	}
	return NULL;
}

static void start_threads(void)
{
	pthread_barrier_init(&barrier, NULL, depth + 1);
	for (long number = 0; number < depth; number++) {
		pthread_t thread;
		int error = pthread_create(&thread, NULL, work, (void *)number);
		if (error)
			die("pthread_create", error);
	}
}

static long run_threads(void)
{
	long total = 0;
	pthread_barrier_wait(&barrier);
	pthread_barrier_wait(&barrier);
	for (int number = 0; number < depth; number++)
		total += counts[number];
	return total;
}

/* io_uring. */

static int ring;
static long places[4096];
static uint32_t *sq_tail, *sq_mask, *cq_head, *cq_tail, *cq_mask, *sq_array;
static struct io_uring_sqe *sqes;
static struct io_uring_cqe *cqes;
static uint64_t ring_state = 88172645463325252ull;

static void start_ring(void)
{
	struct io_uring_params p = {0};
	p.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
	ring = syscall(SYS_io_uring_setup, depth, &p);
	if (ring < 0) {
		memset(&p, 0, sizeof p);
		ring = syscall(SYS_io_uring_setup, depth, &p);
	}
	if (ring < 0)
		die("io_uring_setup", errno);
	size_t sq = p.sq_off.array + p.sq_entries * sizeof(uint32_t);
	size_t cq = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
	char *map = mmap(NULL, sq > cq ? sq : cq, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
			 ring, IORING_OFF_SQ_RING);
	sqes = mmap(NULL, p.sq_entries * sizeof *sqes, PROT_READ | PROT_WRITE,
		    MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQES);
	if (map == MAP_FAILED || (void *)sqes == MAP_FAILED)
		die("mmap of the ring", errno);
	sq_tail = (uint32_t *)(map + p.sq_off.tail);
	sq_mask = (uint32_t *)(map + p.sq_off.ring_mask);
	sq_array = (uint32_t *)(map + p.sq_off.array);
	cq_head = (uint32_t *)(map + p.cq_off.head);
	cq_tail = (uint32_t *)(map + p.cq_off.tail);
	cq_mask = (uint32_t *)(map + p.cq_off.ring_mask);
	cqes = (struct io_uring_cqe *)(map + p.cq_off.cqes);
	struct iovec whole = {memory, blocks * block_bytes};
	for (int number = 0; number < depth; number++)
		places[number] = number;
	if (syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &whole, 1) < 0)
		die("registering buffers (ulimit -l)", errno);
}

static void prepare(uint32_t number)
{
	uint32_t tail = *sq_tail, index = tail & *sq_mask;
	struct io_uring_sqe *sqe = &sqes[index];
	uint64_t offset;
	memset(sqe, 0, sizeof *sqe);
	sqe->fd = somewhere(&ring_state, &offset);
	sqe->opcode = writing ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
	sqe->off = offset;
	sqe->addr = (uint64_t)memory_of(&places[number]);
	sqe->len = block_bytes;
	sqe->user_data = number;
	sq_array[index] = index;
	__atomic_store_n(sq_tail, tail + 1, __ATOMIC_RELEASE);
}

static long run_ring(void)
{
	long total = 0;
	int flying = 0, fresh = 0;
	for (int number = 0; number < depth; number++, fresh++)
		prepare(number);
	do {
		int taken = syscall(SYS_io_uring_enter, ring, fresh, 1, IORING_ENTER_GETEVENTS, NULL, 0);
		if (taken < 0 && errno != EINTR && errno != EAGAIN)
			die("io_uring_enter", errno);
		if (taken > 0) {
			flying += taken;
			fresh -= taken;
		}
		uint32_t head = *cq_head;
		int more = now() < deadline;
		for (; head != __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE); head++) {
			struct io_uring_cqe *cqe = &cqes[head & *cq_mask];
			if (cqe->res != (int)block_bytes)
				die("a short or failed transfer", cqe->res < 0 ? -cqe->res : EIO);
			flying--;
			total++;
			if (more) {
				prepare(cqe->user_data);
				fresh++;
			}
		}
		__atomic_store_n(cq_head, head, __ATOMIC_RELEASE);
	} while (flying + fresh);
	return total;
}

int main(int argc, char **argv)
{
	if (argc < 7 || argc - 6 > MAX_FILES) {
		fprintf(stderr, "usage: reader threads|threads-sum|uring read|write BLOCK_BYTES DEPTH BLOCKS FILE...\n");
		return 2;
	}
	int uring = !strcmp(argv[1], "uring");
	summing = !strcmp(argv[1], "threads-sum");
	writing = !strcmp(argv[2], "write");
	block_bytes = strtoull(argv[3], NULL, 10);
	depth = atoi(argv[4]);
	blocks = atol(argv[5]);
	if (depth < 1 || depth > 4096 || !block_bytes || blocks < depth || blocks % depth)
		return 2;
	for (int i = 6; i < argc; i++, file_count++) {
		struct stat found;
		files[file_count] = open(argv[i], (writing ? O_RDWR : O_RDONLY) | O_DIRECT);
		if (files[file_count] < 0 || fstat(files[file_count], &found) < 0)
			die(argv[i], errno);
		file_blocks[file_count] = found.st_size / block_bytes;
		if (!file_blocks[file_count])
			die(argv[i], ENODATA);
	}
	memory = mmap(NULL, blocks * block_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
		      -1, 0);
	if (memory == MAP_FAILED)
		die("mmap", errno);
	madvise(memory, blocks * block_bytes, MADV_HUGEPAGE);
	memset(memory, 1, blocks * block_bytes);
	uring ? start_ring() : start_threads();
	long milliseconds;
	while (scanf("%ld", &milliseconds) == 1) {
		double begin = now(), used = cpu();
		deadline = begin + 1e-3 * milliseconds;
		long total = uring ? run_ring() : run_threads();
		printf("%ld %.9f %.6f\n", total, now() - begin, cpu() - used);
		fflush(stdout);
	}
	return 0;
}
