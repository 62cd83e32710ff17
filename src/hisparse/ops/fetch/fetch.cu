// Rows from the host through the hot buffer: `fetch_rows`, and `list_held` for what is in it. A cluster of programs has a sequence: the first keeps the books, the others bring
// what is missing.
//
// A thread that keeps the books has EACH_ENTRY adjacent entries and EACH_SLOT adjacent slots in registers, so that sums over
// the threads before it are all that order takes: entries get their number among the missing, slots that make room theirs
// among the slots taken, both in ascending order. The age at which there is room enough is found by counting slots, three
// ages a round. As soon as it is known what is missing, the others request it; where to, they learn while it is on its way.
//
// Macros: THREADS (of a program; 32 warps at most), EACH_ENTRY, EACH_SLOT, AGES (64), VECTORS (of 16 bytes, of a row),
// PER_SEGMENT. EACH_SLOT * THREADS is below 65536: two counts share a word.

typedef unsigned int u32;
typedef long long i64;

constexpr int CLUSTER = 4;  // programs a sequence: attention that starts early finds all other multiprocessors free
constexpr int WARPS = THREADS / 32;
constexpr int ROOM = THREADS * EACH_ENTRY;
constexpr int GROUP = VECTORS < 192 ? (VECTORS + 31) / 32 : 6;  // vectors that a lane has on their way
constexpr u32 ALL = 0xffffffffu;

// For launches that overlap: waits until the kernel ahead has ended and its writes can be seen; lets the next one start.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// A load that stays where it is among waits and barriers; and one of what the kernel ahead wrote.
__device__ __forceinline__ int read(const int* p) {
  int x;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ int read_fresh(const int* p) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// A barrier of the cluster, which also shows each program the others' writes; and a word of the first program's shared memory.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ int read_first(const int* p) {
  u32 at;
  int x;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((u32)__cvta_generic_to_shared(p)), "r"(0));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}

// Sum of `x` over all threads before this one, and over all; `warps`: shared, WARPS words, used by this call alone.
__device__ __forceinline__ u32 sum_before(u32 x, u32* warps, u32& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 own = x;
  for (int d = 1; d < 32; d *= 2) {
    const u32 other = __shfl_up_sync(ALL, own, d);
    if (lane >= d) own += other;
  }
  if (lane == 31) warps[warp] = own;
  __syncthreads();
  u32 sums = lane < WARPS ? warps[lane] : 0;
  for (int d = 1; d < 32; d *= 2) {
    const u32 other = __shfl_up_sync(ALL, sums, d);
    if (lane >= d) sums += other;
  }
  total = __shfl_sync(ALL, sums, 31);
  const u32 ahead = __shfl_sync(ALL, sums, warp > 0 ? warp - 1 : 0);
  return own - x + (warp > 0 ? ahead : 0);
}

struct Missing {
  int number;
  int row[ROOM], slot[ROOM];  // of the missing entries; `slot` has the entry until there is a slot
};

struct Row {
  uint4 x[GROUP];
  __device__ __forceinline__ void request(i64 source, int start) {
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      const int v = start + 32 * g + (int)threadIdx.x % 32;
      if (v < VECTORS)
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[g].x), "=r"(x[g].y), "=r"(x[g].z), "=r"(x[g].w)
                     : "l"(source + (i64)v * 16));
    }
  }
  __device__ __forceinline__ void store(uint4* target, int start) const {
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      const int v = start + 32 * g + (int)threadIdx.x % 32;
      if (v < VECTORS) target[v] = x[g];
    }
  }
};

// What the programs beside the first do: a warp a row, in turns.
__device__ __forceinline__ void bring(const Missing& missing, const i64* addresses, int segments, uint4* buffer) {
  constexpr int MOVERS = (CLUSTER - 1) * WARPS;
  const int first = ((int)blockIdx.x % CLUSTER - 1) * WARPS + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const i64 own = lane < segments ? addresses[lane] : 0;  // of the first 32 segments, read in good time
  sync_cluster();
  const int number = read_first(&missing.number);
  const auto find = [&](int i) {
    const int row = read_first(missing.row + i), segment = row / PER_SEGMENT;
    const u32 low = __shfl_sync(ALL, (u32)own, segment & 31), high = __shfl_sync(ALL, (u32)(own >> 32), segment & 31);
    const i64 begin = segment < 32 ? (i64)high << 32 | low : addresses[segment];
    return begin + (i64)(row % PER_SEGMENT) * (VECTORS * 16);
  };
  Row row;
  i64 source = 0;
  if (first < number) {
    source = find(first);
    row.request(source, 0);
  }
  sync_cluster();
  for (int i = first; i < number; i += MOVERS) {
    uint4* target = buffer + (i64)read_first(missing.slot + i) * VECTORS;
    if (i > first) {
      source = find(i);
      row.request(source, 0);
    }
    row.store(target, 0);
    for (int start = 32 * GROUP; start < VECTORS; start += 32 * GROUP) {
      row.request(source, start);
      row.store(target, start);
    }
  }
  sync_cluster();  // the first program's memory has to stay until here
}

// Grid (CLUSTER, B). table int32 [B, budget]; the rest as in types.py. early: the books may be read before the kernel ahead has
// ended, see cuda.py.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
fetch_rows(const int* rows, const int* number, int* table, int* slot_of, int* owner, int* stamp, const int* first,
           int* clock, i64* counters, const i64* addresses, uint4* buffer, int segments, int budget, int early) {
  __shared__ Missing missing;
  __shared__ u32 s_sums[2][WARPS];
  __shared__ u32 s_ages[3][WARPS][2];
  __shared__ u32 s_used[(THREADS * EACH_SLOT + 31) / 32];  // slots used in this step
  const int b = blockIdx.y, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  start_next();  // its rows wait for the end of this kernel
  if (!early) wait_for_previous();
  if (blockIdx.x % CLUSTER) {
    bring(missing, addresses, segments, buffer);
    return;
  }
  const int now = read(clock + b) + 1;
  const int begin = read(first + b), end = read(first + b + 1);
  int age[EACH_SLOT], held[EACH_SLOT];
#pragma unroll
  for (int j = 0; j < EACH_SLOT; j++) {
    const int s = begin + thread * EACH_SLOT + j;
    held[j] = s < end ? read(owner + s) : -1;
    age[j] = s < end ? read(stamp + s) : now;
  }
  for (int i = thread; i < (THREADS * EACH_SLOT + 31) / 32; i += THREADS) s_used[i] = 0;
  __syncthreads();

  if (early) wait_for_previous();
  const i64 at = (i64)b * budget;
  int row[EACH_ENTRY], slot[EACH_ENTRY];
#pragma unroll
  for (int j = 0; j < EACH_ENTRY; j++) {
    const int entry = thread * EACH_ENTRY + j;
    row[j] = entry < budget ? read_fresh(rows + at + entry) : -1;
  }
  const int wanted = max(min(read_fresh(number + b), budget), 0);
#pragma unroll
  for (int j = 0; j < EACH_ENTRY; j++) {
    if (thread * EACH_ENTRY + j >= wanted) row[j] = -1;
    slot[j] = row[j] >= 0 ? read(slot_of + row[j]) : 0;
  }
  u32 absent = 0;
#pragma unroll
  for (int j = 0; j < EACH_ENTRY; j++) {
    const int entry = thread * EACH_ENTRY + j, place = slot[j] - begin;
    if (slot[j] < 0) {
      absent++;
    } else if (row[j] >= 0) {
      stamp[slot[j]] = now;
      if (place >= 0 && slot[j] < end) atomicOr(s_used + place / 32, 1u << place % 32);
    }
    if (entry < budget) table[at + entry] = max(slot[j], 0);
  }
  u32 lacking;
  u32 place = sum_before(absent, s_sums[0], lacking);
#pragma unroll
  for (int j = 0; j < EACH_ENTRY; j++) {
    if (slot[j] < 0) {
      missing.row[place] = row[j];
      missing.slot[place++] = thread * EACH_ENTRY + j;
    }
  }
  if (thread == 0) {
    missing.number = (int)lacking;
    clock[b] = now;
    counters[2 * b] += wanted - (int)lacking;
    counters[2 * b + 1] += lacking;
  }
  sync_cluster();
  if (lacking > 0) {
#pragma unroll
    for (int j = 0; j < EACH_SLOT; j++) {
      const int i = thread * EACH_SLOT + j;
      const bool used = begin + i >= end || (s_used[i / 32] >> i % 32 & 1);
      age[j] = used ? 0 : held[j] < 0 ? AGES - 1 : min(now - age[j], AGES - 1);
    }
    // The greatest age that `lacking` slots or more have reached, and how many slots are older than that.
    int cut = 0;
    u32 older = 0;
#pragma unroll
    for (int round = 0; round < 3; round++) {
      const int step = AGES / 4 >> 2 * round;
      u32 two = 0, third = 0;
#pragma unroll
      for (int j = 0; j < EACH_SLOT; j++) {
        two += (age[j] >= cut + step ? 1u : 0u) + (age[j] >= cut + 2 * step ? 1u << 16 : 0u);
        third += age[j] >= cut + 3 * step ? 1u : 0u;
      }
      two = __reduce_add_sync(ALL, two);
      third = __reduce_add_sync(ALL, third);
      if (lane == 0) {
        s_ages[round][warp][0] = two;
        s_ages[round][warp][1] = third;
      }
      __syncthreads();
      two = __reduce_add_sync(ALL, lane < WARPS ? s_ages[round][lane][0] : 0u);
      third = __reduce_add_sync(ALL, lane < WARPS ? s_ages[round][lane][1] : 0u);
      const u32 one = two & 0xffff;
      two >>= 16;
      const int passed = (one >= lacking) + (two >= lacking) + (third >= lacking);
      older = passed == 0 ? one : passed == 1 ? two : passed == 2 ? third : older;
      cut += passed * step;
    }
    const u32 rest = lacking - older;  // of the slots of age `cut`
    u32 count = 0;
#pragma unroll
    for (int j = 0; j < EACH_SLOT; j++) count += age[j] > cut ? 1u << 16 : age[j] == cut ? 1u : 0u;
    u32 total;
    count = sum_before(count, s_sums[1], total);
    u32 before = count >> 16, same = count & 0xffff;
#pragma unroll
    for (int j = 0; j < EACH_SLOT; j++) {
      const bool is_older = age[j] > cut, is_same = age[j] == cut;
      const u32 miss = before + min(same, rest);
      const bool taken = (is_older || (is_same && same < rest)) && miss < lacking;
      before += is_older;
      same += is_same;
      if (!taken) continue;
      const int s = begin + thread * EACH_SLOT + j, r = missing.row[miss];
      if (held[j] >= 0) slot_of[held[j]] = -1;
      owner[s] = r;
      stamp[s] = now;
      slot_of[r] = s;
      table[at + missing.slot[miss]] = s;
      missing.slot[miss] = s;
    }
  }
  sync_cluster();
  sync_cluster();
}

// Grid (B). The slots that hold rows, in ascending order: slots int32 [B, width], and their number int32 [B].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
list_held(const int* owner, const int* first, int* slots, int* number, int width) {
  __shared__ u32 s_sums[WARPS];
  const int b = blockIdx.x;
  start_next();
  wait_for_previous();
  const int begin = read(first + b), end = read(first + b + 1);
  u32 holds[EACH_SLOT], held = 0;
#pragma unroll
  for (int j = 0; j < EACH_SLOT; j++) {
    const int s = begin + (int)threadIdx.x * EACH_SLOT + j;
    holds[j] = s < end && read(owner + s) >= 0;
    held += holds[j];
  }
  u32 total;
  u32 place = sum_before(held, s_sums, total);
#pragma unroll
  for (int j = 0; j < EACH_SLOT; j++)
    if (holds[j]) slots[(i64)b * width + place++] = begin + (int)threadIdx.x * EACH_SLOT + j;
  if (threadIdx.x == 0) number[b] = (int)total;
}
