// From the roots that the scan leaves to the rows of most worth: see choice.cuh. Eight programs a sequence choose together,
// a cluster: they tell each other what they found through shared memory. Every row's place in the result follows from
// counts of the rows before it, so that the result is the same each time.
//
// Macros: SETS, BLOCKS (see sketch.cuh), BINS (2048), SHIFT, REACH (rows a quad of lanes sums).

#include "ptx.cuh"
#include "choice.cuh"

constexpr int PC = SETS * 8;
constexpr int THREADS = 512;      // of sum_rows and count_rows
constexpr int CHUNK = 2048;       // rows of a program of count_rows
constexpr int CHOOSERS = 1024;    // threads of choose_rows
constexpr int CLUSTER = 8;        // programs a sequence
constexpr int HELD = 32;          // rows that a thread holds in registers
static_assert(BINS == 2 * CHOOSERS, "two bins a thread");

// ---- worth -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void clear_bins(int* bins) {
  for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
}

__device__ __forceinline__ void add_bins(const int* bins, int* histogram) {
  for (int i = threadIdx.x; i < BINS; i += THREADS)
    if (bins[i]) atomicAdd(histogram + i, bins[i]);
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
  Desk desk;
  int all[2];    // rows taken by the program, and candidates
  u64 few[FEW];  // of the first program: candidates, the key above the complement of the row
};

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
  const int2 bins = ((const int2*)(histogram + b * BINS))[CHOOSERS - 1 - tid];
  const int two[2] = {bins.y, bins.x};
  const Cut cut = find_cut<CHOOSERS>(two, wanted, s.desk);
  const int sure = cut.sure, left = cut.left, rest = wanted - sure, least = cut.least(base), next = cut.next(base);

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
  int to = sum_before<CHOOSERS>(found, s.desk.scratch), to_left = sum_before<CHOOSERS>(found_left, s.desk.scratch);
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
    take_of_many<CHOOSERS>(key, place, table, left, rest, cut.shared_from(), cut.common(base), rows, s.desk);
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
