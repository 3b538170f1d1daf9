// The router of decode rows in one launch: logits by a warp for each expert, the choice by a warp for each row.
//
//     logits = x W^T + bias     lane l sums the chunks of 8 columns l, l + 32, .., each in its order; lanes are added by halves
//     scores = softmax, or the sigmoid of each, or the logits; compared = scores + selection bias, or logits where those decide alone
//     chosen = the largest compared, of equal ones the lowest ids; of the groups whose two best have the largest sums, where there are groups
//     weights = scores of the chosen (softmax of their logits; divided by their sum), times a factor
//
// A block takes 8 experts and 8 rows, and the one that arrives last for its rows chooses: so a row's bits depend on the row alone. Keys are the
// compared number as an unsigned integer of the same order, then the complement of the id. `models/moe.py` has the definition.
//
// Macros: F16; CHUNKS of a lane; KEPT = the weights of an expert stay in registers; PER_LANE experts of a lane; SCORE 0 = softmax, 1 = sigmoid,
// 2 = softmax of the chosen; RENORMALIZE; GROUPED; SELECTION = there is a selection bias.

constexpr int WARP = 32, WARPS = 8;
constexpr bool BY_LOGIT = SCORE == 0 && !SELECTION && !GROUPED;

struct Args {
    const u16* x;
    const u16* w;
    const float* bias;
    const float* selection_bias;
    float* logits;
    u32* arrivals;
    int* ids;
    float* weights;
    int size, num_experts, num_rows, choices, num_groups, top_groups;
    float scale, least;
};

__device__ __forceinline__ float load_float(const float* at) {  // past the first-level cache
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ uint4 load_row(const u16* at) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ float dot(float sum, uint4 a, uint4 b) {
    const u32 left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum = __fmaf_rn(low(left[i]), low(right[i]), sum);
        sum = __fmaf_rn(high(left[i]), high(right[i]), sum);
    }
    return sum;
}
__device__ __forceinline__ u32 ordered(float v) {
    const u32 bits = __float_as_uint(v + 0.0f);  // of two zeros, too, the lowest id is first
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float number(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key); }
__device__ __forceinline__ u64 key_of(float v, int id) { return (u64)ordered(v) << 32 | (u32)~id; }
__device__ __forceinline__ u64 largest_of_lanes(u64 key) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) {
        const u64 other = __shfl_xor_sync(0xFFFFFFFFu, key, lanes);
        key = other > key ? other : key;
    }
    return key;
}

#if GROUPED
// The groups that may be chosen from, a bit each; lane g looks at group g.
__device__ __forceinline__ u32 kept_groups(const float* compared, const Args& args, int lane) {
    const int members = args.num_experts / args.num_groups;
    u64 key = 0;
    if (lane < args.num_groups) {
        float first = __uint_as_float(0xFF800000), second = first;
        for (int i = 0; i < members; ++i) {
            const float v = compared[lane * members + i];
            second = v > first ? first : fmaxf(second, v);
            first = fmaxf(first, v);
        }
        key = key_of(members > 1 ? first + second : first, lane);
    }
    u32 kept = 0;
    for (int i = 0; i < args.top_groups; ++i) {
        const u64 best = largest_of_lanes(key);
        kept |= 1u << (~(u32)best & 31);
        if (key == best) key = 0;
    }
    return kept;
}
#endif

__device__ __forceinline__ void choose(const Args& args, int row, int lane, float* compared_of) {
    float logits[PER_LANE], scores[PER_LANE];
    float most = __uint_as_float(0xFF800000), total = 0.0f;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const int id = j * WARP + lane;
        logits[j] = id < args.num_experts ? load_float(args.logits + (long long)row * args.num_experts + id) : __uint_as_float(0xFF800000);
        most = larger(most, logits[j]);
    }
    if (SCORE == 0) {
        most = warp_max(most);
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) total += scores[j] = __expf(logits[j] - most);
        total = sum_of_lanes(total);
    }
    u64 keys[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const int id = j * WARP + lane;
        scores[j] = SCORE == 0 ? scores[j] / total : SCORE == 1 ? 1.0f / (1.0f + __expf(-logits[j])) : logits[j];
        float compared = BY_LOGIT ? logits[j] : scores[j];
        if (SELECTION && id < args.num_experts) compared += args.selection_bias[id];
        keys[j] = id < args.num_experts ? key_of(compared, id) : 0;
        if (GROUPED && id < args.num_experts) compared_of[id] = compared;
    }
#if GROUPED
    __syncwarp();
    const u32 kept = kept_groups(compared_of, args, lane);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const int id = j * WARP + lane;
        if (id < args.num_experts && !(kept >> id / (args.num_experts / args.num_groups) & 1)) keys[j] &= 0xFFFFFFFFu;  // below all that are in
    }
#endif
    int chosen = 0;
    float weight = SCORE == 2 ? __uint_as_float(0xFF800000) : 0.0f;
    for (int k = 0; k < args.choices; ++k) {
        u64 best = 0;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) best = keys[j] > best ? keys[j] : best;
        best = largest_of_lanes(best);
        const int id = (int)~(u32)best;
        float score = number((u32)(best >> 32));
        if (SELECTION) {
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j)
                if (j * WARP + lane == id) score = scores[j];
            score = __shfl_sync(0xFFFFFFFFu, score, id % WARP);
        }
        if (lane == k) chosen = id, weight = score;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j)
            if (keys[j] == best) keys[j] = 0;
    }
    const bool holds = lane < args.choices;
    if (BY_LOGIT) weight = holds ? __expf(weight - most) / total : 0.0f;
    if (SCORE == 2) {
        weight = __expf(weight - warp_max(weight));
        weight /= sum_of_lanes(weight);
    } else if (RENORMALIZE) weight /= sum_of_lanes(weight) + args.least;
    if (holds) {
        args.ids[(long long)row * args.choices + lane] = chosen;
        args.weights[(long long)row * args.choices + lane] = weight * args.scale;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP) route_rows(const __grid_constant__ Args args) {
    __shared__ float compared[GROUPED ? WARPS * PER_LANE * WARP : 1];
    __shared__ bool last;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, expert = blockIdx.x * WARPS + warp;
    const int first_row = blockIdx.y * WARPS, num_rows = min(args.num_rows - first_row, WARPS);
    const u16* w = args.w + (long long)min(expert, args.num_experts - 1) * args.size + lane * 8;
#if HOPPER
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    uint4 kept[KEPT ? CHUNKS : 1];
#pragma unroll
    for (int c = 0; c < (KEPT ? CHUNKS : 0); ++c)
        if ((c * WARP + lane) * 8 < args.size) kept[c] = *(const uint4*)(w + c * WARP * 8);
#if HOPPER
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#pragma unroll 2
    for (int r = 0; r < num_rows; ++r) {
        const u16* x = args.x + (long long)(first_row + r) * args.size + lane * 8;
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            if ((c * WARP + lane) * 8 < args.size) sum = dot(sum, KEPT ? kept[KEPT ? c : 0] : *(const uint4*)(w + c * WARP * 8), load_row(x + c * WARP * 8));
        sum = sum_of_lanes(sum);
        if (lane == 0 && expert < args.num_experts)
            args.logits[(long long)(first_row + r) * args.num_experts + expert] = args.bias ? sum + args.bias[expert] : sum;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(args.arrivals + blockIdx.y, 1) == gridDim.x - 1;
        if (last) args.arrivals[blockIdx.y] = 0;
        __threadfence();
    }
    __syncthreads();
    if (last && warp < num_rows) choose(args, first_row + warp, lane, compared + (GROUPED ? warp * PER_LANE * WARP : 0));
}
