// The query's weights in the sketch basis, as the scan wants them. Macros: those of sketch.cuh, and QTYPE (0 float32,
// 1 bfloat16, 2 float16).

#include "ptx.cuh"
#include "sketch.cuh"

// ---- the query's weights -----------------------------------------------------------------------------------------

constexpr int CP = (C + 31) / 32 * 32;
constexpr int SAMPLERS = 8;                  // warps that score eight rows each; the others weigh
constexpr int WEIGHERS = 1024 - 32 * SAMPLERS;
constexpr int SPLITS_BY_SIZE = 32768 / (NQ * C * 4) > 0 ? 32768 / (NQ * C * 4) : 1;
constexpr int SPLITS = SPLITS_BY_SIZE < WEIGHERS / CP ? SPLITS_BY_SIZE : WEIGHERS / CP;
constexpr int STEPS = (HEAD_DIM + SPLITS - 1) / SPLITS;
constexpr int AHEAD = STEPS < 16 ? STEPS : 16;  // of the basis, requested together

__device__ __forceinline__ float read_query(const void* q, i64 at) {
#if QTYPE == 0
  return ((const float*)q)[at];
#elif QTYPE == 1
  return __uint_as_float((u32)((const u16*)q)[at] << 16);
#else
  return from_half(((const u16*)q)[at]);
#endif
}

// Grid (HEADS, B), 1024 threads. For one KV head of one sequence:
//   frag u32 [B, HEADS, NB, FRAG / 2, 32, 2]: float16 weights as lanes want them, two registers at a time;
//   middle, top float32 [B, HEADS, NQ]: what the accumulators start from, and the highest score of a sample of rows, which
//   attention is summed relative to.
// Also: tiles int32 [B + 1], the first tile of each sequence; and zeros to `clear`. Nothing of it where all rows are wanted
// (limits, budget: see step.cu; budget below 0: of no account).
extern "C" __global__ void __launch_bounds__(1024, 1)
weigh_queries(const void* q, const float* basis, const u8* codes, const u8* scales, const int* table, const int* count,
              u32* frag, float* middle, float* top, int* tiles, int* clear, int n_clear, float factor, int stride_b,
              int stride_h, int max_rows, int code_stride, int scale_stride, const int* limits, int budget) {
  __shared__ float s_part[SPLITS][NQ][C];
  __shared__ float4 s_q[HEAD_DIM][NQ / 4];
  __shared__ u32 s_frag[NB * 32 * FRAG];
  __shared__ float s_middle[NQ], s_top[SAMPLERS][NQ];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, h = blockIdx.x, b = blockIdx.y;
  const int g = lane >> 2, t = lane & 3;
  const bool samples = tid >= WEIGHERS;
  const int turn = NB > 1 ? 0 : h % HB % HG * QP;  // the head's first column

  // Everything is requested before anything is used: the time goes by waiting.
  const int c = tid % CP, split = tid / CP;
  const bool weighs = c < C && split < SPLITS;
  float x[AHEAD];
  const auto read_basis = [&](int first) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int d = split + (first + i) * SPLITS;
      x[i] = weighs && d < HEAD_DIM ? basis[((i64)h * HEAD_DIM + d) * HEAD_DIM + c] : 0.f;
    }
  };
  read_basis(0);  // of the model: no kernel ahead writes it
  wait_for_previous();
  start_next();
  if (wants_all(count, limits, gridDim.y, max_rows, budget)) return;  // see step.cu
  const int n_rows = clamp_count(count, b, max_rows);
  if (!samples) {
    constexpr int OWN = (HEAD_DIM * NQ + WEIGHERS - 1) / WEIGHERS;
    float y[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int d = (tid + i * WEIGHERS) % HEAD_DIM, n = (tid + i * WEIGHERS) / HEAD_DIM;
      y[i] = n < QUERIES ? read_query(q, (i64)b * stride_b + (i64)(h * QUERIES + n) * stride_h + d) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int d = (tid + i * WEIGHERS) % HEAD_DIM, n = (tid + i * WEIGHERS) / HEAD_DIM;
      if (n < NQ) ((float*)&s_q[d])[n] = y[i] * factor;
    }
#pragma unroll 1
    for (int i = (b * HEADS + h) * WEIGHERS + tid; i < n_clear; i += gridDim.y * HEADS * WEIGHERS) clear[i] = 0;
  }
  __syncthreads();  // the query and the counts come at the same time
  u32 word[4][I] = {}, marks = 0;
  if (samples && n_rows > 0) {
    const int sample = (warp - WEIGHERS / 32) * 8 + g;
    const i64 id = table[(i64)b * max_rows + (int)((i64)sample * n_rows / (SAMPLERS * 8))];
    const u8* at = codes + id * code_stride + h * (ROW * TOKEN) + t * (4 * I);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < I; ++i) word[j][i] = *(const u32*)(at + j * TOKEN + 4 * i);
    marks = *(const u32*)(scales + id * scale_stride + h * ROW);
  }
  if (weighs) {
    float sum[NQ] = {};
#pragma unroll 1
    for (int first = 0; first < STEPS; first += AHEAD) {
      if (first) read_basis(first);
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int d = min(split + (first + i) * SPLITS, HEAD_DIM - 1);
#pragma unroll
        for (int n = 0; n < NQ / 4; ++n) {
          const float4 y = s_q[d][n];
          sum[4 * n] += x[i] * y.x, sum[4 * n + 1] += x[i] * y.y, sum[4 * n + 2] += x[i] * y.z, sum[4 * n + 3] += x[i] * y.w;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < NQ; ++n) s_part[split][n][c] = sum[n];
  }
  __syncthreads();

#pragma unroll 1
  for (int i = tid; i < NB * 32 * FRAG * 2; i += 1024) {
    const int half = i & 1, r = i / 2 % FRAG, at = i / 2 / FRAG, f = r % 6;  // lane at % 32 of operand at / 32
    const int n = at % 32 / 4 - turn + at / 32 * 8, unit = (at % 4 * I + r / 6) * 2 + half;
    const bool is_there = n >= 0 && n < QUERIES && (NB > 1 || n < QP);
    // What a unit of the bits that are taken is worth: see sketch.cuh.
    const auto worth = [&](int field) {
      float w = 0.f;
#pragma unroll
      for (int s = 0; s < SPLITS; ++s) w += s_part[s][n][field * PAIRS + unit];
      return w * (field == 0 ? 0.3352f : field == 1 ? 0.3352f / 16 : 0.9957f / (1 << 2 * (field - 2)));
    };
    float w = 0.f;
    if (is_there) w = worth(f) - (f >= 2 && f < 5 ? worth(f + 1) : 0.f);
    ((u16*)s_frag)[i] = to_half(fminf(fmaxf(w, -60000.f), 60000.f));  // float16 ends at 65504
  }
  if (h == 0 && b == 0 && samples && warp == 31) {  // meanwhile, as long as a batch is small
    int before = 0;
#pragma unroll 1
    for (int first = 0; first < (int)gridDim.y; first += 32) {
      int n = first + lane < (int)gridDim.y ? (clamp_count(count, first + lane, max_rows) + 7) / 8 : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, n, step);
        if (lane >= step) n += other;
      }
      if (first + lane < (int)gridDim.y) tiles[first + lane + 1] = before + n;
      before += __shfl_sync(~0u, n, 31);
    }
    if (lane == 0) tiles[0] = 0;
  }
  __syncthreads();

  float acc[2][NB][4] = {};
  if (samples) {
    u32 weight[NB][FRAG];
#pragma unroll
    for (int nb = 0; nb < NB; ++nb)
#pragma unroll
      for (int r = 0; r < FRAG; ++r) weight[nb][r] = s_frag[(nb * 32 + lane) * FRAG + r];
#pragma unroll
    for (int j = 0; j < 4; j += 2)
#pragma unroll
      for (int i = 0; i < I; ++i) add_products(acc[j / 2], word[j][i], word[j + 1][i], weight, i);
  } else {
    // What the midpoints of the codes take away, from the rounded weights: codes and midpoints then cancel as they should.
    if (warp < NQ) {
      float sum = 0.f;
#pragma unroll 1
      for (int i = lane; i < 4 * FRAG; i += 32) {
        const u32 both = s_frag[(warp / 8 * 32 + warp % 8 * 4) * FRAG + i];
        const int f = i % 6;
        const float middle = f < 2 ? 7.5f * (f ? 16.f : 1.f) : 0.5f * (float)((1 << 2 * (f - 1)) - 1);
        sum += (from_half((u16)both) + from_half((u16)(both >> 16))) * middle;
      }
#pragma unroll
      for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      sum *= -5.9604644775390625e-08f;  // 2^-24
      if (lane == 0) s_middle[warp] = sum, middle[((i64)b * HEADS + h) * NQ + warp] = sum;
    }
    for (int i = tid; i < NB * 32 * FRAG; i += WEIGHERS) {
      const int pair = i % (32 * FRAG) / 64, from = i % 64 / 2;  // of registers, and the lane
      frag[((i64)b * HEADS + h) * (NB * 32 * FRAG) + i] = s_frag[(i / (32 * FRAG) * 32 + from) * FRAG + 2 * pair + (i & 1)];
    }
  }
  __syncthreads();

  if (samples) {
    float scale[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) scale[k] = decode_scale(marks, k);
#pragma unroll
    for (int nb = 0; nb < NB; ++nb)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float mid = s_middle[nb * 8 + 2 * t + k];
        float peak = -1e30f;
#pragma unroll
        for (int j = 0; j < 4; ++j) peak = fmaxf(peak, (acc[j / 2][nb][k + j % 2 * 2] + mid) * scale[j]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
        if (g == 0) s_top[warp - WEIGHERS / 32][nb * 8 + 2 * t + k] = peak;
      }
  }
  __syncthreads();
  if (tid < NQ) {
    float peak = s_top[0][tid];
#pragma unroll
    for (int w = 1; w < SAMPLERS; ++w) peak = fmaxf(peak, s_top[w][tid]);
    const int n = tid - turn;  // a column without a query: so far down that its attention is zero
    top[((i64)b * HEADS + h) * NQ + tid] = n < 0 || n >= QUERIES || (NB == 1 && n >= QP) ? 1e30f : n_rows ? peak : 0.f;
  }
}
