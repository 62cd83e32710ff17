// The sketch scan of a decode step on the matrix units of Hopper and later.
//
// worth(row) = sum over query heads of sqrt(attention on the row / attention of the head)
//
// A 32-bit word of a sketch holds twelve codes: of two 16-bit halves each two of four bits and four of two bits. A mask
// takes the same field out of both halves, and the result, read as two float16, is field * place * 2^-24: subnormals,
// which mma.sync multiplies exactly. So four masks, a shift and two more unpack twelve codes; place and step are in the
// query's weights, the codes' midpoints in what the accumulators start from.
//
// A tile is 8 rows. Lane 4 g + t has row g in both halves of the m = 16 rows of an operand: token j as row g, token
// j + 1 as row g + 8. So all tokens of a row meet in one lane and nothing is shuffled. The n = 8 columns are the query
// heads of a KV head, or of several where they are few (HG).
//
// Names: g row of a tile, t lane of a quad (columns 2 t, 2 t + 1), n column, b sequence. Logarithms are to base 2.
//
// Macros: HEADS, QUERIES (a KV head), HEAD_DIM, BITS, ROW (tokens a row, a multiple of 4), WARPS, STAGES, QTYPE (0 float32,
// 1 bfloat16, 2 float16), and how heads are shared out: HB heads a warp, HG heads an accumulator, QP columns a head, NB
// accumulators a head (more than one where it has more than eight query heads).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

constexpr int I = HEAD_DIM * BITS / 128;           // words of a token and head in a lane
constexpr int PAIRS = HEAD_DIM * BITS / 16;        // byte pairs of a token and head
constexpr int C = 6 * PAIRS;                       // coordinates that have codes
constexpr int G = HB / HG;
constexpr int SETS = G * NB;                       // accumulators, and words of results a lane and row
constexpr int PC = SETS * 8;                       // columns of a warp's heads
constexpr int BLOCKS = HEADS / HB;                 // warps' shares of the heads
constexpr int FRAG = 6 * I;                        // registers of weights a head and operand
constexpr int TOKEN = 16 * I;                      // bytes of a token and head
constexpr int BODY = HB * ROW * TOKEN;             // bytes of a row that a warp reads
constexpr int STRIDE = BODY + (128 + TOKEN - BODY % 128) % 128;  // rows apart in shared memory: no bank conflicts
constexpr int MARKS = HB * ROW;                    // scales of a row that a warp reads
constexpr int STAGE = 8 * (STRIDE + MARKS);
constexpr float CAP = 1.2676506e30f;               // 2^100: more than any sum of attention needs

// ---- instructions ------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float sqrt_fast(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 pack_bfloat(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

__device__ __forceinline__ u16 to_half(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float from_half(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// `size` bytes of 16 from global to shared memory, the rest zeros.
__device__ __forceinline__ void copy16(u32 to, const void* from, int size) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
}

__device__ __forceinline__ void copy4(u32 to, const void* from, int size) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

template <int N>
__device__ __forceinline__ void read_shared(u32 (&w)[N], u32 at) {
  if constexpr (N == 4) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at));
  } else if constexpr (N == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(at));
  } else {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[0]) : "r"(at));
  }
}

// For launches that overlap: waits until the kernel ahead has ended and its writes can be seen; lets the next one start.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- scores ------------------------------------------------------------------------------------------------------

// Adds the products of the words of two tokens (rows g and g + 8 of the operand) with one head's weights.
__device__ __forceinline__ void add_products(float (&acc)[NB][4], u32 a, u32 b, const u32 (&weight)[NB][FRAG], int i) {
  const u32 a8 = a >> 8, b8 = b >> 8;
  const u32 fa[6] = {a & 0x000F000Fu, a & 0x00F000F0u, a8 & 0x00030003u, a8 & 0x000C000Cu, a8 & 0x00300030u, a8 & 0x00C000C0u};
  const u32 fb[6] = {b & 0x000F000Fu, b & 0x00F000F0u, b8 & 0x00030003u, b8 & 0x000C000Cu, b8 & 0x00300030u, b8 & 0x00C000C0u};
#pragma unroll
  for (int p = 0; p < 6; p += 2)
#pragma unroll
    for (int nb = 0; nb < NB; ++nb)
      multiply(acc[nb], fa[p], fb[p], fa[p + 1], fb[p + 1], weight[nb][i * 6 + p], weight[nb][i * 6 + p + 1]);
}

// 2^24 times the root mean square that byte `j` of `word` stands for: 2^((byte - 128) / 16 + 24).
__device__ __forceinline__ float decode_scale(u32 word, int j) {
  const float x = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440 + j));  // 2^23 + byte
  return exp2_fast(__fmaf_rn(x, 0.0625f, 16.f - 524288.f));
}

__device__ __forceinline__ int clamp_count(const int* count, int b, int max_rows) {
  const int c = count[b];
  return c < 0 ? 0 : c < max_rows ? c : max_rows;
}

// First of the tiles of part `i` of `n` equal parts of `total`.
__device__ __forceinline__ int share_start(int i, int n, int total) { return (int)((i64)i * total / n); }

// ---- the query's weights -----------------------------------------------------------------------------------------

constexpr int CP = (C + 31) / 32 * 32;
constexpr int NQ = 8 * NB;
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
//   frag u32 [B, HEADS, NB, 32, FRAG]: float16 weights as lanes want them; middle, top float32 [B, HEADS, NQ]: what the
//   accumulators start from, and the highest score of a sample of rows, which attention is summed relative to.
// Also: tiles int32 [B + 1], the first tile of each sequence; and zeros to `clear`.
extern "C" __global__ void __launch_bounds__(1024, 1)
weigh_queries(const void* q, const float* basis, const u8* codes, const u8* scales, const int* table, const int* count,
              u32* frag, float* middle, float* top, int* tiles, int* clear, int n_clear, float factor, int stride_b,
              int stride_h, int max_rows) {
  __shared__ float s_part[SPLITS][NQ][C];
  __shared__ float4 s_q[HEAD_DIM][NQ / 4];
  __shared__ u32 s_frag[NB * 32 * FRAG];
  __shared__ float s_middle[NQ], s_top[SAMPLERS][NQ];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, h = blockIdx.x, b = blockIdx.y;
  const int g = lane >> 2, t = lane & 3;
  const bool samples = tid >= WEIGHERS;
  const int turn = NB > 1 ? 0 : h % HB % HG * QP;  // the head's first column

  // Everything is requested before anything is used: the time goes by waiting. The basis is not of the kernel ahead.
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
  read_basis(0);
  wait_for_previous();
  start_next();
  const int n_rows = clamp_count(count, b, max_rows);
  u32 word[4][I], marks = 0;
  if (samples) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < I; ++i) word[j][i] = 0;
    if (n_rows > 0) {
      const int sample = (warp - WEIGHERS / 32) * 8 + g;
      const i64 id = table[(i64)b * max_rows + (int)((i64)sample * n_rows / (SAMPLERS * 8))];
      const u8* at = codes + id * (HEADS * ROW * TOKEN) + h * (ROW * TOKEN) + t * (4 * I);
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < I; ++i) word[j][i] = *(const u32*)(at + j * TOKEN + 4 * i);
      marks = *(const u32*)(scales + id * (HEADS * ROW) + h * ROW);
    }
  } else {
    for (int i = tid; i < HEAD_DIM * NQ; i += WEIGHERS) {
      const int d = i % HEAD_DIM, n = i / HEAD_DIM;
      const float y = n < QUERIES ? read_query(q, (i64)b * stride_b + (i64)(h * QUERIES + n) * stride_h + d) : 0.f;
      ((float*)&s_q[d])[n] = y * factor;
    }
#pragma unroll 1
    for (int i = (b * HEADS + h) * WEIGHERS + tid; i < n_clear; i += gridDim.y * HEADS * WEIGHERS) clear[i] = 0;
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
  __syncthreads();

#pragma unroll 1
  for (int i = tid; i < NB * 32 * FRAG * 2; i += 1024) {
    const int half = i & 1, r = i / 2 % FRAG, at = i / 2 / FRAG, f = r % 6;  // lane at % 32 of operand at / 32
    const int n = at % 32 / 4 - turn + at / 32 * 8, unit = (at % 4 * I + r / 6) * 2 + half;
    float w = 0.f;
    if (n >= 0 && n < QUERIES && (NB > 1 || n < QP))
#pragma unroll
      for (int s = 0; s < SPLITS; ++s) w += s_part[s][n][f * PAIRS + unit];
    // What a unit of the field is worth: its step over its place in the byte.
    w *= f == 0 ? 0.3352f : f == 1 ? 0.3352f / 16 : 0.9957f / (1 << 2 * (f - 2));
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
        const float middle = f < 2 ? 7.5f * (f ? 16.f : 1.f) : 1.5f * (float)(1 << 2 * (f - 2));
        sum += (from_half((u16)both) + from_half((u16)(both >> 16))) * middle;
      }
#pragma unroll
      for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      sum *= -5.9604644775390625e-08f;  // 2^-24
      if (lane == 0) s_middle[warp] = sum, middle[((i64)b * HEADS + h) * NQ + warp] = sum;
    }
    for (int i = tid; i < NB * 32 * FRAG; i += WEIGHERS)
      frag[((i64)b * HEADS + h) * (NB * 32 * FRAG) + i] = s_frag[i];
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

// ---- the scan ----------------------------------------------------------------------------------------------------

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
__device__ __forceinline__ void request(u32 stage, Ids ids, const u8* codes, const u8* scales, int lane) {
  constexpr int PIECES = BODY / 16;
  const int piece = lane & 7;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int id = half ? ids.high : ids.low;
    const bool there = id >= 0;
    const i64 row = there ? id : 0;
    const int at = 4 * half + (lane >> 3);
    const u8* from = codes + row * (HEADS * ROW * TOKEN) + piece * 16;
    const u32 to = stage + at * STRIDE + piece * 16;
#pragma unroll
    for (int p = 0; p < PIECES; p += 8)
      if (PIECES % 8 == 0 || p + piece < PIECES) copy16(to + p * 16, from + p * 16, there ? 16 : 0);
    const u8* mark = scales + row * (HEADS * ROW) + piece * 4;
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
           const int* count, u32* value, float* part, int batch, int max_rows) {
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
      if (first + s * WARPS < end) request(own + s * STAGE, ids[s], p_codes, p_scales, lane);
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
      if (tile + STAGES * WARPS < end) request(stage, next, p_codes, p_scales, lane);
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
