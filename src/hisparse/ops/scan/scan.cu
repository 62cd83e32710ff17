// The sketch scan of a decode step: worth(row) = sum over query heads of sqrt(attention on the row / all attention of the
// head). This leaves the roots of the rows' attention; select.cu adds them up, for which all rows have to be known.
// Macros: those of sketch.cuh, WARPS, STAGES (tiles that a warp has on their way), and ONCE (1: sketches leave the L2 cache
// first).

#include "ptx.cuh"
#include "sketch.cuh"

constexpr int BODY = HB * ROW * TOKEN;             // bytes of a row that a warp reads
constexpr int STRIDE = BODY + (128 + TOKEN - BODY % 128) % 128;  // rows apart in shared memory: no bank conflicts
constexpr int MARKS = HB * ROW;                    // scales of a row that a warp reads
constexpr int STAGE = 8 * (STRIDE + MARKS);
constexpr float CAP = 1.2676506e30f;               // 2^100: more than any sum of attention needs

// ---- the scan ----------------------------------------------------------------------------------------------------

// First of the tiles of part `i` of `n` parts of `total`; the first parts are one tile longer where it does not divide.
__device__ __forceinline__ int share_start(int i, int n, int total) { return i * (total / n) + min(i, total % n); }

// Tiles of all sequences and head blocks; finds the sequence that has tile `at` of them.
struct Place {
  int b, before, each;  // the sequence, tiles of the sequences before it, tiles of one of its head blocks
};

__device__ __forceinline__ int count_tiles(const int* count, int b, int batch, int max_rows) {
  return b < batch ? (clamp_count(count, b, max_rows) + 7) / 8 * BLOCKS : 0;
}

__device__ __forceinline__ int all_tiles(const int* count, int batch, int max_rows, int lane) {
  int sum = 0;
#pragma unroll 1
  for (int b = lane; b < batch; b += 32) sum += count_tiles(count, b, batch, max_rows);
#pragma unroll
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

__device__ __forceinline__ Place find_place(const int* count, int batch, int max_rows, int at, int lane) {
  int before = 0;
#pragma unroll 1
  for (int first = 0;; first += 32) {
    const int own = count_tiles(count, first + lane, batch, max_rows);
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    const u32 reached = __ballot_sync(~0u, before + sum > at);
    if (reached || first + 32 >= batch) {
      const int i = __ffs(reached) - 1;
      Place place;
      place.b = first + i;
      place.each = __shfl_sync(~0u, own, i) / BLOCKS;
      place.before = before + __shfl_sync(~0u, sum - own, i);
      return place;
    }
    before += __shfl_sync(~0u, sum, 31);
  }
}

struct Ids {
  int low, high;  // rows lane / 8 and 4 + lane / 8 of a tile; -1 where there is none
};

__device__ __forceinline__ Ids read_ids(const int* table, int tile, int n_rows, int lane) {
  const int row = tile * 8 + (lane >> 3);
  Ids ids;
  ids.low = row < n_rows ? table[row] : -1;
  ids.high = row + 4 < n_rows ? table[row + 4] : -1;
  return ids;
}

// Requests 8 rows' bytes of a warp's heads; of rows that are not there, zeros.
__device__ __forceinline__ void request(u32 stage, Ids ids, const u8* codes, const u8* scales, int code_stride,
                                        int scale_stride, int lane, u64 policy) {
  constexpr int PIECES = BODY / 16;
  const int piece = lane & 7;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int id = half ? ids.high : ids.low;
    const bool there = id >= 0;
    const i64 row = there ? id : 0;
    const int at = 4 * half + (lane >> 3);
    const u8* from = codes + row * code_stride + piece * 16;
    const u32 to = stage + at * STRIDE + piece * 16;
#pragma unroll
    for (int p = 0; p < PIECES; p += 8)
      if (PIECES % 8 == 0 || p + piece < PIECES) copy16(to + p * 16, from + p * 16, there ? 16 : 0, policy);
    const u8* mark = scales + row * scale_stride + piece * 4;
    const u32 mark_to = stage + 8 * STRIDE + at * MARKS + piece * 4;
#pragma unroll
    for (int p = 0; p < MARKS / 4; p += 8)
      if (p + piece < MARKS / 4) copy4(mark_to + p * 4, mark + p * 4, there ? 4 : 0);
  }
}

// Persistent grid, WARPS warps, WARPS * STAGES * STAGE bytes of shared memory. The tiles of all sequences and head blocks
// are shared out evenly; warps of a program take turns. Writes
//   value u32 [BLOCKS, B, max_rows, 4, SETS]: two bfloat16, columns 2 t and 2 t + 1: the root of a row's attention;
//   part float32 [grid + B * BLOCKS, PC]: at program + sequence * BLOCKS + block, the sum of the program's attention.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
scan_rows(const u32* frag, const float* middle, const float* top, const u8* codes, const u8* scales, const int* table,
           const int* count, u32* value, float* part, int batch, int max_rows, int code_stride, int scale_stride) {
  extern __shared__ __align__(16) u8 ring[];
  __shared__ float s_total[WARPS][PC];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  start_next();
  const int all = all_tiles(count, batch, max_rows, lane), programs = min((int)gridDim.x, all);
  if ((int)blockIdx.x >= programs) {
    wait_for_previous();  // or this kernel could end before the one ahead, and what follows would not wait for that one
    return;
  }
  int at = share_start(blockIdx.x, programs, all);
  const int stop = share_start(blockIdx.x + 1, programs, all);
  const u32 own = shared_address(ring) + warp * (STAGES * STAGE);
  const u64 policy = read_once();

  while (at < stop) {
    const Place place = find_place(count, batch, max_rows, at, lane);
    const int b = place.b, each = place.each, block = (at - place.before) / each;
    const int base = place.before + block * each;
    const int first = at - base + warp, end = min(stop - base, each);
    const int n_rows = clamp_count(count, b, max_rows);
    const int* rows = table + (i64)b * max_rows;
    const u8* p_codes = codes + block * BODY;
    const u8* p_scales = scales + block * MARKS;

    Ids ids[STAGES];
#pragma unroll
    for (int s = 0; s < STAGES; ++s) ids[s] = read_ids(rows, first + s * WARPS, n_rows, lane);
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
      if (first + s * WARPS < end) request(own + s * STAGE, ids[s], p_codes, p_scales, code_stride, scale_stride, lane, policy);
      commit_copies();
    }
    Ids next = read_ids(rows, first + STAGES * WARPS, n_rows, lane);

    wait_for_previous();  // sketches, tables and counts are older; the weights are not
    u32 weight[HB][NB][FRAG];
    const i64 head = (i64)b * HEADS + block * HB;
#pragma unroll
    for (int h = 0; h < HB; ++h)
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) {
        const uint2* from = (const uint2*)(frag + (((head + h) * NB + nb) * 32 + lane) * FRAG);
#pragma unroll
        for (int r = 0; r < FRAG / 2; ++r) {
          const uint2 w = from[r];
          weight[h][nb][2 * r] = w.x, weight[h][nb][2 * r + 1] = w.y;
        }
      }
    float mid[SETS][2], low[SETS][2], total[SETS][2] = {};
    const int turn = NB > 1 ? 0 : min(2 * t / QP, HG - 1);  // which of the heads of an accumulator the lane's columns are
#pragma unroll
    for (int s = 0; s < SETS; ++s)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const i64 from = (head + (NB > 1 ? s / NB : s * HG + turn)) * NQ + (s % NB) * 8 + 2 * t + k;
        mid[s][k] = middle[from];
        low[s][k] = -top[from];
      }

    u32 stage = own;
    for (int tile = first; tile < end; tile += WARPS) {
      wait_copies<STAGES - 1>();
      __syncwarp();
      const int row = tile * 8 + g;
      const float there = row < n_rows ? 1.f : 0.f;
      const u32 words = stage + g * STRIDE + t * (4 * I), marks = stage + 8 * STRIDE + g * MARKS;
      u32 result[SETS];
#pragma unroll
      for (int group = 0; group < G; ++group) {
        float sum[NB][2] = {};
#pragma unroll
        for (int j = 0; j < ROW; j += 4) {
          float acc[2][NB][4];
#pragma unroll
          for (int pair = 0; pair < 2; ++pair)
#pragma unroll
            for (int nb = 0; nb < NB; ++nb)
#pragma unroll
              for (int k = 0; k < 4; ++k) acc[pair][nb][k] = mid[group * NB + nb][k & 1];
          u32 mark[1];
          read_shared(mark, marks + (group * HG + turn) * ROW + j);
#pragma unroll
          for (int hg = 0; hg < HG; ++hg) {
            const int h = group * HG + hg;
            u32 word[4][I];
#pragma unroll
            for (int k = 0; k < 4; ++k) read_shared(word[k], words + (h * ROW + j + k) * TOKEN);
#pragma unroll
            for (int i = 0; i < I; ++i) {
              add_products(acc[0], word[0][i], word[1][i], weight[h], i);
              add_products(acc[1], word[2][i], word[3][i], weight[h], i);
            }
          }
          float scale[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) scale[k] = decode_scale(mark[0], k);
#pragma unroll
          for (int nb = 0; nb < NB; ++nb)
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              const float down = low[group * NB + nb][k];
#pragma unroll
              for (int pair = 0; pair < 2; ++pair) {
                sum[nb][k] += exp2_fast(__fmaf_rn(acc[pair][nb][k], scale[2 * pair], down));
                sum[nb][k] += exp2_fast(__fmaf_rn(acc[pair][nb][k + 2], scale[2 * pair + 1], down));
              }
            }
        }
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
          const int s = group * NB + nb;
          sum[nb][0] = fminf(sum[nb][0], CAP), sum[nb][1] = fminf(sum[nb][1], CAP);
          total[s][0] = __fmaf_rn(there, sum[nb][0], total[s][0]);
          total[s][1] = __fmaf_rn(there, sum[nb][1], total[s][1]);
          result[s] = pack_bfloat(sqrt_fast(sum[nb][0]), sqrt_fast(sum[nb][1]));
        }
      }
      __syncwarp();
      if (tile + STAGES * WARPS < end) request(stage, next, p_codes, p_scales, code_stride, scale_stride, lane, policy);
      commit_copies();
      next = read_ids(rows, tile + (STAGES + 1) * WARPS, n_rows, lane);
      stage = stage + STAGE == own + STAGES * STAGE ? own : stage + STAGE;
      if (row < n_rows) {
        u32* to = value + ((((i64)block * batch + b) * max_rows + row) * 4 + t) * SETS;
        if constexpr (SETS % 4 == 0) {
#pragma unroll
          for (int s = 0; s < SETS; s += 4)
            ((uint4*)to)[s / 4] = make_uint4(result[s], result[s + 1], result[s + 2], result[s + 3]);
        } else if constexpr (SETS == 2) {
          *(uint2*)to = make_uint2(result[0], result[1]);
        } else {
#pragma unroll
          for (int s = 0; s < SETS; ++s) to[s] = result[s];
        }
      }
    }

    wait_copies<0>();
#pragma unroll
    for (int s = 0; s < SETS; ++s)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float x = total[s][k];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
        if (g == 0) s_total[warp][s * 8 + 2 * t + k] = x;
      }
    __syncthreads();
    if (tid < PC) {
      float x = 0.f;
      for (int w = 0; w < WARPS; ++w) x += s_total[w][tid];
      part[((i64)blockIdx.x + b * BLOCKS + block) * PC + tid] = x;
    }
    __syncthreads();
    at = base + end;
  }
}
