// Pairs sorted by expert, in their order within an expert, and cut into units of at most `size`: a warp for each expert.
//
// Every block counts the pairs of all experts; a warp then knows where the units of its expert begin, and finds its pairs by ballots, 32 at a
// time. So there is no order that threads decide. Units past the end have no expert, -1, and a unit that is not full ends in pairs of -1.

constexpr int WARP = 32, WARPS = 8, STAGED = 4096;

struct Args {
    const int* ids;
    int* experts;
    int* pairs;
    int num_pairs, num_units, num_experts, size;
};

__device__ __forceinline__ int load_index(const int* at) {  // past the first-level cache
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP) sort_pairs(const __grid_constant__ Args args) {
    __shared__ int counts[EXPERTS];
    __shared__ int ids[STAGED];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, expert = blockIdx.x * WARPS + warp;
#if HOPPER
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    for (int i = threadIdx.x; i < args.num_experts; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < args.num_pairs; i += blockDim.x) {
        const int id = load_index(args.ids + i);
        if (i < STAGED) ids[i] = id;
        if (id >= 0 && id < args.num_experts) atomicAdd(counts + id, 1);
    }
    __syncthreads();

    auto units_of = [&](int i) { return (counts[i] + args.size - 1) / args.size; };
    int first = 0;
    for (int i = lane; i < min(expert, args.num_experts); i += WARP) first += units_of(i);
    first = sum_of_lanes(first);
    const int own = expert < args.num_experts ? counts[expert] : 0, units = (own + args.size - 1) / args.size;
    for (int i = own + lane; i < units * args.size; i += WARP) args.pairs[first * args.size + i] = -1;
    for (int i = lane; i < units; i += WARP) args.experts[first + i] = expert;
    if (expert == args.num_experts - 1)
        for (int i = first + units + lane; i < args.num_units; i += WARP) args.experts[i] = -1;

    int slot = first * args.size;
    for (int stage = 0; stage < args.num_pairs; stage += STAGED) {
        const int count = min(args.num_pairs - stage, STAGED);
        if (stage > 0) {
            __syncthreads();
            for (int i = threadIdx.x; i < count; i += blockDim.x) ids[i] = load_index(args.ids + stage + i);
            __syncthreads();
        }
        for (int at = 0; at < count; at += WARP) {
            const bool is_own = at + lane < count && ids[at + lane] == expert;
            const u32 found = __ballot_sync(0xFFFFFFFFu, is_own);
            if (is_own) args.pairs[slot + __popc(found & ((1u << lane) - 1))] = stage + at + lane;
            slot += __popc(found);
        }
    }
}
