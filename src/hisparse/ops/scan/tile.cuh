// A tile: 8 rows' sketches on their way into shared memory, and what they are worth. See sketch.cuh.
//
// Macros: those of sketch.cuh, WARPS, STAGES (tiles that a warp has on their way), ONCE (1: sketches leave the L2 cache
// first), BULK (1: the bulk copy engine brings a row's bytes at once; 0: lanes bring 16 bytes each).

constexpr int BODY = HB * ROW * TOKEN;             // bytes of a row that a warp reads
constexpr int STRIDE = BODY + (128 + TOKEN - BODY % 128) % 128;  // rows apart in shared memory: no bank conflicts
constexpr int MARKS = HB * ROW;                    // scales of a row that a warp reads
constexpr int COVER = BULK && MARKS < 16 ? 16 : MARKS;  // and the bytes brought for them: a bulk copy has 16 or more
constexpr int STAGE = 8 * (STRIDE + COVER);
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
  int code_stride, scale_stride;
};

#if BULK

// A lane below 8 has the row of its number; -1 where there is none.
struct Ids {
  int row;
};

__device__ __forceinline__ Ids read_ids(const int* table, int tile, int n_rows, int lane) {
  const int row = tile * 8 + lane;
  return {lane < 8 && row < n_rows ? table[row] : -1};
}

// A warp's stages, a barrier each.
struct Ring {
  u32 own, barriers, turns;  // bit i of `turns`: the parity that stage i is waited for with
  u64 policy;

  __device__ __forceinline__ void set_up(void* ring, u64* s_barriers, int warp, int lane) {
    own = shared_address(ring) + warp * (STAGES * STAGE), barriers = shared_address(s_barriers) + warp * (STAGES * 8);
    turns = 0, policy = read_once();
    if (lane < STAGES) set_up_barrier(barriers + 8 * lane);
    publish_barriers();
    __syncwarp();
  }

  // Requests 8 rows' bytes. What a row that is not there leaves is nonsense: what is made of it is not used.
  __device__ __forceinline__ void request(int s, Ids ids, const Sketches& from, int block, int lane) const {
    const u32 to = own + s * STAGE, barrier = barriers + 8 * s;
    const int n = __popc(__ballot_sync(~0u, ids.row >= 0));
    if (lane == 0) expect_bytes(barrier, n * (BODY + COVER));
    if (ids.row >= 0) {
      copy_bulk_once(to + lane * STRIDE, from.codes + (i64)ids.row * from.code_stride, BODY, barrier, policy);
      copy_bulk(to + 8 * STRIDE + lane * COVER, from.scales + (i64)ids.row * from.scale_stride - block * MARKS % COVER, COVER,
                barrier);
    }
  }

  __device__ __forceinline__ void commit() const {}

  __device__ __forceinline__ void wait(int s) {
    wait_barrier(barriers + 8 * s, turns >> s & 1);
    turns ^= 1u << s;
  }

  __device__ __forceinline__ void drain() const {}
};

#else

// Rows lane / 8 and 4 + lane / 8 of a tile; -1 where there is none.
struct Ids {
  int low, high;
};

__device__ __forceinline__ Ids read_ids(const int* table, int tile, int n_rows, int lane) {
  const int row = tile * 8 + (lane >> 3);
  Ids ids;
  ids.low = row < n_rows ? table[row] : -1;
  ids.high = row + 4 < n_rows ? table[row + 4] : -1;
  return ids;
}

// A warp's stages; their copies arrive in the order in which they were requested.
struct Ring {
  u32 own;
  u64 policy;

  __device__ __forceinline__ void set_up(void* ring, u64*, int warp, int) {
    own = shared_address(ring) + warp * (STAGES * STAGE), policy = read_once();
  }

  // Requests 8 rows' bytes; of rows that are not there, zeros.
  __device__ __forceinline__ void request(int s, Ids ids, const Sketches& from, int, int lane) const {
    constexpr int PIECES = BODY / 16;
    const u32 stage = own + s * STAGE;
    const int piece = lane & 7;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int id = half ? ids.high : ids.low;
      const bool there = id >= 0;
      const i64 row = there ? id : 0;
      const int at = 4 * half + (lane >> 3);
      const u8* code = from.codes + row * from.code_stride + piece * 16;
      const u32 to = stage + at * STRIDE + piece * 16;
#pragma unroll
      for (int p = 0; p < PIECES; p += 8)
        if (PIECES % 8 == 0 || p + piece < PIECES) copy16(to + p * 16, code + p * 16, there ? 16 : 0, policy);
      const u8* mark = from.scales + row * from.scale_stride + piece * 4;
      const u32 mark_to = stage + 8 * STRIDE + at * MARKS + piece * 4;
#pragma unroll
      for (int p = 0; p < MARKS / 4; p += 8)
        if (p + piece < MARKS / 4) copy4(mark_to + p * 4, mark + p * 4, there ? 4 : 0);
    }
  }

  __device__ __forceinline__ void commit() const { commit_copies(); }

  __device__ __forceinline__ void wait(int) const {
    wait_copies<STAGES - 1>();
    __syncwarp();
  }

  __device__ __forceinline__ void drain() const { wait_copies<0>(); }
};

#endif

// ---- what a tile is worth ----------------------------------------------------------------------------------------

// The weights of a warp's heads, what their accumulators start from, and minus what attention is summed relative to.
struct Weights {
  u32 weight[HB][NB][FRAG];
  float mid[SETS][2], low[SETS][2];
  int turn;  // which of the heads of an accumulator the lane's columns are

  // head: the first of the warp's, over all sequences. frag, middle, top: see weigh.cu.
  __device__ __forceinline__ void read(const u32* frag, const float* middle, const float* top, i64 head, int lane) {
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
#pragma unroll
    for (int s = 0; s < SETS; ++s) {
      const i64 from = (head + (NB > 1 ? s / NB : s * HG + turn)) * NQ + (s % NB) * 8 + 2 * t;
      const float2 m = *(const float2*)(middle + from), p = *(const float2*)(top + from);
      mid[s][0] = m.x, mid[s][1] = m.y, low[s][0] = -p.x, low[s][1] = -p.y;
    }
  }

  // words, marks: the lane's row of the stage, the first bytes that it reads. Adds the row's attention to `total` if it
  // is there; leaves its roots.
  __device__ __forceinline__ void score(u32 words, u32 marks, bool is_there, float (&total)[SETS][2], u32 (&result)[SETS]) const {
    const float there = is_there ? 1.f : 0.f;
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

// Scores the tiles first, first + step, ... below `end` of a sequence. before(): what has to be done when the first rows
// are on their way; done(tile, row, result): what becomes of the roots. Adds the rows' attention to `total`.
template <class Before, class Done>
__device__ __forceinline__ void score_tiles(Ring& ring, const Sketches& from, int block, const int* table, int n_rows,
                                            int first, int end, int step, Weights& weights, float (&total)[SETS][2], int lane,
                                            Before before, Done done) {
  const int g = lane >> 2, t = lane & 3;
  Ids ids[STAGES];
#pragma unroll
  for (int s = 0; s < STAGES; ++s) ids[s] = read_ids(table, first + s * step, n_rows, lane);
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {
    if (first + s * step < end) ring.request(s, ids[s], from, block, lane);
    ring.commit();
  }
  Ids next = read_ids(table, first + STAGES * step, n_rows, lane);
  before();
  const u32 words = ring.own + g * STRIDE + t * (4 * I);
  const u32 marks = ring.own + 8 * STRIDE + g * COVER + block * MARKS % COVER;
  int s = 0;
#pragma unroll 1
  for (int tile = first; tile < end; tile += step) {
    ring.wait(s);
    const int row = tile * 8 + g;
    u32 result[SETS];
    weights.score(words + s * STAGE, marks + s * STAGE, row < n_rows, total, result);
    __syncwarp();
    if (tile + STAGES * step < end) ring.request(s, next, from, block, lane);
    ring.commit();
    next = read_ids(table, tile + (STAGES + 1) * step, n_rows, lane);
    s = s + 1 == STAGES ? 0 : s + 1;
    done(tile, row, result);
  }
  ring.drain();
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
