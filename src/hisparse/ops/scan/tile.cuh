// A tile: 8 rows' sketches on their way into shared memory, and what they are worth. See sketch.cuh.
//
// Macros: those of sketch.cuh, WARPS, STAGES (tiles that a warp has on their way), ONCE (1: sketches leave the L2 cache
// first).

constexpr int BODY = HB * ROW * TOKEN;             // bytes of a row that a warp reads
constexpr int STRIDE = BODY + (128 + TOKEN - BODY % 128) % 128;  // rows apart in shared memory: no bank conflicts
constexpr int MARKS = HB * ROW;                    // scales of a row that a warp reads
constexpr int STAGE = 8 * (STRIDE + MARKS);
constexpr int WARP_BYTES = STAGES * STAGE;         // shared memory of a warp
constexpr bool HELD_WHOLE = HB * ROW * I <= 32;    // a row's words of a warp's heads fit into registers
constexpr int MARK_WORDS = MARKS % 16 == 0 ? 4 : MARKS % 8 == 0 ? 2 : 1;  // of scales, read together
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

// A warp's shared memory: its stages.
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
};

// What a lane scores of a tile: all words of its row that it has, and all scales.
struct Words {
  u32 word[HB][ROW][I], marks[HB][ROW / 4];

  // code, mark: shared addresses of the lane's row.
  __device__ __forceinline__ void read(u32 code, u32 mark) {
#pragma unroll
    for (int h = 0; h < HB; ++h)
#pragma unroll
      for (int j = 0; j < ROW; ++j) read_shared(word[h][j], code + (h * ROW + j) * TOKEN);
#pragma unroll
    for (int i = 0; i < MARKS / 4; i += MARK_WORDS) {
      u32 x[MARK_WORDS];
      read_shared(x, mark + 4 * i);
#pragma unroll
      for (int k = 0; k < MARK_WORDS; ++k) marks[(i + k) / (ROW / 4)][(i + k) % (ROW / 4)] = x[k];
    }
  }
};

// ---- what a tile is worth ----------------------------------------------------------------------------------------

// Tokens that attention is summed relative to the best of: the first ones of eight rows a warp, all programs the same.
struct Sample {
  u32 word[HB][I], marks[HB];

  // turn, turns: the warp among those of its heads. Lane 4 g + t has row g, as of a tile.
  __device__ __forceinline__ void read(const Sketches& from, const int* table, int n_rows, int turn, int turns, int lane) {
    const int id = table[(int)((i64)(turn * 8 + (lane >> 2)) * n_rows / (turns * 8))];
    const u8* code = from.codes + (u64)(u32)id * from.code_stride + (lane & 3) * (4 * I);
    const u8* mark = from.scales + (u64)(u32)id * from.scale_stride;
#pragma unroll
    for (int h = 0; h < HB; ++h) {
#pragma unroll
      for (int i = 0; i < I; ++i) word[h][i] = *(const u32*)(code + h * (ROW * TOKEN) + 4 * i);
      marks[h] = *(const u32*)(mark + h * ROW);
    }
  }
};

// What the accumulators of a set of columns start from, for the rows g and g + 8 of an operand, of the lanes of a quad; and
// minus what attention is summed relative to.
struct Base {
  float4 middle[SETS][4];
  float low[PC];
};

// Whether a column of a warp's has a query.
__device__ __forceinline__ bool has_query(int column) {
  const int n = NB > 1 ? column % NQ : column % 8;
  return NB > 1 ? n < QUERIES : n % QP < QUERIES && n < HG * QP;
}

// The weights of a warp's heads.
struct Weights {
  u32 weight[HB][NB][FRAG];
  u32 middles, lows;  // shared addresses of the lane's part of a Base
  int turn;  // which of the heads of an accumulator the lane's columns are

  // head: the first of the warp's, over all sequences. frag: see weigh.cu. Warps of the same heads are `apart` warps apart
  // and share a Base. tops: room for PC numbers of each warp. All threads of the program call this; barriers inside.
  __device__ __forceinline__ void read(const u32* frag, i64 head, const Sample& sample, Base& shared, int apart,
                                       float (*tops)[PC], int warp, int lane) {
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
    for (int group = 0; group < G; ++group) {
      float acc[NB][4] = {};
      u32 mark = sample.marks[group * HG];
#pragma unroll
      for (int hg = 0; hg < HG; ++hg) {
        const int h = group * HG + hg;
        if (hg && turn == hg) mark = sample.marks[h];
        // In the place of a second token codes of ones: midpoints take away half of what these add, from the rounded weights,
        // so that codes and midpoints cancel as they should.
#pragma unroll
        for (int i = 0; i < I; ++i) add_products(acc, sample.word[h][i], ~0u, weight[h], i);
      }
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) {
        const int s = group * NB + nb;
        const float middle[2] = {-.5f * acc[nb][2], -.5f * acc[nb][3]};
        if (warp < apart && lane < 4) shared.middle[s][t] = make_float4(middle[0], middle[1], middle[0], middle[1]);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float peak = (acc[nb][k] + middle[k]) * decode_scale(mark, 0);
#pragma unroll
          for (int step = 4; step < 32; step *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
          if (lane < 4) tops[warp][s * 8 + 2 * t + k] = peak;
        }
      }
    }
    __syncthreads();
    if (warp < apart)
      for (int c = lane; c < PC; c += 32) {
        float top = tops[warp][c];
#pragma unroll
        for (int w = warp + apart; w < WARPS; w += apart) top = fmaxf(top, tops[w][c]);
        // A multiple of two, so that roots are rounded alike whichever rows are sampled. Without a query: so far down that
        // attention is zero.
        shared.low[c] = has_query(c) ? -2.f * rintf(.5f * top) : -1e30f;
      }
    middles = shared_address(shared.middle[0] + t), lows = shared_address(shared.low + 2 * t);
    __syncthreads();
  }

  // Adds the row's attention to `total` if it is there; leaves its roots.
  __device__ __forceinline__ void score(const Words& x, bool is_there, float (&total)[SETS][2], u32 (&result)[SETS]) const {
    const float there = is_there ? 1.f : 0.f;
#pragma unroll
    for (int group = 0; group < G; ++group) {
      float sum[NB][2];
#pragma unroll
      for (int j = 0; j < ROW; j += 4) {
        float acc[2][NB][4];
        u32 mark = x.marks[group * HG][j / 4];
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
          read_shared(acc[0][nb], middles + (group * NB + nb) * 64);
#pragma unroll
          for (int k = 0; k < 4; ++k) acc[1][nb][k] = acc[0][nb][k];
        }
#pragma unroll
        for (int hg = 0; hg < HG; ++hg) {
          const int h = group * HG + hg;
          if (hg && turn == hg) mark = x.marks[h][j / 4];
#pragma unroll
          for (int i = 0; i < I; ++i) {
            add_products(acc[0], x.word[h][j][i], x.word[h][j + 1][i], weight[h], i);
            add_products(acc[1], x.word[h][j + 2][i], x.word[h][j + 3][i], weight[h], i);
          }
        }
        float scale[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) scale[i] = decode_scale(mark, i);
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
          float low[2];
          read_shared(low, lows + (group * NB + nb) * 32);
#pragma unroll
          for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float y = exp2_fast(__fmaf_rn(acc[i / 2][nb][k + i % 2 * 2], scale[i], low[k]));
              sum[nb][k] = j + i ? sum[nb][k] + y : y;
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

// Scores the tiles first, first + step, ... below `end` of a sequence. turn: the warp among the `step` of its heads.
// before(sample): what has to be done when the first tiles are on their way; done(tile, row, result): what becomes of the
// roots. Adds the rows' attention to `total`.
template <class Before, class Done>
__device__ __forceinline__ void score_tiles(const Ring& ring, const Sketches& from, const int* table, int n_rows, int first,
                                            int end, int turn, int step, Weights& weights, float (&total)[SETS][2], int lane,
                                            Before before, Done done) {
  const int g = lane >> 2, t = lane & 3;
  Sample sample;
  int ids[STAGES];
#pragma unroll
  for (int s = 0; s < STAGES; ++s) ids[s] = read_id(table, first + s * step, n_rows, lane);
  int next = read_id(table, first + STAGES * step, n_rows, lane);
  sample.read(from, table, n_rows, turn, step, lane);
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {
    ring.request(first + s * step < end, s, ids[s], from, lane);
    commit_copies();
  }
  before(sample);
  const u32 code = ring.own + g * STRIDE + t * (4 * I), mark = ring.own + 8 * STRIDE + g * MARKS;
  int s = 0;
#pragma unroll 1
  for (int tile = first; tile < end; tile += step) {
    wait_copies<STAGES - 1>();
    __syncwarp();
    const int row = tile * 8 + g;
    Words words;
    u32 result[SETS];
    words.read(code + s * STAGE, mark + s * STAGE);
    if (!HELD_WHOLE) weights.score(words, row < n_rows, total, result);
    // From registers: the stage is free before there is anything to compute.
    __syncwarp();
    ring.request(tile + STAGES * step < end, s, next, from, lane);
    commit_copies();
    next = read_id(table, tile + (STAGES + 1) * step, n_rows, lane);
    s = s + 1 == STAGES ? 0 : s + 1;
    if (HELD_WHOLE) weights.score(words, row < n_rows, total, result);
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
