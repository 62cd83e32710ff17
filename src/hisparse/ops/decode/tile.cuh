// Attention of one warp over 16 tokens of one KV head that lie packed in shared memory.

constexpr int WARPS = HEADS * TILES;
constexpr int THREADS = 32 * WARPS;
constexpr int UNIT = 16 * TILES;  // tokens a stage
constexpr int GROUPS = DIM / GROUP;
constexpr int PARTS = DIM / 64;    // parts of 64 channels in which a thread reads K
constexpr int CHUNKS = DIM / 32;   // 16-byte pieces of a token's nibble plane
constexpr int EXTRA = DIM / 8;     // bytes of a token's extra plane
constexpr float FAR = -1e30f;
constexpr float ROOM = 64.f;  // a weight beyond this moves the reference
constexpr float LEAST = 7.8886091e-31f;  // 2^-100, added to steps there: those of constant values are next to nothing, and
                                         // sums of weights would leave float32 before weight * step is large
constexpr float LOG2E = 1.4426950408889634f;
constexpr float CENTRE = V_BITS == 5 ? 15.5f : 7.5f;

__host__ __device__ constexpr int aligned(int size) { return (size + 15) / 16 * 16; }

// Of P tokens and H heads: as it lies in a stage, or, with PAGE_HEADS, in the pool.
template <int P, int H = HEADS>
struct Page {
    static constexpr int k_extra = aligned(H * P * DIM / 2);
    static constexpr int v_nibbles = k_extra + aligned(K_BITS == 5 ? H * P * EXTRA : 0);
    static constexpr int v_extra = v_nibbles + aligned(H * P * DIM / 2);
    static constexpr int k_scales = v_extra + aligned(V_BITS == 5 ? H * P * EXTRA : 0);
    static constexpr int v_scales = k_scales + aligned(H * GROUPS * 4);
    static constexpr int bytes = v_scales + aligned(H * GROUPS * 4);
    static constexpr int per_unit = UNIT / P;
    static constexpr int log = P == 4 ? 2 : P == 8 ? 3 : P == 16 ? 4 : P == 32 ? 5 : 6;
    static_assert(1 << log == P, "pages of 4, 8, 16, 32 or 64 tokens");
    static_assert(UNIT % P == 0, "a stage holds whole pages");
};
constexpr int SCALES = aligned(HEADS * GROUPS * 4);  // from K's to V's
constexpr int KEPT_STAGE = Page<KEPT_P>::bytes * Page<KEPT_P>::per_unit;
constexpr int ROWS_STAGE = Page<ROWS_P>::bytes * Page<ROWS_P>::per_unit;
constexpr int STAGE = KEPT_STAGE > ROWS_STAGE ? KEPT_STAGE : ROWS_STAGE;

// What a warp knows of its eight queries, and what it has summed up. A thread (g, t) = (lane / 4, lane % 4) holds
// columns of the queries 2t and 2t + 1.
struct State {
    u32 weights[PARTS][2][2][2];  // fragments of q: for each word channels (0, 2) and (1, 3) of the slow, fast half
    float sums[GROUPS][2];               // sum of the rounded q over the channels of a group
    float offset[2];                     // q times the mean key
    float start[2];                      // offset - m, the reference of the weights, log2
    float l[2];                          // sum of the weights
    float zero[GROUPS][2];  // sum of weight * middle of the page - rounded weight * step * middle code
    float out[CHUNKS][2][4];             // sum of rounded weight * step * code
    float unit;                          // 2^24 / scale of q
    u32 eighth;                          // 2^24
};

struct Masses {
    float* at;  // of the warp's first query head
    int width;
};

// A choice between kept pages and rows: a constant where they are alike.
__device__ inline int pick(bool rows, int kept_value, int rows_value) { return rows ? rows_value : kept_value; }
#define PICK(rows, field) pick(rows, Page<KEPT_P>::field, Page<ROWS_P>::field)

// Where a thread finds its share of a tile, as offsets into a stage; `far`: from there to its second row, eight tokens further
// on, in a field of so many bytes a token. The same code serves both kinds of page: code that a block runs through for the
// first time is slow.
struct Places {
    u32 k, k_extra, scales, v, v_extra;
    u32 far_nibbles, far_extra, far_scales;

    // From a token to the one eight tokens on.
    template <int P>
    __host__ __device__ static constexpr int further(int width) {
        return P >= 16 ? 8 * width : 8 / P * Page<P>::bytes;
    }

    __device__ inline Places(bool rows, int head, int tile) {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        const int bytes = PICK(rows, bytes), log = PICK(rows, log), in_page = (1 << log) - 1;
        far_nibbles = pick(rows, further<KEPT_P>(DIM / 2), further<ROWS_P>(DIM / 2));
        far_extra = pick(rows, further<KEPT_P>(EXTRA), further<ROWS_P>(EXTRA));
        far_scales = pick(rows, further<KEPT_P>(0), further<ROWS_P>(0));
        const int token = tile * 16 + g, page = (token >> log) * bytes, row = (head << log) + (token & in_page);
        k = opaque(page + row * (DIM / 2) + 8 * t);
        k_extra = opaque(page + PICK(rows, k_extra) + row * EXTRA + (DIM == 64 ? 0 : DIM == 128 ? 8 * (t & 1) : 8 * t));
        scales = opaque(page + PICK(rows, k_scales) + head * GROUPS * 4);
        // V is read transposed: every eight lanes name the rows of one 8 x 16-byte matrix.
        const int matrix = lane >> 3, other = tile * 16 + (lane & 7);
        const int half = DIM == 64 ? matrix >> 1 : 0, piece = DIM == 64 ? matrix & 1 : matrix;
        const int from = (other >> log) * bytes, line = (head << log) + (other & in_page);
        v = opaque(from + PICK(rows, v_nibbles) + line * (DIM / 2) + half * far_nibbles + 16 * piece);
        if (DIM == 64) {
            const int own = tile * 16 + 2 * t;
            v_extra = opaque((own >> log) * bytes + PICK(rows, v_extra) + ((head << log) + (own & in_page)) * EXTRA + 2 * (g & 3));
        } else {
            const int which = DIM == 128 ? matrix & 1 : matrix >> 1, part = DIM == 128 ? 0 : matrix & 1;
            v_extra = opaque(from + PICK(rows, v_extra) + line * EXTRA + which * far_extra + 16 * part);
        }
    }
};

__device__ inline void attend_tile(State& s, const Places& places, u32 stage, int tile, int valid, int page_log,
                                   int first_page, Masses masses) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    // -- Loads: K, V and their steps and zeros -----------------------------------------------------------------------
    u32 extra[2][2], keys[PARTS][2][2], k_scales[2][GROUPS], v_scales[2][GROUPS];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const u32 k = stage + places.k + r * places.far_nibbles;
#pragma unroll
        for (int part = 0; part < PARTS; part++) load2(keys[part][r], k + part * 32);
        if (K_BITS == 5) load2(extra[r], stage + places.k_extra + r * places.far_extra);
        const u32 scales = stage + places.scales + r * places.far_scales;
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            k_scales[r][group] = load1(scales + group * 4);
            v_scales[r][group] = load1(scales + SCALES + group * 4);
        }
    }
    const int shift = DIM == 64 ? 2 * t : DIM == 128 ? 2 * (t >> 1) : 0;
    // -- K -----------------------------------------------------------------------------------------------------------
    float scores[GROUPS][4];
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int i = 0; i < 4; i++) scores[group][i] = 0.f;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        float(&c)[4] = scores[part / (GROUP / 64)];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const u32(&b)[2][2] = s.weights[part][j];
            const u32 x = keys[part][0][j], y = keys[part][1][j];
            product(c, x & 0x000F000Fu, y & 0x000F000Fu, x & 0x00F000F0u, y & 0x00F000F0u, b[0][0], b[0][1]);
            const u32 x8 = down8(x, s.eighth), y8 = down8(y, s.eighth);
            product(c, x8 & 0x000F000Fu, y8 & 0x000F000Fu, x8 & 0x00F000F0u, y8 & 0x00F000F0u, b[1][0], b[1][1]);
            if (K_BITS == 5) {
                const int turn = DIM == 256 ? 2 * part : 4 * part;
                const u32 ex = extra[0][j] >> (shift + turn), ey = extra[1][j] >> (shift + turn);
                // The bits' weights follow from the codes'; in float16 only exponents change.
                if (SPLIT) {
                    product(c, ex & 0x00030003u, ey & 0x00030003u, ex & 0x03000300u, ey & 0x03000300u, times(b[0][0], 4),
                            times(b[1][0], 4 - 8));
                } else {
                    product(c, ex & 0x00010001u, ey & 0x00010001u, ex & 0x00020002u, ey & 0x00020002u, times(b[0][0], 4),
                            times(b[0][1], 8 - 1));
                    product(c, ex & 0x01000100u, ey & 0x01000100u, ex & 0x02000200u, ey & 0x02000200u,
                            times(b[1][0], 4 - 8), times(b[1][1], 8 - 9));
                }
            }
        }
    }
    // -- V, on its way while the weights are worked out --
    u32 w[2][CHUNKS];
    if (DIM == 64) {
        load_transposed(w[0][0], w[0][1], w[1][0], w[1][1], stage + places.v);
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int c = 0; c < CHUNKS; c += 4)
                load_transposed(w[half][c], w[half][c + 1], w[half][(c + 2) % CHUNKS], w[half][(c + 3) % CHUNKS],
                                stage + places.v + half * places.far_nibbles + 16 * c);
    }
    float score[2][2];  // [row][query], log2, relative to the reference
    auto sum_up = [&](const float (&start)[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float x = start[i];
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    const float step = bits((k_scales[r][group] & 0x7FFFu) << 16) * s.unit;
                    const float zero = bits(k_scales[r][group] & 0xFFFF0000u);
                    x = fmaf(scores[group][2 * r + i], step, fmaf(zero, s.sums[group][i], x));
                }
                score[r][i] = g + 8 * r < valid ? x : __int_as_float(0xFF800000);
            }
    };
    sum_up(s.start);
    // -- Weights -----------------------------------------------------------------------------------------------------
    float p[2][2], scaled[GROUPS][2][2], largest = 0.f;
    float step[2][GROUPS];
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++) step[r][group] = bits(v_scales[r][group] << 16);
    auto weigh = [&]() {
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                p[r][i] = exp2_(score[r][i]);
#pragma unroll
                for (int group = 0; group < GROUPS; group++) scaled[group][r][i] = p[r][i] * step[r][group];
            }
            float widest = step[r][0];
#pragma unroll
            for (int group = 1; group < GROUPS; group++) widest = fmaxf(widest, step[r][group]);
            const float most = fmaxf(p[r][0], p[r][1]) * (widest + LEAST);
            largest = r ? fmaxf(largest, most) : most;
        }
    };
    weigh();
    if (__any_sync(ALL, !(largest <= ROOM))) {  // rare: the reference moves up to the largest weight * step seen
        sum_up(s.offset);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = FAR;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float widest = step[r][0];
#pragma unroll
                for (int group = 1; group < GROUPS; group++) widest = fmaxf(widest, step[r][group]);
                top = fmaxf(top, score[r][i] + fmaxf(log2_(widest), -100.f));
            }
#pragma unroll
            for (int across = 4; across < 32; across *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, across));
            const float old = s.offset[i] - s.start[i], m = fmaxf(old, top), factor = exp2_(old - m);
            s.start[i] = s.offset[i] - m;
            s.l[i] *= factor;
#pragma unroll
            for (int group = 0; group < GROUPS; group++) s.zero[group][i] *= factor;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    s.out[c][half][i] *= factor;
                    s.out[c][half][i + 2] *= factor;
                }
#pragma unroll
            for (int r = 0; r < 2; r++) score[r][i] -= m;
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
    // Pages of 4, 8 or 16 tokens.
    const int lines = page_log < 3 ? 1 << page_log : 8;  // that a page has of the eight that are eight lanes apart
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float sum[2] = {p[0][i], p[1][i]};
        if (page_log == 4) sum[0] += sum[1];
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int across = 4; across < 32; across *= 2) {
                const float other = __shfl_xor_sync(ALL, sum[r], across);
                if (across < 4 * lines) sum[r] += other;
            }
            if ((g & (lines - 1)) == 0 && g + 8 * r < valid && 2 * t + i < QUERIES && (r == 0 || page_log < 4))
                masses.at[(i64)(2 * t + i) * masses.width + first_page + ((tile * 16 + g + 8 * r) >> page_log)] =
                    (log2_(sum[r]) + s.offset[i] - s.start[i]) / LOG2E;
        }
    }
#endif
    u32 b[GROUPS][2];  // weights as the second operand: [tokens, queries]
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int r = 0; r < 2; r++) b[group][r] = transposed(halves(scaled[group][r][0], scaled[group][r][1]));
    // -- V -----------------------------------------------------------------------------------------------------------
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        constexpr u32 one = 0x3C003C00u;
        float sum[4] = {0.f, 0.f, 0.f, 0.f};  // of the tile's rounded weights, in all rows alike
        product(sum, one, one, one, one, b[group][0], b[group][1]);
        // Each of the eight rows of lanes has the whole sum; they will be added up.
#pragma unroll
        for (int i = 0; i < 2; i++) s.zero[group][i] = fmaf(sum[i], -CENTRE / 8.f, s.zero[group][i]);
    }
    u32 e[2][DIM == 256 ? 2 : 1];
    if (V_BITS == 5) {
        const u32 at = stage + places.v_extra;
        if (DIM == 64) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 from = at + half * places.far_extra;
                e[half][0] = (load_half(from) | load_half(from + EXTRA) << 16) >> (2 * (g >> 2));
            }
        } else if (DIM == 128) {
            load_transposed(e[0][0], e[1][0], at);
        } else {
            load_transposed(e[0][0], e[0][DIM == 256], e[1][0], e[1][DIM == 256], at);
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const u32(&q)[2] = b[c * 32 / GROUP];
        const u32 x = w[0][c], y = w[1][c], x8 = down8(x, s.eighth), y8 = down8(y, s.eighth);
        product(s.out[c][0], x & 0x000F000Fu, x8 & 0x000F000Fu, y & 0x000F000Fu, y8 & 0x000F000Fu, q[0], q[1]);
        product(s.out[c][1], x & 0x00F000F0u, x8 & 0x00F000F0u, y & 0x00F000F0u, y8 & 0x00F000F0u, q[0], q[1]);
        if (V_BITS == 5) {
            const int turn = DIM == 64 ? 4 * c : DIM == 128 ? 2 * c : 2 * (c >> 1), k = DIM == 256 ? c & 1 : 0;
            const u32 ex = e[0][k], ey = e[1][k], ex8 = down8(ex, s.eighth), ey8 = down8(ey, s.eighth);
            const u32 low = 0x00010001u << turn, high = 0x00020002u << turn;
            product(s.out[c][0], ex & low, ex8 & low, ey & low, ey8 & low, times(q[0], 4 - turn), times(q[1], 4 - turn));
            product(s.out[c][1], ex & high, ex8 & high, ey & high, ey8 & high, times(q[0], 7 - turn),
                    times(q[1], 7 - turn));
        }
    }
}
