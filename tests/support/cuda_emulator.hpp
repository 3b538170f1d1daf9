// CUDA C++ on a CPU, one block at a time: every thread of a block is a coroutine, which runs until it waits for its warp or its block.
// What kernels write in PTX is written again here in C++, exactly but for products, which are rounded once per matrix instruction.

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes)

struct Index {
    unsigned x, y;
};
static Index threadIdx, blockIdx, blockDim, gridDim;
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Shared memory of a launch, by the names that kernels give it. An address is an offset that fits 32 bits, of static shared memory, too.
alignas(128) float shared_sums[1 << 18];
alignas(128) char shared_memory[1 << 20];
static size_t __cvta_generic_to_shared(const void* at) { return (const char*)at - shared_memory; }
static char* shared_at(unsigned address) { return shared_memory + (int)address; }

enum Waits { NO, WARP_WAITS, BLOCK_WAITS, DONE };
struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    Waits waits;
    bool started;
    jmp_buf at;
};
static std::vector<Thread> threads;
static ucontext_t scheduler;
static jmp_buf scheduler_at;
static unsigned current;

// A coroutine starts by swapcontext, which asks the system for the signal mask twice, and goes on by longjmp, which does not.
static void wait_for(Waits what) {
    threads[current].waits = what;
    if (!_setjmp(threads[current].at)) _longjmp(scheduler_at, 1);
}
static void run_until_it_waits(Thread& thread) {
    if (_setjmp(scheduler_at)) return;
    if (thread.started) _longjmp(thread.at, 1);
    thread.started = true;
    swapcontext(&scheduler, &thread.context);
}
static void __syncthreads() { wait_for(BLOCK_WAITS); }
static void __syncwarp() { wait_for(WARP_WAITS); }

static void __threadfence() {}
static unsigned atomicAdd(unsigned* at, unsigned added) { return (*at += added) - added; }

static float __uint_as_float(unsigned bits) {
    float v;
    memcpy(&v, &bits, 4);
    return v;
}
static unsigned __float_as_uint(float v) {
    unsigned bits;
    memcpy(&bits, &v, 4);
    return bits;
}
static float __int_as_float(int bits) { return __uint_as_float(bits); }
static unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned v = 0;
    for (int i = 0; i < 4; ++i) v |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return v;
}
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __frcp_rn(float v) { return 1 / v; }
static float __fdividef(float a, float b) { return a / b; }
static float fast_exp(float v) { return expf(v); }
#define __expf fast_exp
static float rsqrtf(float v) { return 1 / sqrtf(v); }
static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }
static int atomicAdd(int* at, int added) { return (*at += added) - added; }
static int __popc(unsigned v) { return __builtin_popcount(v); }

// What a function makes of the numbers of all lanes of the warp.
template <typename T, typename Read> static auto of_lanes(T v, Read read) {
    static T shown[32][32];
    T(&warp)[32] = shown[threadIdx.x / 32];
    warp[threadIdx.x % 32] = v;
    __syncwarp();
    const auto found = read(warp);
    __syncwarp();
    return found;
}
// A number of another lane of the warp.
template <typename T> static T __shfl_sync(unsigned, T v, int lane) {
    return of_lanes(v, [=](const T* warp) { return warp[lane]; });
}
template <typename T> static T __shfl_xor_sync(unsigned mask, T v, int lanes) { return __shfl_sync(mask, v, threadIdx.x % 32 ^ lanes); }

static float widen(uint16_t bits) {
#if F16
    _Float16 v;
    memcpy(&v, &bits, 2);
    return (float)v;
#else
    return __uint_as_float((unsigned)bits << 16);
#endif
}
static uint16_t narrow(float v) {
#if F16
    const _Float16 rounded = (_Float16)v;
    uint16_t bits;
    memcpy(&bits, &rounded, 2);
    return bits;
#else
    const unsigned bits = __float_as_uint(v);
    if (v != v) return 0x7FFF;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
#endif
}
static void prefetch(const void*) {}
static uint64_t policy_of(bool) { return 0; }
static float larger(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }

static unsigned __ballot_sync(unsigned, bool v) {
    return of_lanes(v, [](const bool* warp) {
        unsigned all = 0;
        for (int lane = 0; lane < 32; ++lane) all |= (unsigned)warp[lane] << lane;
        return all;
    });
}

static unsigned __reduce_max_sync(unsigned, unsigned v) {
    return of_lanes(v, [](const unsigned* warp) { return *std::max_element(warp, warp + 32); });
}
static unsigned __reduce_min_sync(unsigned mask, unsigned v) { return ~__reduce_max_sync(mask, ~v); }

template <bool FLOAT16> static float factor(unsigned pair, int half) {
    const uint16_t bits = pair >> (16 * half);
    if (!FLOAT16) return __uint_as_float((unsigned)bits << 16);
    _Float16 v;
    memcpy(&v, &bits, 2);
    return (float)v;
}
struct Factors {
    unsigned a[32][4], b[32][2];
};
static Factors factors_of_warps[32];
// mma.m16n8k16: thread 4 g + t has rows g and g + 8 of A, column g of B, and columns 2 t and 2 t + 1 of the result.
template <bool FLOAT16> static void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool accumulate) {
    const int lane = threadIdx.x % 32;
    Factors& factors = factors_of_warps[threadIdx.x / 32];
    memcpy(factors.a[lane], a, 16);
    factors.b[lane][0] = b0, factors.b[lane][1] = b1;
    __syncwarp();
    for (int r = 0; r < 4; ++r) {
        const int row = lane / 4, half = r / 2, column = lane % 4 * 2 + r % 2;
        double sum = accumulate ? d[r] : 0.0;
        for (int k = 0; k < 16; ++k) {
            const unsigned left = factors.a[row * 4 + k % 8 / 2][half + k / 8 * 2], right = factors.b[column * 4 + k % 8 / 2][k / 8];
            sum += (double)factor<FLOAT16>(left, k % 2) * factor<FLOAT16>(right, k % 2);
        }
        d[r] = (float)sum;
    }
    __syncwarp();
}

// mma.m16n8k32 of int8: a word has four columns.
static void mma(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const int lane = threadIdx.x % 32;
    Factors& factors = factors_of_warps[threadIdx.x / 32];
    memcpy(factors.a[lane], a, 16);
    factors.b[lane][0] = b0, factors.b[lane][1] = b1;
    __syncwarp();
    for (int r = 0; r < 4; ++r) {
        const int row = lane / 4, half = r / 2, column = lane % 4 * 2 + r % 2;
        for (int k = 0; k < 32; ++k) {
            const unsigned left = factors.a[row * 4 + k % 16 / 4][half + k / 16 * 2], right = factors.b[column * 4 + k % 16 / 4][k / 16];
            d[r] += (int8_t)(left >> 8 * (k % 4)) * (int8_t)(right >> 8 * (k % 4));
        }
    }
    __syncwarp();
}

static void run_block(void (*kernel)()) {
    for (Thread& each : threads) {
        getcontext(&each.context);
        each.context.uc_stack.ss_sp = each.stack.data(), each.context.uc_stack.ss_size = each.stack.size();
        each.context.uc_link = &scheduler, each.waits = NO, each.started = false;
        makecontext(&each.context, kernel, 0);
    }
    for (bool live = true; live;) {
        live = false;
        for (current = 0; current < threads.size(); ++current) {
            if (threads[current].waits != NO) continue;
            threadIdx = {current, 0};
            threads[current].waits = DONE;  // unless it waits before its end
            run_until_it_waits(threads[current]);
            live = true;
        }
        auto release = [&](unsigned first, unsigned stop, Waits what) {
            for (unsigned i = first; i < stop; ++i)
                if (threads[i].waits != what && threads[i].waits != DONE) return;
            for (unsigned i = first; i < stop; ++i)
                if (threads[i].waits == what) threads[i].waits = NO, live = true;
        };
        for (unsigned warp = 0; warp < threads.size(); warp += 32) release(warp, warp + 32, WARP_WAITS);
        release(0, threads.size(), BLOCK_WAITS);
    }
}
