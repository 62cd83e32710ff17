// The query's weights in the sketch basis, as the scan wants them. Macros: those of sketch.cuh, and QTYPE (0 float32,
// 1 bfloat16, 2 float16).

#include "ptx.cuh"
#include "sketch.cuh"

// ---- the query's weights -----------------------------------------------------------------------------------------

constexpr int CP = (C + 31) / 32 * 32;
constexpr int SPLITS_BY_SIZE = 32768 / (NQ * C * 4) > 0 ? 32768 / (NQ * C * 4) : 1;
constexpr int SPLITS = SPLITS_BY_SIZE < 1024 / CP ? SPLITS_BY_SIZE : 1024 / CP;
constexpr int STEPS = (HEAD_DIM + SPLITS - 1) / SPLITS;
constexpr int AHEAD = STEPS < 16 ? STEPS : 16;  // of the basis, requested together
static_assert(C <= HEAD_DIM, "the weights of a query take the place of its coordinates");
constexpr int OWN = (HEAD_DIM * NQ + 1023) / 1024;  // coordinates of the queries that a thread reads

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
//   frag u32 [B, HEADS, NB, FRAG / 2, 32, 2]: float16 weights as lanes want them, two registers at a time.
// Also: tiles int32 [B + 1], the first tile of each sequence; and zeros to `clear`. Nothing of it where all rows are wanted
// (limits, budget: see step.cu; budget below 0: of no account).
extern "C" __global__ void __launch_bounds__(1024, 1)
weigh_queries(const void* q, const float* basis, const int* count, u32* frag, int* tiles, int* clear, int n_clear,
              float factor, int stride_b, int stride_h, int max_rows, const int* limits, int budget) {
  __shared__ float s_part[SPLITS][NQ][C];
  __shared__ float4 s_q[HEAD_DIM][NQ / 4];
  float(*s_weight)[C] = (float(*)[C])s_q;  // afterwards: the sums of the parts
  const int tid = threadIdx.x, lane = tid & 31, h = blockIdx.x, b = blockIdx.y;
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
  float y[OWN];
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int d = (tid + i * 1024) % HEAD_DIM, n = (tid + i * 1024) / HEAD_DIM;
    y[i] = n < QUERIES ? read_query(q, (i64)b * stride_b + (i64)(h * QUERIES + n) * stride_h + d) : 0.f;
  }
  if (wants_all(count, limits, gridDim.y, max_rows, budget)) return;  // see step.cu
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int d = (tid + i * 1024) % HEAD_DIM, n = (tid + i * 1024) / HEAD_DIM;
    if (n < NQ) ((float*)&s_q[d])[n] = y[i] * factor;
  }
  __syncthreads();
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
#pragma unroll 1
  for (int i = (b * HEADS + h) * 1024 + tid; i < n_clear; i += gridDim.y * HEADS * 1024) clear[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int i = tid; i < NQ * C; i += 1024) {
    const int f = i % C / PAIRS;
    float w = 0.f;
#pragma unroll
    for (int s = 0; s < SPLITS; ++s) w += (&s_part[s][0][0])[i];
    (&s_weight[0][0])[i] = w * (f == 0 ? 0.3352f : f == 1 ? 0.3352f / 16 : 0.9957f / (1 << 2 * (f - 2)));
  }
  __syncthreads();

#pragma unroll 1
  for (int i = tid; i < NB * 32 * FRAG; i += 1024) {
    const int at = i % (32 * FRAG), r = at / 64 * 2 + (at & 1), f = r % 6;  // register r
    const int of = at % 64 / 2, n = of / 4 - turn + i / (32 * FRAG) * 8;     // of lane `of`
    const bool is_there = n >= 0 && n < QUERIES && (NB > 1 || n < QP);
    u32 both = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int unit = (of % 4 * I + r / 6) * 2 + half;
      float w = 0.f;
      // What a unit of the bits that are taken is worth: see sketch.cuh.
      if (is_there) w = s_weight[n][f * PAIRS + unit] - (f >= 2 && f < 5 ? s_weight[n][(f + 1) * PAIRS + unit] : 0.f);
      both |= (u32)to_half(fminf(fmaxf(w, -60000.f), 60000.f)) << 16 * half;  // float16 ends at 65504
    }
    frag[((i64)b * HEADS + h) * (NB * 32 * FRAG) + i] = both;
  }
  if (h == 0 && b == 0 && tid >= 992) {
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
}
