// Decode attention over the paged cache for Hopper: every warp walks keys of its own, and no two warps meet before the end.
//
//     slice i covers keys [i KEYS, (i + 1) KEYS)       lane i mod LANES has it; a lane's slices are added in ascending order
//     s = k q^T scale log2(e);  m' = max(m, max s);  l = l 2^(m - m') + sum 2^(s - m');  o = o 2^(m - m') + v^T 2^(s - m')
//     a + b of two lanes: m = max;  l = l_a 2^(m_a - m) + l_b 2^(m_b - m), o likewise;  out = o / l of all lanes
//     a sink is a score of a head without a value: out = o / (l + 2^(sink log2(e) - m))
//
// (flash decoding, arXiv 2311.01282, with lanes that are fixed over absolute positions.) Lanes are added by one tree: half of all apart, a quarter, .. 2, 1.
// A cluster of P blocks of WARPS warps serves one request and KV head; warp w of its P WARPS has the lanes w + P WARPS j, adds them up where it
// stands, and the rest of the tree is climbed through the cluster's shared memory. So P and WARPS change the time and no bit, and neither do
// the number of queries (columns of the matrix instructions) or of requests: what a row does not see has weight 0.
//
// Contexts of more than `section` slices are summed in sections of so many, each as a context of its own by other blocks, which leave m, l and o of
// each row in memory; `merge_sections` adds them in their order. So a row's bits follow from its own length, and a few requests fill the device.
//
// Products are transposed, keys or channels by queries: eight queries are the least that an instruction takes. p goes from the layout of a
// result to that of a factor inside the warp (movmatrix).
//
// With SPECIALIZED two warps have the same lanes: one reads keys and hands the scores of each slice over through shared memory, the other reads
// values. Who computes what changes no bit.
//
// A warp has DEPTH slices on their way, K and V each refilled as soon as it was read. What is older than this step's positions is fetched
// before griddepcontrol.wait: `hopper.py` says why it may. With ENGINE, the copy engine brings slices without new positions, one lane requesting
// a whole tile (TILED: a block of the cache holds it, and its rows are 32 or 64 bytes or some 128), and permutes the 16-byte chunks of its rows, so
// that eight rows fall into different banks. All lanes of a warp copy other slices, 16 bytes each, to the same places.
//
// Codes become factors by masks and shifts alone. Unsigned integers are the subnormal numbers of 16 bits: u stands for u U (U = 2^-133 in
// bfloat16, where 128 to 255 are the next binade and just as right, 2^-24 in float16). A code is u minus an OFFSET, for which a product of a
// constant with the other factor makes up, sum (u - OFFSET) x = sum u x - OFFSET sum x: one of q at the start, one of p for each slice, so
// that no large sum is cancelled later. Scales are factors of scores and of weights, not of codes.
//
// After numbers.cuh, global.cuh and shared.cuh. Macros: LANES; DIVIDED: contexts may have several sections; F16 (else bfloat16); FORMAT 0 as they are, 1 e4m3, 2 e4m3 with one scale for all keys and one for all
// values, 3 bytes -127 .. 127, 4 nibbles + 8; of 1, 3 and 4 each position and head has a scale; C channels; KEYS; DEPTH; ENGINE; SPECIALIZED; S positions of a
// block; NT eights of query rows; P; WARPS; LONG_TABLE, LONG_LENS: int64, else int32; BLOCKS of a multiprocessor at least.

#if LONG_TABLE
typedef long long TableEntry;
#else
typedef int TableEntry;
#endif
#if LONG_LENS
typedef long long Length;
#else
typedef int Length;
#endif

struct alignas(64) TileMap {
    char bytes[128];
};
struct Args {
    TileMap k_map, v_map;  // TILED
    const u16* q;
    const char* k;
    const char* v;
    const float* k_scale;
    const float* v_scale;
    const TableEntry* table;
    const Length* lens;
    u16* out;
    const float* sinks;  // of heads, or NULL
    float* parts;        // of sections, or NULL
    long long table_stride, head_bytes, scale_stride;
    int num_columns, q_len, group, num_kv_heads, window, section, sent_bytes;  // slices of a section, or 0; sent by one warp to one block
    float scale;
};

constexpr bool SCALED = FORMAT == 1 || FORMAT >= 3;  // for each position and head
constexpr int OWN_LANES = LANES / (WARPS * P);
constexpr int OWN_BITS = OWN_LANES == 8 ? 3 : OWN_LANES == 4 ? 2 : OWN_LANES == 2 ? 1 : 0;
#define INFINITE __int_as_float(0x7F800000)
constexpr int ROW_BYTES = FORMAT == 0 ? 2 * C : FORMAT == 4 ? C / 2 : C, CHUNKS = ROW_BYTES / 16;
constexpr int KEY_TILES = KEYS / 16, C_TILES = C / 16, ROWS = 8 * NT;
constexpr bool ONE_BLOCK = S % KEYS == 0;  // of the cache holds a slice
constexpr bool TILED = ENGINE && ONE_BLOCK && (ROW_BYTES == 32 || ROW_BYTES == 64 || ROW_BYTES % 128 == 0);
// In a tile rows follow one another, in parts of SPAN bytes: the first parts of all rows, then the second ones. Rows that are not TILED are an
// odd number of 16 bytes apart.
constexpr int SPAN = TILED && ROW_BYTES > 128 ? 128 : ROW_BYTES, PITCH = TILED || CHUNKS % 2 ? SPAN : ROW_BYTES + 16;
constexpr int TILE_BYTES = KEYS * PITCH * (ROW_BYTES / SPAN), SCALE_BYTES = SCALED ? 4 * KEYS : 0;
constexpr int STAGE_BYTES = 2 * TILE_BYTES, WARP_BYTES = DEPTH * STAGE_BYTES;  // of a slice: keys, values
constexpr int SCORE_BYTES = SPECIALIZED ? KEYS * ROWS * 4 : 0;  // of a slice
constexpr int KEYS_EACH = KEYS > 32 ? KEYS / 32 : 1;  // whose slot one thread looks up
// Where 16 bytes of a row are in a tile, and those that are `byte` further on in the row, where the thread's own are among the first: `byte` is a
// multiple of 16, or of 32 where the thread's own are among the first 32.
__device__ __forceinline__ u32 place_of(int row, int byte) {
    const u32 at = row * PITCH + byte % SPAN;
    return byte / SPAN * (KEYS * SPAN) + (TILED ? at ^ (at >> 3 & (SPAN - 16)) : at);
}
__device__ __forceinline__ u32 further(u32 at, int byte) { return (TILED ? at ^ byte % SPAN : at + byte % SPAN) + byte / SPAN * (KEYS * SPAN); }
// A block of its own keeps a warp's sums where its tiles were, so that more blocks fit; in a cluster they arrive while others still read tiles.
#define LANDING_PITCH (P == 1 ? WARP_BYTES : args.sent_bytes)

__device__ __forceinline__ int load_index(const long long* at) { return load_index((const int*)at); }  // the low half
// To shared memory: that many of 16 bytes, and zeros.
__device__ __forceinline__ void copy(u32 to, const char* from, int real) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS> __device__ __forceinline__ void wait_pending() {  // until at most GROUPS of the newest are unfinished
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
    __syncwarp();
}
// By the copy engine: KEYS rows of a head from a slot on, and their scales; a barrier counts the bytes.
__device__ __forceinline__ void copy_tile(u32 to, const TileMap* map, int slot, int head, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %2, %4}], [%5], %6;"
                 ::"r"(to), "l"(map), "r"(0), "r"(slot), "r"(head), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ void copy_scales(u32 to, const float* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ void let_engine_overwrite() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }  // what a warp wrote itself
// Blocks of 8 x 8 numbers of 16 bits from shared memory, a row's address from a thread: thread 4 g + t has columns 2 t and 2 t + 1 of row g, or,
// transposed, rows 2 t and 2 t + 1 of column g.
__device__ __forceinline__ void load_blocks(u32 (&a)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&a)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&a)[2], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(a[0]), "=r"(a[1]) : "r"(at) : "memory");
}
__device__ __forceinline__ void await_launches() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float at_least_finite(float m) { return m == -INFINITE ? 0.0f : m; }

#if F16
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif
__device__ __forceinline__ u32 narrow_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 transposed(u32 v) {
    u32 w;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(w) : "r"(v));
    return w;
}

// A word of codes as pairs of factors times a power of two: every second code of two pairs, or every fourth of four, where the odd pairs are
// ODD times too large. e4m3 (kernels/operands/e4m3.py) becomes value * 2^-120 in bfloat16, value * 2^-8 in float16. The factors that make up
// for it are dealt out so that no sum is subnormal.
constexpr int PAIRS = FORMAT == 4 ? 4 : 2, AT_ONCE = PAIRS / 2;  // tiles of channels from one word
constexpr int WIDER = F16 ? 1 : 4;
constexpr u32 MAGNITUDE = F16 ? 0x3F803F80 : 0x07F007F0;
__device__ __forceinline__ u32 e4m3_of_high_bytes(u32 v) { return (v & 0x80008000) | ((v >> WIDER) & MAGNITUDE); }
__device__ __forceinline__ u32 plus_128_of_low_bytes(u32 v) {  // in one instruction, which C++ would make two
    asm("lop3.b32 %0, %0, %1, %2, 0x28;" : "+r"(v) : "r"(0x00800080), "r"(0x00FF00FF));
    return v;
}
__device__ __forceinline__ void decode(u32 (&pairs)[PAIRS], u32 word) {
#if FORMAT == 3
    pairs[0] = plus_128_of_low_bytes(word), pairs[1] = plus_128_of_low_bytes(word >> 8);
#elif FORMAT == 4
    pairs[0] = word & 0x000F000F, pairs[1] = word & 0x00F000F0, pairs[2] = word >> 8 & 0x000F000F, pairs[3] = word >> 8 & 0x00F000F0;
#else
    pairs[0] = e4m3_of_high_bytes(word << 8), pairs[1] = e4m3_of_high_bytes(word);
#endif
}
struct Words {  // of 16 keys and AT_ONCE tiles of channels
    u32 w[FORMAT ? 2 : 4];
};
constexpr int AHEAD = C_TILES / AT_ONCE > 2 ? 2 : 1;  // tiles that are read before those are multiplied
constexpr float ODD = FORMAT == 4 ? 16.0f : 1.0f;
constexpr u32 EVEN_OFFSET = FORMAT == 4 ? 0x80088008 : 0x80808080, ODD_OFFSET = 0x80808080;  // -8 U, -128 U
constexpr float TO_60 = 1152921504606846976.0f, TO_13 = 8192.0f, TO_24 = 16777216.0f;
constexpr float Q_FACTOR = FORMAT && !F16 ? TO_60 : 1.0f, P_FACTOR = Q_FACTOR;
constexpr float S_FACTOR = FORMAT >= 3 ? (F16 ? TO_24 : TO_60 * TO_13) : FORMAT ? (F16 ? 256.0f : TO_60) : 1.0f, O_FACTOR = S_FACTOR;

// To a block of the cluster, by the address that the same thing has here; its barrier counts the bytes.
__device__ __forceinline__ void send(u32 to, int block, u32 barrier, float v) {
#if P > 1
    asm volatile("{.reg .b32 there, counter; mapa.shared::cluster.u32 there, %0, %1; mapa.shared::cluster.u32 counter, %2, %1;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [counter];}"
                 ::"r"(to), "r"(block), "r"(barrier), "r"(__float_as_uint(v)) : "memory");
#else
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
#endif
}
__device__ __forceinline__ void store_four(u32 to, const float (&v)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
__device__ __forceinline__ void send_four(u32 to, int block, u32 barrier, const float (&v)[4]) {
#if P > 1
    asm volatile("{.reg .b32 there, counter; mapa.shared::cluster.u32 there, %0, %1; mapa.shared::cluster.u32 counter, %2, %1;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%3, %4, %5, %6}, [counter];}"
                 ::"r"(to), "r"(block), "r"(barrier), "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])), "r"(__float_as_uint(v[2])), "r"(__float_as_uint(v[3])) : "memory");
#else
    store_four(to, v);
#endif
}
__device__ __forceinline__ float load_scale(u32 scales, int key) { return SCALED ? __uint_as_float(load_word(scales + 4 * key)) : 1.0f; }
__device__ __forceinline__ void load_four(float (&v)[4], u32 at) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(at) : "memory");
}

// A row of the result goes through shared memory in fours, as threads have their sums: thread 4 g + t has four 8 i + g, of tiles 2 i and 2 i + 1, and
// half of one where a tile is left over.
constexpr int FOURS = C / 4, WHOLE_FOURS = C_TILES / 2 * 8;  // of a row
// Channels of tile i: the first that thread 4 g + t has of a query, and the h-th that it has of a sum.
__device__ __forceinline__ int channel_of_query(int i, int t) { return FORMAT == 4 ? i / 2 * 32 + i % 2 * 2 + 8 * t : FORMAT ? 16 * i + 4 * t : 16 * i + 2 * t; }
__device__ __forceinline__ int channel_of_sum(int i, int g, int h) {
    return FORMAT == 4 ? i / 2 * 32 + i % 2 * 2 + 4 * g + h : FORMAT ? 16 * i + 2 * g + h : 16 * i + 8 * h + g;
}

// A lane's sums, or those of several: of the channels `channel_of_sum` and query rows 8 n + 2 t (+ 1), thread 4 g + t of the warp. Within a
// lane l is of the thread's own keys.
struct State {
    float o[C_TILES][NT][4], m[NT][2], l[NT][2];
};
__device__ __forceinline__ void clear(State& a) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        a.m[n][0] = a.m[n][1] = -INFINITE, a.l[n][0] = a.l[n][1] = 0.0f;
#pragma unroll
        for (int i = 0; i < C_TILES; ++i) a.o[i][n][0] = a.o[i][n][1] = a.o[i][n][2] = a.o[i][n][3] = 0.0f;
    }
}
__device__ __forceinline__ float sum(float a, float weight_a, float b, float weight_b) { return __fmaf_rn(a, weight_a, __fmul_rn(b, weight_b)); }
__device__ __forceinline__ void weigh(float& m_a, float m_b, float& weight_a, float& weight_b) {
    const float m = fmaxf(m_a, m_b), finite = at_least_finite(m);
    weight_a = exp2_of(m_a - finite), weight_b = exp2_of(m_b - finite);
    m_a = m;
}
__device__ __forceinline__ void add(State& b, const State& a) {  // b = a + b, a the lower lane
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float m = a.m[n][r], weight_a, weight_b;
            weigh(m, b.m[n][r], weight_a, weight_b);
            b.m[n][r] = m;
            b.l[n][r] = sum(a.l[n][r], weight_a, b.l[n][r], weight_b);
#pragma unroll
            for (int i = 0; i < C_TILES; ++i) {
                b.o[i][n][r] = sum(a.o[i][n][r], weight_a, b.o[i][n][r], weight_b);
                b.o[i][n][r + 2] = sum(a.o[i][n][r + 2], weight_a, b.o[i][n][r + 2], weight_b);
            }
        }
}

// Where a warp is: the n-th of its lanes, and a slice of it. Lanes come in the order in which the tree adds them.
struct Place {
    int n, slice;
    __device__ __forceinline__ void to_lane(int lane_n, int own, int first_slice) {
        n = lane_n;
        int j = 0;
#pragma unroll
        for (int bit = 1; bit < OWN_LANES; bit *= 2) j = 2 * j + (n & bit ? 1 : 0);
        slice = own + WARPS * P * j;
        if (slice < first_slice) slice += (first_slice - slice + LANES - 1) / LANES * LANES;
    }
    __device__ __forceinline__ void skip_empty(int own, int first_slice, int end_slice) {
        while (slice >= end_slice && n + 1 < OWN_LANES) to_lane(n + 1, own, first_slice);
    }
    __device__ __forceinline__ void advance(int own, int first_slice, int end_slice) {
        slice += LANES;
        skip_empty(own, first_slice, end_slice);
    }
};

// What the sums of a row are multiplied by.
__device__ __forceinline__ float factor_of(const Args& args, int head, float m, float l, float o_factor) {
    const float sink = args.sinks ? exp2_of(args.sinks[head] * 1.4426950408889634f - m) : 0.0f;
    return l == 0.0f ? 0.0f : o_factor / (l + sink);
}
// Where a section leaves what a row has of it: sums of its channels, m and l.
__device__ __forceinline__ float* part_of(const Args& args, int section, int num_pairs, int pair, int num_rows, int row) {
    return args.parts + (((long long)section * num_pairs + pair) * num_rows + row) * (C + 4);
}

extern "C" __global__ void __launch_bounds__(WARPS * (SPECIALIZED ? 64 : 32), BLOCKS) attend_lanes(const __grid_constant__ Args args) {
    extern __shared__ __align__(TILED ? 1024 : 128) char shared_memory[];
    __shared__ float ml[WARPS * P][2][ROWS];
    __shared__ unsigned long long arrivals, full[TILED ? WARPS * DEPTH * 2 : 1], handed_over[SPECIALIZED ? WARPS * 4 : 1];
    const int warp_of_block = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int warp = SPECIALIZED ? warp_of_block % WARPS : warp_of_block;
    const bool scores = SPECIALIZED && warp_of_block >= WARPS, has_keys = scores || !SPECIALIZED, has_values = !scores;
    const u32 shared = (u32)__cvta_generic_to_shared(shared_memory);
    const u32 tiles = shared + warp * WARP_BYTES;
    const int rank = blockIdx.x % P, pair = blockIdx.x / P, own = rank * WARPS + warp;
    const int request = pair / args.num_kv_heads, kv_head = pair - request * args.num_kv_heads;
    const int num_rows = args.q_len * args.group;
#if DIVIDED
    const int row_blocks = (num_rows + ROWS - 1) / ROWS, section = blockIdx.y / row_blocks, section_start = section * args.section;
    const int first_row = (blockIdx.y - section * row_blocks) * ROWS;
#else
    const int first_row = blockIdx.y * ROWS, section_start = 0;
#endif
    const TableEntry* table = args.table + request * args.table_stride;
    const char* k_head = args.k + kv_head * args.head_bytes;
    const char* v_head = args.v + kv_head * args.head_bytes;

    const u32 barrier = (u32)__cvta_generic_to_shared(&arrivals), ml_at = (u32)__cvta_generic_to_shared(&ml[0][0][0]);
    const u32 scales = shared + WARPS * WARP_BYTES + warp * DEPTH * 2 * SCALE_BYTES, full_at = (u32)__cvta_generic_to_shared(full) + warp * DEPTH * 16;
    const u32 scored_at = (u32)__cvta_generic_to_shared(handed_over) + warp * 32, taken_at = scored_at + 16;
    const u32 all_scores = shared + WARPS * (WARP_BYTES + DEPTH * 2 * SCALE_BYTES), scores_at = all_scores + warp * 2 * SCORE_BYTES + lane * 16;
    const u32 landing = P == 1 ? shared : all_scores + WARPS * 2 * SCORE_BYTES;
    const int fours = min(num_rows - first_row, ROWS) * FOURS;  // 32 of them are one block's, the next 32 the next's
    if ((TILED || SPECIALIZED) && lane == 0 && has_values) {
#pragma unroll
        for (int i = 0; i < 2 * DEPTH && TILED; ++i) init_barrier(full_at + 8 * i, 1);
#pragma unroll
        for (int i = 0; i < 4 && SPECIALIZED; ++i) init_barrier(scored_at + 8 * i, 1);
        publish_barriers();
    }
#if P > 1
    if (threadIdx.x == 0) {
        int own_fours = 0;
        for (int at = rank * 32; at < fours; at += 32 * P) own_fours += min(32, fours - at);
        init_barrier(barrier, 1);
        publish_barriers();
        arrive_expecting(barrier, WARPS * P * (own_fours * 16 + 8 * ROWS));
    }
#endif
    if (SPECIALIZED) __syncthreads();
    else __syncwarp();  // no lane waits at a barrier that is not set up
#if P > 1
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif

    const int key_lane = ONE_BLOCK ? 0 : lane * KEYS_EACH % KEYS;  // of a slice's keys the first whose slot this thread looks up
    // The entry of the table for this thread's key of a slice: nothing waits for it where it is read.
    auto entry_of = [&](int slice) { return load_index(table + min((slice * KEYS + key_lane) / S, args.num_columns - 1)); };
    const int first_entry = entry_of(section_start + own);  // beside the length, not after it
    const int context_len = __shfl_sync(0xFFFFFFFFu, load_index(args.lens + request), 0), old_len = context_len - args.q_len;
    const int first_key = args.window ? max(old_len + 1 - args.window, 0) : 0;
    const int context_slices = (context_len + KEYS - 1) / KEYS;
#if DIVIDED
    const bool in_parts = context_slices > args.section;
    const int first_slice = max(first_key / KEYS, section_start), end_slice = min(context_slices, section_start + args.section);
    if (section > 0 && first_slice >= end_slice) {  // no key of this section is seen
#if P > 1
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
        await_launches();
        return;
    }
#else
    const int first_slice = first_key / KEYS, end_slice = context_slices;
#endif

    // The slot of this thread's key of a slice (of its first key where they follow one another), and their order.
    auto slot_of = [&](int entry, int slice) {
        const int key = slice * KEYS + key_lane;
        return key < context_len ? entry * S + key % S : 0;
    };
    auto slot_at = [&](int slot, int row) { return ONE_BLOCK ? slot + row : __shfl_sync(0xFFFFFFFFu, slot, row / KEYS_EACH) + row % KEYS_EACH; };
    // Rows of a slice before position `known`, and zeros where none is, whose weight is 0: what lies there may be NaN. What is between comes later.
    auto load_rows = [&](u32 to, const char* head, int slice, int slot, int known) {
        if (ONE_BLOCK && 32 % CHUNKS == 0) {  // rows lie one after the other
            constexpr int TOGETHER = 32 / CHUNKS;  // by one copy of a warp
            const char* from = head + (long long)slot * ROW_BYTES + lane * 16;
            if (!TILED && (slice + 1) * KEYS <= known) {
                to += lane / CHUNKS * PITCH + lane % CHUNKS * 16;
#pragma unroll
                for (int i = 0; i < KEYS / TOGETHER; ++i) copy(to + i * TOGETHER * PITCH, from + i * 512, 16);
                return;
            }
            int row = lane / CHUNKS;
#pragma unroll 4
            for (int i = 0; i < KEYS / TOGETHER; ++i, row += TOGETHER) {
                const int key = slice * KEYS + row;
                if (key < known || key >= context_len) copy(to + place_of(row, lane % CHUNKS * 16), from + i * 512, key < known ? 16 : 0);
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < KEYS * CHUNKS / 32; ++i) {
                const int chunk = i * 32 + lane, row = chunk / CHUNKS, byte = (chunk - row * CHUNKS) * 16, key = slice * KEYS + row;
                const int at = slot_at(slot, row);
                if (key < known || key >= context_len) copy(to + place_of(row, byte), head + (long long)at * ROW_BYTES + byte, key < known ? 16 : 0);
            }
        }
    };
    auto load_new_rows = [&](u32 to, const char* head, int slice, int slot) {
        const int first = max(old_len - slice * KEYS, 0), chunks = (min(context_len - slice * KEYS, KEYS) - first) * CHUNKS;
#pragma unroll 1
        for (int done = 0; done < chunks; done += 32) {
            const int chunk = done + lane, row = first + chunk / CHUNKS, byte = chunk % CHUNKS * 16, at = slot_at(slot, min(row, KEYS - 1));
            if (chunk < chunks) copy(to + place_of(row, byte), head + (long long)at * ROW_BYTES + byte, 16);
        }
    };
    // Scales, by fours: those without a position from `known` on, or the `others`.
    auto load_scales = [&](u32 to, const float* head, int slice, int slot, int known, bool others) {
        if (!SCALED) return;
        const int row = 4 * lane % KEYS, key = slice * KEYS + row, at = slot_at(slot, row);
        const bool is_new = key + 4 > known && key < context_len && known < context_len;
        if (4 * lane < KEYS && is_new == others) copy(to + 4 * row, (const char*)(head + at), 4 * max(0, min(context_len - key, 4)));
    };
    const float* k_scales = args.k_scale + kv_head * args.scale_stride;
    const float* v_scales = args.v_scale + kv_head * args.scale_stride;
    auto has_new = [&](int slice) { return slice < end_slice && (slice + 1) * KEYS > old_len; };
    const u64 policy = policy_of(true);
    auto load = [&](u32 to, const TileMap* map, const char* head, u32 scales_to, const float* head_scales, u32 barrier, int slice, int slot, int known) {
        if (!TILED || has_new(slice)) {
            load_rows(to, head, slice, slot, known);
            load_scales(scales_to, head_scales, slice, slot, known, false);
        } else if (slot = __shfl_sync(0xFFFFFFFFu, slot, 0), lane == 0) {
            arrive_expecting(barrier, TILE_BYTES + SCALE_BYTES);
            copy_tile(to, map, slot, kv_head, barrier, policy);
            if (SCALED) copy_scales(scales_to, head_scales + slot, SCALE_BYTES, barrier, policy);
        }
    };
    auto load_keys = [&](int stage, int slice, int slot, int known) {
        load(tiles + stage * STAGE_BYTES, &args.k_map, k_head, scales + stage * 2 * SCALE_BYTES, k_scales, full_at + stage * 16, slice, slot, known);
    };
    auto load_values = [&](int stage, int slice, int slot, int known) {
        load(tiles + stage * STAGE_BYTES + TILE_BYTES, &args.v_map, v_head, scales + (2 * stage + 1) * SCALE_BYTES, v_scales, full_at + stage * 16 + 8, slice, slot, known);
    };
    u32 phases = 0;  // of the barriers of each stage
    auto await = [&](int stage, bool values, int slice) {
        if (has_new(slice)) wait_pending<0>();
        else if (TILED) wait_barrier(full_at + stage * 16 + 8 * values, phases >> stage & 1);
        else wait_pending<(SPECIALIZED ? DEPTH : 2 * DEPTH) - 1>();
    };

    Place now, ahead;  // the slice that is multiplied, and the next one to be fetched, DEPTH slices later
    now.to_lane(0, own, first_slice);
    now.skip_empty(own, first_slice, end_slice);
    ahead = now;
    int newest = -1, newest_slot = 0;  // of the slices fetched now, one with new positions
#pragma unroll 1
    for (int stage = 0; stage < DEPTH; ++stage) {
        const int slice = ahead.slice, slot = slot_of(slice == section_start + own ? first_entry : entry_of(slice), slice);
        if (has_keys) {
            if (slice < end_slice) load_keys(stage, slice, slot, old_len);
            commit();
        }
        if (has_values) {
            if (slice < end_slice) load_values(stage, slice, slot, old_len);
            commit();
        }
        if (has_new(slice)) newest = slice, newest_slot = slot;
        ahead.advance(own, first_slice, end_slice);
    }
    int entry = entry_of(ahead.slice);
    await_launches();
    let_next_start();  // not before the wait: the next launch may be another of this kernel
    if (newest >= 0) {
        Place place = now;
#pragma unroll 1
        for (int stage = 0; stage < DEPTH; ++stage, place.advance(own, first_slice, end_slice)) {
            if (!has_new(place.slice)) continue;
            const u32 at = tiles + stage * STAGE_BYTES, scales_at = scales + stage * 2 * SCALE_BYTES;
            const int own_slot = place.slice == newest ? newest_slot : slot_of(entry_of(place.slice), place.slice);
            if (has_keys) {
                load_new_rows(at, k_head, place.slice, own_slot);
                load_scales(scales_at, k_scales, place.slice, own_slot, old_len, true);
            }
            if (has_values) {
                load_new_rows(at + TILE_BYTES, v_head, place.slice, own_slot);
                load_scales(scales_at + SCALE_BYTES, v_scales, place.slice, own_slot, old_len, true);
            }
        }
    }
    commit();

    u32 q[NT][C_TILES][2];
    int position[NT][2];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int row = first_row + 8 * n + g;
        const long long head = ((long long)request * args.q_len + row / args.group) * args.num_kv_heads * args.group;
        const u16* at = args.q + (head + kv_head * args.group + row % args.group) * C;
#pragma unroll
        for (int i = 0; i < C_TILES; ++i) {
            u32 low = 0, high = 0;
            if (row < num_rows) {
                const int channel = channel_of_query(i, t);
                low = *(const u32*)(at + channel), high = *(const u32*)(at + channel + (FORMAT ? PAIRS : 8));
            }
#if FORMAT
            // The order of channels in which codes come apart.
            const u32 even = __byte_perm(low, high, 0x5410), odd = __byte_perm(low, high, 0x7632);
            low = narrow_pair(widen((u16)even) * Q_FACTOR, widen((u16)(even >> 16)) * Q_FACTOR);
            high = narrow_pair(widen((u16)odd) * (Q_FACTOR / ODD), widen((u16)(odd >> 16)) * (Q_FACTOR / ODD));
#endif
            q[n][i][0] = low, q[n][i][1] = high;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) position[n][r] = old_len + (first_row + 8 * n + 2 * t + r) / args.group;
    }
    float s_factor = args.scale * 1.4426950408889634f * S_FACTOR, o_factor = O_FACTOR;
#if FORMAT == 2
    s_factor *= *args.k_scale, o_factor *= *args.v_scale;
#endif
    float no_keys[NT][4] = {};  // scores before the first channel
#if FORMAT >= 3
    const u32 offsets[4] = {EVEN_OFFSET, EVEN_OFFSET, ODD_OFFSET, ODD_OFFSET};
#pragma unroll
    for (int m = 0; m < NT; ++m)
#pragma unroll
        for (int i = 0; i < C_TILES; ++i) mma(no_keys[m], offsets, q[m][i][0], q[m][i][1]);
#endif

    // Of a tile what this thread reads of its first 16 keys: words of keys in its own order, and blocks that are transposed.
    const u32 own_keys = FORMAT ? place_of(g, 0) + 4 * t : place_of(lane & 15, (lane >> 4) * 16);
    const u32 own_values = TILE_BYTES + (FORMAT ? place_of(lane & 15, 0) : place_of((lane >> 4) * 8 + (lane & 7), ((lane >> 3) & 1) * 16));
    int stage = 0;
    auto take_slice = [&](int& slice, int& fetched, int& slot) {  // the next one, and the one to be fetched in its place
        slice = now.slice, fetched = ahead.slice, slot = slot_of(entry, fetched);
        now.advance(own, first_slice, end_slice);
        ahead.advance(own, first_slice, end_slice);
        entry = entry_of(ahead.slice);  // one slice early
    };
    auto next_stage = [&](int slice) {
        if (!has_new(slice)) phases ^= 1 << stage;
        stage = stage == DEPTH - 1 ? 0 : stage + 1;
    };
    auto score = [&](float (&s)[KEY_TILES][NT][4], int slice, int fetched, int slot) {
        await(stage, false, slice);
        const u32 keys_at = tiles + stage * STAGE_BYTES + own_keys, key_scales = scales + stage * 2 * SCALE_BYTES + 4 * g;
#pragma unroll
        for (int j = 0; j < KEY_TILES; ++j)
#pragma unroll
            for (int m = 0; m < NT; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[j][m][e] = no_keys[m][e];
        Words words[AHEAD + 1][KEY_TILES];
        auto read_keys = [&](int i) {  // of tiles i of channels
#pragma unroll
            for (int j = 0; j < KEY_TILES; ++j) {
                Words& to = words[i % (AHEAD + 1)][j];
#if FORMAT == 0
                load_blocks(to.w, further(keys_at, 32 * i) + 16 * j * PITCH);
#else
                const u32 at = further(keys_at, 16 * i) + 16 * j * PITCH;
                to.w[0] = load_word(at), to.w[1] = load_word(at + 8 * PITCH);
#endif
            }
        };
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) read_keys(i);
#pragma unroll
        for (int i = 0; i < C_TILES / AT_ONCE; ++i) {
            if (i + AHEAD < C_TILES / AT_ONCE) read_keys(i + AHEAD);
#pragma unroll
            for (int j = 0; j < KEY_TILES; ++j) {
                const Words& from = words[i % (AHEAD + 1)][j];
                u32 a[AT_ONCE][4];
#if FORMAT == 0
#pragma unroll
                for (int e = 0; e < 4; ++e) a[0][e] = from.w[e];
#else
                u32 above[PAIRS], below[PAIRS];
                decode(above, from.w[0]), decode(below, from.w[1]);
#pragma unroll
                for (int c = 0; c < AT_ONCE; ++c) a[c][0] = above[2 * c], a[c][1] = below[2 * c], a[c][2] = above[2 * c + 1], a[c][3] = below[2 * c + 1];
#endif
#pragma unroll
                for (int c = 0; c < AT_ONCE; ++c)
#pragma unroll
                    for (int m = 0; m < NT; ++m) mma(s[j][m], a[c], q[m][i * AT_ONCE + c][0], q[m][i * AT_ONCE + c][1]);
            }
        }
#pragma unroll
        for (int j = 0; j < KEY_TILES; ++j) {
            const float key_scale[2] = {s_factor * load_scale(key_scales, 16 * j), s_factor * load_scale(key_scales, 16 * j + 8)};
#pragma unroll
            for (int m = 0; m < NT; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[j][m][e] *= key_scale[e / 2];
        }
        if (TILED && has_new(slice)) let_engine_overwrite();
        __syncwarp();
        if (fetched < end_slice) load_keys(stage, fetched, slot, context_len);
        commit();
    };
    State state, waiting[OWN_BITS + 1];
    int handed = 0;  // SPECIALIZED: slices whose scores went from warp to warp, through two places in turn
    if (scores) {
        while (now.slice < end_slice) {
            int slice, fetched, slot;
            take_slice(slice, fetched, slot);
            float s[KEY_TILES][NT][4];
            score(s, slice, fetched, slot);
            const int place = handed & 1;
            if (handed > 1) wait_barrier(taken_at + 8 * place, (handed >> 1) - 1 & 1);
#pragma unroll
            for (int j = 0; j < KEY_TILES; ++j)
#pragma unroll
                for (int m = 0; m < NT; ++m) store_four(scores_at + place * SCORE_BYTES + (j * NT + m) * 512, s[j][m]);
            __syncwarp();
            if (lane == 0) arrive(scored_at + 8 * place);
            ++handed;
            next_stage(slice);
        }
        return;
    }
#pragma unroll 1
    for (int n = 0; n < OWN_LANES; ++n) {
        clear(state);
#pragma unroll 1
        while (now.n == n && now.slice < end_slice) {
            int slice, fetched, slot;
            take_slice(slice, fetched, slot);
            float s[KEY_TILES][NT][4];
            if (SPECIALIZED) {
                const int place = handed & 1;
                wait_barrier(scored_at + 8 * place, handed >> 1 & 1);
#pragma unroll
                for (int j = 0; j < KEY_TILES; ++j)
#pragma unroll
                    for (int m = 0; m < NT; ++m) load_four(s[j][m], scores_at + place * SCORE_BYTES + (j * NT + m) * 512);
                __syncwarp();
                if (lane == 0) arrive(taken_at + 8 * place);
                ++handed;
            } else {
                score(s, slice, fetched, slot);
            }

            const bool everything = (slice + 1) * KEYS <= old_len && !args.window;  // is seen by every row
#pragma unroll
            for (int m = 0; m < NT; ++m)
#pragma unroll
                for (int j = 0; j < KEY_TILES; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int key = slice * KEYS + 16 * j + e / 2 * 8 + g, last = position[m][e % 2];
                        if (!everything && (key > last || (args.window && key <= last - args.window))) s[j][m][e] = -INFINITE;
                    }
            float weight[NT][KEY_TILES][4], alpha[NT][2];
#pragma unroll
            for (int m = 0; m < NT; ++m)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float most = -INFINITE;
#pragma unroll
                    for (int j = 0; j < KEY_TILES; ++j) most = fmaxf(most, fmaxf(s[j][m][r], s[j][m][2 + r]));
#pragma unroll
                    for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
                    const float top = fmaxf(state.m[m][r], most), finite = at_least_finite(top);
                    alpha[m][r] = exp2_of(state.m[m][r] - finite);
                    state.m[m][r] = top;
                    float total = 0.0f;
#pragma unroll
                    for (int j = 0; j < KEY_TILES; ++j)
#pragma unroll
                        for (int h = 0; h < 2; ++h) total += weight[m][j][2 * h + r] = exp2_of(s[j][m][2 * h + r] - finite);
                    state.l[m][r] = __fmaf_rn(state.l[m][r], alpha[m][r], total);
                }

            await(stage, true, slice);
            const u32 values_at = tiles + stage * STAGE_BYTES + own_values, value_scales = scales + (2 * stage + 1) * SCALE_BYTES + 4 * g;
            float value_scale[KEY_TILES][2];
            Words words[AHEAD + 1][KEY_TILES];
            auto read_values = [&](int i) {
#pragma unroll
                for (int j = 0; j < KEY_TILES; ++j) {
                    Words& to = words[i % (AHEAD + 1)][j];
                    load_transposed(to.w, further(values_at, (FORMAT ? 16 : 32) * i) + 16 * j * PITCH);
                }
            };
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) read_values(i);
#pragma unroll
            for (int j = 0; j < KEY_TILES; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) value_scale[j][h] = P_FACTOR * load_scale(value_scales, 16 * j + 8 * h);
            u32 p[KEY_TILES][NT][2];
#pragma unroll
            for (int m = 0; m < NT; ++m) {
                float no_values[4] = {};
#pragma unroll
                for (int j = 0; j < KEY_TILES; ++j) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const float(&of)[4] = weight[m][j];
                        p[j][m][h] = transposed(FORMAT ? narrow_pair(of[2 * h] * value_scale[j][h], of[2 * h + 1] * value_scale[j][h]) : narrow_pair(of[2 * h], of[2 * h + 1]));
                    }
#if FORMAT >= 3
                    const u32 offsets[4] = {EVEN_OFFSET, ODD_OFFSET, EVEN_OFFSET, ODD_OFFSET};
                    mma(no_values, offsets, p[j][m][0], p[j][m][1]);
#endif
                }
#pragma unroll
                for (int i = 0; i < C_TILES; ++i)
#pragma unroll
                    for (int e = 0; e < 4; ++e) state.o[i][m][e] = FORMAT >= 3 ? __fmaf_rn(state.o[i][m][e], alpha[m][e % 2], no_values[e]) : state.o[i][m][e] * alpha[m][e % 2];
            }
#pragma unroll
            for (int i = 0; i < C_TILES / AT_ONCE; ++i) {
                if (i + AHEAD < C_TILES / AT_ONCE) read_values(i + AHEAD);
#pragma unroll
                for (int j = 0; j < KEY_TILES; ++j) {
                    const Words& from = words[i % (AHEAD + 1)][j];
                    u32 a[AT_ONCE][4];
#if FORMAT == 0
#pragma unroll
                    for (int e = 0; e < 4; ++e) a[0][e] = from.w[e];
#else
                    u32 first_keys[PAIRS], other_keys[PAIRS];  // eight keys each
                    decode(first_keys, from.w[0]), decode(other_keys, from.w[1]);
#pragma unroll
                    for (int c = 0; c < AT_ONCE; ++c)
                        a[c][0] = first_keys[2 * c], a[c][1] = first_keys[2 * c + 1], a[c][2] = other_keys[2 * c], a[c][3] = other_keys[2 * c + 1];
#endif
#pragma unroll
                    for (int c = 0; c < AT_ONCE; ++c)
#pragma unroll
                        for (int m = 0; m < NT; ++m) mma(state.o[i * AT_ONCE + c][m], a[c], p[j][m][0], p[j][m][1]);
                }
            }
            if (TILED && has_new(slice)) let_engine_overwrite();
            __syncwarp();
            if (fetched < end_slice) load_values(stage, fetched, slot, context_len);
            commit();
            next_stage(slice);
        }
#pragma unroll
        for (int m = 0; m < NT; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int step = 4; step < 32; step *= 2) state.l[m][r] += __shfl_xor_sync(0xFFFFFFFFu, state.l[m][r], step);
        // Lanes meet as a counter carries: a subtree waits for its neighbour, or is added to the one that waits.
        bool closes = true;
#pragma unroll
        for (int level = 0; level < OWN_BITS; ++level) {
            const bool last = n >> level & 1;
            if (closes && last) add(state, waiting[level]);
            else if (closes) waiting[level] = state;
            closes = closes && last;
        }
    }
    wait_pending<0>();

    // Sums of the warp's lanes go to the blocks that have their elements.
#if P > 1
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // until every barrier is set up
#endif
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = 8 * n + 2 * t + r;
            if (g < P) {
                const u32 to = ml_at + ((own * 2) * ROWS + row) * 4;
                send(to, g, barrier, state.m[n][r]), send(to + ROWS * 4, g, barrier, state.l[n][r]);
            }
            if (first_row + row < num_rows)
#pragma unroll
                for (int i = 0; i < C_TILES; i += 2) {
                    const bool whole = i + 1 < C_TILES;
                    const int next = whole ? i + 1 : i, four = row * FOURS + i / 2 * 8 + (whole ? g : g / 2), group = four / 32;
                    const u32 to = landing + own * LANDING_PITCH + group / P * 512 + four % 32 * 16;
                    const float sums[4] = {state.o[i][n][r], state.o[i][n][2 + r] * (1 / ODD), state.o[next][n][r], state.o[next][n][2 + r] * (1 / ODD)};
                    if (whole) send_four(to, group % P, barrier, sums);
                    else
                        for (int h = 0; h < 2; ++h) send(to + g % 2 * 8 + h * 4, group % P, barrier, sums[h]);
                }
        }
#if P > 1
    u32 done = 0;
    while (!done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(barrier) : "memory");
#else
    __syncthreads();
#endif

    // To four elements a thread for each warp of a block.
    const int w = threadIdx.x % WARPS;
    for (int at = threadIdx.x / WARPS, four; (four = at / 32 * 32 * P + rank * 32 + at % 32) < fours; at += 32) {
        const int row = four / FOURS;
        float m[P], l[P], o[P][4];
#pragma unroll
        for (int b = 0; b < P; ++b) {
            m[b] = ml[b * WARPS + w][0][row], l[b] = ml[b * WARPS + w][1][row];
            load_four(o[b], landing + (b * WARPS + w) * LANDING_PITCH + at * 16);
        }
#pragma unroll
        for (int half = P / 2; half > 0; half /= 2)
#pragma unroll
            for (int b = 0; b < half; ++b) {
                float weight_a, weight_b;
                weigh(m[b], m[b + half], weight_a, weight_b);
                l[b] = sum(l[b], weight_a, l[b + half], weight_b);
#pragma unroll
                for (int i = 0; i < 4; ++i) o[b][i] = sum(o[b][i], weight_a, o[b + half][i], weight_b);
            }
#pragma unroll
        for (int step = WARPS / 2; step > 0; step /= 2) {
            const unsigned active = ((1u << WARPS) - 1) << lane / WARPS * WARPS;
            const bool upper = w & step;
            const float m_other = __shfl_xor_sync(active, m[0], step), l_other = __shfl_xor_sync(active, l[0], step);
            float m_a = upper ? m_other : m[0], weight_a, weight_b;
            weigh(m_a, upper ? m[0] : m_other, weight_a, weight_b);
            m[0] = m_a;
            l[0] = sum(upper ? l_other : l[0], weight_a, upper ? l[0] : l_other, weight_b);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float other = __shfl_xor_sync(active, o[0][i], step);
                o[0][i] = sum(upper ? other : o[0][i], weight_a, upper ? o[0][i] : other, weight_b);
            }
        }
        if (w == 0) {
            const int whole_row = first_row + row;
            const long long token = (long long)request * args.q_len + whole_row / args.group;
            const long long head = (token * args.num_kv_heads + kv_head) * args.group + whole_row % args.group;
            const float factor = factor_of(args, kv_head * args.group + whole_row % args.group, m[0], l[0], o_factor);
#if DIVIDED
            float* part = part_of(args, section, gridDim.x / P, pair, num_rows, whole_row);
            if (in_parts && four % FOURS == 0) part[C] = m[0], part[C + 1] = l[0];
#endif
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at_row = four % FOURS;
                const int channel = at_row < WHOLE_FOURS ? channel_of_sum(at_row / 8 * 2 + i / 2, at_row % 8, i % 2) : channel_of_sum(C_TILES - 1, at_row % 8 * 2 + i / 2, i % 2);
#if DIVIDED
                if (in_parts) {
                    part[channel] = o[0][i];
                    continue;
                }
#endif
                args.out[head * C + channel] = narrow(o[0][i] * factor);
            }
        }
    }
}

#if DIVIDED
// The sections of contexts that have several, added in their order: a thread for each channel, a block for each row of a request and KV head.
extern "C" __global__ void merge_sections(const __grid_constant__ Args args) {
    let_next_start();
    const int pair = blockIdx.x, row = blockIdx.y, num_rows = gridDim.y, channel = threadIdx.x;
    const int request = pair / args.num_kv_heads, kv_head = pair - request * args.num_kv_heads;
    const int context_len = load_index(args.lens + request), old_len = context_len - args.q_len, section_keys = args.section * KEYS;
    const int first_key = args.window ? max(old_len + 1 - args.window, 0) : 0, position = old_len + row / args.group;
    await_launches();
    if (context_len <= section_keys || channel >= C) return;
    float o_factor = O_FACTOR, m = -INFINITE, l = 0.0f, o = 0.0f;
#if FORMAT == 2
    o_factor *= *args.v_scale;
#endif
    const int first = first_key / section_keys;
#pragma unroll 4
    for (int z = first; z <= position / section_keys; ++z) {
        const float* part = part_of(args, z, gridDim.x, pair, num_rows, row);
        const float m_z = part[C], l_z = part[C + 1], o_z = part[channel];
        if (z == first) {
            m = m_z, l = l_z, o = o_z;
        } else {
            float weight, weight_z;
            weigh(m, m_z, weight, weight_z);
            l = sum(l, weight, l_z, weight_z), o = sum(o, weight, o_z, weight_z);
        }
    }
    const int head = kv_head * args.group + row % args.group;
    const long long token = (long long)request * args.q_len + row / args.group;
    args.out[(token * args.num_kv_heads * args.group + head) * C + channel] = narrow(o * factor_of(args, head, m, l, o_factor));
}
#endif
