// Decode attention over packed pages. See cuda.py for the launch and docs/performance.md for the reasoning.
//
// Macros: PAGE_HEADS (KV heads), HEADS (of them, that a block has), QUERIES (query heads a KV head, at most 8), DIM (64, 128, 256), GROUP (channels that share
// a step; 64 or a multiple), K_BITS, V_BITS (4 or 5), SPLIT (1: five-bit K is split in six and four bits), BF16 (dtype of
// q and the dense slots; 0: float16), KEPT_P and ROWS_P (tokens a page; of a kind that is absent, any), TILES (tiles of
// 16 tokens a stage), STAGES, BLOCKS (blocks a multiprocessor), MASS (1: write each page's log-sum-exp), MULTIPLY (1:
// shift by multiplication).
//
// A block has its turns at the units of one sequence's pages; a unit is what a stage holds. Whole pages, or a block's heads
// of them, are copied into shared memory, stage by stage (bulk copies that complete on a barrier); HEADS * TILES warps each take one KV head of 16
// tokens of a stage, and the last to be done with a stage has it filled again. Codes are masked, not converted: a masked
// field read as float16 is the subnormal code * 2^-24. The matrix units multiply it exactly and sum such products to less than
// float32, but to far more than queries of 16 bits have.
//
// Kernels ahead. With EARLY, those that chose and brought the recalled rows may still run: dense slots and kept pages are
// older, and are attended to at once; the rows, their table and their number only after the wait. What makes them older is
// said in cuda.py. Without EARLY the wait comes before everything that is read.

#include "ptx.cuh"
#include "tile.cuh"

#include "dense.cuh"
#include "query.cuh"

// A warp may be STAGES units ahead of another, so more page ids than that are waiting.
constexpr int WAITING = 16;
static_assert(STAGES + 2 <= WAITING, "too many stages");
constexpr int PER_UNIT = Page<KEPT_P>::per_unit > Page<ROWS_P>::per_unit ? Page<KEPT_P>::per_unit : Page<ROWS_P>::per_unit;
constexpr int FIRST = ((STAGES + 1) * PER_UNIT + THREADS - 1) / THREADS;  // pages of the first STAGES + 1 units, a thread
// Shared memory: the ring of stages, later the warps' sums; then words for, in turn, dense slots, queries and V's statistics.
constexpr int SUM_ROW = DIM + 4;  // no bank conflicts
constexpr int SUMS = WARPS * 8 * (SUM_ROW + 2) * 4;
constexpr int RING = STAGES * STAGE > SUMS ? STAGES * STAGE : SUMS;

// Which units a block has. Blocks below `busy` have dense slots to attend to, too: a round of kept pages before all is shared by
// the others. Rows come to the last block first, which has most likely a unit of kept pages less.
struct Turns {
    int own, blocks, busy;
    __device__ inline int kept(int n) const {
        const int free = blocks - busy;
        n -= own >= busy;
        return n < 0 ? own - busy : free + n * blocks + own;
    }
    __device__ inline int first_rows() const { return blocks - 1 - own; }
    __device__ inline int rows(int n) const { return n * blocks + first_rows(); }
    __device__ inline int unit(bool of_rows, int n) const { return of_rows ? rows(n) : kept(n); }
    // How many of `units` are the block's.
    __device__ inline int number(bool of_rows, int units) const {
        if (of_rows) return (max(units - first_rows(), 0) + blocks - 1) / blocks;
        const int first = own >= busy && own - busy < units, together = units - (blocks - busy) - own;
        return first + (max(together, 0) + blocks - 1) / blocks;
    }
};

struct Pages {
    const u8* pool;
    const int *table, *count;  // of the sequence; null: none
    int width, stride;         // entries of the table, bytes from page to page
    bool rows;
    __device__ inline int per_unit() const { return PICK(rows, per_unit); }
    __device__ inline int bytes() const { return PICK(rows, bytes); }
};

__device__ inline int units_of(bool rows, int count) {
    const int log = PICK(rows, log);
    return (int)((((i64)count << log) + UNIT - 1) / UNIT);
}

// A ring of stages, as all warps see it.
struct Ring {
    u32 stages, full, counters;
    int (*ids)[PER_UNIT];  // pages of the block's n-th unit, at n % WAITING: read by one warp a unit ahead of the one that needs them
};

// Where a warp is in the ring.
struct Place {
    int stage;
    u32 parity;
    __device__ inline void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The page that this lane copies for a unit; past the last one that, which is masked later.
__device__ inline int read_id(const Pages& pages, int unit, int count) {
    const int lane = threadIdx.x & 31, per = pages.per_unit(), i = unit * per + (lane < per ? lane : 0);
    return read_fresh(pages.table + (i < count ? i : count - 1));
}

// A page is copied whole; of some of its heads, codes, extra bits and steps of K and of V lie apart.
constexpr int PIECES = HEADS == PAGE_HEADS ? 1 : 6;
static_assert(PIECES == 1 || HEADS * GROUPS % 4 == 0, "pieces of a multiple of 16 bytes");
struct Piece {
    u32 from, to, size;
};

template <class Layout>
__device__ inline u32 begin_of(int i) {
    return i == 0   ? 0
           : i == 1 ? Layout::k_extra
           : i == 2 ? Layout::v_nibbles
           : i == 3 ? Layout::v_extra
           : i == 4 ? Layout::k_scales
           : i == 5 ? Layout::v_scales
                    : Layout::bytes;
}

template <int P>
__device__ inline Piece piece_of(int i) {
    if (PIECES == 1) return {0, 0, Page<P>::bytes};
    const u32 to = begin_of<Page<P>>(i), size = begin_of<Page<P>>(i + 1) - to;
    return {begin_of<Page<P, PAGE_HEADS>>(i) + blockIdx.z * size, to, size};
}

__device__ inline void copy_piece(const Pages& pages, int id, int i, u32 to, u32 barrier) {
    const Piece piece = pages.rows ? piece_of<ROWS_P>(i) : piece_of<KEPT_P>(i);
    if (piece.size) bulk_copy(to + piece.to, pages.pool + (i64)id * pages.stride + piece.from, piece.size, barrier);
}

// By a warp; ids: shared.
__device__ inline void fill(const Pages& pages, const int* ids, int stage, const Ring& ring) {
    const int lane = threadIdx.x & 31, per = pages.per_unit(), bytes = pages.bytes();
    const u32 to = ring.stages + stage * STAGE, barrier = ring.full + 8 * stage;
    if (lane == 0) barrier_expect(barrier, per * bytes);
    __syncwarp();
    if (PIECES == 1) {
        if (lane < per) copy_piece(pages, ids[lane], 0, to + lane * bytes, barrier);
    } else {
        for (int i = lane; i < per * PIECES; i += 32)
            copy_piece(pages, ids[i / PIECES], i % PIECES, to + i / PIECES * bytes, barrier);
    }
}

// The first STAGES + 1 units, a page a thread, of a unit in as many warps as possible: a warp issues its copies one by one. Ids
// are read before it is known how many there are; the last one is any that is there, for pages past the end.
__device__ inline void look_up(int (&ids)[FIRST + 1], const Pages& pages, const Turns& turns) {
    const int per = pages.per_unit();
#pragma unroll
    for (int j = 0; j < FIRST; j++) {
        const int copy = j * THREADS + (threadIdx.x & 31) * WARPS + (threadIdx.x >> 5);
        const i64 i = (i64)turns.unit(pages.rows, copy / per) * per + copy % per;
        ids[j] = copy < (STAGES + 1) * per ? read_fresh(pages.table + (i < pages.width ? i : pages.width - 1)) : 0;
    }
    ids[FIRST] = read_fresh(pages.table);
}

// Fills the ring, which is free from where it stands on, with the block's units from `from` to `to`.
__device__ inline void start(int (&ids)[FIRST + 1], const Pages& pages, int count, const Turns& turns, int stage,
                             const Ring& ring, int from = 0, int to = STAGES + 1) {
    const int per = pages.per_unit(), bytes = pages.bytes();
#pragma unroll
    for (int j = 0; j < FIRST; j++) {
        const int copy = j * THREADS + (threadIdx.x & 31) * WARPS + (threadIdx.x >> 5);
        const int n = copy / per, page = copy % per, unit = turns.unit(pages.rows, n);
        if (n < from || n >= to || unit >= units_of(pages.rows, count)) continue;
        const int id = unit * per + page < count ? ids[j] : ids[FIRST];
        if (n == STAGES) {
            ring.ids[n % WAITING][page] = id;
            continue;
        }
        const int at = (stage + n) % STAGES;
        if (page == 0) barrier_expect(ring.full + 8 * at, per * bytes);
#pragma unroll 1
        for (int i = 0; i < PIECES; i++)
            copy_piece(pages, id, i, ring.stages + at * STAGE + page * bytes, ring.full + 8 * at);
    }
}

// `number` units; `rest`: tokens of the last one, UNIT or fewer.
__device__ inline void attend_units(State& s, const Pages& pages, bool rows, int count, const Turns& turns, int number,
                                    int rest, Place& place, const Ring& ring, int head, int tile, Masses masses) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, per = PICK(rows, per_unit), log = PICK(rows, log);
    const Places places(rows, head, tile);
#pragma unroll 1
    for (int n = 0; n < number; n++) {
        const int left = (n == number - 1 ? rest : UNIT) - tile * 16;  // tokens from this warp's tile on
        const bool ahead = n + STAGES + 1 < number && n % WARPS == warp;
        int id = 0;
        if (ahead) id = read_id(pages, turns.unit(rows, n + STAGES + 1), count);
        barrier_wait(ring.full + 8 * place.stage, place.parity);
        if (left > 0)
            attend_tile(s, places, ring.stages + place.stage * STAGE, tile, left, log,
                        MASS ? turns.unit(rows, n) * per : 0, masses);
        if (ahead && lane < per) ring.ids[(n + STAGES + 1) % WAITING][lane] = id;
        __syncwarp();
        if (n + STAGES < number) {
            u32 done = 0;
            if (lane == 0)
                asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;"
                             : "=r"(done)
                             : "r"(ring.counters + 4 * place.stage)
                             : "memory");
            if (__shfl_sync(ALL, done, 0) == WARPS - 1) {
                if (lane == 0) asm volatile("st.shared.u32 [%0], 0;" ::"r"(ring.counters + 4 * place.stage) : "memory");
                fill(pages, ring.ids[(n + STAGES) % WAITING], place.stage, ring);
            }
        }
        place.advance();
    }
}

// Combines the warps of each head and writes the block's part of the result. Every stage has been read: its memory is free.
__device__ inline void write_part(State& s, float* sums, const float* v_stats, int head, int tile, float* part,
                                  float* part_lse, int n_part) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float* references = sums + WARPS * 8 * SUM_ROW;  // [WARPS, 8]
    float* lengths = references + WARPS * 8;         // [WARPS, 8]
    // Sum up over the lanes that hold the same queries.
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int across = 4; across < 32; across *= 2) {
            s.l[i] += __shfl_xor_sync(ALL, s.l[i], across);
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
                s.zero[group][i] += __shfl_xor_sync(ALL, s.zero[group][i], across);
        }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (g == 0) {
            references[warp * 8 + 2 * t + i] = s.offset[i] - s.start[i];
            lengths[warp * 8 + 2 * t + i] = s.l[i];
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float rest = s.zero[c * 32 / GROUP][i], unit = half ? 1048576.f : 16777216.f;
                float2 both;
                both.x = fmaf(s.out[c][half][i], unit, rest);
                both.y = fmaf(s.out[c][half][i + 2], unit, rest);
                *(float2*)(sums + (warp * 8 + 2 * t + i) * SUM_ROW + half * (DIM / 2) + 16 * c + 2 * g) = both;
            }
    }
    __syncthreads();
#pragma unroll 2
    for (int i = threadIdx.x; i < HEADS * QUERIES * DIM / 4; i += THREADS) {
        const int query = i / (DIM / 4), kv = query / QUERIES, in_head = query % QUERIES, channel = i % (DIM / 4) * 4;
        float top = FAR, length = 0.f;
#pragma unroll
        for (int other = 0; other < TILES; other++) top = fmaxf(top, references[(other * HEADS + kv) * 8 + in_head]);
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int other = 0; other < TILES; other++) {
            const int at = (other * HEADS + kv) * 8 + in_head;
            const float factor = exp2_(references[at] - top);
            const float4 x = *(const float4*)(sums + at * SUM_ROW + channel);
            length = fmaf(lengths[at], factor, length);
            sum.x = fmaf(x.x, factor, sum.x), sum.y = fmaf(x.y, factor, sum.y);
            sum.z = fmaf(x.z, factor, sum.z), sum.w = fmaf(x.w, factor, sum.w);
        }
        const float share = __fdividef(1.f, length);
        const float4 scale = *(const float4*)(v_stats + kv * DIM + channel);
        const float4 mean = *(const float4*)(v_stats + (HEADS + kv) * DIM + channel);
        sum.x = fmaf(sum.x * share, scale.x, mean.x), sum.y = fmaf(sum.y * share, scale.y, mean.y);
        sum.z = fmaf(sum.z * share, scale.z, mean.z), sum.w = fmaf(sum.w * share, scale.w, mean.w);
        *(float4*)(part + (i64)query * n_part * DIM + channel) = sum;
        if (channel == 0) part_lse[(i64)query * n_part] = top + log2_(length);
    }
}

// Grid (blocks, B, PAGE_HEADS / HEADS). part float32 [B, PAGE_HEADS * QUERIES, n_part, DIM] and part_lse [.., n_part]: results of pieces of DENSE
// dense slots, then of blocks where there may be pages, and their log2-sum-exps (-inf: none, and part is not written).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    decode(const u16* q, const u16* dense_k, const u16* dense_v, const int* dense_len, const u8* kept,
           const int* kept_table, const int* kept_count, float* kept_mass, const u8* rows, const int* rows_table,
           const int* rows_count, float* rows_mass, const i64* order, const float* k_mean, const float* k_scale,
           const float* v_mean, const float* v_scale, float* part, float* part_lse, float scaling, int dense_slots, int n_part,
           int kept_width, int rows_width, int q_batch, int q_head, int dense_batch, int dense_head, int dense_token,
           u32 eighth, int kept_stride, int rows_stride, int early) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u64 barriers[STAGES];
    __shared__ u32 counters[STAGES];
    __shared__ int waiting[WAITING][PER_UNIT];
    __shared__ Pages pages[2];  // of either kind
    start_next();  // it waits for the end of this kernel
    const int warp = threadIdx.x >> 5, batch = blockIdx.y, pieces = (dense_slots + DENSE - 1) / DENSE;
    const int n_jobs = pieces * HEADS;
    const Turns turns = {(int)blockIdx.x, (int)gridDim.x, min(n_jobs, max(1, (int)gridDim.x / 2))};
    const Ring ring = {opaque(shared_address(shared)), opaque(shared_address(barriers)), opaque(shared_address(counters)),
                       waiting};
    if (threadIdx.x == 0) {
        pages[0] = {kept, kept_table + (i64)batch * kept_width, kept_count + batch, kept_width, kept_stride, false};
        pages[1] = {rows, rows_table + (i64)batch * rows_width, rows_count + batch, rows_width, rows_stride, true};
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.full + 8 * i, 1);
            counters[i] = 0;
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (!early) wait_for_previous();
    const int first_head = (int)blockIdx.z * HEADS;
    q += (i64)batch * q_batch + (i64)first_head * QUERIES * q_head;
    k_mean += first_head * DIM, k_scale += first_head * DIM;
    v_mean += first_head * DIM, v_scale += first_head * DIM;
    scaling *= LOG2E;
    const i64 first_query = ((i64)batch * PAGE_HEADS + first_head) * QUERIES, row = first_query * n_part + pieces + turns.own;
    const bool packed = kept_table || rows_table;
    const bool has_dense = turns.own < turns.busy;
    const Queries queries = {q, q_head, order, k_mean, k_scale};
    Place place = {0, 0};
    Requested asked;
    int ids[FIRST + 1], row_ids[FIRST + 1], n_kept = 0, n_rows = 0;
    const bool together = !early && rows_table;  // rows take the stages that kept pages leave
    if (kept_table) {
        look_up(ids, pages[0], turns);
        n_kept = kept_count[batch];
    }
    if (together) {
        look_up(row_ids, pages[1], turns);
        n_rows = rows_count[batch];
    }
    if (packed && !has_dense) asked.request(queries, warp);
    if (kept_table) start(ids, pages[0], n_kept, turns, 0, ring);
    const int kept_number = turns.number(false, units_of(false, n_kept));
    if (together && kept_number < STAGES)
        start(row_ids, pages[1], n_rows, turns, kept_number, ring, 0, STAGES - kept_number);
    float* weights = (float*)(shared + RING);
    if (has_dense) {
        for (int job = turns.own; job < n_jobs; job += turns.busy) {
            const int head = job % HEADS, piece = job / HEADS, first = piece * DENSE;
            const i64 at = (i64)batch * dense_batch + (i64)(first_head + head) * dense_head + (i64)first * dense_token;
            const i64 to = (first_query + head * QUERIES) * n_part + piece;
            attend_dense(weights, q + (i64)head * QUERIES * q_head, q_head, dense_k + at, dense_v + at, dense_token,
                         dense_slots - first, dense_len + batch, first, scaling, part + to * DIM, part_lse + to, n_part);
        }
        if (packed) asked.request(queries, warp);
    }
    if (!packed) return wait_for_previous();  // every block, or this kernel could end before those ahead
    const auto write_nothing = [&]() {
        wait_for_previous();
        if (threadIdx.x < HEADS * QUERIES) part_lse[row + (i64)threadIdx.x * n_part] = __int_as_float(0xFF800000);
    };
    if ((!early || !rows_table) && !kept_number && !turns.number(true, units_of(true, n_rows))) return write_nothing();
    normalise(weights, queries, asked, scaling);
    __syncthreads();
    const int head = warp % HEADS, tile = warp / HEADS;
    State s;
    s.eighth = eighth;
    prepare(s, weights, head);
    __syncthreads();
    const u32 v_stats = shared_address(weights);  // [2, HEADS, DIM]: scale, mean; used at the end
    for (int i = threadIdx.x; i < HEADS * DIM; i += THREADS) {
        copy4(v_stats + 4 * i, v_scale + i);
        copy4(v_stats + 4 * (HEADS * DIM + i), v_mean + i);
    }
    const i64 first = first_query + head * QUERIES;
    bool some = false;
    int count = n_kept;
    Masses masses = {kept_mass + first * kept_width, kept_width};
#pragma unroll 1
    for (bool second = false;; second = true) {
        const int units = units_of(second, count), number = turns.number(second, units);
        if (number) {
            const int spare = units * UNIT - (count << (second ? Page<ROWS_P>::log : Page<KEPT_P>::log));
            const int rest = turns.unit(second, number - 1) == units - 1 ? UNIT - spare : UNIT;
            attend_units(s, pages[second], second, count, turns, number, rest, place, ring, head, tile, masses);
            some = true;
        }
        if (second || !rows_table) break;
        wait_for_previous();
        masses = {rows_mass + first * rows_width, rows_width};
        count = read_fresh(rows_count + batch);
        int begun = 0;
        if (!early) {  // read anew: fewer registers
            begun = max(STAGES - turns.number(false, units_of(false, kept_table ? read_fresh(kept_count + batch) : 0)), 0);
            if (turns.number(true, units_of(true, count)) <= begun) continue;
        }
        look_up(ids, pages[1], turns);
        __syncthreads();  // every other stage is free
        start(ids, pages[1], count, turns, place.stage, ring, begun);
    }
    wait_for_previous();
    wait_copies();
    if (some) write_part(s, (float*)shared, weights, head, tile, part + row * DIM, part_lse + row, n_part);
    else write_nothing();
}
