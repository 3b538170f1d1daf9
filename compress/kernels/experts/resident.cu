// Experts of decode rows in one launch, on sm_90: gate, up and their activation (or up and its own), then down, of weights of 16 bits and of e4m3. Blocks stay, one on a
// multiprocessor, and read their share of both products through one ring, so that weights of down arrive while the last of gate and up is multiplied.
//
//     sum of an output    steps of 128 bytes of a row ascend (128 columns of e4m3, 64 of 16 bits); 16 columns to a matrix instruction, ascending. Blocks
//                         of e4m3 sum a step from zero and add it times its two scales
//     sum of a token      choices ascend, in float32, then the residual
//
// So a row's bits depend on the row alone. A row of x or h is rounded to e4m3 where it is read (numbers.cuh), and multiplied as float16, exactly.
//
// Work: an item is a unit (TOKENS rows of one expert's tokens; where CHOICES is not 0, one pair of a token and an expert it chose) and up to 64 outputs of
// gate and of up, or 128 of up without a gate; or a unit and 128 outputs of down, where CHOICES is not 0 a token and tiles of 16 outputs of all its choices, as many as a stage holds,
// or one in two stages where CHOICES is above 8.
// Items are dealt in ranges, as many as there are blocks or some times as many, and blocks take one after the other, first all of gate and up, then those of
// down: whoever waits for h of a unit waits for blocks that run, however few the GPU has room for, and a block that memory serves slowly takes fewer.
//
// A block has four warps that multiply for each part of a sum, two tiles of 16 outputs of a stage each, and one warp that asks for weights: a stage of the ring is 8
// tiles of 16 rows x 128 bytes, by the copy engine, 16-byte chunks swizzled by row. Where units are pairs, it asks for weights of down when its own of gate
// and up have arrived, so that no block waits for h behind them. `state`: the next range, the number of the launch, counters of the tiles of h that are
// written, for even and for odd launches, and where units are pairs h itself (two numbers and the launch that they are of). The last to ask for a range in
// vain makes the counters of the next launch zero.
//
// Macros: F16 0 = bfloat16, 1 = float16 (the model's dtype); FORMAT 0 = 16 bits, 2 = e4m3 with a scale for each output and row, 3 = e4m3 in blocks;
// ACT as in products.cuh, or RELU2 = the squared relu without a gate; CHOICES; TOKENS 8 or 16.

struct alignas(64) TileMap {
    char bytes[128];
};
// Eight numbers, of h where units are pairs four, and whether they are of another launch.
struct Chunk {
    uint4 numbers;
    u32 stale;
};
struct Args {
    TileMap gate_up_map, down_map;
    const u16 *x, *residual, *gate_up_bias, *down_bias;
    const float *gate_up_scale, *down_scale;
    u16* h;     // [pairs, F]
    float* y;   // [pairs, D], CHOICES 0
    u16* out;   // [T, D], else
    const int *experts, *pairs;  // of units, -1 after the last; their pairs, -1 where there are fewer
    const float* weights;        // of pairs
    int* state;
    int hidden, ffn, num_units, num_rows, choices, stages, gate_tiles, gate_items, down_items, num_counters;  // gate_tiles of an item, up to GATE_TILES; items of a unit
};

constexpr int HEADER = 4;  // numbers of `state` before the counters: the next range, the number of the launch
constexpr int WARP = 32, PARTS = 4, TEAM = 4, WARPS = PARTS * TEAM, THREADS = WARPS * WARP;  // a team of warps for each part of a sum
constexpr int MATRICES = ACT ? 2 : 1;  // gate and up, or up
constexpr int TILES = 8, TILE_BYTES = 2048, STAGE_BYTES = TILES * TILE_BYTES;
constexpr bool PAIRED = CHOICES > 0, FP8 = FORMAT != 0;
// Ranges for each block, at most: more of them even out what memory serves slowly, and load rows more often.
constexpr bool ONE_RANGE = PAIRED || (FP8 && TOKENS == 8);
constexpr int GATE_RANGES = ONE_RANGE ? 1 : TOKENS == 8 ? 4 : 2, DOWN_RANGES = ONE_RANGE ? 1 : 4;
constexpr int EIGHTS = TOKENS / 8, COLUMNS = FP8 ? 128 : 64, FACTORS = COLUMNS / 16;  // of a step; each matrix instruction takes 16 columns
constexpr int HALVES = CHOICES > TILES ? 2 : 1;  // stages of a step of down
constexpr int SUMS = HALVES * TILES * TOKENS * 16, BUFFERS = PAIRED || EIGHTS > 1 ? 1 : 2;  // sums of an item, which has one for each part; buffers of them in turn
constexpr int DOWN_TILES = !PAIRED ? TILES : CHOICES > 1 ? HALVES * TILES / (CHOICES ? CHOICES : 1) : TILES / 2, GATE_TILES = TILES / MATRICES;  // of outputs of an item
constexpr int ENDED = 4 / HALVES;  // outputs of down that a warp ends, where units are pairs, with a lane for each choice
static_assert(CHOICES <= 2 * TILES && (TOKENS == 8 || (TOKENS == 16 && !PAIRED)), "a tile for each choice");

__device__ __forceinline__ void prefetch_map(const TileMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
__device__ __forceinline__ void await_launches() {
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");  // the next launch may read what was written before this one
}
// Some tiles of 16 rows, which the map says, too.
__device__ __forceinline__ void copy_tiles(u32 to, const TileMap* map, int column, int row, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ void count_up(int* counter) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory"); }
__device__ __forceinline__ void await_count(const int* counter, int count) {
    int v;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
    while (v < count);
}
// Two numbers of h and the launch that they are of, at once: who reads them needs no other sign that they are there.
__device__ __forceinline__ void store_pair(u64* at, u32 pair, u32 launch) {
    asm volatile("{.reg .b64 v; mov.b64 v, {%1, %2}; st.relaxed.gpu.global.b64 [%0], v;}" ::"l"(at), "r"(pair), "r"(launch) : "memory");
}
__device__ __forceinline__ Chunk load_pairs(const u64* at, u32 launch) {
    u32 pairs[2], launches[2];
    asm volatile("{.reg .b64 v, w; ld.relaxed.gpu.global.v2.b64 {v, w}, [%4]; mov.b64 {%0, %1}, v; mov.b64 {%2, %3}, w;}"
                 : "=r"(pairs[0]), "=r"(launches[0]), "=r"(pairs[1]), "=r"(launches[1]) : "l"(at) : "memory");
    return {make_uint4(pairs[0], pairs[1], 0, 0), (launches[0] ^ launch) | (launches[1] ^ launch)};
}
__device__ __forceinline__ void rest_a_moment() { asm volatile("nanosleep.u32 40;"); }
__device__ __forceinline__ void meet() {  // of the warps that multiply
    __syncwarp();
    asm volatile("bar.sync 1, 512;" ::: "memory");
}

// What those that multiply are told: the first item of a range of gate and up or of down, and how many it has, -1 after the last range.
struct alignas(16) Ticket {
    int unit, tile, count, down;
    u32 launch;
};
__device__ __forceinline__ int steps_of(int columns) { return (columns + COLUMNS - 1) / COLUMNS; }
// Where things lie in shared memory.
struct Places {
    u32 ring, rows, full, empty, range_full, range_empty;
    float *row_scales, *parts, *weights, *mosts;
    int *pairs, *experts, *ranges;
    Ticket* tickets;
};
__device__ __forceinline__ Places places_of(const Args& args, char* base) {
    Places at;
    const u32 start = (u32)__cvta_generic_to_shared(base);
    u32 next = args.stages * STAGE_BYTES;
    auto take = [&](u32 bytes) { const u32 own = next; next += bytes; return own; };
    at.ring = start;
    const int x_steps = steps_of(args.hidden), h_steps = steps_of(args.ffn);
    at.rows = start + take(2 * COLUMNS * (PAIRED ? max(x_steps, HALVES * TILES * h_steps) : TOKENS * max(x_steps, h_steps)));
    at.parts = (float*)(base + take(4 * BUFFERS * PARTS * SUMS));
    at.tickets = (Ticket*)(base + take(2 * sizeof(Ticket)));
    at.full = start + take(8 * args.stages), at.empty = start + take(8 * args.stages);
    at.range_full = start + take(16), at.range_empty = start + take(16);
    at.row_scales = (float*)(base + take(4 * HALVES * TOKENS * (FORMAT == 3 ? max(x_steps, h_steps) : 1)));
    at.weights = (float*)(base + take(4 * HALVES * TILES)), at.mosts = (float*)(base + take(4 * WARPS));
    at.pairs = (int*)(base + take(4 * TOKENS)), at.ranges = (int*)(base + take(PAIRED ? 4 * gridDim.x : 0)), at.experts = (int*)(base + take(4 * args.num_units));
    return at;
}

// One of the two products: its items, and the tiles of a stage of them.
struct Product {
    const bool down;
    int steps, columns, outputs;  // outputs of one matrix
    int of_item, tiles;           // tiles of 16 outputs of one matrix in an item; items of a unit
    int row_bytes, scales;        // of a row of x or h in shared memory: from one to the next, 0 where there is one
    __device__ Product(const Args& args, bool down) : down(down) {
        columns = down ? args.ffn : args.hidden, outputs = down ? args.hidden : args.ffn;
        steps = steps_of(columns);
        of_item = down ? DOWN_TILES : args.gate_tiles, tiles = down ? args.down_items : args.gate_items;
        row_bytes = PAIRED && !down ? 0 : 2 * COLUMNS * steps, scales = FORMAT == 3 ? steps : 1;
    }
    // The tile of outputs that tile i of a stage is of, or -1; its matrix of gate and up; its pair or unit.
    __device__ int tile_of(int tile, int i) const {
        const bool own = !down ? i % GATE_TILES < of_item : !PAIRED || i < CHOICES * DOWN_TILES;
        const int outputs_tile = tile * of_item + (!down ? i % GATE_TILES : !PAIRED ? i : i / max(CHOICES, 1));
        return own && 16 * outputs_tile < outputs ? outputs_tile : -1;
    }
    __device__ int matrix_of(int expert, int i) const { return down ? expert : MATRICES * expert + i / GATE_TILES; }
    __device__ int unit_of(int unit, int i) const { return down && PAIRED ? unit * CHOICES + i % max(CHOICES, 1) : unit; }
};
struct Item {
    int unit, tile;
    __device__ Item next(int tiles) const { return tile + 1 < tiles ? Item{unit, tile + 1} : Item{unit + 1, 0}; }
};

template <bool DOWN, typename Midway> __device__ __forceinline__ void ask(const Args& args, const Places& at, const Ticket& ticket, u32& stage, u32& phase, Midway midway) {
    constexpr int APART = (DOWN ? PAIRED : !ACT) ? 1 : TILES / 2;  // tiles of a stage from one copy to the next
    const Product product(args, DOWN);
    const int lane = threadIdx.x % WARP, first = lane * APART;  // of the tiles of this lane's copy
    const TileMap* map = DOWN ? &args.down_map : &args.gate_up_map;
    const u64 policy = policy_of(true);
    const int copied = TILE_BYTES * (DOWN || !ACT ? APART : product.of_item);
    constexpr int STAGES = DOWN ? HALVES : 1;  // of a step
    Item item{ticket.unit, ticket.tile};
#pragma unroll 1
    for (int left = ticket.count; left > 0; --left, item = item.next(product.tiles)) {
        const int own = first < STAGES * TILES ? product.tile_of(item.tile, first) : -1;
        const u32 copies = __ballot_sync(0xFFFFFFFFu, own >= 0);
        const int row = product.matrix_of(at.experts[product.unit_of(item.unit, first % (STAGES * TILES))], first) * product.outputs + 16 * own;
#pragma unroll 1
        for (int step = 0; step < product.steps; ++step) {
#pragma unroll
            for (int half = 0; half < STAGES; ++half) {
                wait_barrier(at.empty + 8 * stage, phase);
                const u32 here = STAGES == 1 ? copies : half ? copies >> TILES : copies & ((1 << TILES) - 1);
                if (lane == 0) arrive_expecting(at.full + 8 * stage, __popc(here) * copied);
                __syncwarp();
                if (own >= 0 && first / TILES == half) copy_tiles(at.ring + stage * STAGE_BYTES + first % TILES * TILE_BYTES, map, step * COLUMNS, row, at.full + 8 * stage, policy);
                if (++stage == args.stages) stage = 0, phase ^= 1;
            }
            if (step == product.steps / 2) midway();
        }
    }
}

__device__ __forceinline__ u64* h_of(const Args& args, int pair) { return (u64*)(args.state + HEADER + 2 * args.num_counters) + (long long)pair * (args.ffn / 2); }

// The pairs of a unit, one for a lane, -1 where there is none.
__device__ __forceinline__ int pair_of_lane(const Args& args, int unit) {
    const int lane = threadIdx.x % WARP;
    return !PAIRED && lane < TOKENS ? load_index(args.pairs + unit * TOKENS + lane) : -1;
}

// The rows of x or h that a unit multiplies, to shared memory, rounded where their format is, chunks swizzled like the weights'. Returns how many.
template <bool DOWN> __device__ __forceinline__ int load_rows(const Args& args, const Places& at, int unit, int own_pair, const Product& product, u32 launch) {
    constexpr bool EXCHANGED = DOWN && PAIRED;  // h by the launch that its numbers are of
    constexpr int NUMBERS = EXCHANGED ? 4 : 8, AT_ONCE = 4;  // of a load; loads of a lane under way
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, columns = product.columns;
    const int count = !PAIRED ? __popc(__ballot_sync(0xFFFFFFFFu, own_pair >= 0)) : DOWN ? CHOICES : 1;
    const int places = count <= 1 ? 1 : count <= 2 ? 2 : count <= 4 ? 4 : count <= 8 ? 8 : 16;  // of rows, which have as many warps each
    const int row = warp % places, own = warp / places, share = WARPS / places, pair = __shfl_sync(0xFFFFFFFFu, own_pair, row);
    const u16* from = DOWN ? args.h + (long long)pair * columns : args.x + (long long)(PAIRED ? unit : pair / args.choices) * columns;
    const u64* exchanged = h_of(args, unit * CHOICES + row);
    if (EXCHANGED && threadIdx.x < CHOICES) at.weights[threadIdx.x] = load_float(args.weights + unit * CHOICES + threadIdx.x);
    if (!PAIRED && threadIdx.x < TOKENS) at.pairs[threadIdx.x] = own_pair;
    auto load = [&](int number) { return EXCHANGED ? load_pairs(exchanged + 2 * number, launch) : Chunk{load_chunk(from + 8 * number), 0}; };
    auto place = [&](int chunk) { return at.rows + row * product.row_bytes + chunk / 8 * 128 + ((chunk % 8 ^ row % 8) << 4); };
    auto store_codes = [&](int eight, uint2 codes) {  // eight columns, as the factors of 16 columns of weights lie in their registers
        const uint2 low = factors_of(codes.x), high = factors_of(codes.y);
        const u32 half = eight % 2 * 8;
        store_shared(place(eight & ~1) + half, make_uint2(low.x, high.x));
        store_shared(place(eight | 1) + half, make_uint2(low.y, high.y));
    };
    const int there = row < count ? columns / NUMBERS : 0, padded = row < count ? product.steps * COLUMNS / NUMBERS : 0;
    float* const scales = at.row_scales + row * product.scales;
    float most = 0.0f;
#pragma unroll 1
    for (int first = own * WARP; first < padded; first += AT_ONCE * share * WARP) {
        Chunk held[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int number = first + i * share * WARP + lane;
            held[i] = number < there ? load(number) : Chunk{};
        }
#pragma unroll 1
        for (int i = 0; i < AT_ONCE; ++i) {
            const int number = first + i * share * WARP + lane;
            if (number - lane >= padded) break;
            while (EXCHANGED && number < there && held[0].stale) {
                rest_a_moment();
                held[0] = load(number);
            }
            const uint4 v = held[0].numbers;
#pragma unroll
            for (int j = 1; j < AT_ONCE; ++j) held[j - 1] = held[j];
            const int chunk = number * NUMBERS / 8;
#if FORMAT == 3
            most = max_magnitude(0.0f, v);
#pragma unroll
            for (int lanes = 64 / NUMBERS; lanes > 0; lanes >>= 1) most = larger(most, __shfl_xor_sync(0xFFFFFFFFu, most, lanes));
            const float scale = scale_of(most);
            uint2 codes = e4m3_chunk(EXCHANGED ? make_uint4(v.x, v.y, v.x, v.y) : v, scale);
            if (EXCHANGED) codes.y = __shfl_xor_sync(0xFFFFFFFFu, codes.x, 1);
            if (number < padded && (!EXCHANGED || lane % 2 == 0)) store_codes(chunk, codes);
            if (number < padded && number % (128 / NUMBERS) == 0) scales[number / (128 / NUMBERS)] = scale;
#else
            if (FORMAT == 2) most = max_magnitude(most, v);
            if (number >= padded) continue;
            if (EXCHANGED) store_shared(place(chunk) + number % 2 * 8, make_uint2(v.x, v.y));
            else store_shared(place(chunk), v);
#endif
        }
    }
#if FORMAT == 2  // rounded where it lies, once all warps have seen their part
    most = warp_max(most);
    if (lane == 0) at.mosts[warp] = most;
    meet();
    for (int s = 0; s < share; ++s) most = larger(most, at.mosts[s * places + row]);
    const float scale = scale_of(most);
    const int chunks = padded * NUMBERS / 8;
#pragma unroll 1
    for (int first = own * WARP; first < chunks; first += share * WARP) {
        const int chunk = first + lane;
        const uint4 v = chunk < chunks ? load_shared(place(chunk)) : make_uint4(0, 0, 0, 0);
        __syncwarp();
        if (chunk < chunks) store_codes(chunk, e4m3_chunk(v, scale));
    }
    if (own == 0 && lane == 0 && row < count) *scales = scale;
#endif
    return count;
}

// Whether all that gate and up read is one row, which is there before the first range is known.
__device__ __forceinline__ bool of_one_token(const Args& args) { return PAIRED && args.num_rows == 1; }

// Products of a step of this team, for two tiles of a stage and the first COUNT eights of rows.
template <int COUNT> __device__ __forceinline__ void multiply_step(const u32 (&tiles)[2], u32 rows, u32 row_bytes, u32 full, u32 phase, u32 empty, float (&sums)[2][EIGHTS][4]) {
    const int lane = threadIdx.x % WARP;
    const u32 w_lane = (lane / 8 % 2 * 8 + lane % 8) * 128 + ((lane / 16 ^ lane % 8) << 4), row = row_bytes ? lane % 8 : 0, x_lane = row * row_bytes + ((lane / 8 ^ row) << 4);
    u32 x[COUNT][4];
    wait_barrier(full, phase);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        constexpr int EACH = FACTORS / 4;  // matrix instructions of a pair of chunks; rows are read for two
        if (pair * EACH % 2 == 0)
#pragma unroll
            for (int eight = 0, i = pair * EACH / 2; eight < COUNT; ++eight) load_matrices(x[eight], rows + eight * 8 * row_bytes + i / 2 * 128 + (x_lane ^ i % 2 * 64));
        u32 w[2][4];
#pragma unroll
        for (int s = 0; s < 2; ++s) load_matrices(w[s], tiles[s] + (w_lane ^ pair * 32));
        if (pair == 3) {
            __syncwarp();
            if (lane == 0) arrive(empty);
        }
#pragma unroll
        for (int k = 0; k < EACH; ++k)
#pragma unroll
            for (int s = 0; s < 2; ++s) {
#if FORMAT == 0
                const u32(&a)[4] = w[s];
#else
                const uint2 above = factors_of(w[s][k * 2]), below = factors_of(w[s][k * 2 + 1]);
                const u32 a[4] = {above.x, below.x, above.y, below.y};
#endif
                const int of_step = pair * EACH + k;
#pragma unroll
                for (int eight = 0; eight < COUNT; ++eight)
                    mma<F16 || FP8>(sums[s][eight], a, x[eight][of_step % 2 * 2], x[eight][of_step % 2 * 2 + 1], FORMAT != 3 || of_step > 0);
            }
    }
}

template <bool DOWN> __device__ __forceinline__ void multiply(const Args& args, const Places& at, const Ticket& ticket, u32& stage, u32& phase, u32& buffer) {
    constexpr int STAGES = DOWN ? HALVES : 1, OWN = 2 * STAGES;  // of a step; tiles of a warp in them
    const Product product(args, DOWN);
    int* const done = args.state + HEADER + ticket.launch % 2 * args.num_counters;
    const int part = threadIdx.x / (TEAM * WARP), warp = threadIdx.x / WARP % TEAM, lane = threadIdx.x % WARP, t = lane & 3;
    const float* scales = DOWN ? args.down_scale : args.gate_up_scale;
    const u16* bias = DOWN ? args.down_bias : args.gate_up_bias;
    auto place_of = [&](int s) { return s * TEAM + warp; };  // of this warp's tiles in a stage, or in two: the same outputs of gate and up
    auto expert_of = [&](int unit, int i) { return at.experts[product.unit_of(unit, i)]; };
    auto block_scale = [&](Item item, bool there, int s, int step) {  // of a step for each lane
        const int i = place_of(s), own = product.tile_of(item.tile, i);
        if (!there || own < 0 || step + lane >= product.steps) return 0.0f;
        const int matrix = product.matrix_of(expert_of(item.unit, i), i);
        return scales[((long long)matrix * ((product.outputs + 127) / 128) + own / 8) * product.steps + step + lane];
    };
    auto advance = [&](u32& stage, u32& phase, u32 steps) {
        for (stage += steps; stage >= args.stages; stage -= args.stages) phase ^= 1;
    };
    Item item{ticket.unit, ticket.tile};
    float of_steps[OWN], of_next[OWN];
    int* written = nullptr;  // the counter of the item before, whose part of h all have written when they meet again
    int held = !DOWN && of_one_token(args) ? 0 : -1, next_pair = pair_of_lane(args, item.unit), eights = 1, left = ticket.count;
    if (FORMAT == 3)
        for (int s = 0; s < OWN; ++s) of_next[s] = block_scale(item, left > 0, s, 0);
#pragma unroll 1
    for (; left > 0; --left) {
        const int group = !DOWN && PAIRED ? item.unit / max(CHOICES, 1) : item.unit;
        if (group != held) {
            if (!PAIRED && DOWN && threadIdx.x == 0) await_count(done + group, args.gate_items);
            meet();
            const int count = load_rows<DOWN>(args, at, group, next_pair, product, ticket.launch);
            if (EIGHTS > 1) eights = (count + 7) / 8;
            meet();
            held = group;
        }
        const Item next = item.next(product.tiles);
        if (next.unit != item.unit && left > 1) next_pair = pair_of_lane(args, next.unit);
        if (FORMAT == 3)
            for (int s = 0; s < OWN; ++s) of_steps[s] = of_next[s], of_next[s] = block_scale(next, left > 1, s, 0);
        const int choice = lane / ENDED, own = threadIdx.x / WARP * ENDED + lane % ENDED;  // of a lane that ends an output of down, where units are pairs
        const bool ends = choice < CHOICES && own < 16 * DOWN_TILES && 16 * DOWN_TILES * item.tile + own < product.outputs;
        const long long to = (long long)item.unit * product.outputs + 16 * DOWN_TILES * item.tile + own;
        const u16 residual = PAIRED && DOWN && ends && args.residual ? load_number(args.residual + to) : 0;
        float total[OWN][EIGHTS][4] = {};
        u32 own_stage = stage, own_phase = phase;
        advance(own_stage, own_phase, STAGES * part);
        advance(stage, phase, STAGES * product.steps);
#pragma unroll 1
        for (int step = part; step < product.steps; step += PARTS) {
            if (FORMAT == 3 && step >= WARP && step % WARP < PARTS)
                for (int s = 0; s < OWN; ++s) of_steps[s] = block_scale(item, true, s, step / WARP * WARP);
            float step_sums[OWN][EIGHTS][4];
            float(&sums)[OWN][EIGHTS][4] = FORMAT == 3 ? step_sums : total;
#pragma unroll
            for (int half = 0; half < STAGES; ++half) {
                const u32 tiles = at.ring + own_stage * STAGE_BYTES, of_tiles[2] = {tiles + place_of(0) * TILE_BYTES, tiles + place_of(1) * TILE_BYTES};
                const u32 rows = at.rows + step * (2 * COLUMNS) + half * 8 * product.row_bytes, full = at.full + 8 * own_stage, empty = at.empty + 8 * own_stage;
                float(&of_half)[2][EIGHTS][4] = *(float(*)[2][EIGHTS][4])sums[2 * half];
                if (half && place_of(2) >= CHOICES) {  // none of its tiles is there
                    wait_barrier(full, own_phase);
                    __syncwarp();
                    if (lane == 0) arrive(empty);
                } else if (eights == 1) multiply_step<1>(of_tiles, rows, product.row_bytes, full, own_phase, empty, of_half);
                else multiply_step<EIGHTS>(of_tiles, rows, product.row_bytes, full, own_phase, empty, of_half);
                advance(own_stage, own_phase, half + 1 < STAGES ? 1 : STAGES * PARTS - half);
            }
            if (FORMAT == 3) {
                float w_scale[OWN];
#pragma unroll
                for (int s = 0; s < OWN; ++s) w_scale[s] = __shfl_sync(0xFFFFFFFFu, of_steps[s], step % WARP);
#pragma unroll
                for (int i = 0; i < 4 * EIGHTS; ++i) {
                    const int eight = i / 4, r = i % 4;
                    if (eight == eights) break;
                    float x_scale[STAGES];
#pragma unroll
                    for (int half = 0; half < STAGES; ++half) x_scale[half] = at.row_scales[(8 * (eight + half) + 2 * t + r % 2) * product.scales + step] * E4M3_FACTOR;
#pragma unroll
                    for (int s = 0; s < OWN; ++s) total[s][eight][r] = __fmaf_rn(__fmul_rn(step_sums[s][eight][r], x_scale[s / 2]), w_scale[s], total[s][eight][r]);
                }
            }
        }

        // All parts, as they lie in registers; then every thread ends outputs of its own.
        float* const parts = at.parts + buffer * PARTS * SUMS;
#pragma unroll
        for (int s = 0; s < OWN; ++s)
#pragma unroll
            for (int eight = 0; eight < EIGHTS; ++eight) {
                if (eight == eights) break;
                const float(&sum)[4] = total[s][eight];
                *(float4*)(parts + part * SUMS + (place_of(s) * EIGHTS + eight) * 128 + lane * 4) = make_float4(sum[0], sum[1], sum[2], sum[3]);
            }
        meet();
        if (written && threadIdx.x == 0) count_up(written);
        auto finished = [&](int i, int output, int token) {  // of 16 outputs of tile i
            const float* sum = parts + (i * EIGHTS + token / 8 % EIGHTS) * 128 + (output % 8 * 4 + token % 8 / 2) * 4 + output / 8 * 2 + token % 2;
            float v = *sum;
#pragma unroll
            for (int p = 1; p < PARTS; ++p) v += sum[p * SUMS];
            const long long at_matrix = (long long)product.matrix_of(expert_of(item.unit, i), i) * product.outputs + 16 * product.tile_of(item.tile, i) + output;
            if (FORMAT == 2) v = __fmul_rn(__fmul_rn(v, at.row_scales[token * product.scales] * E4M3_FACTOR), scales[at_matrix]);
            return bias ? v + widen(bias[at_matrix]) : v;
        };
        auto hidden = [&](int i, int output, int token) {  // a number of h, of 16 outputs of tile i
#if RELU2
            const float up = finished(i, output, token);
            return up < 0.0f ? 0.0f : __fmul_rn(up, up);
#else
            return gated(finished(i, output, token), finished(GATE_TILES + i, output, token));
#endif
        };
        if constexpr (DOWN && PAIRED) {  // a lane for each choice of some outputs of a warp
            const float y = ends ? finished(own / 16 * CHOICES + choice, own % 16, choice) : 0.0f;
            float sum = 0.0f;
#pragma unroll
            for (int c = 0; c < CHOICES; ++c) sum = __fmaf_rn(__shfl_sync(0xFFFFFFFFu, y, ENDED * c + lane % ENDED), at.weights[c], sum);
            if (ends && choice == 0) args.out[to] = args.residual ? narrow(widen(residual) + rounded(sum)) : narrow(sum);
        } else if constexpr (PAIRED) {
            const int own = 2 * threadIdx.x, output = 16 * product.of_item * item.tile + own;
            if (own < 16 * product.of_item && output < product.outputs) {
                u32 pair = 0;
#pragma unroll
                for (int i = 0; i < 2; ++i) pair |= (u32)narrow(hidden(own / 16, own % 16 + i, 0)) << 16 * i;
                store_pair(h_of(args, item.unit) + output / 2, pair, ticket.launch);
            }
        } else {
            const int outputs = 16 * product.of_item;
#pragma unroll 1
            for (int i = threadIdx.x; i < outputs * 8 * eights; i += THREADS) {
                const int own = i % outputs, output = outputs * item.tile + own, token = i / outputs, pair = at.pairs[token];
                if (output >= product.outputs || pair < 0) continue;
                const long long to = (long long)pair * product.outputs + output;
                if constexpr (DOWN) args.y[to] = finished(own / 16, own % 16, token);
                else args.h[to] = narrow(hidden(own / 16, own % 16, token));
            }
        }
        __syncwarp();
        if (!PAIRED && !DOWN) written = done + group;
        if (BUFFERS == 1) meet();
        else buffer ^= 1;
        item = next;
    }
    if (!PAIRED && !DOWN) {
        meet();
        if (written && threadIdx.x == 0) count_up(written);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + WARP, 1) resident_experts(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) char shared_memory[];
    const Places at = places_of(args, shared_memory);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        for (int s = 0; s < args.stages; ++s) init_barrier(at.full + 8 * s, 1), init_barrier(at.empty + 8 * s, TEAM);
        for (int s = 0; s < 2; ++s) init_barrier(at.range_full + 8 * s, 1), init_barrier(at.range_empty + 8 * s, WARPS);
        publish_barriers();
    }
    __syncthreads();
    u32 stage = 0, slot = 0;
    if (warp == WARPS) {
        if (lane == 0) prefetch_map(&args.gate_up_map), prefetch_map(&args.down_map);
        await_launches();
        int range = 0, num_units = args.num_units;
        if (lane == 0) range = atomicAdd(args.state, 1);
        const u32 launch = load_index(args.state + 1) + 1, next = (launch + 1) % 2;
        constexpr int AT_ONCE = 8;
        for (int first = lane; first < num_units; first += AT_ONCE * WARP) {
            int held[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) held[i] = load_index(args.experts + min(first + i * WARP, num_units - 1));
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (first + i * WARP < num_units) at.experts[first + i * WARP] = held[i];
        }
        __syncwarp();
        if (!PAIRED)  // units that there are
            for (int first = 0; first < num_units;) {
                const int middle = (first + num_units) / 2;
                if (at.experts[middle] < 0) num_units = middle;
                else first = middle + 1;
            }
        u32 phase = 1, slot_phase = 1;  // places are free at first
        auto tell = [&](const Ticket& ticket) {  // those that multiply
            wait_barrier(at.range_empty + 8 * slot, slot_phase);
            if (lane == 0) {
                at.tickets[slot] = ticket;
                arrive(at.range_full + 8 * slot);
            }
            slot ^= 1, slot_phase ^= slot == 0;
        };
        auto items_of = [&](int range, int ranges, bool down) {
            const int tiles = down ? args.down_items : args.gate_items;
            const u32 items = tiles * (PAIRED && down ? args.num_rows : num_units), begin = items * range / ranges;
            return Ticket{(int)(begin / tiles), (int)(begin % tiles), (int)(items * (range + 1) / ranges - begin), down, launch};
        };
        auto ranges_of = [&](int items, int most) { return (int)gridDim.x * min(max(items / (int)(2 * gridDim.x), 1), most); };
        const int gates = ranges_of(num_units * args.gate_items, GATE_RANGES), downs = ranges_of(num_units * args.down_items, DOWN_RANGES), all = PAIRED ? gates : gates + downs;
        int taken = 0;
        bool asked = false;
        for (;; ++taken) {
            range = __shfl_sync(0xFFFFFFFFu, range, 0);
            if (range >= all) break;
            const bool down = range >= gates;
            const Ticket ticket = down ? items_of(range - gates, downs, true) : items_of(range, gates, false);
            tell(ticket);
            if (PAIRED && lane == 0) at.ranges[taken] = range;
            asked |= ticket.count > 0;
            int following = -1;
            auto take_next = [&] { if (lane == 0 && following < 0) following = atomicAdd(args.state, 1); };
            if (down) ask<true>(args, at, ticket, stage, phase, take_next);
            else ask<false>(args, at, ticket, stage, phase, take_next);
            take_next();
            range = following;
        }
        if (range == all + (int)gridDim.x - 1) {  // every block has asked in vain
            for (int u = lane; u < args.num_counters; u += WARP) args.state[HEADER + next * args.num_counters + u] = 0;
            if (lane == 0) args.state[0] = 0, args.state[1] = launch;
        }
        if (PAIRED) {  // the same ranges of down: whoever has taken none of gate and up would take many, and then wait for h
            __syncwarp();
            if (asked) wait_barrier(at.full + 8 * (stage ? stage - 1 : args.stages - 1), stage ? phase ^ 1 : phase);
            for (int i = 0; i < taken; ++i) {
                const Ticket ticket = items_of(at.ranges[i], gates, true);
                tell(ticket);
                ask<true>(args, at, ticket, stage, phase, [] {});
            }
        }
        tell({0, 0, -1, true, launch});
    } else {
        await_launches();
        if (of_one_token(args)) {
            load_rows<false>(args, at, 0, -1, Product(args, false), 0);
            meet();
        }
        u32 phase = 0, slot_phase = 0, buffer = 0;
        for (;;) {
            wait_barrier(at.range_full + 8 * slot, slot_phase);
            const Ticket ticket = at.tickets[slot];
            __syncwarp();
            if (lane == 0) arrive(at.range_empty + 8 * slot);
            slot ^= 1, slot_phase ^= slot == 0;
            if (ticket.count < 0) break;
            if (ticket.down) multiply<true>(args, at, ticket, stage, phase, buffer);
            else multiply<false>(args, at, ticket, stage, phase, buffer);
        }
    }
}
