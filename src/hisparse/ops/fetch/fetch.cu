// Rows from the host through the hot buffer: `assign` keeps the books of a sequence, `move_rows` brings what is missing.
//
// One program keeps the books. A thread has EACH_ENTRY adjacent entries and EACH_SLOT adjacent slots in registers, so
// that sums over the threads before it are all that order takes: entries get their number among the missing, slots that
// make room theirs among the slots taken, both in ascending order. The age at which there is room enough is found by
// counting slots, three ages a round.
//
// Macros: THREADS (of assign; 32 warps at most), EACH_ENTRY, EACH_SLOT, AGES (64), VECTORS (of 16 bytes, of a row),
// PER_SEGMENT. EACH_SLOT * THREADS is below 65536: two counts share a word.

typedef unsigned int u32;
typedef long long i64;

constexpr int WARPS = THREADS / 32;
constexpr int ROOM = THREADS * EACH_ENTRY;
constexpr u32 ALL = 0xffffffffu;

// For launches that overlap: waits until the kernel ahead has ended and its writes can be seen; lets the next one start.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

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

extern "C" __global__ void __launch_bounds__(THREADS) assign(
    const int* rows, const int* number, int* table, int* miss_row, int* miss_slot, int* missing_rows, int* slot_of,
    int* owner, int* stamp, const int* first, int* clock, i64* counters, int budget) {
  __shared__ int s_row[ROOM], s_entry[ROOM];
  __shared__ u32 s_sums[2][WARPS];
  __shared__ u32 s_ages[3][WARPS][2];
  const int b = blockIdx.x, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  wait_for_previous();
  start_next();  // its rows wait for the end of this kernel
  const i64 at = (i64)b * budget;
  const int wanted = max(min(number[b], budget), 0);
  const int now = clock[b] + 1;
  const int begin = first[b], end = first[b + 1];

  int row[EACH_ENTRY], slot[EACH_ENTRY];
#pragma unroll
  for (int j = 0; j < EACH_ENTRY; j++) {
    const int entry = thread * EACH_ENTRY + j;
    row[j] = entry < wanted ? rows[at + entry] : -1;
  }
#pragma unroll
  for (int j = 0; j < EACH_ENTRY; j++) slot[j] = row[j] >= 0 ? slot_of[row[j]] : 0;
  u32 absent = 0;
#pragma unroll
  for (int j = 0; j < EACH_ENTRY; j++) {
    const int entry = thread * EACH_ENTRY + j;
    if (slot[j] < 0) absent++;
    else if (row[j] >= 0) stamp[slot[j]] = now;
    if (entry < budget) table[at + entry] = max(slot[j], 0);
  }
  u32 missing;
  u32 place = sum_before(absent, s_sums[0], missing);
#pragma unroll
  for (int j = 0; j < EACH_ENTRY; j++) {
    if (slot[j] < 0) {
      s_row[place] = row[j];
      s_entry[place++] = thread * EACH_ENTRY + j;
    }
  }
  __syncthreads();  // every thread has read the clock, and sees the stamps and the missing rows
  if (thread == 0) {
    missing_rows[b] = (int)missing;
    clock[b] = now;
    counters[2 * b] += wanted - (int)missing;
    counters[2 * b + 1] += missing;
  }
  if (missing == 0) return;

  int age[EACH_SLOT], held[EACH_SLOT];
#pragma unroll
  for (int j = 0; j < EACH_SLOT; j++) {
    const int s = begin + thread * EACH_SLOT + j;
    held[j] = s < end ? owner[s] : -1;
    age[j] = s < end ? (held[j] < 0 ? AGES - 1 : min(now - stamp[s], AGES - 1)) : 0;
  }
  // The greatest age that `missing` slots or more have reached, and how many slots are older than that.
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
    const int passed = (one >= missing) + (two >= missing) + (third >= missing);
    older = passed == 0 ? one : passed == 1 ? two : passed == 2 ? third : older;
    cut += passed * step;
  }
  const u32 rest = missing - older;  // of the slots of age `cut`
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
    const bool taken = (is_older || (is_same && same < rest)) && miss < missing;
    before += is_older;
    same += is_same;
    if (!taken) continue;
    const int s = begin + thread * EACH_SLOT + j, r = s_row[miss];
    if (held[j] >= 0) slot_of[held[j]] = -1;
    owner[s] = r;
    stamp[s] = now;
    slot_of[r] = s;
    table[at + s_entry[miss]] = s;
    miss_row[at + miss] = r;
    miss_slot[at + miss] = s;
  }
}

constexpr int MOVERS = 128;  // threads of move_rows
constexpr int GROUP = VECTORS < 256 ? (VECTORS + 31) / 32 : 8;  // vectors that a lane has on their way

// A warp a row, the warps of a sequence take turns. addresses: where the host's segments begin.
extern "C" __global__ void __launch_bounds__(MOVERS) move_rows(
    const i64* addresses, const int* miss_row, const int* miss_slot, const int* missing_rows, uint4* buffer, int budget) {
  const int b = blockIdx.y, lane = threadIdx.x % 32;
  const int warps = gridDim.x * (MOVERS / 32);
  wait_for_previous();
  const int missing = missing_rows[b];
  for (int miss = blockIdx.x * (MOVERS / 32) + threadIdx.x / 32; miss < missing; miss += warps) {
    const int row = miss_row[(i64)b * budget + miss], slot = miss_slot[(i64)b * budget + miss];
    const i64 source = addresses[row / PER_SEGMENT] + (i64)(row % PER_SEGMENT) * (VECTORS * 16);
    uint4* target = buffer + (i64)slot * VECTORS;
    for (int start = 0; start < VECTORS; start += 32 * GROUP) {
      uint4 x[GROUP];
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
        const int v = start + 32 * g + lane;
        if (v < VECTORS)
          asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(x[g].x), "=r"(x[g].y), "=r"(x[g].z), "=r"(x[g].w)
                       : "l"(source + (i64)v * 16));
      }
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
        const int v = start + 32 * g + lane;
        if (v < VECTORS) target[v] = x[g];
      }
    }
  }
}
