// Rows from the host through the hot buffer. A cluster of programs has a sequence, or all sequences where they share a buffer:
// each program keeps the books of its part of the entries and of the slots, and brings its part of what is missing.
//
// A warp has EACH_ENTRY times 32 adjacent entries and EACH_SLOT times 32 adjacent slots, so that votes and sums over the warps
// and programs before it are all that order takes: entries get their number among the missing, slots that make room theirs
// among the slots taken, both in ascending order. The age at which there is room enough follows from how many slots there are
// of each age. As soon as it is known what is missing, it is requested; where to, is found out while it is on its way.
//
// Where several sequences want the same row (MERGE), the lowest of its entries stands for it. In slot_of a missing row then
// says for a while which that is: CLAIM + entry.
//
// Rows come by plain loads of the host's memory: for each line of 128 bytes there is one request on the link, and no more, where
// the loads of a warp begin at lines. (The bulk copy engine asks for less at a time, and is an eighth slower.) A warp has DEPTH
// pieces of rows on their way, in registers.
//
// Macros: CLUSTER (8 programs at most), EACH_ENTRY, EACH_SLOT, AGES (64), VECTORS (of 16 bytes, of a row), PIECES (of a row),
// DEPTH (1 or 2), PER_SEGMENT, MERGE, and common.cuh's.

#include "common.cuh"

constexpr int ENTRIES = THREADS * EACH_ENTRY, SLOTS = THREADS * EACH_SLOT;  // of a program
constexpr int PIECE = ((VECTORS + PIECES - 1) / PIECES + 7) / 8 * 8;         // vectors, but for the last piece of a row
constexpr int GROUP = (PIECE + 7 + 31) / 32;                                // vectors of a piece that a lane has
constexpr int CLAIM = -2147483647 - 1;
static_assert(SLOTS < 65536, "two counts share a word");

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// A barrier of the cluster, which also shows each program the others' writes; and words of another program's shared memory.
__device__ __forceinline__ void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void sync_cluster() {
  arrive_in_cluster();
  wait_for_cluster();
}
__device__ __forceinline__ u32 address_in(const void* p, int program) {
  u32 at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(program));
  return at;
}
__device__ __forceinline__ int read_in(const void* p, int program) {
  int x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(address_in(p, program)) : "memory");
  return x;
}
__device__ __forceinline__ void write_in(const void* p, int program, u32 x) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address_in(p, program)), "r"(x) : "memory");
}
struct Missing {
  int row[ENTRIES], slot[ENTRIES];  // of a program's missing entries; slot -1 until there is one
};

// The cluster's missing rows: which program has the m-th, in which place.
struct Place {
  int program, at;
};
__device__ __forceinline__ Place find(const u32* counts, u32 m) {
  Place place = {0, (int)m};
#pragma unroll
  for (int p = 0; p < CLUSTER - 1; p++) {
    if (place.program == p && place.at >= (int)counts[p]) place = {p + 1, place.at - (int)counts[p]};
  }
  return place;
}

// A piece of a row. Lane 0 has what is at the beginning of a line of 128 bytes, before the piece if need be.
struct Piece {
  uint4 x[GROUP];
  int first, vectors;
  __device__ __forceinline__ void request(const char* source, int n) {
    first = (int)threadIdx.x % 32 - (int)((u64)source / 16 % 8), vectors = n;
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      const int v = first + 32 * g;
      if (v >= 0 && v < vectors)
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[g].x), "=r"(x[g].y), "=r"(x[g].z), "=r"(x[g].w)
                     : "l"(source + (i64)v * 16));
    }
  }
  __device__ __forceinline__ void store(uint4* target) const {
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      const int v = first + 32 * g;
      if (v >= 0 && v < vectors) target[v] = x[g];
    }
  }
};

// What a warp brings: the l-th piece is the cluster's unit (l WARPS + warp) CLUSTER + program. Lane l % 32 knows where the l-th
// is and comes to, of 32 at a time.
struct Mover {
  int program, units;
  Place place;
  i64 source;
  int part;

  __device__ __forceinline__ void look_up(int chunk, const u32* counts, const Missing& missing, const i64* addresses) {
    const int unit = ((chunk + (int)threadIdx.x % 32) * WARPS + (int)threadIdx.x / 32) * CLUSTER + program;
    if (unit >= units) return;
    part = unit % PIECES;
    place = find(counts, unit / PIECES);
    const int row = read_in(missing.row + place.at, place.program);
    source = addresses[row / PER_SEGMENT] + ((i64)(row % PER_SEGMENT) * VECTORS + part * PIECE) * 16;
  }
  __device__ __forceinline__ void request(Piece& piece, int l) const {
    const u32 low = __shfl_sync(ALL, (u32)source, l & 31), high = __shfl_sync(ALL, (u32)(source >> 32), l & 31);
    const int start = PIECES > 1 ? __shfl_sync(ALL, part, l & 31) * PIECE : 0;
    piece.request((const char*)((i64)high << 32 | low), min(VECTORS - start, PIECE));
  }
  __device__ __forceinline__ void store(const Piece& piece, int l, uint4* buffer, int slot) const {
    const int to = __shfl_sync(ALL, slot, l & 31), start = PIECES > 1 ? __shfl_sync(ALL, part, l & 31) * PIECE : 0;
    if (to >= 0) piece.store(buffer + (i64)to * VECTORS + start);
  }
};

// Grid (CLUSTER, B), or (CLUSTER, 1) where they share the buffer. rows, table int32 [B, width]; sharing int64 [2]: see cuda.py; the
// rest as in types.py. early: clock and first may be read before the kernel ahead has ended, see cuda.py.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
fetch_rows(const int* rows, const int* number, int* table, int* slot_of, int* owner, int* stamp, const int* first,
           int* clock, i64* counters, i64* sharing, const i64* addresses, uint4* buffer, int batch, int width, int early) {
  extern __shared__ __align__(16) char memory[];
  __shared__ u32 s_own[AGES];         // slots of each age
  __shared__ u32 s_ages[CLUSTER][AGES];
  __shared__ u32 s_counts[2][CLUSTER];
  __shared__ u32 s_sums[3][WARPS];
  Missing& missing = *(Missing*)memory;
  const int program = blockIdx.x, b = blockIdx.y, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const u32 below = (1u << lane) - 1;
  start_next();  // its rows wait for the end of this kernel
  if (!early) wait_for_previous();
  for (int i = thread; i < AGES; i += THREADS) s_own[i] = 0;
  arrive_in_cluster();
  const int now = read(clock + b) + 1;
  const int begin = read(first + b), end = read(first + b + 1);
  const int own_slot = begin + program * SLOTS + warp * 32 * EACH_SLOT + lane;
  if (early) wait_for_previous();
  const i64 at = (i64)b * width;
  const int entries = MERGE ? batch * width : width, own_entry = program * ENTRIES + warp * 32 * EACH_ENTRY + lane;
  int row[EACH_ENTRY], slot[EACH_ENTRY];
#pragma unroll
  for (int j = 0; j < EACH_ENTRY; j++) {
    const int entry = own_entry + 32 * j;
    row[j] = entry < entries ? read_fresh(rows + at + entry) : -1;
  }
#pragma unroll
  for (int j = 0; j < EACH_ENTRY; j++) {
    const int entry = own_entry + 32 * j, sequence = MERGE && entry < entries ? entry / width : b;
    if (entry - (MERGE ? sequence * width : 0) >= read_fresh(number + sequence)) row[j] = -1;
  }
#pragma unroll
  for (int j = 0; j < EACH_ENTRY; j++) slot[j] = row[j] >= 0 ? read(slot_of + row[j]) : 0;
  wait_for_cluster();
  u32 counts = 0;  // missing entries
  int used[EACH_ENTRY];
#pragma unroll
  for (int j = 0; j < EACH_ENTRY; j++) {
    const int entry = own_entry + 32 * j;
    used[j] = now;
    if (row[j] >= 0 && slot[j] >= 0) {
      if (MERGE)
        used[j] = atomicExch(stamp + slot[j], now);
      else
        stamp[slot[j]] = now;
    } else if (MERGE && slot[j] < 0) {
      atomicMin(slot_of + row[j], CLAIM + entry);
    }
    if (entry < entries && slot[j] >= 0) table[at + entry] = slot[j];
    counts += __popc(__ballot_sync(ALL, slot[j] < 0));
  }
  // Entries of which one program has `own`, before this warp's: those that stand for a missing row list it.
  const auto list = [&](u32 place) {
#pragma unroll
    for (int j = 0; j < EACH_ENTRY; j++) {
      const u32 absent = __ballot_sync(ALL, slot[j] < 0 && slot[j] != CLAIM);
      if (slot[j] < 0 && slot[j] != CLAIM) {
        const int i = (int)(place + __popc(absent & below));
        missing.row[i] = row[j];
        missing.slot[i] = -1;
        slot[j] = -1 - i;
      }
      place += __popc(absent);
    }
  };
  u32 total;
  u32 before = sum_before(counts, s_sums[0], total);
  if (thread < CLUSTER) write_in(s_counts[0] + program, thread, total);
  if (!MERGE) list(before);
  sync_cluster();
  u32 lacking = 0;
#pragma unroll
  for (int p = 0; p < CLUSTER; p++) lacking += s_counts[0][p];
  if (MERGE) {  // slots found, and entries: of those that found the same slot, the first counts
    u32 found = 0;
#pragma unroll
    for (int j = 0; j < EACH_ENTRY; j++) found += __popc(__ballot_sync(ALL, used[j] != now));
    if (lane == 0 && found > 0) {
      atomicAdd((u64*)counters, (u64)found);
      atomicAdd((u64*)sharing + 1, 0 - (u64)found);
    }
  }
  const u32* absent = s_counts[0];  // of each program
  if (MERGE && lacking > 0) {
    u32 own = 0;
#pragma unroll
    for (int j = 0; j < EACH_ENTRY; j++) {
      if (slot[j] < 0) slot[j] = read_fresh(slot_of + row[j]) == CLAIM + own_entry + 32 * j ? -1 : CLAIM;
      own += __popc(__ballot_sync(ALL, slot[j] == -1));
    }
    before = sum_before(own, s_sums[1], total);
    if (thread < CLUSTER) write_in(s_counts[1] + program, thread, total);
    list(before);
    sync_cluster();
    absent = s_counts[1];
    lacking = 0;
#pragma unroll
    for (int p = 0; p < CLUSTER; p++) lacking += absent[p];
  }
  if (program == 0 && warp == 0) {
    int wanted = 0, queries = 0;
    for (int i = MERGE ? lane : b; i < (MERGE ? batch : b + 1); i += 32) {
      const int n = max(min(read_fresh(number + i), width), 0);
      wanted += n;
      queries += n > 0;
    }
    if (MERGE) {
      wanted = __reduce_add_sync(ALL, wanted);
      queries = __reduce_add_sync(ALL, queries);
    }
    if (lane == 0) {
      clock[b] = now;
      counters[2 * b + 1] += lacking;
      if (MERGE) {
        sharing[0] += queries - 1;
        atomicAdd((u64*)sharing + 1, (u64)(wanted - (int)lacking));
      } else {
        counters[2 * b] += wanted - (int)lacking;
      }
    }
  }
  if (lacking == 0) return;

  Mover mover;
  mover.program = program, mover.units = (int)lacking * PIECES;
  const int first_unit = warp * CLUSTER + program, step = WARPS * CLUSTER;
  const int pieces = mover.units > first_unit ? (mover.units - first_unit + step - 1) / step : 0;
  Piece on_way[DEPTH];
  if (pieces > 0) {
    mover.look_up(0, absent, missing, addresses);
    __syncwarp();
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
      if (d < pieces) mover.request(on_way[d], d);
  }

  u32 ages[(EACH_SLOT + 3) / 4] = {};  // a byte each; 0: used in this step, or no slot
#pragma unroll
  for (int j = 0; j < EACH_SLOT; j++) {
    const int s = own_slot + 32 * j;
    const int held = s < end ? read(owner + s) : 0, last = s < end ? read_fresh(stamp + s) : now;
    ages[j / 4] |= (u32)(held < 0 ? AGES - 1 : min(now - last, AGES - 1)) << 8 * (j % 4);
  }
  u32 low = 0, high = 0;  // slots whose age is the lane's number, or 32 more
#pragma unroll
  for (int j = 0; j < EACH_SLOT; j++) {
    const u32 age = ages[j / 4] >> 8 * (j % 4);
    u32 same = ALL;
#pragma unroll
    for (int bit = 0; bit < 5; bit++) {
      const u32 votes = __ballot_sync(ALL, age >> bit & 1);
      same &= lane >> bit & 1 ? votes : ~votes;
    }
    const u32 upper = __ballot_sync(ALL, age >> 5 & 1);
    low += __popc(same & ~upper);
    high += __popc(same & upper);
  }
  if (low) atomicAdd(s_own + lane, low);
  if (high) atomicAdd(s_own + lane + 32, high);
  __syncthreads();
  for (int i = thread; i < AGES * CLUSTER; i += THREADS) write_in(s_ages[program] + i % AGES, i / AGES, s_own[i % AGES]);
  sync_cluster();
  // The greatest age that `lacking` slots or more have reached; how many are older, and how many of either kind come before.
  const u32 bin_high = 63 - lane, bin_low = 31 - lane;
  u32 all_high = 0, all_low = 0, ahead_high = 0, ahead_low = 0;
#pragma unroll
  for (int p = 0; p < CLUSTER; p++) {
    const u32 h = s_ages[p][bin_high], l = s_ages[p][bin_low];
    all_high += h, all_low += l;
    if (p < program) ahead_high += h, ahead_low += l;
  }
  u32 reached_high = all_high, reached_low = all_low;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const u32 h = __shfl_up_sync(ALL, reached_high, d), l = __shfl_up_sync(ALL, reached_low, d);
    if (lane >= d) reached_high += h, reached_low += l;
  }
  reached_low += __shfl_sync(ALL, reached_high, 31);
  const u32 cut = __popc(__ballot_sync(ALL, reached_high >= lacking)) +
                  __popc(__ballot_sync(ALL, bin_low > 0 && reached_low >= lacking));
  const auto sum = [&](u32 h, u32 l, bool older) {
    const bool has_high = older ? bin_high > cut : bin_high == cut, has_low = older ? bin_low > cut : bin_low == cut;
    return __reduce_add_sync(ALL, (has_high ? h : 0u) + (has_low ? l : 0u));
  };
  // Of the slots of age `cut`. Were there too few of all, those used in this step would have to stay all the same.
  const u32 rest = cut > 0 ? lacking - sum(all_high, all_low, true) : 0;
  u32 older = sum(ahead_high, ahead_low, true), same = sum(ahead_high, ahead_low, false);
  u32 taken = 0;  // and 65536 times those of age `cut`
#pragma unroll
  for (int j = 0; j < EACH_SLOT; j++) {
    const u32 age = ages[j / 4] >> 8 * (j % 4) & 255;
    taken += __popc(__ballot_sync(ALL, age > cut)) + (__popc(__ballot_sync(ALL, age == cut)) << 16);
  }
  taken = sum_before(taken, s_sums[2], total);
  older += taken & 0xffff;
  same += taken >> 16;
#pragma unroll
  for (int j = 0; j < EACH_SLOT; j++) {
    const u32 age = ages[j / 4] >> 8 * (j % 4) & 255;
    const u32 is_older = __ballot_sync(ALL, age > cut), is_same = __ballot_sync(ALL, age == cut);
    const u32 my_same = same + __popc(is_same & below);
    const u32 miss = older + __popc(is_older & below) + min(my_same, rest);
    older += __popc(is_older);
    same += __popc(is_same);
    if (age < cut || (age == cut && my_same >= rest) || miss >= lacking) continue;
    const int s = own_slot + 32 * j;
    const Place place = find(absent, miss);
    const int r = read_in(missing.row + place.at, place.program), old = read(owner + s);
    write_in(missing.slot + place.at, place.program, s);
    if (old >= 0) slot_of[old] = -1;
    owner[s] = r;
    stamp[s] = now;
    slot_of[r] = s;
  }
  sync_cluster();
#pragma unroll
  for (int j = 0; j < EACH_ENTRY; j++) {
    if (slot[j] >= 0) continue;
    const int s = slot[j] == CLAIM ? read_fresh(slot_of + row[j]) : missing.slot[-1 - slot[j]];
    table[at + own_entry + 32 * j] = max(s, 0);
    if (MERGE && slot[j] != CLAIM && s < 0) slot_of[row[j]] = -1;
  }
  for (int chunk = 0; chunk < pieces; chunk += 32) {
    const int end = min(pieces, chunk + 32);
    if (chunk > 0) {
      mover.look_up(chunk, absent, missing, addresses);
      __syncwarp();
#pragma unroll
      for (int d = 0; d < DEPTH; d++)
        if (chunk + d < end) mover.request(on_way[d], chunk + d);
    }
    const int target = chunk + lane < end ? read_in(missing.slot + mover.place.at, mover.place.program) : -1;
    for (int l = chunk; l < end; l += DEPTH) {
#pragma unroll
      for (int d = 0; d < DEPTH; d++) {
        if (l + d >= end) break;
        mover.store(on_way[d], l + d, buffer, target);
        if (l + d + DEPTH < end) mover.request(on_way[d], l + d + DEPTH);
      }
    }
  }
  sync_cluster();  // the others read this program's shared memory until here
}
