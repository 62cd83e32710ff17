// Choosing by bins: what select.cu and step.cu share.
//
// Worth is not negative, so its bits order as it does. Rows are counted by bins of 2^-8 of an octave; the bin at which
// the budget runs out says for nearly every row whether it is taken. Rows of higher bins are taken, rows of that bin
// become candidates, of which the best are taken, among equals the first.
//
// Macros: BINS (2048), SHIFT.

constexpr int FEW = 1024;         // candidates that are ranked by comparing each with each

__device__ __forceinline__ int find_bin(int key, int base) { return max(min((key >> SHIFT) - base, BINS - 1), 0); }

__device__ __forceinline__ int key_of(float worth) { return __float_as_int(worth) & 0x7FFFFFFF; }

// Which of the n parts of `total` tiles has tile x (see share_start in tile.cuh).
__device__ __forceinline__ int share_of(int x, int n, int total) {
  const int each = total / n, longer = total % n, border = longer * (each + 1);
  return x < border ? x / (each + 1) : longer + (x - border) / each;
}

// What the threads of a program share while they choose.
struct Desk {
  int scratch[32], cut, sure, left, rest, digit;
  int count[256];
};

// Sum of x over the threads before this one. Barriers inside.
template <int THREADS>
__device__ __forceinline__ int sum_before(int x, int* scratch) {
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
  int warps = lane < THREADS / 32 ? scratch[lane] : 0;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, warps, step);
    if (lane >= step) warps += other;
  }
  const int before = __shfl_sync(~0u, warps, (warp + 31) & 31);
  return sum - x + (warp ? before : 0);
}

// Where the budget runs out: rows of bins above `cut` are taken, `sure` of them; of the `left` rows of the bin `cut` some.
// BINS: nothing is wanted.
struct Cut {
  int cut, sure, left;

  // Keys from `least` up are candidates or taken, from `next` up taken. Nothing reaches those of a cut above all bins.
  __device__ __forceinline__ int least(int base) const {
    return cut >= BINS ? 0x7FFFFFFF : cut > 0 ? (cut + base) << SHIFT : 0;
  }
  __device__ __forceinline__ int next(int base) const {
    return cut >= BINS - 1 ? 0x7FFFFFFF : cut < 0 ? 0 : (cut + base + 1) << SHIFT;
  }
  // The bits that all candidates' keys share are those from shared_from() up, of common().
  __device__ __forceinline__ bool is_inner() const { return cut > 0 && cut < BINS - 1; }
  __device__ __forceinline__ int shared_from() const { return is_inner() ? SHIFT : 31; }
  __device__ __forceinline__ int common(int base) const { return is_inner() ? (cut + base) << SHIFT : 0; }
};

// bins[i]: rows of bin BINS - 1 - EACH * thread - i, so that sums run from the top bin down; one bin reaches what is
// wanted. Barriers inside.
template <int THREADS, int EACH>
__device__ __forceinline__ Cut find_cut(const int (&bins)[EACH], int wanted, Desk& s) {
  const int tid = threadIdx.x;
  if (tid == 0) s.cut = wanted ? -1 : BINS, s.sure = 0, s.left = 0;
  int own = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) own += bins[i];
  int above = sum_before<THREADS>(own, s.scratch);
  if (above < wanted && above + own >= wanted)
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (above < wanted && above + bins[i] >= wanted) s.cut = BINS - 1 - EACH * tid - i, s.sure = above, s.left = bins[i];
      above += bins[i];
    }
  __syncthreads();
  return {s.cut, s.sure, s.left};
}

__device__ __forceinline__ int read_volatile(const int* p) { return *(const volatile int*)p; }

// The `wanted`-th largest of the values of 0 .. n - 1 that share the bits of `limit` from `bits` up, found eight bits at a
// time by counting; and how many values that equal it are among the `wanted`. Values below 0 do not count.
template <int THREADS, class Value>
__device__ __forceinline__ int find_limit(Value value, int n, int wanted, int bits, int limit, Desk& s, int& equal) {
#pragma unroll 1
  for (int shift = bits; shift > 0;) {
    const int width = shift < 8 ? shift : 8, above_bits = shift;
    shift -= width;
    if (threadIdx.x < 256) s.count[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += THREADS) {
      const int x = value(i);
      if (x >= 0 && (x >> above_bits) == (limit >> above_bits)) atomicAdd(s.count + ((x >> shift) & ((1 << width) - 1)), 1);
    }
    __syncthreads();
    // Thread i has digit 255 - i: sums run from the largest digit down.
    const int own = threadIdx.x < 256 ? s.count[255 - threadIdx.x] : 0;
    const int above = sum_before<THREADS>(own, s.scratch);
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
template <int THREADS>
__device__ __noinline__ void take_of_many(const int* key, const int* place, const int* table, int n, int rest, int bits,
                                          int common, int* to, Desk& s) {
  int equal, ignored;
  const int limit = find_limit<THREADS>([&](int i) { return read_volatile(key + i); }, n, rest, bits, common, s, equal);
  const auto early = [&](int i) { return read_volatile(key + i) == limit ? 0x7FFFFFFF - read_volatile(place + i) : -1; };
  const int last = find_limit<THREADS>(early, n, equal, 31, 0, s, ignored);
  int done = 0;
#pragma unroll 1
  for (int start = 0; start < n; start += THREADS) {
    const int i = start + threadIdx.x;
    const int take = i < n && (read_volatile(key + i) > limit || early(i) >= last);
    const int at = done + sum_before<THREADS>(take, s.scratch);
    if (take) to[at] = table[read_volatile(place + i)];
    if (threadIdx.x == THREADS - 1) s.rest = at + take;
    __syncthreads();
    done = s.rest;
  }
}
