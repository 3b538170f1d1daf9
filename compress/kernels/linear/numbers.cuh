// Numbers of the model's dtype (F16 0 = bfloat16, 1 = float16) and the RMSNorm of a row (arXiv 1910.07467):
//
//     y = round(round(x / sqrt(mean(x^2) + eps)) * weight)        mean and quotient in float32; round: to the model's dtype
//
// Squares are summed in one order whoever sums them: quarter q of a row has the chunks of 16 bytes l + 32 (4 j + q), lane l, j ascending;
// the quarters of a lane are added, then lanes by halves.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#if __CUDA_ARCH__ >= 900 && !defined(PORTABLE)
#define HOPPER 1
#else
#define HOPPER 0
#endif
__device__ __forceinline__ float widen(u16 bits) {
#if F16
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
    return v;
#else
    return __uint_as_float((u32)bits << 16);
#endif
}
__device__ __forceinline__ u16 narrow(float v) {
    u16 bits;
#if F16
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
#endif
    return bits;
}
__device__ __forceinline__ float rounded(float v) { return widen(narrow(v)); }
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
__device__ __forceinline__ float low(u32 pair) { return widen((u16)(pair & 0xFFFF)); }
__device__ __forceinline__ float high(u32 pair) { return widen((u16)(pair >> 16)); }

__device__ __forceinline__ float plus_squares(float sum, uint4 v) {
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum = fmaf(low(pairs[i]), low(pairs[i]), sum);
        sum = fmaf(high(pairs[i]), high(pairs[i]), sum);
    }
    return sum;
}
// 1 / rms of a row of k from the quarters of a warp's lanes.
__device__ __forceinline__ float inverse_rms(float q0, float q1, float q2, float q3, int k, float eps) {
    float sum = (q0 + q1) + (q2 + q3);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
    return rsqrtf(sum / (float)k + eps);
}
__device__ __forceinline__ u32 normed_pair(u32 pair, float scale, u32 weight) {
    const u16 first = narrow(rounded(low(pair) * scale) * low(weight)), second = narrow(rounded(high(pair) * scale) * high(weight));
    return (u32)first | ((u32)second << 16);
}
__device__ __forceinline__ uint4 normed(uint4 v, float scale, uint4 weight) {
    return make_uint4(normed_pair(v.x, scale, weight.x), normed_pair(v.y, scale, weight.y), normed_pair(v.z, scale, weight.z),
                      normed_pair(v.w, scale, weight.w));
}
