// What a linear wants of its rows, as a kernel of its own: RMSNorm (NORM), then e4m3 with a scale for each row (QUANT 1) or a given one
// (QUANT 2), or int8 with a scale for each row (QUANT 3). The arithmetic is numbers.cuh's. A thread keeps KEEP
// chunks of 8 of a row of k, a multiple of 8. A row has up to KEEP blocks: each looks at the whole row, and writes every gridDim.y-th chunk of a thread.

struct Args {
    const uint4* x;
    const uint4* weight;
    void* y;
    float* scales;
    const float* static_scale;
    int k;
    float eps;
};

extern "C" __global__ void __launch_bounds__(512) prepare_rows(const __grid_constant__ Args args) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, num_warps = blockDim.x >> 5, chunks = args.k / 8;
    const uint4 none = make_uint4(0, 0, 0, 0);
    uint4 row[KEEP];
    auto each_chunk = [&](auto visit) {  // rows as long as a compiler can unroll: they stay in registers
#pragma unroll
        for (int j = 0; j < KEEP; ++j) visit(row[j], (int)(threadIdx.x + j * blockDim.x), j * num_warps + warp);
    };
    auto own_chunk = [&](auto write) {
#pragma unroll
        for (int j = 0; j < KEEP; ++j) {
            const int c = threadIdx.x + j * blockDim.x;
            if (j % gridDim.y == blockIdx.y && c < chunks) write(row[j], c);
        }
    };
#if HOPPER
    asm volatile("griddepcontrol.launch_dependents;");
#endif
#if NORM
    uint4 weight[KEEP];
#pragma unroll
    for (int j = 0; j < KEEP; ++j) {
        const int c = threadIdx.x + j * blockDim.x;
        weight[j] = c < chunks ? args.weight[c] : none;
    }
#endif
#if HOPPER
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const uint4* x = args.x + (long long)blockIdx.x * chunks;
    each_chunk([&](uint4& chunk, int c, int) { chunk = c < chunks ? x[c] : none; });
#if NORM
    __shared__ float segments[KEEP * 16];
    each_chunk([&](uint4& chunk, int, int segment) {
        const float squares = segment_squares(chunk);
        if (lane == 0) segments[segment] = squares;
    });
    __syncthreads();
    const float factor = inverse_rms(args.k, args.eps, lane, [&](int s) { return segments[s]; });
#pragma unroll
    for (int j = 0; j < KEEP; ++j) row[j] = normed(row[j], factor, weight[j]);
#endif
#if QUANT
#if QUANT != 2
    __shared__ float most_of[16];
    float most = 0.0f;
    each_chunk([&](uint4& chunk, int, int) { most = max_magnitude(most, chunk); });
    most = warp_max(most);
    if (lane == 0) most_of[warp] = most;
    __syncthreads();
    const float scale = scale_of(warp_max(lane < num_warps ? most_of[lane] : 0.0f), QUANT == 3 ? 127.0f : 448.0f);
#else
    const float scale = *args.static_scale;
#endif
    if (threadIdx.x == 0 && blockIdx.y == 0) args.scales[blockIdx.x] = scale;
    uint2* y = (uint2*)args.y + (long long)blockIdx.x * chunks;
#if QUANT == 3
    own_chunk([&](uint4& chunk, int c) { y[c] = int8_chunk(chunk, scale); });
#else
    own_chunk([&](uint4& chunk, int c) { y[c] = e4m3_chunk(chunk, scale); });
#endif
#else
    uint4* y = (uint4*)args.y + (long long)blockIdx.x * chunks;
    own_chunk([&](uint4& chunk, int c) { y[c] = chunk; });
#endif
}
