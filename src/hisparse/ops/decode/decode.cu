// Decode attention over packed pages. See cuda.py for the launch and docs/performance.md for the reasoning.
//
// Macros: HEADS (KV heads), QUERIES (query heads a KV head, at most 8), DIM (64, 128, 256), GROUP (channels that share
// a step; 64 or a multiple), K_BITS, V_BITS (4 or 5), SPLIT (1: five-bit K is split in six and four bits), BF16 (dtype of
// q and the dense slots; 0: float16), KEPT_P and ROWS_P (tokens a page), TILES (tiles of 16 tokens a stage), STAGES,
// BLOCKS (blocks a multiprocessor), MASS (1: write each page's log-sum-exp), CHUNK (dense slots a block).
//
// A block walks through a share of one sequence's pages. One warp copies whole pages into shared memory, stage by stage
// (bulk copies that complete on a barrier); HEADS * TILES warps each take one KV head of 16 tokens of a stage.
// Codes are masked, not converted: a masked field read as float16 is the subnormal code * 2^-24, which the matrix units
// multiply exactly.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int WARPS = HEADS * TILES;
constexpr int THREADS = 32 * (WARPS + 1);
constexpr int UNIT = 16 * TILES;  // tokens a stage
constexpr int GROUPS = DIM / GROUP;
constexpr int PARTS = DIM / 64;    // parts of 64 channels in which a thread reads K
constexpr int CHUNKS = DIM / 32;   // 16-byte pieces of a token's nibble plane
constexpr int EXTRA = DIM / 8;     // bytes of a token's extra plane
constexpr int PRODUCTS = K_BITS == 4 ? 2 : SPLIT ? 3 : 4;  // matrix products a word of K
constexpr float FAR = -1e30f;
constexpr float ROOM = 64.f;  // a weight beyond this moves the reference
constexpr float LOG2E = 1.4426950408889634f;
constexpr float CENTRE = V_BITS == 5 ? 15.5f : 7.5f;
constexpr u32 ALL = 0xFFFFFFFFu;

__host__ __device__ constexpr int aligned(int size) { return (size + 15) / 16 * 16; }

template <int P>
struct Page {
    static constexpr int k_extra = aligned(HEADS * P * DIM / 2);
    static constexpr int v_nibbles = k_extra + aligned(K_BITS == 5 ? HEADS * P * EXTRA : 0);
    static constexpr int v_extra = v_nibbles + aligned(HEADS * P * DIM / 2);
    static constexpr int k_scales = v_extra + aligned(V_BITS == 5 ? HEADS * P * EXTRA : 0);
    static constexpr int v_scales = k_scales + aligned(HEADS * GROUPS * 4);
    static constexpr int bytes = v_scales + aligned(HEADS * GROUPS * 4);
    static constexpr int per_unit = UNIT / P;
    static_assert(P == 0 || UNIT % (P ? P : 1) == 0, "a stage holds whole pages");
};
template <>
struct Page<0> {  // there are no such pages
    static constexpr int k_extra = 0, v_nibbles = 0, v_extra = 0, k_scales = 0, v_scales = 0, bytes = 0, per_unit = 1;
};

constexpr int KEPT_STAGE = Page<KEPT_P>::bytes * Page<KEPT_P>::per_unit;
constexpr int ROWS_STAGE = Page<ROWS_P>::bytes * Page<ROWS_P>::per_unit;
constexpr int STAGE = KEPT_STAGE > ROWS_STAGE ? KEPT_STAGE : ROWS_STAGE;

__device__ inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ inline void barrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ inline void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ inline void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ inline void barrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n .reg .pred done;\nagain:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
        " @done bra.uni over;\n bra.uni again;\nover:\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
__device__ inline void bulk_copy(u32 to, const u8* from, u32 bytes, u32 bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
        "r"(bytes), "r"(bar)
        : "memory");
}
__device__ inline void load2(u32 (&x)[2], u32 at) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at) : "memory");
}
__device__ inline u32 load1(u32 at) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}
__device__ inline u32 load_half(u32 at) {
    u16 x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at) : "memory");
    return x;
}
__device__ inline void load_transposed(u32& a, u32& b, u32& c, u32& d, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(at)
                 : "memory");
}
__device__ inline void load_transposed(u32& a, u32& b, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(at) : "memory");
}
__device__ inline u32 transposed(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
__device__ inline void product(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline u32 halves(float low, float high) {
    u32 x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
__device__ inline float low_half(u32 x) {
    float y;
    asm("{\n .reg .f16 a, b;\n mov.b32 {a, b}, %1;\n cvt.f32.f16 %0, a;\n}" : "=f"(y) : "r"(x));
    return y;
}
__device__ inline float high_half(u32 x) { return low_half(x >> 16); }
__device__ inline u32 times(u32 x, int exponent) {  // both halves times 2^exponent
    u32 y;
    const u32 factor = (u32)(15 + exponent) << 10;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(factor << 16 | factor));
    return y;
}
__device__ inline float exp2_(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float log2_(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float bits(u32 x) { return __uint_as_float(x); }
__device__ inline float number(u16 x) {
#if BF16
    return bits((u32)x << 16);
#else
    return low_half(x);
#endif
}

// What a warp knows of its eight queries, and what it has summed up. A thread (g, t) = (lane / 4, lane % 4) holds
// columns of the queries 2t and 2t + 1.
struct State {
    u32 weights[PARTS][2][PRODUCTS][2];  // fragments of q
    float sums[GROUPS][2];               // sum of the rounded q over the channels of a group
    float offset[2];                     // q times the mean key
    float start[2];                      // offset - m
    float m[2];                          // reference of the weights, log2
    float l[2];                          // sum of the weights
    float zero[GROUPS][2];               // sum of weight * middle of the page's codes
    float ones[GROUPS][4];               // sum of the rounded weights times step
    float out[CHUNKS][2][4];             // sum of rounded weight * step * code
    float unit;                          // 2^24 / scale of q
};

struct Masses {
    float* at;  // of the warp's first query head
    int width;
};

template <int P>
__device__ inline void attend_tile(State& s, u32 stage, int head, int tile, int valid, int first_page, Masses masses) {
    using F = Page<P>;
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    // The two tokens of this thread's rows.
    const int tokens[2] = {tile * 16 + g, tile * 16 + g + 8};
    u32 page[2], row[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        page[r] = stage + tokens[r] / P * F::bytes;
        row[r] = head * P + tokens[r] % P;
    }
    // -- K -----------------------------------------------------------------------------------------------------------
    u32 extra[2][2];
    const int shift = DIM == 64 ? 2 * t : DIM == 128 ? 2 * (t >> 1) : 0;
    if (K_BITS == 5) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int byte = DIM == 64 ? 0 : DIM == 128 ? 8 * (t & 1) : 8 * t;
            load2(extra[r], page[r] + F::k_extra + row[r] * EXTRA + byte);
        }
    }
    float scores[GROUPS][4];
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int i = 0; i < 4; i++) scores[group][i] = 0.f;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        float(&c)[4] = scores[part / (GROUP / 64)];
        u32 w[2][2];
#pragma unroll
        for (int r = 0; r < 2; r++) load2(w[r], page[r] + row[r] * (DIM / 2) + part * 32 + 8 * t);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const u32(&b)[PRODUCTS][2] = s.weights[part][j];
            const u32 x = w[0][j], y = w[1][j];
            product(c, x & 0x000F000Fu, y & 0x000F000Fu, x & 0x00F000F0u, y & 0x00F000F0u, b[0][0], b[0][1]);
            const u32 x8 = x >> 8, y8 = y >> 8;
            product(c, x8 & 0x000F000Fu, y8 & 0x000F000Fu, x8 & 0x00F000F0u, y8 & 0x00F000F0u, b[1][0], b[1][1]);
            if (K_BITS == 5) {
                const int turn = DIM == 256 ? 2 * part : 4 * part;
                const u32 ex = extra[0][j] >> (shift + turn), ey = extra[1][j] >> (shift + turn);
                if (SPLIT) {
                    product(c, ex & 0x00030003u, ey & 0x00030003u, ex & 0x03000300u, ey & 0x03000300u, b[2][0], b[2][1]);
                } else {
                    product(c, ex & 0x00010001u, ey & 0x00010001u, ex & 0x00020002u, ey & 0x00020002u, b[2][0], b[2][1]);
                    product(c, ex & 0x01000100u, ey & 0x01000100u, ex & 0x02000200u, ey & 0x02000200u, b[PRODUCTS - 1][0],
                            b[PRODUCTS - 1][1]);
                }
            }
        }
    }
    u32 k_scales[2][GROUPS], v_scales[2][GROUPS];
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            k_scales[r][group] = load1(page[r] + F::k_scales + (head * GROUPS + group) * 4);
            v_scales[r][group] = load1(page[r] + F::v_scales + (head * GROUPS + group) * 4);
        }
    float score[2][2], linear[2][2];  // [row][query]; `linear` lacks the reference
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float x = 0.f;
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                const float step = bits((k_scales[r][group] & 0x7FFFu) << 16) * s.unit;
                const float zero = bits(k_scales[r][group] & 0xFFFF0000u);
                x = fmaf(scores[group][2 * r + i], step, fmaf(zero, s.sums[group][i], x));
            }
            if (g + 8 * r >= valid) x = __int_as_float(0xFF800000);
            linear[r][i] = x;
            score[r][i] = x + s.start[i];
        }
    // -- Weights -----------------------------------------------------------------------------------------------------
    float p[2][2], scaled[GROUPS][2][2], largest = 0.f;
    float step[2][GROUPS];
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++) step[r][group] = bits(v_scales[r][group] << 16);
    auto weigh = [&]() {
        largest = 0.f;
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                p[r][i] = exp2_(score[r][i]);
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    scaled[group][r][i] = p[r][i] * step[r][group];
                    largest = fmaxf(largest, scaled[group][r][i]);
                }
            }
    };
    weigh();
    if (__any_sync(ALL, !(largest <= ROOM))) {  // rare: the reference moves up to the largest weight * step seen
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = FAR;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float widest = step[r][0];
#pragma unroll
                for (int group = 1; group < GROUPS; group++) widest = fmaxf(widest, step[r][group]);
                top = fmaxf(top, linear[r][i] + s.offset[i] + fmaxf(log2_(widest), -100.f));
            }
#pragma unroll
            for (int across = 4; across < 32; across *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, across));
            const float m = fmaxf(s.m[i], top), factor = exp2_(s.m[i] - m);
            s.m[i] = m;
            s.start[i] = s.offset[i] - m;
            s.l[i] *= factor;
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                s.zero[group][i] *= factor;
                s.ones[group][i] *= factor;
            }
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    s.out[c][half][i] *= factor;
                    s.out[c][half][i + 2] *= factor;
                }
#pragma unroll
            for (int r = 0; r < 2; r++) score[r][i] = linear[r][i] + s.start[i];
        }
        weigh();
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        s.l[i] += p[0][i] + p[1][i];
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float middle = fmaf(CENTRE, step[r][group], bits(v_scales[r][group] & 0xFFFF0000u));
                s.zero[group][i] = fmaf(p[r][i], middle, s.zero[group][i]);
            }
    }
#if MASS
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float sum[2] = {p[0][i], p[1][i]};
        if (P >= 16) sum[0] += sum[1];
#pragma unroll
        for (int r = 0; r < (P >= 16 ? 1 : 2); r++) {
#pragma unroll
            for (int across = 4; across < 4 * (P < 8 ? P : 8); across *= 2)
                sum[r] += __shfl_xor_sync(ALL, sum[r], across);
            if (g % (P < 8 ? P : 8) == 0 && g + 8 * r < valid && 2 * t + i < QUERIES)
                masses.at[(i64)(2 * t + i) * masses.width + first_page + tokens[r] / P] = (log2_(sum[r]) + s.m[i]) / LOG2E;
        }
    }
#endif
    u32 b[GROUPS][2];  // weights as the second operand: [tokens, queries]
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int r = 0; r < 2; r++) b[group][r] = transposed(halves(scaled[group][r][0], scaled[group][r][1]));
    // -- V -----------------------------------------------------------------------------------------------------------
    const u32 one = 0x3C003C00u;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) product(s.ones[group], one, one, one, one, b[group][0], b[group][1]);
    u32 e[2][DIM == 256 ? 2 : 1];
    const int matrix = lane >> 3, matrix_row = lane & 7;
    auto address = [&](int half, int base, int width) {  // of a token of this lane's matrix row
        const int token = tile * 16 + half * 8 + matrix_row;
        return stage + token / P * F::bytes + base + (head * P + token % P) * width;
    };
    if (V_BITS == 5) {
        if (DIM == 64) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 x = 0;
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const int token = tile * 16 + half * 8 + 2 * t + k;
                    const u32 at = stage + token / P * F::bytes + F::v_extra + (head * P + token % P) * EXTRA;
                    x |= load_half(at + 2 * (g & 3)) << (16 * k);
                }
                e[half][0] = x >> (2 * (g >> 2));
            }
        } else if (DIM == 128) {
            load_transposed(e[0][0], e[1][0], address(matrix & 1, F::v_extra, EXTRA));
        } else {
            load_transposed(e[0][0], e[0][DIM == 256], e[1][0], e[1][DIM == 256],
                            address(matrix >> 1, F::v_extra, EXTRA) + 16 * (matrix & 1));
        }
    }
    u32 w[2][CHUNKS];
    if (DIM == 64) {
        load_transposed(w[0][0], w[0][1], w[1][0], w[1][1],
                        address(matrix >> 1, F::v_nibbles, DIM / 2) + 16 * (matrix & 1));
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int c = 0; c < CHUNKS; c += 4)
                load_transposed(w[half][c], w[half][c + 1], w[half][(c + 2) % CHUNKS], w[half][(c + 3) % CHUNKS],
                                address(half, F::v_nibbles, DIM / 2) + 16 * (c + matrix));
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const u32(&q)[2] = b[c * 32 / GROUP];
        const u32 x = w[0][c], y = w[1][c], x8 = x >> 8, y8 = y >> 8;
        product(s.out[c][0], x & 0x000F000Fu, x8 & 0x000F000Fu, y & 0x000F000Fu, y8 & 0x000F000Fu, q[0], q[1]);
        product(s.out[c][1], x & 0x00F000F0u, x8 & 0x00F000F0u, y & 0x00F000F0u, y8 & 0x00F000F0u, q[0], q[1]);
        if (V_BITS == 5) {
            const int turn = DIM == 64 ? 4 * c : DIM == 128 ? 2 * c : 2 * (c >> 1), k = DIM == 256 ? c & 1 : 0;
            const u32 ex = e[0][k], ey = e[1][k], ex8 = ex >> 8, ey8 = ey >> 8;
            const u32 low = 0x00010001u << turn, high = 0x00020002u << turn;
            product(s.out[c][0], ex & low, ex8 & low, ey & low, ey8 & low, times(q[0], 4 - turn), times(q[1], 4 - turn));
            product(s.out[c][1], ex & high, ex8 & high, ey & high, ey8 & high, times(q[0], 7 - turn),
                    times(q[1], 7 - turn));
        }
    }
}

// The units [begin, end) of one kind of page, as the copying warp sees them.
template <int P>
__device__ inline void copy_units(u32 stages, u32 full, u32 empty, const u8* pool, const int* table, int count, int begin,
                                  int end, int& turn) {
    using F = Page<P>;
    constexpr int BATCH = 32 / F::per_unit;  // units whose page ids are read at once
    const int lane = threadIdx.x & 31;
    auto ids = [&](int unit) {
        const int i = unit * F::per_unit + lane;
        return i < count ? table[i] : table[count - 1];  // past the end: a page that is there, masked later
    };
    if (begin >= end) return;
    int next = ids(begin);
    for (int first = begin; first < end; first += BATCH) {
        const int now = next;
        if (first + BATCH < end) next = ids(first + BATCH);
        for (int unit = first; unit < end && unit < first + BATCH; unit++, turn++) {
            const int stage = turn % STAGES;
            barrier_wait(empty + 8 * stage, (turn / STAGES & 1) ^ 1);
            const i64 id = __shfl_sync(ALL, now, ((unit - first) * F::per_unit + lane) & 31);
            if (lane == 0) barrier_expect(full + 8 * stage, F::per_unit * F::bytes);
            __syncwarp();
            if (lane < F::per_unit)
                bulk_copy(stages + stage * STAGE + lane * F::bytes, pool + id * F::bytes, F::bytes, full + 8 * stage);
        }
    }
}

template <int P>
__device__ inline void attend_units(State& s, u32 stages, u32 full, u32 empty, int head, int tile, int count, int begin,
                                    int end, Masses masses, int& turn) {
    for (int unit = begin; unit < end; unit++, turn++) {
        const int stage = turn % STAGES;
        barrier_wait(full + 8 * stage, turn / STAGES & 1);
        const i64 left = (i64)count * P - (i64)unit * UNIT - tile * 16;
        if (left > 0)
            attend_tile<P>(s, stages + stage * STAGE, head, tile, left < 16 ? (int)left : 16, unit * Page<P>::per_unit, masses);
        __syncwarp();
        if ((threadIdx.x & 31) == 0) barrier_arrive(empty + 8 * stage);
    }
}

// Fragments of q for one warp's head: normalised, permuted, times 2^k so that the largest lies in [512, 1024).
__device__ inline void prepare(State& s, const u16* q, int q_stride, const i64* order, const float* k_mean,
                               const float* k_scale, float scaling) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float mean = 0.f, largest = 0.f;
    auto weight = [&](int place) -> float {  // of query g at a stored place of K
        const int channel = (int)order[place];
        return g < QUERIES ? number(q[(i64)g * q_stride + channel]) * k_scale[channel] * scaling : 0.f;
    };
#pragma unroll 1
    for (int i = t; i < DIM; i += 4) {
        const int channel = (int)order[i];
        const float x = g < QUERIES ? number(q[(i64)g * q_stride + channel]) * scaling : 0.f;
        mean = fmaf(x, k_mean[channel], mean);
        largest = fmaxf(largest, fabsf(x * k_scale[channel]) * (SPLIT && K_BITS == 5 ? 4.2f : 1.f));
    }
#pragma unroll
    for (int across = 1; across < 32; across *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, across));
    mean += __shfl_xor_sync(ALL, mean, 1);
    mean += __shfl_xor_sync(ALL, mean, 2);
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
            u32(&w)[PRODUCTS][2] = s.weights[part][j];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                w[k][0] = a[k];
                w[k][1] = times(b[k], -4);
            }
            if (K_BITS == 5 && SPLIT) {
                w[2][0] = times(a[0], 4);
                w[2][1] = times(a[1], 4 - 8);
            } else if (K_BITS == 5) {
                w[2][0] = times(a[0], 4);
                w[2][1] = times(b[0], 4 - 1);
                w[PRODUCTS - 1][0] = times(a[1], 4 - 8);
                w[PRODUCTS - 1][1] = times(b[1], 4 - 9);
            }
        }
    // From the lanes of query g to those that hold its columns.
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int from = (2 * t + i) * 4;
        s.offset[i] = __shfl_sync(ALL, mean, from);
        s.m[i] = FAR;
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
#pragma unroll
        for (int i = 0; i < 4; i++) s.ones[group][i] = 0.f;
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
    constexpr int PER = DIM / 32, ALL_WARPS = WARPS + 1;
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
    for (int slot = warp; slot < slots; slot += ALL_WARPS) {
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
    for (int query = warp; query < QUERIES; query += ALL_WARPS) {
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
    for (int slot = warp; slot < slots; slot += ALL_WARPS) {
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
           int kept_width, int rows_width, int q_batch, int q_head, int dense_batch, int dense_head, int dense_token) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u64 barriers[2 * STAGES];
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
    const int n_share = n_part - n_dense, share = blockIdx.x - n_dense;
    const int n_kept = KEPT_P ? kept_count[batch] : 0, n_rows = ROWS_P ? rows_count[batch] : 0;
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
    const int kept_begin = min(begin, kept_units), kept_end = min(end, kept_units);
    const int rows_begin = max(begin, kept_units) - kept_units, rows_end = max(end, kept_units) - kept_units;
    const u32 stages = shared_address(shared), full = shared_address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int head = warp % HEADS, tile = warp / HEADS;
    int turn = 0;
    State s;
    if (warp == WARPS) {
#if KEPT_P
        copy_units<KEPT_P>(stages, full, empty, kept, kept_table + (i64)batch * kept_width, n_kept, kept_begin, kept_end, turn);
#endif
#if ROWS_P
        copy_units<ROWS_P>(stages, full, empty, rows, rows_table + (i64)batch * rows_width, n_rows, rows_begin, rows_end, turn);
#endif
    } else {
        prepare(s, q + (i64)head * QUERIES * q_head, q_head, order, k_mean + head * DIM, k_scale + head * DIM, scaling);
        const i64 first = first_query + head * QUERIES;
#if KEPT_P
        attend_units<KEPT_P>(s, stages, full, empty, head, tile, n_kept, kept_begin, kept_end,
                             {kept_mass + first * kept_width, kept_width}, turn);
#endif
#if ROWS_P
        attend_units<ROWS_P>(s, stages, full, empty, head, tile, n_rows, rows_begin, rows_end,
                             {rows_mass + first * rows_width, rows_width}, turn);
#endif
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
    }
    // Combine the tiles of a head. Every stage has been read: its memory is free.
    float* heads = (float*)shared;                       // [HEADS, 8, DIM]
    float* references = heads + HEADS * 8 * DIM;         // [WARPS, 8]
    float* lengths = references + WARPS * 8;             // [WARPS, 8]
    __syncthreads();
    if (warp < WARPS && g == 0)
        for (int i = 0; i < 2; i++) {
            references[warp * 8 + 2 * t + i] = s.m[i];
            lengths[warp * 8 + 2 * t + i] = s.l[i];
        }
    __syncthreads();
    for (int turn_of = 0; turn_of < TILES; turn_of++) {
        if (warp < WARPS && tile == turn_of) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float top = FAR;
                for (int other = 0; other < TILES; other++)
                    top = fmaxf(top, references[(other * HEADS + head) * 8 + 2 * t + i]);
                const float factor = exp2_(s.m[i] - top);
#pragma unroll
                for (int c = 0; c < CHUNKS; c++) {
                    const int group = c * 32 / GROUP;
                    const float rest = s.zero[group][i] - CENTRE * s.ones[group][i];
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
    for (int i = threadIdx.x; i < HEADS * QUERIES * DIM; i += THREADS) {
        const int query = i / DIM, kv = query / QUERIES, in_head = query % QUERIES, channel = i % DIM;
        float top = FAR, length = 0.f;
        for (int other = 0; other < TILES; other++) top = fmaxf(top, references[(other * HEADS + kv) * 8 + in_head]);
        for (int other = 0; other < TILES; other++) {
            const int at = (other * HEADS + kv) * 8 + in_head;
            length = fmaf(lengths[at], exp2_(references[at] - top), length);
        }
        const i64 row = (first_query + query) * n_part + own;
        part[row * DIM + channel] =
            heads[(kv * 8 + in_head) * DIM + channel] / length * v_scale[kv * DIM + channel] + v_mean[kv * DIM + channel];
        if (channel == 0) part_lse[row] = top + log2_(length);
    }
}
