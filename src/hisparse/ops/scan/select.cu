// From the roots that the scan leaves to the rows of most worth.
//
// Worth is not negative, so its bits order as it does. Rows are counted by bins of 2^-8 of an octave; the bin at which
// the budget runs out says for nearly every row whether it is taken. Rows of higher bins are taken, rows of that bin
// become candidates, of which the best are taken, among equals the first. Eight programs a sequence choose together, a
// cluster: they tell each other what they found through shared memory. Every row's place in the result follows from
// counts of the rows before it, so that the result is the same each time.
//
// Macros: SETS, BLOCKS (see sketch.cuh), BINS (2048), SHIFT, REACH (rows a quad of lanes sums).

#include "ptx.cuh"

constexpr int PC = SETS * 8;
constexpr int THREADS = 512;      // of sum_rows and count_rows
constexpr int CHUNK = 2048;       // rows of a program of count_rows
constexpr int CHOOSERS = 1024;    // threads of choose_rows
constexpr int CLUSTER = 8;        // programs a sequence
constexpr int HELD = 32;          // rows that a thread holds in registers
constexpr int FEW = 1024;         // candidates that are ranked by comparing each with each
static_assert(BINS == 2 * CHOOSERS, "two bins a thread");

// ---- worth -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int clamp_count(const int* count, int b, int max_rows) {
  const int c = count[b];
  return c < 0 ? 0 : c < max_rows ? c : max_rows;
}

__device__ __forceinline__ int find_bin(int key, int base) { return max(min((key >> SHIFT) - base, BINS - 1), 0); }

__device__ __forceinline__ int key_of(float worth) { return __float_as_int(worth) & 0x7FFFFFFF; }

__device__ __forceinline__ void clear_bins(int* bins) {
  for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
}

__device__ __forceinline__ void add_bins(const int* bins, int* histogram) {
  for (int i = threadIdx.x; i < BINS; i += THREADS)
    if (bins[i]) atomicAdd(histogram + i, bins[i]);
}

// Which of the n parts of `total` tiles has tile x (see share_start in scan.cu).
__device__ __forceinline__ int share_of(int x, int n, int total) {
  const int each = total / n, longer = total % n, border = longer * (each + 1);
  return x < border ? x / (each + 1) : longer + (x - border) / each;
}

// Grid (max_rows / (128 REACH), B), THREADS threads. worth float32 [B, max_rows], -inf beyond the count; where `histogram`
// int32 [B, BINS] is given, adds the rows' bins to it. value, part, tiles: as scan.cu leaves them, `programs` its grid.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
sum_rows(const u32* value, const float* part, const int* tiles, const int* count, float* worth, int* histogram,
         int batch, int max_rows, int programs, int base) {
  __shared__ float s_part[THREADS], s_factor[BLOCKS * PC];
  __shared__ int s_bins[BINS];
  const int tid = threadIdx.x, b = blockIdx.y, t = tid & 3, quad = tid >> 2;
  const int n_rows = clamp_count(count, b, max_rows), first = blockIdx.x * (THREADS / 4 * REACH);
  float* to = worth + (i64)b * max_rows;
  clear_bins(s_bins);
  wait_for_previous();
  start_next();
  if (first >= n_rows) {
    for (int i = first + tid; i < min(first + THREADS / 4 * REACH, max_rows); i += THREADS) to[i] = __int_as_float(0xFF800000);
    return;
  }
  u32 root[REACH][BLOCKS][SETS];
#pragma unroll
  for (int r = 0; r < REACH; ++r) {
    const int row = min(first + r * (THREADS / 4) + quad, n_rows - 1);
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k) {
      const u32* from = value + ((((i64)k * batch + b) * max_rows + row) * 4 + t) * SETS;
      if constexpr (SETS % 4 == 0) {
#pragma unroll
        for (int s = 0; s < SETS; s += 4) {
          const uint4 x = ((const uint4*)from)[s / 4];
          root[r][k][s] = x.x, root[r][k][s + 1] = x.y, root[r][k][s + 2] = x.z, root[r][k][s + 3] = x.w;
        }
      } else if constexpr (SETS == 2) {
        const uint2 x = *(const uint2*)from;
        root[r][k][0] = x.x, root[r][k][1] = x.y;
      } else {
#pragma unroll
        for (int s = 0; s < SETS; ++s) root[r][k][s] = from[s];
      }
    }
  }

  // All attention of each column: programs' sums, added in the same order everywhere.
  constexpr int COLUMNS = BLOCKS * PC, WAYS = THREADS / COLUMNS;
  const int all = tiles[batch] * BLOCKS, n = min(programs, all), each = tiles[b + 1] - tiles[b];
  static_assert(WAYS > 0, "a thread for each column");
  if (tid < WAYS * COLUMNS) {
    const int column = tid % COLUMNS, way = tid / COLUMNS, block = column / PC;
    const int begin = tiles[b] * BLOCKS + block * each, last = share_of(begin + each - 1, n, all);
    float sum = 0.f;
#pragma unroll 8
    for (int c = share_of(begin, n, all) + way; c <= last; c += WAYS)
      sum += part[((i64)c + b * BLOCKS + block) * PC + column % PC];
    s_part[tid] = sum;
  }
  __syncthreads();
  if (tid < COLUMNS) {
    float sum = 0.f;
#pragma unroll 8
    for (int way = 0; way < WAYS; ++way) sum += s_part[way * COLUMNS + tid];
    s_factor[tid] = sum > 0.f ? rsqrtf(sum) : 0.f;
  }
  __syncthreads();

  float factor[BLOCKS][SETS][2];
#pragma unroll
  for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
    for (int s = 0; s < SETS; ++s) {
      factor[k][s][0] = s_factor[k * PC + s * 8 + 2 * t];
      factor[k][s][1] = s_factor[k * PC + s * 8 + 2 * t + 1];
    }
#pragma unroll
  for (int r0 = 0; r0 < REACH; r0 += 4) {
    float mine = 0.f;
#pragma unroll
    for (int r = r0; r < r0 + 4; ++r) {
      float sum = 0.f;
#pragma unroll
      for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
        for (int s = 0; s < SETS; ++s) {
          sum = __fmaf_rn(__int_as_float(root[r][k][s] << 16), factor[k][s][0], sum);
          sum = __fmaf_rn(__int_as_float(root[r][k][s] & 0xFFFF0000u), factor[k][s][1], sum);
        }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (r - r0 == t) mine = sum;
    }
    const int row = first + (r0 + t) * (THREADS / 4) + quad;
    if (row < max_rows) to[row] = row < n_rows ? mine : __int_as_float(0xFF800000);
    if (histogram && row < n_rows) atomicAdd(s_bins + find_bin(key_of(mine), base), 1);
  }
  if (!histogram) return;
  __syncthreads();
  add_bins(s_bins, histogram + b * BINS);
}

// Grid (max_rows / CHUNK, B), THREADS threads. Adds the bins of worth float32 [B, max_rows] to the histogram.
extern "C" __global__ void __launch_bounds__(THREADS)
count_rows(const float* worth, const int* count, int* histogram, int max_rows, int base) {
  __shared__ int s_bins[BINS];
  const int b = blockIdx.y, first = blockIdx.x * CHUNK, end = min(first + CHUNK, clamp_count(count, b, max_rows));
  start_next();
  if (first >= end) return;
  clear_bins(s_bins);
  __syncthreads();
  for (int i = first + threadIdx.x; i < end; i += THREADS)
    atomicAdd(s_bins + find_bin(key_of(worth[(i64)b * max_rows + i]), base), 1);
  __syncthreads();
  add_bins(s_bins, histogram + b * BINS);
}

// ---- the choice --------------------------------------------------------------------------------------------------

struct Shared {
  int scratch[32], cut, sure, left, rest, digit;
  int all[2];  // rows taken by the program, and candidates
  int count[256];
  u64 few[FEW];  // of the first program: candidates, the key above the complement of the row
};

// Sum of x over the threads before this one. Barriers inside.
__device__ __noinline__ int sum_before(int x, int* scratch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();  // scratch may be in use still
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  int warps = scratch[lane];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, warps, step);
    if (lane >= step) warps += other;
  }
  const int before = __shfl_sync(~0u, warps, (warp + 31) & 31);
  return sum - x + (warp ? before : 0);
}

__device__ __forceinline__ int read_volatile(const int* p) { return *(const volatile int*)p; }

// The `wanted`-th largest of the values of 0 .. n - 1 that share the bits of `limit` from `bits` up, found eight bits at a
// time by counting; and how many values that equal it are among the `wanted`. Values below 0 do not count.
template <class Value>
__device__ __forceinline__ int find_limit(Value value, int n, int wanted, int bits, int limit, Shared& s, int& equal) {
#pragma unroll 1
  for (int shift = bits; shift > 0;) {
    const int width = shift < 8 ? shift : 8, above_bits = shift;
    shift -= width;
    if (threadIdx.x < 256) s.count[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += CHOOSERS) {
      const int x = value(i);
      if (x >= 0 && (x >> above_bits) == (limit >> above_bits)) atomicAdd(s.count + ((x >> shift) & ((1 << width) - 1)), 1);
    }
    __syncthreads();
    // Thread i has digit 255 - i: sums run from the largest digit down.
    const int own = threadIdx.x < 256 ? s.count[255 - threadIdx.x] : 0;
    const int above = sum_before(own, s.scratch);
    if (threadIdx.x < 256 && above < wanted && above + own >= wanted) s.digit = 255 - threadIdx.x, s.rest = wanted - above;
    __syncthreads();
    limit |= s.digit << shift;
    wanted = s.rest;
    __syncthreads();
  }
  equal = wanted;
  return limit;
}

// The best `rest` of many candidates in memory, key and row; of equal ones the first rows.
__device__ __noinline__ void take_of_many(const int* key, const int* place, const int* table, int n, int rest, int bits,
                                          int common, int* to, Shared& s) {
  int equal, ignored;
  const int limit = find_limit([&](int i) { return read_volatile(key + i); }, n, rest, bits, common, s, equal);
  const auto early = [&](int i) { return read_volatile(key + i) == limit ? 0x7FFFFFFF - read_volatile(place + i) : -1; };
  const int last = find_limit(early, n, equal, 31, 0, s, ignored);
  int done = 0;
#pragma unroll 1
  for (int start = 0; start < n; start += CHOOSERS) {
    const int i = start + threadIdx.x;
    const int take = i < n && (read_volatile(key + i) > limit || early(i) >= last);
    const int at = done + sum_before(take, s.scratch);
    if (take) to[at] = table[read_volatile(place + i)];
    if (threadIdx.x == CHOOSERS - 1) s.rest = at + take;
    __syncthreads();
    done = s.rest;
  }
}

// Grid (CLUSTER, B), CHOOSERS threads. rows int32 [B, budget], chosen int32 [B]. histogram int32 [B, BINS] of all rows;
// key, place int32 [B, max_rows]: room for candidates; limits: int32 [B] or null.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(CHOOSERS, 1)
choose_rows(const float* worth, const int* table, const int* count, const int* limits, const int* histogram, int* rows,
            int* chosen, int* key, int* place, int max_rows, int budget, int base) {
  __shared__ Shared s;
  const int tid = threadIdx.x, lane = tid & 31, b = blockIdx.y, rank = blockIdx.x;
  wait_for_previous();
  start_next();
  const int n_rows = clamp_count(count, b, max_rows);
  const int wanted = min(max(limits ? min(limits[b], budget) : budget, 0), n_rows);
  worth += (i64)b * max_rows, table += (i64)b * max_rows, key += (i64)b * max_rows, place += (i64)b * max_rows;
  rows += (i64)b * budget;

  // A thread has every 1024th row of the program's share, HELD at a time.
  const int each = (n_rows + CLUSTER * CHOOSERS - 1) / (CLUSTER * CHOOSERS), first = rank * each * CHOOSERS + tid;
  int own[HELD];
  const auto read_keys = [&](int start) {
#pragma unroll
    for (int e0 = 0; e0 < HELD; e0 += 4)
      if (start + e0 < each)
#pragma unroll
        for (int e = e0; e < e0 + 4; ++e) {
          const int row = first + (start + e) * CHOOSERS;
          own[e] = start + e < each && row < n_rows ? key_of(worth[row]) : -1;
        }
  };
  read_keys(0);
  // Thread i has bins BINS - 1 - 2 i and the one below: sums run from the top bin down. One bin reaches what is wanted.
  const int2 bins = ((const int2*)(histogram + b * BINS))[CHOOSERS - 1 - tid];
  if (tid == 0) s.cut = wanted ? -1 : BINS, s.sure = 0, s.left = 0;
  const int above = sum_before(bins.x + bins.y, s.scratch);
  if (above < wanted && above + bins.y >= wanted) s.cut = BINS - 1 - 2 * tid, s.sure = above, s.left = bins.y;
  else if (above + bins.y < wanted && above + bins.y + bins.x >= wanted)
    s.cut = BINS - 2 - 2 * tid, s.sure = above + bins.y, s.left = bins.x;
  __syncthreads();
  const int cut = s.cut, sure = s.sure, left = s.left, rest = wanted - sure;
  // The keys of the bin at the cut: bounds are cheaper than bins. Nothing reaches those of a cut above all bins.
  const int least = cut >= BINS ? 0x7FFFFFFF : cut > 0 ? (cut + base) << SHIFT : 0;
  const int next = cut >= BINS - 1 ? 0x7FFFFFFF : cut < 0 ? 0 : (cut + base + 1) << SHIFT;

  u32 takes = 0, those = 0;  // bit e: own[e] is taken, is a candidate
  const auto sort_out = [&](int start) {
    takes = those = 0;
#pragma unroll
    for (int e0 = 0; e0 < HELD; e0 += 4)
      if (start + e0 < each)
#pragma unroll
        for (int e = e0; e < e0 + 4; ++e) {
          if (own[e] >= least) those |= 1u << e;
          if (own[e] >= next) takes |= 1u << e;
        }
    those &= ~takes;
  };
  int found = 0, found_left = 0;
#pragma unroll 1
  for (int start = 0; start < each; start += HELD) {
    if (start) read_keys(start);
    sort_out(start);
    found += __popc(takes), found_left += __popc(those);
  }
  int to = sum_before(found, s.scratch), to_left = sum_before(found_left, s.scratch);
  if (tid == CHOOSERS - 1) s.all[0] = to + found, s.all[1] = to_left + found_left;
  sync_cluster();
  const bool earlier = lane < rank;
  to += __reduce_add_sync(~0u, earlier ? read_in(s.all, lane) : 0);
  to_left += __reduce_add_sync(~0u, earlier ? read_in(s.all + 1, lane) : 0);
  const bool few = left <= FEW;
#pragma unroll 1
  for (int start = 0; start < each; start += HELD) {
    if (each > HELD) read_keys(start), sort_out(start);
    for (; takes; takes &= takes - 1) rows[to++] = table[first + (start + __ffs(takes) - 1) * CHOOSERS];
    for (; those; those &= those - 1) {
      const int row = first + (start + __ffs(those) - 1) * CHOOSERS, x = key_of(worth[row]);
      if (few) write_in(s.few + to_left, 0, (u64)x << 32 | (u32)~row);
      else key[to_left] = x, place[to_left] = row;
      ++to_left;
    }
  }
  if (rank == CLUSTER - 1) {
    for (int i = wanted + tid; i < budget; i += CHOOSERS) rows[i] = 0;
    if (tid == 0) chosen[b] = wanted;
  }
  sync_cluster();
  if (rank || rest <= 0) return;
  rows += sure;
  if (!few) {
    const bool inner = cut > 0 && cut < BINS - 1;  // the rows of such a bin share their first digits
    take_of_many(key, place, table, left, rest, inner ? SHIFT : 31, inner ? (cut + base) << SHIFT : 0, rows, s);
    return;
  }
  // Each candidate's rank: four lanes compare it with a quarter of the others each.
#pragma unroll 1
  for (int i = tid / 4; i < (left + 7) / 8 * 8; i += CHOOSERS / 4) {
    const u64 mine = i < left ? s.few[i] : 0;
    int better = 0;
#pragma unroll 4
    for (int j = lane & 3; j < left; j += 4) better += s.few[j] > mine;
    better += __shfl_xor_sync(~0u, better, 1);
    better += __shfl_xor_sync(~0u, better, 2);
    if (i < left && better < rest && (lane & 3) == 0) rows[better] = table[~(u32)mine];
  }
}
