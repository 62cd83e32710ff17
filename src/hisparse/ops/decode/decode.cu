// Decode attention over packed pages. See cuda.py for the launch and docs/performance.md for the reasoning.
//
// Macros: HEADS (KV heads), QUERIES (query heads a KV head, at most 8), DIM (64, 128, 256), GROUP (channels that share
// a step; 64 or a multiple), K_BITS, V_BITS (4 or 5), SPLIT (1: five-bit K is split in six and four bits), BF16 (dtype of
// q and the dense slots; 0: float16), KEPT_P and ROWS_P (tokens a page; of a kind that is absent, any), TILES (tiles of
// 16 tokens a stage), STAGES, BLOCKS (blocks a multiprocessor), MASS (1: write each page's log-sum-exp), CHUNK (dense
// slots a block), MULTIPLY (1: shift by multiplication).
//
// A block walks through a share of one sequence's pages. Whole pages are copied into shared memory, stage by stage (bulk
// copies that complete on a barrier); HEADS * TILES warps each take one KV head of 16 tokens of a stage, and the last to
// be done with a stage has it filled again.
// Codes are masked, not converted: a masked field read as float16 is the subnormal code * 2^-24, which the matrix units
// multiply exactly.

#include "ptx.cuh"
#include "tile.cuh"

// A warp may be STAGES units ahead of another, so more page ids than that are waiting.
constexpr int RING = 16;
static_assert(STAGES + 2 <= RING, "too many stages");

// What a block has to go through: units of kept pages, then units of rows, counted from 0.
struct Work {
    const u8* pools[2];
    const int* tables[2];  // from the block's first page on
    int counts[2];         // pages of the sequence from there on
    int strides[2];        // bytes from page to page
    int kept, all;         // units
    int ids[RING][32];     // pages of unit n, at n % RING: read by one warp a unit ahead of the warp that needs them

    // The page that this lane copies for unit n; past the end one that is there, which is masked later.
    __device__ inline int page(int n) const {
        const bool second = n >= kept;
        const int per = second ? Page<ROWS_P>::per_unit : Page<KEPT_P>::per_unit;
        const int lane = threadIdx.x & 31, i = (second ? n - kept : n) * per + (lane < per ? lane : 0);
        int id;
        asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(id) : "l"(tables[second] + min(i, counts[second] - 1)));
        return id;
    }

    __device__ inline void fill(int n, int stage, int id, u32 stages, u32 full) const {
        const int lane = threadIdx.x & 31;
        const bool second = n >= kept;
        const int per = second ? Page<ROWS_P>::per_unit : Page<KEPT_P>::per_unit;
        const int bytes = second ? Page<ROWS_P>::bytes : Page<KEPT_P>::bytes;
        if (lane == 0) barrier_expect(full + 8 * stage, per * bytes);
        __syncwarp();
        if (lane < per) bulk_copy(stages + stage * STAGE + lane * bytes, pools[second] + (i64)id * strides[second], bytes,
                                  full + 8 * stage);
    }
};

template <int P>
__device__ inline void attend_units(State& s, Work& work, u32 stages, u32 full, u32 counters, int head, int tile,
                                    int begin, int end, int pages, Masses masses, int first_page, int& stage, u32& parity) {
    if (begin == end) return;
    const Places<P> places(head, tile);
    const int all = work.all, warp = threadIdx.x >> 5;
    int left = pages * P - tile * 16;  // tokens from this warp's tile on
    for (int n = begin; n < end; n++, left -= UNIT, first_page += Page<P>::per_unit) {
        const bool more = n + STAGES < all, ahead = n % WARPS == warp && n + STAGES + 1 < all;
        int id = 0;
        if (ahead) id = work.page(n + STAGES + 1);
        barrier_wait(full + 8 * stage, parity);
        if (left > 0) attend_tile<P>(s, places, stages + stage * STAGE, tile, left, first_page, masses);
        if (ahead) work.ids[(n + STAGES + 1) % RING][threadIdx.x & 31] = id;
        __syncwarp();
        if (more) {
            u32 done = 0;
            if ((threadIdx.x & 31) == 0)
                asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;"
                             : "=r"(done)
                             : "r"(counters + 4 * stage)
                             : "memory");
            if (__shfl_sync(ALL, done, 0) == WARPS - 1) {
                if ((threadIdx.x & 31) == 0)
                    asm volatile("st.shared.u32 [%0], 0;" ::"r"(counters + 4 * stage) : "memory");
                work.fill(n + STAGES, stage, work.ids[(n + STAGES) % RING][threadIdx.x & 31], stages, full);
            }
        }
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
}

// All queries of the block, normalised and permuted: weights [HEADS * QUERIES, DIM], and their products with the mean
// keys [HEADS * QUERIES].
__device__ inline void normalise(float* weights, float* means, const u16* q, int q_stride, const i64* order,
                                 const float* k_mean, const float* k_scale, float scaling) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    constexpr int PER = DIM / 32;
    int channel[PER];
#pragma unroll
    for (int c = 0; c < PER; c++) channel[c] = (int)order[lane + 32 * c];
#pragma unroll 2
    for (int row = warp; row < HEADS * QUERIES; row += WARPS) {
        const int at = row / QUERIES * DIM;
        float mean = 0.f, x[PER], scale[PER];
#pragma unroll
        for (int c = 0; c < PER; c++) {
            x[c] = number(q[(i64)row * q_stride + channel[c]]) * scaling;
            scale[c] = k_scale[at + channel[c]];
            mean = fmaf(x[c], k_mean[at + channel[c]], mean);
        }
#pragma unroll
        for (int c = 0; c < PER; c++) weights[row * DIM + lane + 32 * c] = x[c] * scale[c];
#pragma unroll
        for (int across = 1; across < 32; across *= 2) mean += __shfl_xor_sync(ALL, mean, across);
        if (lane == 0) means[row] = mean;
    }
}

// Fragments of q for one warp's head, times 2^k so that the largest lies in [512, 1024).
__device__ inline void prepare(State& s, const float* weights, const float* means) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    auto weight = [&](int place) -> float {  // of query g at a stored place of K
        return g < QUERIES ? weights[g * DIM + place] : 0.f;
    };
    float largest = 0.f;
#pragma unroll 8
    for (int i = lane; i < QUERIES * DIM; i += 32)
        largest = fmaxf(largest, fabsf(weights[i]) * (SPLIT && K_BITS == 5 ? 4.2f : 1.f));
#pragma unroll
    for (int across = 1; across < 32; across *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, across));
    // Exponent of the largest weight; its float16 form may be scaled by up to 16 and down by up to 512.
    int exponent = (int)(__float_as_uint(largest) >> 23) - 127;
    exponent = exponent < -100 ? -100 : exponent > 100 ? 100 : exponent;
    const float up = bits((u32)(127 + 9 - exponent) << 23);
    s.unit = bits((u32)(127 + 24 - 9 + exponent) << 23);
    float sums[GROUPS];
#pragma unroll
    for (int group = 0; group < GROUPS; group++) sums[group] = 0.f;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 a[2], b[2];  // pairs (0, 2) and (1, 3) of the word's four
            const int pair = part * 32 + 8 * t + 4 * j;
            constexpr float ratio = SPLIT && K_BITS == 5 ? 4.2f : 1.f;
#pragma unroll
            for (int k = 0; k < 2; k++) {
                a[k] = halves(weight(pair + k) * up, weight(pair + k + 2) * up);
                b[k] = halves(weight(DIM / 2 + pair + k) * ratio * up, weight(DIM / 2 + pair + k + 2) * ratio * up);
                sums[part / (GROUP / 64)] += low_half(a[k]) + high_half(a[k]) + (low_half(b[k]) + high_half(b[k])) / ratio;
            }
#pragma unroll
            for (int k = 0; k < 2; k++) {
                s.weights[part][j][k][0] = a[k];
                s.weights[part][j][k][1] = times(b[k], -4);
            }
        }
    // From the lanes of query g to those that hold its columns.
#pragma unroll
    for (int i = 0; i < 2; i++) {
        s.offset[i] = 2 * t + i < QUERIES ? means[2 * t + i] : 0.f;
        s.start[i] = s.offset[i] - FAR;
        s.l[i] = 0.f;
    }
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        float sum = sums[group];
        sum += __shfl_xor_sync(ALL, sum, 1);
        sum += __shfl_xor_sync(ALL, sum, 2);
        sum /= up;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            s.sums[group][i] = __shfl_sync(ALL, sum, (2 * t + i) * 4);
            s.zero[group][i] = 0.f;
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) s.out[c][half][i] = 0.f;
}

// Attention over up to CHUNK dense slots of one KV head, by the whole block.
__device__ void attend_dense(u8* shared, const u16* q, int q_stride, const u16* k, const u16* v, int token_stride, int slots,
                             float scaling, float* part, float* part_lse, int n_part) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    constexpr int PER = DIM / 32;
    float* scores = (float*)shared;                // [slots, 8]
    float* total = scores + CHUNK * 8;             // [8]: sum, then [8]: reference
    float* sums = total + 16;                      // [8, DIM]
    float x[8][PER];
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int c = 0; c < PER; c++)
            x[i][c] = i < QUERIES ? number(q[(i64)i * q_stride + lane * PER + c]) * scaling : 0.f;
    auto load = [&](float (&y)[PER], const u16* from) {
#pragma unroll
        for (int c = 0; c < PER; c += 2) {
            const u32 both = *(const u32*)(from + lane * PER + c);
            y[c] = number((u16)both);
            y[c + 1] = number((u16)(both >> 16));
        }
    };
#pragma unroll 2
    for (int slot = warp; slot < slots; slot += WARPS) {
        float y[PER], dot[8];
        load(y, k + (i64)slot * token_stride);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            dot[i] = 0.f;
#pragma unroll
            for (int c = 0; c < PER; c++) dot[i] = fmaf(x[i][c], y[c], dot[i]);
        }
        // Each exchange halves the number of queries a lane sums up.
#pragma unroll
        for (int width = 4, across = 16; width; width /= 2, across /= 2)
#pragma unroll
            for (int i = 0; i < width; i++) {
                const bool upper = lane & across;
                const float give = upper ? dot[i] : dot[i + width], keep = upper ? dot[i + width] : dot[i];
                dot[i] = keep + __shfl_xor_sync(ALL, give, across);
            }
        dot[0] += __shfl_xor_sync(ALL, dot[0], 1);
        dot[0] += __shfl_xor_sync(ALL, dot[0], 2);
        const int query = (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
        if ((lane & 3) == 0) scores[slot * 8 + query] = dot[0];
    }
    for (int i = threadIdx.x; i < 8 * DIM; i += THREADS) sums[i] = 0.f;
    __syncthreads();
    for (int query = warp; query < QUERIES; query += WARPS) {
        float top = FAR, sum = 0.f;
        for (int slot = lane; slot < slots; slot += 32) top = fmaxf(top, scores[slot * 8 + query]);
#pragma unroll
        for (int across = 1; across < 32; across *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, across));
        for (int slot = lane; slot < slots; slot += 32) {
            const float p = exp2_(scores[slot * 8 + query] - top);
            scores[slot * 8 + query] = p;
            sum += p;
        }
#pragma unroll
        for (int across = 1; across < 32; across *= 2) sum += __shfl_xor_sync(ALL, sum, across);
        if (lane == 0) {
            total[query] = sum;
            total[8 + query] = top;
        }
    }
    __syncthreads();
    float acc[8][PER];
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int c = 0; c < PER; c++) acc[i][c] = 0.f;
#pragma unroll 4
    for (int slot = warp; slot < slots; slot += WARPS) {
        float y[PER];
        load(y, v + (i64)slot * token_stride);
#pragma unroll
        for (int i = 0; i < QUERIES; i++)
#pragma unroll
            for (int c = 0; c < PER; c++) acc[i][c] = fmaf(scores[slot * 8 + i], y[c], acc[i][c]);
    }
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
#pragma unroll
        for (int c = 0; c < PER; c++) atomicAdd(&sums[i * DIM + lane * PER + c], acc[i][c]);
    __syncthreads();
    for (int i = threadIdx.x; i < QUERIES * DIM; i += THREADS) {
        const int query = i / DIM;
        if (slots > 0) part[(i64)query * n_part * DIM + i % DIM] = sums[i] / total[query];
        if (i % DIM == 0)
            part_lse[(i64)query * n_part] = slots > 0 ? total[8 + query] + log2_(total[query]) : __int_as_float(0xFF800000);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    decode(const u16* q, const u16* dense_k, const u16* dense_v, const int* dense_len, const u8* kept,
           const int* kept_table, const int* kept_count, float* kept_mass, const u8* rows, const int* rows_table,
           const int* rows_count, float* rows_mass, const i64* order, const float* k_mean, const float* k_scale,
           const float* v_mean, const float* v_scale, float* part, float* part_lse, float scaling, int n_dense,
           int kept_width, int rows_width, int q_batch, int q_head, int dense_batch, int dense_head, int dense_token,
           u32 eighth, int kept_stride, int rows_stride) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u64 barriers[STAGES];
    __shared__ u32 counters[STAGES];
    const int batch = blockIdx.y, pieces = n_dense / HEADS;
    const int n_part = pieces + gridDim.x - n_dense;  // partial results of a query head: dense pieces first
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    q += (i64)batch * q_batch;
    const i64 first_query = (i64)batch * HEADS * QUERIES;
    scaling *= LOG2E;
    if ((int)blockIdx.x < n_dense) {
        const int head = blockIdx.x % HEADS, first = blockIdx.x / HEADS * CHUNK;
        const int slots = min(max(dense_len[batch] - first, 0), CHUNK);
        const i64 at = (i64)batch * dense_batch + (i64)head * dense_head + (i64)first * dense_token;
        const i64 row = (first_query + head * QUERIES) * n_part + blockIdx.x / HEADS;
        attend_dense(shared, q + (i64)head * QUERIES * q_head, q_head, dense_k + at, dense_v + at, dense_token, slots, scaling,
                     part + row * DIM, part_lse + row, n_part);
        return;
    }
    const int n_share = gridDim.x - n_dense, share = blockIdx.x - n_dense;
    const int n_kept = kept_count ? kept_count[batch] : 0, n_rows = rows_count ? rows_count[batch] : 0;
    const int kept_units = (int)(((i64)n_kept * KEPT_P + UNIT - 1) / UNIT);
    const int rows_units = (int)(((i64)n_rows * ROWS_P + UNIT - 1) / UNIT);
    const i64 units = (i64)kept_units + rows_units;
    const int begin = (int)(units * share / n_share), end = (int)(units * (share + 1) / n_share);
    const int own = pieces + share;
    if (begin == end) {
        for (int i = threadIdx.x; i < HEADS * QUERIES; i += THREADS)
            part_lse[(first_query + i) * n_part + own] = __int_as_float(0xFF800000);
        return;
    }
    const int kept_begin = min(begin, kept_units), rows_begin = max(begin, kept_units) - kept_units;
    const int kept_first = kept_begin * Page<KEPT_P>::per_unit, rows_first = rows_begin * Page<ROWS_P>::per_unit;
    __shared__ Work work;
    const u32 stages = opaque(shared_address(shared)), full = opaque(shared_address(barriers));
    if (threadIdx.x == 0) {
        work.pools[0] = kept, work.pools[1] = rows;
        work.strides[0] = kept_stride, work.strides[1] = rows_stride;
        work.tables[0] = kept_table + (i64)batch * kept_width + kept_first;
        work.tables[1] = rows_table + (i64)batch * rows_width + rows_first;
        work.counts[0] = n_kept - kept_first, work.counts[1] = n_rows - rows_first;
        work.kept = min(end, kept_units) - kept_begin, work.all = end - begin;
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            counters[i] = 0;
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    float* weights = (float*)(shared + (STAGES - 1) * STAGE);  // in the last stage, until q's fragments are made
    float* means = weights + HEADS * QUERIES * DIM;
    if (warp == 0) {
        __syncwarp();
        int ids[STAGES];
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) ids[i] = i < work.all ? work.page(i) : 0;
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++)
            if (i < work.all) work.fill(i, i, ids[i], stages, full);
        if (STAGES < work.all) work.ids[STAGES % RING][lane] = work.page(STAGES);
    }
    normalise(weights, means, q, q_head, order, k_mean, k_scale, scaling);
    __syncthreads();
    const int head = warp % HEADS, tile = warp / HEADS;
    State s;
    s.eighth = eighth;
    prepare(s, weights + head * QUERIES * DIM, means + head * QUERIES);
    __syncthreads();
    if (warp == 0 && STAGES - 1 < work.all) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // after ordinary stores to that stage
        work.fill(STAGES - 1, STAGES - 1, work.page(STAGES - 1), stages, full);
    }
    int stage = 0;
    u32 parity = 0;
    const i64 first = first_query + head * QUERIES;
    attend_units<KEPT_P>(s, work, stages, full, opaque(shared_address(counters)), head, tile, 0, work.kept, work.counts[0], {kept_mass + first * kept_width, kept_width}, kept_first, stage,
                         parity);
    attend_units<ROWS_P>(s, work, stages, full, opaque(shared_address(counters)), head, tile, work.kept, work.all, work.counts[1], {rows_mass + first * rows_width, rows_width}, rows_first,
                         stage, parity);
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
    // Combine the tiles of a head. Every stage has been read: its memory is free.
    float* heads = (float*)shared;                       // [HEADS, 8, DIM]
    float* references = heads + HEADS * 8 * DIM;         // [WARPS, 8]
    float* lengths = references + WARPS * 8;             // [WARPS, 8]
    __syncthreads();
    if (g == 0)
        for (int i = 0; i < 2; i++) {
            references[warp * 8 + 2 * t + i] = s.offset[i] - s.start[i];
            lengths[warp * 8 + 2 * t + i] = s.l[i];
        }
    __syncthreads();
    for (int turn_of = 0; turn_of < TILES; turn_of++) {
        if (tile == turn_of) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float top = FAR;
                for (int other = 0; other < TILES; other++)
                    top = fmaxf(top, references[(other * HEADS + head) * 8 + 2 * t + i]);
                const float factor = exp2_(s.offset[i] - s.start[i] - top);
#pragma unroll
                for (int c = 0; c < CHUNKS; c++) {
                    const int group = c * 32 / GROUP;
                    const float rest = s.zero[group][i];
#pragma unroll
                    for (int half = 0; half < 2; half++)
#pragma unroll
                        for (int odd = 0; odd < 2; odd++) {
                            const float code = s.out[c][half][i + 2 * odd] * (half ? 1048576.f : 16777216.f);
                            float& to = heads[(head * 8 + 2 * t + i) * DIM + half * (DIM / 2) + 16 * c + 2 * g + odd];
                            to = (turn_of ? to : 0.f) + factor * (code + rest);
                        }
                }
            }
        }
        __syncthreads();
    }
#pragma unroll 4
    for (int i = threadIdx.x; i < HEADS * QUERIES * DIM; i += THREADS) {
        const int query = i / DIM, kv = query / QUERIES, in_head = query % QUERIES, channel = i % DIM;
        const float scale = v_scale[kv * DIM + channel], mean = v_mean[kv * DIM + channel];
        float top = FAR, length = 0.f;
#pragma unroll
        for (int other = 0; other < TILES; other++) top = fmaxf(top, references[(other * HEADS + kv) * 8 + in_head]);
#pragma unroll
        for (int other = 0; other < TILES; other++) {
            const int at = (other * HEADS + kv) * 8 + in_head;
            length = fmaf(lengths[at], exp2_(references[at] - top), length);
        }
        const i64 row = (first_query + query) * n_part + own;
        part[row * DIM + channel] = fmaf(__fdividef(heads[(kv * 8 + in_head) * DIM + channel], length), scale, mean);
        if (channel == 0) part_lse[row] = top + log2_(length);
    }
}
