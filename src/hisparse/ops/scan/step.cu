// The scan and the choice of a decode step in one kernel: see tile.cuh for the scan and choice.cuh for the choice.
//
// Every program is on its multiprocessor from the beginning to the end. It scores its share of the rows and keeps the roots
// of their attention in shared memory, those that do not fit in global memory; what takes all rows, the programs tell each
// other through global memory:
//   1. the sums of their rows' attention: then each knows all attention, and so its rows' worth;
//   2. how many rows each bin has, at a barrier: then each knows the bin at which the budget runs out, and the rows of that
//      bin are candidates; where they are many, how many share their next bits, until they are few or equal;
//   3. how many rows each takes: then each knows where its own go;
//   4. the candidates, where they are few, which those that have some compare with each other; of equal ones 3 says enough.
// What is told in 1, 3 and 4 is never zero, and memory is zero before, so that a word that is not zero is there. Sums are
// added and rows placed in the order of programs, candidates by their rank, so that the result is the same each time.
//
// Macros: those of tile.cuh, BINS (2048), SHIFT, CHOOSE (0: only the rows' worth is wanted).

#include "ptx.cuh"
#include "sketch.cuh"
#include "tile.cuh"
#include "choice.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int COLUMNS = BLOCKS * PC;               // of all heads
constexpr int TURNS = WARPS / BLOCKS;              // warps that share the tiles of a block of heads
constexpr int QUADS = COLUMNS / 4;                 // sums that are told four at a time
constexpr int MOST = 32;                           // sequences
constexpr int EACH = BINS / 256;                   // bins of a thread
constexpr int ROOTS = BLOCKS * 32 * SETS;          // words of a tile's roots
constexpr int HELD = 8;                            // rows that a thread holds in registers
constexpr int LEVELS = 4;                          // of at most eight bits each: a key
constexpr u32 TOLD = 0x80000000;
static_assert(WARPS % BLOCKS == 0 && THREADS >= 256 && QUADS <= THREADS, "see plan_step in cuda.py");

// The tiles that a program has of a sequence, from `first` to `end`; they are its own from `at` on.
struct Piece {
  int b, first, end, at, rows;  // rows: of the sequence
  int begin, last;              // first and last program that has tiles of it
  int wanted, sure, left, candidates, least, next;
};

// What a program needs when its rows have been read; where the stages were.
struct Tail {
  float part[WARPS > THREADS / QUADS ? WARPS : THREADS / QUADS][COLUMNS], factor[COLUMNS];
  int bins[BINS];
  u64 few[FEW];
  Desk desk;
};

// Global memory, zero at first, by which programs tell each other things: u32 words, see state_words in cuda.py.
struct State {
  u32* total;      // [grid + B, COLUMNS]: sums of attention of program + sequence, with the sign bit set
  u64* few;        // [B, FEW]: candidates, the key above the complement of the row
  int* histogram;  // [B, BINS]
  u64* found;      // [grid + B]: rows taken, candidates, each with the sign bit set
  int* level;      // [B, LEVELS, 256]: where candidates are many, how many have which next bits
  int* met;        // [B, LEVELS]: programs that have counted theirs
  int* slots;      // [B]: of `few` that are taken
  int* arrived;    // at the barrier

  __device__ __forceinline__ State(u32* p, int batch) {
    const int shares = (int)gridDim.x + batch;
    total = p, p += shares * COLUMNS;
    few = (u64*)p, p += batch * (2 * FEW);
    histogram = (int*)p, p += batch * BINS;
    found = (u64*)p, p += shares * 2;
    level = (int*)p, p += batch * (LEVELS * 256);
    met = (int*)p, p += batch * LEVELS;
    slots = (int*)p, p += batch;
    arrived = (int*)p;
  }
};

// Where the roots of the program's tiles are.
struct Roots {
  u32 *near, *far;
  int room;

  __device__ __forceinline__ const u32* at(int tile) const { return (tile < room ? near : far) + (i64)tile * ROOTS; }

  __device__ __forceinline__ void write(int tile, int place, const u32 (&x)[SETS]) const {
    if (tile < room) write_words(near + tile * ROOTS + place, x);
    else write_words(far + (i64)tile * ROOTS + place, x);
  }
};

// ---- worth -------------------------------------------------------------------------------------------------------

// All attention of each column of a sequence, as factors 1 / sqrt: programs' sums, added in the same order everywhere.
__device__ __forceinline__ void hear_totals(const State& state, const Piece& piece, Tail& s) {
  constexpr int WAYS = THREADS / QUADS;
  const int tid = threadIdx.x, quad = tid % QUADS, way = tid / QUADS;
  float sum[4] = {};
  if (way < WAYS) {
    const uint4* from = (const uint4*)(state.total + (i64)piece.b * COLUMNS) + quad;
    const auto is_there = [](uint4 x) { return (int)(x.x & x.y & x.z & x.w) < 0; };
#pragma unroll 1
    for (int p = piece.begin + way; p <= piece.last; p += 4 * WAYS) {
      uint4 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int own = p + i * WAYS;
        x[i] = own <= piece.last ? hear(from + (i64)own * QUADS) : make_uint4(TOLD, TOLD, TOLD, TOLD);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        while (!is_there(x[i])) x[i] = hear(from + (i64)(p + i * WAYS) * QUADS);
        sum[0] += __uint_as_float(x[i].x ^ TOLD), sum[1] += __uint_as_float(x[i].y ^ TOLD);
        sum[2] += __uint_as_float(x[i].z ^ TOLD), sum[3] += __uint_as_float(x[i].w ^ TOLD);
      }
    }
  }
  __syncwarp();
  constexpr bool TOGETHER = QUADS < 32 && 32 % QUADS == 0;  // lanes of a warp have the same columns
  if constexpr (TOGETHER)
#pragma unroll
    for (int step = QUADS; step < 32; step *= 2)
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[k] += __shfl_xor_sync(~0u, sum[k], step);
  constexpr int PARTS = TOGETHER ? WARPS : WAYS;
  const int part = TOGETHER ? tid >> 5 : way;
  if (part < PARTS && (!TOGETHER || (tid & 31) < QUADS))
#pragma unroll
    for (int k = 0; k < 4; ++k) s.part[part][4 * quad + k] = sum[k];
  __syncthreads();
  for (int c = tid; c < COLUMNS; c += THREADS) {
    float all = 0.f;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) all += s.part[i][c];
    s.factor[c] = all > 0.f ? rsqrtf(all) : 0.f;
  }
  __syncthreads();
}

// A factor as the sum of three bfloat16, which are as exact as the float32; the g-th, or zero from the fourth on.
__device__ __forceinline__ float third_of(float x, int g) {
  const auto head = [](float y) { return __uint_as_float(pack_bfloat(y, 0.f) << 16); };
  const float second = x - head(x), third = second - head(second);
  return g == 0 ? head(x) : g == 1 ? head(second) : g == 2 ? third : 0.f;
}

// Leaves the rows' worth in s_worth and counts their bins, or leaves it in `to`. Roots lie as operands of a matrix
// product want them: two tiles are its 16 rows, the factors' three parts its columns.
__device__ __forceinline__ void sum_rows(const Roots& roots, float* s_worth, float* to, const Piece& piece, Tail& s, int base) {
  constexpr int WORDS = BLOCKS * SETS, STEPS = (WORDS + 1) / 2;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  u32 factor[2 * STEPS];
#pragma unroll
  for (int w = 0; w < 2 * STEPS; ++w) {
    const float* from = s.factor + w / SETS * PC + w % SETS * 8 + 2 * t;
    factor[w] = w < WORDS ? pack_bfloat(third_of(from[0], g), third_of(from[1], g)) : 0;
  }
  const int n = piece.end - piece.first;
#pragma unroll 2
  for (int tile = warp * 2; tile < n; tile += WARPS * 2) {
    u32 x[2][2 * STEPS];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32* from = roots.at(piece.at + min(tile + i, n - 1)) + lane * SETS;
#pragma unroll
      for (int k = 0; k < BLOCKS; ++k)
        if constexpr (SETS % 4 == 0) {
#pragma unroll
          for (int j = 0; j < SETS; j += 4) {
            const uint4 y = *(const uint4*)(from + k * (32 * SETS) + j);
            const int w = k * SETS + j;
            x[i][w] = y.x, x[i][w + 1] = y.y, x[i][w + 2] = y.z, x[i][w + 3] = y.w;
          }
        } else {
#pragma unroll
          for (int j = 0; j < SETS; ++j) x[i][k * SETS + j] = from[k * (32 * SETS) + j];
        }
      if (WORDS % 2) x[i][2 * STEPS - 1] = 0;
    }
    float sum[4] = {};
#pragma unroll
    for (int w = 0; w < 2 * STEPS; w += 2)
      multiply_bfloat(sum, x[0][w], x[1][w], x[0][w + 1], x[1][w + 1], factor[w], factor[w + 1]);
    sum[0] += sum[1], sum[2] += sum[3];
    sum[0] += __shfl_xor_sync(~0u, sum[0], 1), sum[2] += __shfl_xor_sync(~0u, sum[2], 1);
    const float worth = t ? sum[2] : sum[0];  // lane 0 of a quad has the first tile's row, lane 1 the second's
    const int row = (piece.first + tile + t) * 8 + g;
    if (t < 2 && tile + t < n && row < piece.rows) {
      if constexpr (CHOOSE) s_worth[(piece.at + tile + t) * 8 + g] = worth;
      if constexpr (!CHOOSE) to[row] = worth;
      else atomicAdd(s.bins + find_bin(key_of(worth), base), 1);
    }
  }
}

// ---- the choice --------------------------------------------------------------------------------------------------

// What a thread has of HELD * THREADS rows of a piece: which of every THREADS-th row are taken, which are candidates (bit e:
// the e-th), and their entries of the table.
struct Held {
  u32 takes, those;
  int entry[HELD];

  // The entries of the first rows, before it is known which are taken.
  __device__ __forceinline__ void read_entries(const Piece& piece, const int* table) {
    const int first = piece.first * 8, n = min(piece.end * 8, piece.rows) - first;
#pragma unroll
    for (int e = 0; e < HELD; ++e) {
      const int i = e * THREADS + (int)threadIdx.x;
      entry[e] = i < n ? table[first + i] : 0;
    }
  }

  // has_entries: of these rows.
  __device__ __forceinline__ void read(const float* s_worth, const Piece& piece, int start, const int* table,
                                       bool has_entries = false) {
    const int first = piece.first * 8, n = min(piece.end * 8, piece.rows) - first;
    takes = those = 0;
#pragma unroll
    for (int e = 0; e < HELD; ++e) {
      const int i = start + e * THREADS + (int)threadIdx.x, key = i < n ? key_of(s_worth[piece.at * 8 + i]) : -1;
      if (key >= piece.next) takes |= 1u << e;
      else if (key >= piece.least) those |= 1u << e;
      if (!has_entries) entry[e] = key >= piece.least ? table[first + i] : 0;
    }
  }

  // The candidate that is bit e of `those`: the key above the complement of the row.
  __device__ __forceinline__ u64 candidate(const float* s_worth, const Piece& piece, int start, int e) const {
    const int i = start + e * THREADS + (int)threadIdx.x;
    return (u64)key_of(s_worth[piece.at * 8 + i]) << 32 | (u32) ~(piece.first * 8 + i);
  }

  // Rows that are taken times 2^16, and candidates: a program has fewer than 2^15 rows.
  __device__ __forceinline__ int number() const { return __popc(takes) << 16 | __popc(those); }
};

__device__ __forceinline__ int rows_of(const Piece& piece) { return min(piece.end * 8, piece.rows) - piece.first * 8; }

#include "narrow.cuh"

// The bin at which the budget runs out; and what the program has above it and in it, which it tells the others, with the
// candidates where these are few. Leaves the thread's first rows, and what the threads before this one have.
__device__ __forceinline__ int tell_own(const State& state, const float* s_worth, Piece& piece, const int* limits,
                                        const int* table, int budget, int base, Held& held, bool has_entries, Tail& s) {
  const int tid = threadIdx.x;
  int bins[EACH] = {};
  if (tid < 256) {
    const uint4* from = (const uint4*)(state.histogram + (i64)piece.b * BINS + BINS - EACH * (tid + 1));
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
      const uint4 x = hear(from + i / 4);
      bins[EACH - 1 - i] = (int)x.x, bins[EACH - 2 - i] = (int)x.y;
      bins[EACH - 3 - i] = (int)x.z, bins[EACH - 4 - i] = (int)x.w;
    }
  }
  const int wanted = min(max(limits ? min(limits[piece.b], budget) : budget, 0), piece.rows);
  const Cut cut = find_cut<THREADS>(bins, wanted, s.desk);
  if (tid == 0) {
    piece.wanted = wanted, piece.sure = cut.sure, piece.left = cut.left;
    piece.least = cut.least(base), piece.next = cut.next(base);
  }
  __syncthreads();
  if (cut.left > FEW)
    narrow(state.level + (i64)piece.b * (LEVELS * 256), state.met + piece.b * LEVELS, s_worth + piece.at * 8, piece,
           cut.shared_from(), cut.common(base), s);
  int own = 0;
#pragma unroll 1
  for (int start = (rows_of(piece) - 1) / (HELD * THREADS) * (HELD * THREADS); start >= 0; start -= HELD * THREADS) {
    held.read(s_worth, piece, start, table, has_entries && start == 0);
    own += held.number();
    if (piece.left <= FEW)  // where each is does not matter: they are ranked
      for (u32 those = held.those; those; those &= those - 1)
        tell(state.few + (i64)piece.b * FEW + atomicAdd(state.slots + piece.b, 1),
             held.candidate(s_worth, piece, start, __ffs(those) - 1));
  }
  const int before = sum_before<THREADS>(own, s.desk.scratch);
  if (tid == THREADS - 1) {
    const int takes = before + own >> 16, candidates = before + own & 0xFFFF;
    tell(state.found + blockIdx.x + piece.b, (u64)((u32)candidates | TOLD) << 32 | ((u32)takes | TOLD));
    piece.candidates = candidates;
  }
  __syncthreads();
  return before;
}

// Puts the rows that are taken in their places, behind those of earlier programs; and the first of equal candidates.
// held, before: see tell_own; is_held: of this piece.
__device__ __forceinline__ void place_own(const State& state, const float* s_worth, const Piece& piece, Held& held,
                                          bool is_held, int before, const int* table, int* rows, Tail& s) {
  const int tid = threadIdx.x, lane = tid & 31;
  int earlier = 0, earlier_left = 0;
  for (int p = piece.begin + tid; p < (int)blockIdx.x; p += THREADS) {
    u64 x;
    do x = hear(state.found + p + piece.b);
    while (!x);
    earlier += (int)((u32)x ^ TOLD), earlier_left += (int)((u32)(x >> 32) ^ TOLD);
  }
  __syncwarp();
  earlier = __reduce_add_sync(~0u, earlier), earlier_left = __reduce_add_sync(~0u, earlier_left);
  if (lane == 0) s.desk.count[tid >> 5] = earlier, s.desk.count[32 + (tid >> 5)] = earlier_left;
  __syncthreads();
  earlier = __reduce_add_sync(~0u, lane < WARPS ? s.desk.count[lane] : 0);
  earlier_left = __reduce_add_sync(~0u, lane < WARPS ? s.desk.count[32 + lane] : 0);
  int to = earlier + (before >> 16);
#pragma unroll 1
  for (int start = 0; start < rows_of(piece); start += HELD * THREADS) {
    if (start || !is_held) held.read(s_worth, piece, start, table);
#pragma unroll
    for (int e = 0; e < HELD; ++e)
      if (held.takes >> e & 1) rows[to++] = held.entry[e];
  }
  if (piece.left > FEW) take_equal(s_worth, piece, earlier_left, table, rows + piece.sure, s.desk);
  __syncthreads();
}

// The rank of each of the program's few candidates says whether it is taken, and where it goes.
__device__ __forceinline__ void rank_own(const State& state, const float* s_worth, const Piece& piece, Held& held, bool is_held,
                                         const int* table, int* rows, Tail& s) {
  const int tid = threadIdx.x, lane = tid & 31, rest = piece.wanted - piece.sure;
  if (rest <= 0 || !piece.candidates) return;
  for (int i = tid; i < piece.left; i += THREADS) {
    u64 x;
    do x = hear(state.few + (i64)piece.b * FEW + i);
    while (!x);
    s.few[i] = x;
  }
  __syncthreads();
#pragma unroll 1
  for (int start = 0; start < rows_of(piece); start += HELD * THREADS) {
    if (start || !is_held) held.read(s_worth, piece, start, table);
    u32 those = held.those;
#pragma unroll 1
    for (u32 lanes; (lanes = __ballot_sync(~0u, those != 0));) {
      const int from = __ffs(lanes) - 1;
      const u64 own = those ? held.candidate(s_worth, piece, start, __ffs(those) - 1) : 0;
      const u64 mine = (u64)__shfl_sync(~0u, (u32)(own >> 32), from) << 32 | __shfl_sync(~0u, (u32)own, from);
      int better = 0;
      for (int j = lane; j < piece.left; j += 32) better += s.few[j] > mine;
      better = __reduce_add_sync(~0u, better);
      if (lane == from) {
        if (better < rest) rows[piece.sure + better] = table[~(u32)mine];
        those &= those - 1;
      }
    }
  }
  __syncthreads();
}

// ---- the step ----------------------------------------------------------------------------------------------------

// Grid: at most as many programs as there are multiprocessors, all there at once; WARPS warps. Of the up to `tiles` tiles of
// a program, `room` have their roots in shared memory, and the others in far u32 [grid, tiles - room, ROOTS]. Behind those in
// shared memory lie the stages, where later are the worth of the rows and a Tail. At most MOST sequences.
// words: see State. Where CHOOSE is 0: worth float32 [B, max_rows], -inf beyond the count. Where it is 1: rows int32 [B,
// budget], chosen int32 [B]; limits int32 [B] or null, older than the launch of weigh.cu, as counts are.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
scan_and_choose(const u32* frag, const u8* codes, const u8* scales, const int* table, const int* count, u32* words, u32* far,
                float* worth, const int* limits, int* rows, int* chosen, int batch, int max_rows, int code_stride,
                int scale_stride, int tiles, int room, int budget, int base) {
  extern __shared__ __align__(16) u8 memory[];
  __shared__ Base s_base[BLOCKS];
  __shared__ float s_total[WARPS][PC];
  __shared__ Piece s_piece[MOST];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  start_next();
  if (CHOOSE && wants_all(count, limits, batch, max_rows, budget)) {  // limits are older than the weights, as counts are
#pragma unroll 1
    for (int b = 0; b < batch; ++b) {
      const int n_rows = clamp_count(count, b, max_rows);
      for (int i = (int)blockIdx.x * THREADS + tid; i < budget; i += (int)gridDim.x * THREADS)
        rows[(i64)b * budget + i] = i < n_rows ? table[(i64)b * max_rows + i] : 0;
      if (blockIdx.x == 0 && tid == 0) chosen[b] = n_rows;
    }
    wait_for_previous();
    return;
  }
  const Lengths lengths = read_lengths(count, batch, max_rows, lane);
  const int all = lengths.all, programs = max(1, min((int)gridDim.x, all));
  const State state(words, batch);
  const Roots roots = {(u32*)memory, far + ((i64)blockIdx.x * (tiles - room) - room) * ROOTS, room};
  float* s_worth = (float*)(memory + room * (4 * ROOTS));
  Tail& tail = *(Tail*)((u8*)s_worth + tiles * 32);
  Ring ring;
  ring.set_up(s_worth, warp);

  // 1. The roots.
  int at = share_start(blockIdx.x, programs, all), pieces = 0;
  const int start = at, stop = share_start(blockIdx.x + 1, programs, all);
  while ((int)blockIdx.x < programs && at < stop) {
    const Place found = find_place(lengths, count, batch, max_rows, at, lane);
    const int b = found.b, n_rows = found.rows, all_of_b = (n_rows + 7) / 8, block = warp % BLOCKS;
    const int first = at - found.before, end = min(stop - found.before, all_of_b);
    if (tid == 0) {
      s_piece[pieces] = {b, first, end, at - start, n_rows, share_of(found.before, programs, all),
                         share_of(found.before + all_of_b - 1, programs, all)};
    }
    const Sketches from = {codes + block * BODY, scales + block * MARKS, (u32)code_stride, (u32)scale_stride};
    const int own = at - start - first;
    Weights weights;
    float total[SETS][2] = {};
    score_tiles(
        ring, from, table + (i64)b * max_rows, n_rows, first + warp / BLOCKS, end, warp / BLOCKS, TURNS, weights, total,
        lane,
        [&](const Sample& sample) {
          wait_for_previous();  // sketches, tables and counts are older; the weights are not
          weights.read(frag, (i64)b * HEADS + block * HB, sample, s_base[block], BLOCKS, s_total, warp, lane);
        },
        [&](int tile, int, const u32(&result)[SETS]) {
          roots.write(own + tile, (block * 32 + lane) * SETS, result);
        });
    add_rows(total, s_total[warp], lane);
    __syncthreads();
    for (int c = tid; c < COLUMNS; c += THREADS) {
      float x = 0.f;
#pragma unroll
      for (int w = 0; w < TURNS; ++w) x += s_total[w * BLOCKS + c / PC][c % PC];
      tell(state.total + (i64)(blockIdx.x + b) * COLUMNS + c, __float_as_uint(x) | TOLD);
    }
    __syncthreads();
    at = found.before + end, ++pieces;
  }
  wait_for_previous();  // every program, or this kernel could end before the one ahead

  // 2. The rows' worth, and its bins.
#pragma unroll 1
  for (int i = 0; i < pieces; ++i) {
    const Piece& piece = s_piece[i];
    if (CHOOSE)
      for (int j = tid; j < BINS; j += THREADS) tail.bins[j] = 0;
    hear_totals(state, piece, tail);
    sum_rows(roots, s_worth, worth + (i64)piece.b * max_rows, piece, tail, base);
    if (!CHOOSE) continue;
    __syncthreads();
    for (int j = tid; j < BINS; j += THREADS)
      if (tail.bins[j]) atomicAdd(state.histogram + (i64)piece.b * BINS + j, tail.bins[j]);
    __syncthreads();
  }
  if constexpr (!CHOOSE) {
#pragma unroll 1
    for (int b = 0; b < batch; ++b)
      for (int i = clamp_count(count, b, max_rows) + (int)blockIdx.x * THREADS + tid; i < max_rows;
           i += (int)gridDim.x * THREADS)
        worth[(i64)b * max_rows + i] = __int_as_float(0xFF800000);
    return;
  }
#pragma unroll 1
  for (int b = blockIdx.x; b < batch; b += gridDim.x)
    if (clamp_count(count, b, max_rows) == 0) {  // a sequence that no program has
      if (tid == 0) chosen[b] = 0;
      for (int i = tid; i < budget; i += THREADS) rows[(i64)b * budget + i] = 0;
    }
  if (!pieces) return;

  // 3. The choice.
  arrive(state.arrived);
  Held held;
  const bool has_entries = pieces == 1 && rows_of(s_piece[0]) <= HELD * THREADS;
  if (has_entries) held.read_entries(s_piece[0], table + (i64)s_piece[0].b * max_rows);  // while others are waited for
  wait_for_programs(state.arrived, programs);
  int before = 0;
#pragma unroll 1
  for (int i = 0; i < pieces; ++i)
    before = tell_own(state, s_worth, s_piece[i], limits, table + (i64)s_piece[i].b * max_rows, budget, base, held, has_entries,
                      tail);
#pragma unroll 1
  for (int i = 0; i < pieces; ++i) {
    const Piece& piece = s_piece[i];
    const i64 row = (i64)piece.b * max_rows;
    if (pieces > 1) {
      int own = 0;
      for (int start = 0; start < rows_of(piece); start += HELD * THREADS) {
        held.read(s_worth, piece, start, table + row);
        own += held.number();
      }
      before = sum_before<THREADS>(own, tail.desk.scratch);
    }
    place_own(state, s_worth, piece, held, pieces == 1, before, table + row, rows + (i64)piece.b * budget, tail);
  }
#pragma unroll 1
  for (int i = 0; i < pieces; ++i) {
    const Piece& piece = s_piece[i];
    int* to = rows + (i64)piece.b * budget;
    const int* own_table = table + (i64)piece.b * max_rows;
    const bool is_held = pieces == 1 && rows_of(piece) <= HELD * THREADS;
    if (piece.left <= FEW) rank_own(state, s_worth, piece, held, is_held, own_table, to, tail);
    if (piece.begin != (int)blockIdx.x) continue;
    // The first of a sequence's programs does what is left.
    if (tid == 0) chosen[piece.b] = piece.wanted;
    for (int j = piece.wanted + tid; j < budget; j += THREADS) to[j] = 0;
  }
}
