// A tile: 8 rows' sketches on their way into shared memory, and what they are worth. See sketch.cuh.
//
// Macros: those of sketch.cuh, WARPS, STAGES (tiles that a warp has on their way), ONCE (1: sketches leave the L2 cache
// first).

constexpr int BODY = HB * ROW * TOKEN;             // bytes of a row that a warp reads
constexpr int STRIDE = BODY + (128 + TOKEN - BODY % 128) % 128;  // rows apart in shared memory: no bank conflicts
constexpr int MARKS = HB * ROW;                    // scales of a row that a warp reads
constexpr int STAGE = 8 * (STRIDE + MARKS);
constexpr int WARP_BYTES = STAGES * STAGE + 32 * MARKS;  // shared memory of a warp
constexpr float CAP = 1.2676506e30f;               // 2^100: more than any sum of attention needs

// ---- which tiles -------------------------------------------------------------------------------------------------

// First of the tiles of part `i` of `n` parts of `total`; the first parts are one tile longer where it does not divide.
__device__ __forceinline__ int share_start(int i, int n, int total) { return i * (total / n) + min(i, total % n); }

__device__ __forceinline__ int add_lanes_before(int x, int lane) {
  int sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  return sum - x;
}

// The lengths of a batch: a lane has the sequence of its number. Those of sequences from the 33rd on are read again.
struct Lengths {
  int rows, before, all;  // of the lane's sequence: rows, tiles of the sequences before it; tiles of all sequences
};

__device__ __forceinline__ int count_rows(const int* count, int b, int batch, int max_rows) {
  return b < batch ? clamp_count(count, b, max_rows) : 0;
}

__device__ __forceinline__ Lengths read_lengths(const int* count, int batch, int max_rows, int lane) {
  Lengths x;
  x.rows = count_rows(count, lane, batch, max_rows);
  int sum = (x.rows + 7) / 8;
  x.before = add_lanes_before(sum, lane);
#pragma unroll 1
  for (int b = lane + 32; b < batch; b += 32) sum += (count_rows(count, b, batch, max_rows) + 7) / 8;
  x.all = __reduce_add_sync(~0u, sum);
  return x;
}

struct Place {
  int b, before, rows;  // a sequence, tiles of the sequences before it, its rows
};

// The sequence that has tile `at` of all.
__device__ __forceinline__ Place find_place(Lengths x, const int* count, int batch, int max_rows, int at, int lane) {
  Place place;
  for (int first = 0;;) {
    const u32 reached = __ballot_sync(~0u, x.before + (x.rows + 7) / 8 > at);
    if (reached || first + 32 >= batch) {
      const int i = __ffs(reached) - 1;
      place.b = first + i;
      place.before = __shfl_sync(~0u, x.before, i);
      place.rows = __shfl_sync(~0u, x.rows, i);
      return place;
    }
    const int before = __shfl_sync(~0u, x.before + (x.rows + 7) / 8, 31);
    first += 32;
    x.rows = count_rows(count, first + lane, batch, max_rows);
    x.before = before + add_lanes_before((x.rows + 7) / 8, lane);
  }
}

// ---- rows on their way -------------------------------------------------------------------------------------------

struct Sketches {
  const u8 *codes, *scales;  // of the warp's heads
  u32 code_stride, scale_stride;
};

// Row g = lane / 4 of a tile; beyond the last row of the sequence the last one again, of which nothing is used.
__device__ __forceinline__ int read_id(const int* table, int tile, int n_rows, int lane) {
  return table[min(tile * 8 + (lane >> 2), n_rows - 1)];
}

// A warp's shared memory: its stages, and the decoded scales of a tile.
struct Ring {
  u32 own;
  u64 policy;

  __device__ __forceinline__ void set_up(void* ring, int warp) {
    own = shared_address(ring) + warp * WARP_BYTES, policy = read_once();
  }

  // Requests 8 rows' bytes, if the warp has these rows: four rows' codes at a time, eight lanes a row, and all scales, four
  // lanes a row.
  __device__ __forceinline__ void request(bool are_there, int s, int id, const Sketches& from, int lane) const {
    constexpr int PIECES = BODY / 16;
    const u32 stage = own + s * STAGE;
    const int piece = lane & 7, t = lane & 3;
    const int ids[2] = {__shfl_sync(~0u, id, lane >> 3 << 2), __shfl_sync(~0u, id, 16 + (lane >> 3 << 2))};
    if (!are_there) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * half + (lane >> 3);
      const u8* code = from.codes + (u64)(u32)ids[half] * from.code_stride + piece * 16;
      const u32 to = stage + at * STRIDE + piece * 16;
#pragma unroll
      for (int p = 0; p < PIECES; p += 8)
        if (PIECES % 8 == 0 || p + piece < PIECES) copy16(to + p * 16, code + p * 16, policy);
    }
    const u8* mark = from.scales + (u64)(u32)id * from.scale_stride + t * 4;
    const u32 to = stage + 8 * STRIDE + (lane >> 2) * MARKS + t * 4;
#pragma unroll
    for (int p = 0; p < MARKS / 4; p += 4)
      if (MARKS % 16 == 0 || p + t < MARKS / 4) copy4(to + p * 4, mark + p * 4);
  }

  // Decodes the scales of a tile that has arrived; a lane has four of them at a time.
  __device__ __forceinline__ void decode_scales(int s, int lane) const {
    const u32 marks = own + s * STAGE + 8 * STRIDE, to = own + STAGES * STAGE;
#pragma unroll
    for (int i = 0; i < 2 * MARKS; i += 32)
      if (2 * MARKS % 32 == 0 || i + lane < 2 * MARKS) {
        u32 mark[1];
        read_shared(mark, marks + 4 * (i + lane));
        write_shared(to + 16 * (i + lane), decode_scale(mark[0], 0), decode_scale(mark[0], 1), decode_scale(mark[0], 2),
                     decode_scale(mark[0], 3));
      }
    __syncwarp();
  }
};

// ---- what a tile is worth ----------------------------------------------------------------------------------------

// What the accumulators of a set of columns start from, for the rows g and g + 8 of an operand, and minus what attention is
// summed relative to: of the lanes of a quad.
struct Base {
  float4 middle[SETS][4];
  float2 low[SETS][4];
};

// The weights of a warp's heads.
struct Weights {
  u32 weight[HB][NB][FRAG];
  u32 middles, lows;  // shared addresses of the lane's part of a Base
  int turn;  // which of the heads of an accumulator the lane's columns are

  // head: the first of the warp's, over all sequences. frag, middle, top: see weigh.cu. Warps of the same heads share a
  // Base, which one of them (`writes`) fills. All threads of the program call this; barriers inside.
  __device__ __forceinline__ void read(const u32* frag, const float* middle, const float* top, i64 head, Base& shared,
                                       bool writes, int lane) {
    const int t = lane & 3;
#pragma unroll
    for (int h = 0; h < HB; ++h)
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) {
        const uint2* from = (const uint2*)(frag + ((head + h) * NB + nb) * (32 * FRAG)) + lane;
#pragma unroll
        for (int r = 0; r < FRAG / 2; ++r) {
          const uint2 w = from[32 * r];
          weight[h][nb][2 * r] = w.x, weight[h][nb][2 * r + 1] = w.y;
        }
      }
    turn = NB > 1 ? 0 : min(2 * t / QP, HG - 1);
    for (int s = lane >> 2; writes && s < SETS; s += 8) {
      const i64 from = (head + (NB > 1 ? s / NB : s * HG + turn)) * NQ + (s % NB) * 8 + 2 * t;
      const float2 m = *(const float2*)(middle + from), p = *(const float2*)(top + from);
      shared.middle[s][t].x = shared.middle[s][t].z = m.x, shared.middle[s][t].y = shared.middle[s][t].w = m.y;
      shared.low[s][t].x = -p.x, shared.low[s][t].y = -p.y;
    }
    middles = shared_address(shared.middle[0] + t), lows = shared_address(shared.low[0] + t);
    __syncthreads();
  }

  // words, scales: the lane's row of the stage, and of the decoded scales. Adds the row's attention to `total` if it is
  // there; leaves its roots.
  __device__ __forceinline__ void score(u32 words, u32 scales, bool is_there, float (&total)[SETS][2],
                                        u32 (&result)[SETS]) const {
    const float there = is_there ? 1.f : 0.f;
#pragma unroll
    for (int group = 0; group < G; ++group) {
      float sum[NB][2];
#pragma unroll
      for (int j = 0; j < ROW; j += 4) {
        float acc[2][NB][4];
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
          read_shared(acc[0][nb], middles + (group * NB + nb) * 64);
#pragma unroll
          for (int k = 0; k < 4; ++k) acc[1][nb][k] = acc[0][nb][k];
        }
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
        read_shared(scale, scales + ((group * HG + turn) * ROW + j) * 4);
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
          float low[2];
          read_shared(low, lows + (group * NB + nb) * 32);
#pragma unroll
          for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float x = exp2_fast(__fmaf_rn(acc[i / 2][nb][k + i % 2 * 2], scale[i], low[k]));
              sum[nb][k] = j + i ? sum[nb][k] + x : x;
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
  }
};

// A warp's SETS words of a row, 16 bytes at a time where that fits.
__device__ __forceinline__ void write_words(u32* to, const u32 (&x)[SETS]) {
  if constexpr (SETS % 4 == 0) {
#pragma unroll
    for (int s = 0; s < SETS; s += 4) ((uint4*)to)[s / 4] = make_uint4(x[s], x[s + 1], x[s + 2], x[s + 3]);
  } else if constexpr (SETS == 2) {
    *(uint2*)to = make_uint2(x[0], x[1]);
  } else {
#pragma unroll
    for (int s = 0; s < SETS; ++s) to[s] = x[s];
  }
}

// Scores the tiles first, first + step, ... below `end` of a sequence. before(): what has to be done when the first tile is
// on its way; done(tile, row, result): what becomes of the roots. Adds the rows' attention to `total`.
template <class Before, class Done>
__device__ __forceinline__ void score_tiles(const Ring& ring, const Sketches& from, const int* table, int n_rows, int first,
                                            int end, int step, Weights& weights, float (&total)[SETS][2], int lane,
                                            Before before, Done done) {
  const int g = lane >> 2, t = lane & 3;
  int ids[STAGES];
#pragma unroll
  for (int s = 0; s < STAGES; ++s) ids[s] = read_id(table, first + s * step, n_rows, lane);
  int next = read_id(table, first + STAGES * step, n_rows, lane);
  // Requests are taken one after the other: those of the first tile only, before there is something else to do.
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {
    ring.request(first + s * step < end, s, ids[s], from, lane);
    commit_copies();
    if (s == 0) before();
  }
  const u32 words = ring.own + g * STRIDE + t * (4 * I), scales = ring.own + STAGES * STAGE + g * (4 * MARKS);
  int s = 0;
#pragma unroll 1
  for (int tile = first; tile < end; tile += step) {
    wait_copies<STAGES - 1>();
    __syncwarp();
    ring.decode_scales(s, lane);
    const int row = tile * 8 + g;
    u32 result[SETS];
    weights.score(words + s * STAGE, scales, row < n_rows, total, result);
    __syncwarp();
    ring.request(tile + STAGES * step < end, s, next, from, lane);
    commit_copies();
    next = read_id(table, tile + (STAGES + 1) * step, n_rows, lane);
    s = s + 1 == STAGES ? 0 : s + 1;
    done(tile, row, result);
  }
  wait_copies<0>();
}

// The sums over a warp's rows, at its columns in `to`.
__device__ __forceinline__ void add_rows(const float (&total)[SETS][2], float* to, int lane) {
#pragma unroll
  for (int s = 0; s < SETS; ++s)
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float x = total[s][k];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
      if (lane < 4) to[s * 8 + 2 * lane + k] = x;
    }
}
