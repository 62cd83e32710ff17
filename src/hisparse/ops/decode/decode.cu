// Decode attention over packed pages. See cuda.py for the launch and docs/performance.md for the reasoning.
//
// Macros: HEADS (KV heads), QUERIES (query heads a KV head, at most 8), DIM (64, 128, 256), GROUP (channels that share
// a step; 64 or a multiple), K_BITS, V_BITS (4 or 5), SPLIT (1: five-bit K is split in six and four bits), BF16 (dtype of
// q and the dense slots; 0: float16), KEPT_P and ROWS_P (tokens a page; of a kind that is absent, any), TILES (tiles of
// 16 tokens a stage), STAGES, BLOCKS (blocks a multiprocessor), MASS (1: write each page's log-sum-exp), MULTIPLY (1:
// shift by multiplication).
//
// A block has its turns at the units of one sequence's pages; a unit is what a stage holds. Whole pages are copied into
// shared memory, stage by stage (bulk copies that complete on a barrier); HEADS * TILES warps each take one KV head of 16
// tokens of a stage, and the last to be done with a stage has it filled again. Codes are masked, not converted: a masked
// field read as float16 is the subnormal code * 2^-24, which the matrix units multiply exactly.
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

// Which units a block has. Blocks from `early` on start late, when the kernels ahead leave them a multiprocessor; so the
// first `ahead` rounds of kept pages are shared by the others. Rows come to all alike, to the last block first.
struct Turns {
    int own, blocks, early, ahead;
    __device__ inline int kept(int n) const {
        const int rounds = own < early ? ahead : 0;
        return n < rounds ? n * early + own : ahead * early + (n - rounds) * blocks + own;
    }
    __device__ inline int rows(int n) const { return (n + 1) * blocks - 1 - own; }
};

struct Pages {
    const u8* pool;
    const int *table, *count;  // of the sequence; null: none
    int width, stride;         // entries of the table, bytes from page to page
};

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

template <int P>
__device__ inline int units_of(int count) {
    return (int)(((i64)count * P + UNIT - 1) / UNIT);
}

// The page that this lane copies for a unit; past the last one that, which is masked later.
template <int P>
__device__ inline int read_id(const Pages& pages, int unit, int count) {
    constexpr int per = Page<P>::per_unit;
    const int lane = threadIdx.x & 31, i = unit * per + (lane < per ? lane : 0);
    return read_fresh(pages.table + (i < count ? i : count - 1));
}

template <int P>
__device__ inline void fill(const Pages& pages, int id, int stage, const Ring& ring) {
    constexpr int per = Page<P>::per_unit, bytes = Page<P>::bytes;
    const int lane = threadIdx.x & 31;
    if (lane == 0) barrier_expect(ring.full + 8 * stage, per * bytes);
    __syncwarp();
    if (lane < per)
        bulk_copy(ring.stages + stage * STAGE + lane * bytes, pages.pool + (i64)id * pages.stride, bytes,
                  ring.full + 8 * stage);
}

// The first STAGES + 1 units, a page a thread, of a unit in as many warps as possible: a warp issues its copies one by one. Ids
// are read before it is known how many there are; the last one is any that is there, for pages past the end.
template <int P, class Turn>
__device__ inline void look_up(int (&ids)[FIRST + 1], const Pages& pages, Turn turn) {
    constexpr int per = Page<P>::per_unit;
#pragma unroll
    for (int j = 0; j < FIRST; j++) {
        const int copy = j * THREADS + (threadIdx.x & 31) * WARPS + (threadIdx.x >> 5);
        const i64 i = (i64)turn(copy / per) * per + copy % per;
        ids[j] = copy < (STAGES + 1) * per ? read_fresh(pages.table + (i < pages.width ? i : pages.width - 1)) : 0;
    }
    ids[FIRST] = read_fresh(pages.table);
}

// Fills the ring, all of which is free, from where it stands on.
template <int P, class Turn>
__device__ inline void start(int (&ids)[FIRST + 1], const Pages& pages, int count, Turn turn, int stage, const Ring& ring) {
    constexpr int per = Page<P>::per_unit, bytes = Page<P>::bytes;
#pragma unroll
    for (int j = 0; j < FIRST; j++) {
        const int copy = j * THREADS + (threadIdx.x & 31) * WARPS + (threadIdx.x >> 5);
        const int n = copy / per, page = copy % per, unit = turn(n);
        if (n > STAGES || unit >= units_of<P>(count)) continue;
        const int id = unit * per + page < count ? ids[j] : ids[FIRST];
        if (n == STAGES) {
            ring.ids[n % WAITING][page] = id;
            continue;
        }
        const int to = (stage + n) % STAGES;
        if (page == 0) barrier_expect(ring.full + 8 * to, per * bytes);
        bulk_copy(ring.stages + to * STAGE + page * bytes, pages.pool + (i64)id * pages.stride, bytes, ring.full + 8 * to);
    }
}

template <int P, class Turn>
__device__ inline void attend_units(State& s, const Pages& pages, int count, Turn turn, Place& place, const Ring& ring,
                                    int head, int tile, Masses masses) {
    constexpr int per = Page<P>::per_unit;
    const int units = units_of<P>(count), warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (turn(0) >= units) return;
    const Places<P> places(head, tile);
#pragma unroll 1
    for (int n = 0;; n++) {
        const int unit = turn(n);
        if (unit >= units) return;
        const int left = count * P - unit * UNIT - tile * 16;  // tokens from this warp's tile on
        const bool more = turn(n + STAGES) < units, ahead = n % WARPS == warp && turn(n + STAGES + 1) < units;
        int id = 0;
        if (ahead) id = read_id<P>(pages, turn(n + STAGES + 1), count);
        barrier_wait(ring.full + 8 * place.stage, place.parity);
        if (left > 0)
            attend_tile<P>(s, places, ring.stages + place.stage * STAGE, tile, left, unit * Page<P>::per_unit, masses);
        if (ahead && lane < per) ring.ids[(n + STAGES + 1) % WAITING][lane] = id;
        __syncwarp();
        if (more) {
            u32 done = 0;
            if (lane == 0)
                asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;"
                             : "=r"(done)
                             : "r"(ring.counters + 4 * place.stage)
                             : "memory");
            if (__shfl_sync(ALL, done, 0) == WARPS - 1) {
                if (lane == 0) asm volatile("st.shared.u32 [%0], 0;" ::"r"(ring.counters + 4 * place.stage) : "memory");
                fill<P>(pages, ring.ids[(n + STAGES) % WAITING][lane < per ? lane : 0], place.stage, ring);
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

// Grid (blocks, B). part float32 [B, HEADS * QUERIES, n_part, DIM] and part_lse [.., n_part]: results of pieces of DENSE
// dense slots, then of blocks where there may be pages, and their log2-sum-exps (-inf: none, and part is not written).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    decode(const u16* q, const u16* dense_k, const u16* dense_v, const int* dense_len, const u8* kept,
           const int* kept_table, const int* kept_count, float* kept_mass, const u8* rows, const int* rows_table,
           const int* rows_count, float* rows_mass, const i64* order, const float* k_mean, const float* k_scale,
           const float* v_mean, const float* v_scale, float* part, float* part_lse, float scaling, int dense_slots, int n_part,
           int kept_width, int rows_width, int q_batch, int q_head, int dense_batch, int dense_head, int dense_token,
           u32 eighth, int kept_stride, int rows_stride, int early, int late, int ahead) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u64 barriers[STAGES];
    __shared__ u32 counters[STAGES];
    __shared__ int waiting[WAITING][PER_UNIT];
    start_next();  // it waits for the end of this kernel
    const int warp = threadIdx.x >> 5, batch = blockIdx.y, pieces = (dense_slots + DENSE - 1) / DENSE;
    const Turns turns = {(int)blockIdx.x, (int)gridDim.x, (int)gridDim.x - late, ahead};
    const auto turn_kept = [&](int n) { return turns.kept(n); };
    const auto turn_rows = [&](int n) { return turns.rows(n); };
    const Ring ring = {opaque(shared_address(shared)), opaque(shared_address(barriers)), opaque(shared_address(counters)),
                       waiting};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.full + 8 * i, 1);
            counters[i] = 0;
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (!early) wait_for_previous();
    const Pages kept_pages = {kept, kept_table + (i64)batch * kept_width, kept_count + batch, kept_width, kept_stride};
    const Pages row_pages = {rows, rows_table + (i64)batch * rows_width, rows_count + batch, rows_width, rows_stride};
    q += (i64)batch * q_batch;
    scaling *= LOG2E;
    const i64 first_query = (i64)batch * HEADS * QUERIES, row = first_query * n_part + pieces + turns.own;
    const bool packed = kept_table || rows_table;
    // The last of the early blocks take dense slots: kept pages come to the first ones first.
    const int first_job = turns.own < turns.early ? turns.early - 1 - turns.own : pieces * HEADS;
    const bool has_dense = first_job < pieces * HEADS;
    const Queries queries = {q, q_head, order, k_mean, k_scale};
    Place place = {0, 0};
    Requested asked;
    int ids[FIRST + 1], n_kept = 0, n_rows = 0;
    if (kept_table) {
        look_up<KEPT_P>(ids, kept_pages, turn_kept);
        n_kept = kept_count[batch];
    }
    if (packed && !has_dense) asked.request(queries, warp);
    if (kept_table) start<KEPT_P>(ids, kept_pages, n_kept, turn_kept, 0, ring);
    float* weights = (float*)(shared + RING);
    if (has_dense) {
        for (int job = first_job; job < pieces * HEADS; job += turns.early) {
            const int head = job % HEADS, piece = job / HEADS, first = piece * DENSE;
            const i64 at = (i64)batch * dense_batch + (i64)head * dense_head + (i64)first * dense_token;
            const i64 to = (first_query + head * QUERIES) * n_part + piece;
            attend_dense(weights, q + (i64)head * QUERIES * q_head, q_head, dense_k + at, dense_v + at, dense_token,
                         dense_slots - first, dense_len + batch, first, scaling, part + to * DIM, part_lse + to, n_part);
        }
        if (packed) asked.request(queries, warp);
    }
    if (!packed) return;
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
    bool some = turns.kept(0) < units_of<KEPT_P>(n_kept);
    attend_units<KEPT_P>(s, kept_pages, n_kept, turn_kept, place, ring, head, tile,
                         {kept_mass + first * kept_width, kept_width});
    if (rows_table) {
        wait_for_previous();
        look_up<ROWS_P>(ids, row_pages, turn_rows);
        n_rows = read_fresh(row_pages.count);
        __syncthreads();  // every stage is free
        start<ROWS_P>(ids, row_pages, n_rows, turn_rows, place.stage, ring);
        some |= turns.rows(0) < units_of<ROWS_P>(n_rows);
        attend_units<ROWS_P>(s, row_pages, n_rows, turn_rows, place, ring, head, tile,
                             {rows_mass + first * rows_width, rows_width});
    }
    wait_copies();
    if (some) write_part(s, (float*)shared, weights, head, tile, part + row * DIM, part_lse + row, n_part);
    else if (threadIdx.x < HEADS * QUERIES) part_lse[row + (i64)threadIdx.x * n_part] = __int_as_float(0xFF800000);
}
