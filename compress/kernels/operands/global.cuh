// Loads of what other blocks or the launch before have written, past the first-level cache, which may hold what was there before. After numbers.cuh.

__device__ __forceinline__ int load_index(const int* at) {
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ float load_float(const float* at) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ u16 load_number(const u16* at) {
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ uint4 load_chunk(const u16* at) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
