// out = sum_i 2^(lse_i - lse) part_i over the parts of a query head; a part that saw no token has lse -inf and is not used.
// A head that saw no token at all gets 0 and -inf. Macros: DIM, BF16 (dtype of out; 0: float16).

#include "ptx.cuh"

constexpr int THREADS = 256;
constexpr int CHANNELS = 32;               // of a block
constexpr int LANES = CHANNELS / 4;        // that share a part
constexpr int WAYS = THREADS / LANES;      // parts read at once
constexpr int BATCH = 6;                   // parts that a thread has on their way
constexpr float FAR = -1e30f;

// A sum of vectors with weights 2^(.. - top).
struct Sum {
    float top, length, x[4];
    __device__ inline void add(float other_top, float other_length, const float (&y)[4]) {
        const float highest = fmaxf(top, other_top), own = exp2_(top - highest), other = exp2_(other_top - highest);
        top = highest;
        length = length * own + other_length * other;
#pragma unroll
        for (int c = 0; c < 4; c++) x[c] = x[c] * own + y[c] * other;
    }
};

// Grid (DIM / CHANNELS, B * Hq). part float32 [B * Hq, n_part, DIM], part_lse [B * Hq, n_part], log2; out [B * Hq, DIM];
// lse float32 [B * Hq], natural.
extern "C" __global__ void __launch_bounds__(THREADS)
    combine(const float* part, const float* part_lse, u16* out, float* lse, int n_part) {
    __shared__ float sums[THREADS / 32][LANES][6];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, way = threadIdx.x / LANES;
    const int channel = blockIdx.x * CHANNELS + threadIdx.x % LANES * 4;
    const i64 row = blockIdx.y;
    wait_for_previous();
    start_next();
    Sum sum = {FAR, 0.f, {0.f, 0.f, 0.f, 0.f}};
    for (int first = way; first < n_part; first += BATCH * WAYS) {
        u32 weight[BATCH], x[BATCH][4];
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            const int i = min(first + n * WAYS, n_part - 1);
            asm volatile("ld.global.u32 %0, [%1];" : "=r"(weight[n]) : "l"(part_lse + row * n_part + i) : "memory");
            asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x[n][0]), "=r"(x[n][1]), "=r"(x[n][2]), "=r"(x[n][3])
                         : "l"(part + (row * n_part + i) * DIM + channel)
                         : "memory");
        }
        float top = FAR;
#pragma unroll
        for (int n = 0; n < BATCH; n++)
            if (first + n * WAYS < n_part) top = fmaxf(top, bits(weight[n]));
        float length = 0.f, y[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            const float log = bits(weight[n]);
            if (first + n * WAYS >= n_part || !(log > FAR)) continue;
            const float factor = exp2_(log - top);
            length += factor;
#pragma unroll
            for (int c = 0; c < 4; c++) y[c] += bits(x[n][c]) * factor;
        }
        sum.add(top, length, y);
    }
#pragma unroll
    for (int across = LANES; across < 32; across *= 2) {
        float y[4];
#pragma unroll
        for (int c = 0; c < 4; c++) y[c] = __shfl_xor_sync(ALL, sum.x[c], across);
        const float top = __shfl_xor_sync(ALL, sum.top, across), length = __shfl_xor_sync(ALL, sum.length, across);
        sum.add(top, length, y);
    }
    if (lane < LANES) {
        float(&to)[6] = sums[warp][lane];
        to[0] = sum.top, to[1] = sum.length;
#pragma unroll
        for (int c = 0; c < 4; c++) to[2 + c] = sum.x[c];
    }
    __syncthreads();
    if (threadIdx.x >= LANES) return;
#pragma unroll
    for (int other = 1; other < THREADS / 32; other++) {
        const float(&from)[6] = sums[other][lane];
        const float y[4] = {from[2], from[3], from[4], from[5]};
        sum.add(from[0], from[1], y);
    }
    const float share = sum.length > 0.f ? __fdividef(1.f, sum.length) : 0.f;
    u32 low, high;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(low) : "f"(sum.x[1] * share), "f"(sum.x[0] * share));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(high) : "f"(sum.x[3] * share), "f"(sum.x[2] * share));
#else
    low = halves(sum.x[0] * share, sum.x[1] * share);
    high = halves(sum.x[2] * share, sum.x[3] * share);
#endif
    *(uint2*)(out + row * DIM + channel) = make_uint2(low, high);
    if (blockIdx.x == 0 && threadIdx.x == 0)
        lse[row] = sum.length > 0.f ? (sum.top + log2_(sum.length)) * 0.6931471805599453f : __int_as_float(0xFF800000);
}
