// Bookkeeping of speculative rounds: the rows to verify, and what a verify's choices lead to. One thread block a
// sequence, whose first warp walks the drafts, a lane each; the others help where rows are copied.
// NumPy reference: hsswap.driver.host_rounds. Words are those of hsswap.driver.round_operations.
#include "common.cuh"

constexpr u32 NO_TOKEN = 0xffffffffu, UNWRITTEN = 0xfffffffeu;
constexpr u32 OVERFLOW = 1, BAD_TOKEN = 2, STOPPED = 4, CAPACITY = 8, BAD_DRAFT = 16;

struct Rules {
    u32* flags;
    const u32* stops;
    u32 vocab;
    int stop_count;
};

struct AssembleParams {
    Rules rules;
    u32* drafts;
    const u32* pend;
    u32* vtok;
    u32* brk;
    const int* pos_start;
    const u32* token_map;  // or null
    const u32* depth;      // or null
    const int* capacity;   // or null
    i64 map_count;
    int count;  // K
    float p_min;
    int p_min_first;
    int pad;
};

__device__ __forceinline__ int first_lane(bool mine) { return __ffs(__ballot_sync(ALL, mine)) - 1; }

extern "C" __global__ void __launch_bounds__(32) assemble(const __grid_constant__ AssembleParams p) {
    const int s = blockIdx.x, lane = lane_index();
    const u32 pending = p.pend[s];
    const int base = pending != NO_TOKEN;
    u32 flags = p.rules.flags[s];
    i64 room = p.count;
    if (p.capacity) room = static_cast<i64>(p.capacity[s]) - p.pos_start[s] - base;
    if (base && pending >= p.rules.vocab) flags |= BAD_TOKEN;
    if (room < 0) flags |= CAPACITY;
    int most = static_cast<int>(min(room, static_cast<i64>(p.count)));
    if (p.depth) most = static_cast<int>(min(static_cast<u32>(max(most, 0)), p.depth[s]));
    if (flags) most = 0;
    u32* vtok = p.vtok + static_cast<i64>(s) * (p.count + 1);
    u32* drafts = p.drafts + static_cast<i64>(s) * 2 * p.count;
    int taken = 0;
    for (int first = 0; first < most; first += WARP) {
        const int j = first + lane;
        bool ends = j >= most, is_bad = false;
        u32 token = 0;
        if (!ends) {
            token = drafts[2 * j];
            const float probability = __uint_as_float(drafts[2 * j + 1]);
            const bool may_stop = j > 0 || (p.p_min_first && base);
            ends = token == NO_TOKEN || (p.p_min > 0.f && may_stop && !(probability >= p.p_min));
            if (!ends && p.token_map) token = token < p.map_count ? p.token_map[token] : UNWRITTEN;
            is_bad = !ends && token >= p.rules.vocab;
            ends |= is_bad;
        }
        const int end = first_lane(ends);
        const int here = end < 0 ? WARP : end;
        if (lane < here) vtok[base + j] = token;
        taken = first + here;
        if (end >= 0) {
            if (__shfl_sync(ALL, is_bad, end)) flags |= BAD_DRAFT;
            break;
        }
    }
    for (int i = base + taken + lane; i <= p.count; i += WARP) vtok[i] = 0;
    __syncwarp();
    for (int i = lane; i < 2 * p.count; i += WARP) drafts[i] = i & 1 ? 0 : UNWRITTEN;
    if (lane) return;
    if (base) vtok[0] = pending < p.rules.vocab ? pending : 0;
    p.brk[2 * s] = taken;
    p.brk[2 * s + 1] = base;
    p.rules.flags[s] = flags;
}

// Parts that are not wanted have null pointers: preds, hidden, len_ptrs, pend, depth.
struct EndParams {
    Rules rules;
    const u32* preds;  // accept
    const u32* vtok;
    const u32* last_pred;
    u32* acc;
    u32* brk;
    u32* ring;  // or null in accept
    u32* tally;  // or null
    const u8* hidden;  // seed
    const u8* fill_prev;
    u8* h_seed;
    const i64* len_ptrs;  // rollback
    const int* pos_start;
    u32* pend;  // commit
    u32* commit_flags;
    u32* history;  // or null
    u32* depth;  // adapt
    i64 row_bytes;
    i64 ring_words;  // 1 + C
    i64 history_tokens;
    int rows;  // K + 1
    int counters;
    int depth_words;
    int floor;
    int cap;
    int pad;
};

__device__ __forceinline__ bool is_stop(const Rules& rules, int s, u32 token) {
    for (int i = 0; i < rules.stop_count; i++)
        if (rules.stops[static_cast<i64>(s) * rules.stop_count + i] == token) return true;
    return false;
}

// One warp. Writes acc, flags and tally.
__device__ __forceinline__ void accept(const EndParams& p, int s) {
    const int lane = lane_index();
    u32* acc = p.acc + 2 * s;
    const u32 flags = p.rules.flags[s];
    const int base = p.brk[2 * s + 1] != 0;
    const int used = static_cast<int>(min(p.brk[2 * s], static_cast<u32>(p.rows - base)));
    const u32* vtok = p.vtok + static_cast<i64>(s) * p.rows;
    const u32* preds = p.preds + static_cast<i64>(s) * p.rows;
    i64 room = p.rows + 1;
    if (p.ring) room = max(0ll, p.ring_words - 1 - static_cast<i64>(p.ring[s * p.ring_words]));
    u32 flag = 0, last = NO_TOKEN;
    int emitted = 0;
    for (int first = 0; !flags; first += WARP) {
        // A lane's choice is emitted if all drafts before it stand and nothing ended the row earlier.
        const int i = first + lane;
        u32 choice = NO_TOKEN, why = 0;
        bool is_last = i >= used;
        if (i <= used) {
            const int row = base + i - 1;
            choice = row < 0 ? p.last_pred[s] : preds[row];
            if (i < used) is_last = vtok[base + i] != choice;
            if (i == room) why = OVERFLOW;
            else if (choice >= p.rules.vocab) why = BAD_TOKEN;
            else if (is_stop(p.rules, s, choice)) why = STOPPED;
        }
        const int end = first_lane(is_last || why);
        const u32 here = __shfl_sync(ALL, why, end < 0 ? 0 : end);
        int count = end < 0 ? WARP : end + 1;
        if (end >= 0 && (here == OVERFLOW || here == BAD_TOKEN)) count--;
        if (count) last = __shfl_sync(ALL, choice, count - 1);
        emitted += count;
        if (end >= 0) {
            flag = here;
            break;
        }
    }
    if (lane) return;
    acc[0] = emitted ? emitted - 1 : 0;
    acc[1] = emitted ? last : NO_TOKEN;
    if (flag) p.rules.flags[s] = flags | flag;
    if (emitted && p.tally) {
        p.tally[3 * s] += 1;
        p.tally[3 * s + 1] += used;
        p.tally[3 * s + 2] += emitted - 1;
    }
}

// The thread block. `rows`: what the round commits.
__device__ __forceinline__ void seed(const EndParams& p, int s, int rows) {
    const u8* from = p.fill_prev + s * p.row_bytes;
    if (rows) from = p.hidden + (static_cast<i64>(s) * p.rows + rows - 1) * p.row_bytes;
    u8* to = p.h_seed + s * p.row_bytes;
    if ((reinterpret_cast<u64>(from) | reinterpret_cast<u64>(to) | p.row_bytes) & 15) {
        for (i64 at = 2 * threadIdx.x; at < p.row_bytes; at += 2 * blockDim.x)
            *reinterpret_cast<u16*>(to + at) = *reinterpret_cast<const u16*>(from + at);
        return;
    }
    for (i64 at = 16 * threadIdx.x; at < p.row_bytes; at += 16 * blockDim.x) {
        Chunk<16> chunk;
        load_chunk(chunk, from + at);
        store_chunk(to + at, chunk);
    }
}

// One warp.
__device__ __forceinline__ void commit(const EndParams& p, int s, int position) {
    const int lane = lane_index();
    const u32 following = p.acc[2 * s + 1];
    if (following == NO_TOKEN) return;
    const int base = p.brk[2 * s + 1] != 0;
    const u32* vtok = p.vtok + static_cast<i64>(s) * p.rows + base;
    const i64 accepted = min(p.acc[2 * s], static_cast<u32>(p.rows - base));
    u32* ring = p.ring + s * p.ring_words;
    const i64 held = min(static_cast<i64>(ring[0]), p.ring_words - 1);
    const i64 count = min(accepted + 1, p.ring_words - 1 - held);
    for (i64 i = lane; i < count; i += WARP) {
        const u32 token = i < accepted ? vtok[i] : following;
        ring[1 + held + i] = token;
        if (i == count - 1) p.pend[s] = token;
        const i64 at = position + base + i;
        if (p.history && at >= 0 && at < p.history_tokens) p.history[s * p.history_tokens + at] = token;
    }
    __syncwarp();
    if (lane) return;
    if (count) ring[0] = static_cast<u32>(held + count);
    if (count <= accepted) p.commit_flags[s] |= OVERFLOW;
}

extern "C" __global__ void __launch_bounds__(128) round_end(const __grid_constant__ EndParams p) {
    const int s = blockIdx.x;
    if (p.preds) {
        if (threadIdx.x < WARP) accept(p, s);
        __syncthreads();
    }
    const int position = p.pos_start ? p.pos_start[s] : 0;
    if (p.hidden || p.len_ptrs) {
        const bool is_nothing = p.acc[2 * s + 1] == NO_TOKEN;
        const int most = p.hidden ? p.rows : 0x7fffffff;
        const int rows = is_nothing ? 0 : static_cast<int>(min(p.brk[2 * s + 1] + p.acc[2 * s], static_cast<u32>(most)));
        if (p.hidden) seed(p, s, rows);
        if (p.len_ptrs) {
            for (int i = threadIdx.x; i < p.counters; i += blockDim.x) {
                int* counter = reinterpret_cast<int*>(p.len_ptrs[static_cast<i64>(s) * p.counters + i]);
                if (counter) *counter = position + rows;
            }
        }
    }
    if (p.pend && threadIdx.x < WARP) commit(p, s, position);
    if (p.depth) {
        __syncthreads();  // depth may be brk
        if (threadIdx.x == 0) {
            const u32 wanted = max(p.acc[2 * s] + 1, static_cast<u32>(p.floor));
            p.depth[static_cast<i64>(s) * p.depth_words] = min(wanted, static_cast<u32>(p.cap));
        }
    }
}
