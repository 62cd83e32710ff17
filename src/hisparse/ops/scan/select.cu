// From the roots that the scan leaves to the rows of most worth.
//
// Worth is not negative, so its bits order as it does. Rows are counted by bins of 2^-8 of an octave; the bin at which
// the budget runs out says for nearly every row whether it is taken. Rows of higher bins are taken, rows of that bin
// become candidates, and the last program of a sequence to finish takes the best of them, among equals the first. Every
// row's place in the result follows from counts of the rows before it, so that the result is the same each time.
//
// Macros: SETS, BLOCKS (see scan.cu), BINS (2048), SHIFT, REACH (rows a quad of lanes sums), CHUNK (rows a program of
// choose_rows looks at).

typedef unsigned int u32;
typedef long long i64;

constexpr int PC = SETS * 8;
constexpr int THREADS = 512;      // of sum_rows and count_rows
constexpr int CHOOSERS = 1024;    // of choose_rows
constexpr int EACH = CHUNK / CHOOSERS;
static_assert(BINS == 2 * CHOOSERS, "two bins a thread");

// ---- instructions ------------------------------------------------------------------------------------------------

// For launches that overlap: waits until the kernel ahead has ended and its writes can be seen; lets the next one start.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

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

// Which of n equal parts of `total` tiles has tile x.
__device__ __forceinline__ int share_of(int x, int n, int total) { return (int)((((i64)x + 1) * n - 1) / total); }

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
#pragma unroll 2
    for (int c = share_of(begin, n, all) + way; c <= last; c += WAYS)
      sum += part[((i64)c + b * BLOCKS + block) * PC + column % PC];
    s_part[tid] = sum;
  }
  __syncthreads();
  if (tid < COLUMNS) {
    float sum = 0.f;
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

// Sum of x over the threads before this one, for CHOOSERS threads; `total` is that of all. Barriers inside.
__device__ __forceinline__ int sum_before(int x, int* scratch, int& total) {
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
  total = __shfl_sync(~0u, warps, 31);
  const int before = __shfl_sync(~0u, warps, (warp + 31) & 31);
  return sum - x + (warp ? before : 0);
}

__device__ __forceinline__ int read_volatile(const int* p) { return *(const volatile int*)p; }

// The `wanted`-th largest of n keys below 2^bits (in memory that other programs wrote), and how many keys that equal it
// are among the `wanted`. Eight bits at a time by counting.
__device__ __forceinline__ int find_limit(const int* key, int n, int wanted, int bits, int common, int* scratch, int& equal) {
  __shared__ int s_count[256], s_digit, s_rest;
  int limit = common;
  for (int shift = bits; shift > 0;) {
    const int width = shift < 8 ? shift : 8;
    shift -= width;
    if (threadIdx.x < 256) s_count[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += CHOOSERS) {
      const int x = read_volatile(key + i);
      if ((x >> (shift + width)) == (limit >> (shift + width))) atomicAdd(s_count + ((x >> shift) & ((1 << width) - 1)), 1);
    }
    __syncthreads();
    // Thread i has digit 255 - i: sums run from the largest digit down.
    const int own = threadIdx.x < 256 ? s_count[255 - threadIdx.x] : 0;
    int total;
    const int above = sum_before(own, scratch, total);
    if (threadIdx.x < 256 && above < wanted && above + own >= wanted) s_digit = 255 - threadIdx.x, s_rest = wanted - above;
    __syncthreads();
    limit |= s_digit << shift;
    wanted = s_rest;
    __syncthreads();
  }
  equal = wanted;
  return limit;
}

// Grid (max_rows / CHUNK, B), CHOOSERS threads; programs of one sequence wait for those of lower number, which started
// before. rows int32 [B, budget], chosen int32 [B]. histogram int32 [B, BINS] of all rows; state int32 [B, grid + 1], zeros
// at first: what each program found, and how many are done; key, place int32 [B, max_rows]: candidates. limits: int32
// [B] or null.
extern "C" __global__ void __launch_bounds__(CHOOSERS, 1)
choose_rows(const float* worth, const int* table, const int* count, const int* limits, const int* histogram, int* state,
            int* rows, int* chosen, int* key, int* place, int max_rows, int budget, int base) {
  __shared__ int s_scratch[32], s_cut, s_sure, s_left, s_before, s_last;
  const int tid = threadIdx.x, lane = tid & 31, b = blockIdx.y, chunk = blockIdx.x;
  const int n_rows = clamp_count(count, b, max_rows), chunks = max((n_rows + CHUNK - 1) / CHUNK, 1);
  if (chunk >= chunks) return;
  const int wanted = min(max(limits ? min(limits[b], budget) : budget, 0), n_rows);
  worth += (i64)b * max_rows, table += (i64)b * max_rows, key += (i64)b * max_rows, place += (i64)b * max_rows;
  rows += (i64)b * budget, state += b * (gridDim.x + 1);

  int own[EACH], id[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int row = chunk * CHUNK + tid * EACH + e;
    id[e] = row < n_rows ? table[row] : 0;
  }
  wait_for_previous();
  start_next();
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int row = chunk * CHUNK + tid * EACH + e;
    own[e] = row < n_rows ? key_of(worth[row]) : -1;
  }
  // Thread i has bins BINS - 1 - 2 i and the one below: sums run from the top bin down. One bin reaches what is wanted.
  const int2 bins = ((const int2*)(histogram + b * BINS))[CHOOSERS - 1 - tid];
  if (tid == 0) s_cut = wanted ? -1 : BINS, s_sure = 0, s_left = 0;
  int total;
  const int above = sum_before(bins.x + bins.y, s_scratch, total);
  if (above < wanted && above + bins.y >= wanted) s_cut = BINS - 1 - 2 * tid, s_sure = above, s_left = bins.y;
  else if (above + bins.y < wanted && above + bins.y + bins.x >= wanted)
    s_cut = BINS - 2 - 2 * tid, s_sure = above + bins.y, s_left = bins.x;
  __syncthreads();
  const int cut = s_cut, sure = s_sure, left = s_left;

  int found = 0;  // rows taken, and from bit 16 candidates
  int bin[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    bin[e] = own[e] < 0 ? -2 : find_bin(own[e], base);
    found += (bin[e] > cut) + ((bin[e] == cut) << 16);
  }
  int all;
  const int within = sum_before(found, s_scratch, all);
  if (tid == 0) *(volatile int*)(state + chunk) = all | 0x80000000;
  if (tid < 32) {
    int taken = 0, candidates = 0;
    for (int i = lane; i < chunk; i += 32) {
      int x;
      while ((x = read_volatile(state + i)) >= 0) {}
      taken += x & 0xFFFF, candidates += (x >> 16) & 0x7FFF;
    }
#pragma unroll
    for (int step = 16; step; step /= 2) {
      taken += __shfl_xor_sync(~0u, taken, step);
      candidates += __shfl_xor_sync(~0u, candidates, step);
    }
    if (lane == 0) s_before = taken, s_last = candidates;
  }
  __syncthreads();
  int to = s_before + (within & 0xFFFF), to_left = s_last + (within >> 16);
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    if (bin[e] > cut) rows[to++] = id[e];
    if (bin[e] == cut) key[to_left] = own[e], place[to_left++] = id[e];
  }
  __threadfence();
  __syncthreads();
  if (tid == 0) s_last = atomicAdd(state + gridDim.x, 1) == chunks - 1;
  __syncthreads();
  if (!s_last) return;
  __threadfence();

  for (int i = wanted + tid; i < budget; i += CHOOSERS) rows[i] = 0;
  if (tid == 0) chosen[b] = wanted;
  const int rest = wanted - sure;
  if (left == 0 || rest == 0) return;
  const bool inner = cut > 0 && cut < BINS - 1;  // the rows of such a bin share their first digits
  int equal = 0, limit = 0;
  if (rest < left)
    limit = find_limit(key, left, rest, inner ? SHIFT : 31, inner ? (cut + base) << SHIFT : 0, s_scratch, equal);
  int done = sure, equals = 0;
  for (int start = 0; start < left; start += CHOOSERS) {
    const int i = start + tid, x = i < left ? read_volatile(key + i) : -1;
    int number;
    if (rest < left) {
      const int same = x == limit;
      const int before = equals + sum_before(same, s_scratch, number);
      equals += number;
      const int take = x > limit || (same && before < equal);
      const int at = sum_before(take, s_scratch, number);
      if (take) rows[done + at] = read_volatile(place + i);
      done += number;
    } else if (x >= 0) {
      rows[sure + i] = read_volatile(place + i);
    }
  }
}
