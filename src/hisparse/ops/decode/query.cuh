// The queries of a block: normalised, then in fragments for each warp.

constexpr int QUERY_ROW = DIM + 1;  // no bank conflicts where lanes read the same channels of different queries
constexpr int MEANS = HEADS * QUERIES * QUERY_ROW;
constexpr int PLACES = MEANS + 2 * HEADS * QUERIES;
constexpr int WEIGHTS = (PLACES + DIM / 4 + 3) / 4 * 4;  // words in all
constexpr int V_STATS = 2 * HEADS * DIM;
constexpr int LARGER = WEIGHTS > V_STATS ? WEIGHTS : V_STATS;
constexpr int SCRATCH = LARGER > DENSE_WORDS ? LARGER : DENSE_WORDS;

// Where the queries are, and what normalises them.
struct Queries {
    const u16* q;
    int stride;
    const i64* order;
    const float *k_mean, *k_scale;
};

// Some of them on their way to a warp: all is requested before any is used.
struct Requested {
    static constexpr int PER = DIM / 32, ROWS = HEADS * QUERIES, BATCH = ROWS > WARPS ? 2 : 1;
    u16 x[BATCH][PER];
    float scale[BATCH][PER], centre[BATCH][PER];
    int channel;

    __device__ inline void request(const Queries& from, int first) {
        const int lane = threadIdx.x & 31;
        channel = threadIdx.x < DIM ? (int)from.order[threadIdx.x] : 0;
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            const int row = min(first + n * WARPS, ROWS - 1), at = row / QUERIES * DIM + lane;
#pragma unroll
            for (int c = 0; c < PER; c++) {
                x[n][c] = from.q[(i64)row * from.stride + lane + 32 * c];
                scale[n][c] = from.k_scale[at + 32 * c];
                centre[n][c] = from.k_mean[at + 32 * c];
            }
        }
    }
};

// weights: shared; float [HEADS * QUERIES, QUERY_ROW], by channel; then [HEADS * QUERIES] products with the mean keys, and
// [HEADS * QUERIES] largest weights; then u8 [DIM], the channel at each stored place of K. `asked`: the warp's first
// ones.
__device__ inline void normalise(float* weights, const Queries& from, Requested& asked, float scaling) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    constexpr int PER = Requested::PER, ROWS = Requested::ROWS, BATCH = Requested::BATCH;
    for (int place = threadIdx.x; place < DIM; place += THREADS)
        ((u8*)(weights + PLACES))[place] = (u8)(place == (int)threadIdx.x ? asked.channel : (int)from.order[place]);
#pragma unroll 1
    for (int first = warp; first < ROWS; first += BATCH * WARPS) {
        if (first > warp) asked.request(from, first);
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            const int row = first + n * WARPS;
            float mean = 0.f, top = 0.f;
#pragma unroll
            for (int c = 0; c < PER; c++) {
                float x = number(asked.x[n][c]) * scaling;
                mean = fmaf(x, asked.centre[n][c], mean);
                x *= asked.scale[n][c];
                top = fmaxf(top, fabsf(x));
                if (row < ROWS) weights[row * QUERY_ROW + lane + 32 * c] = x;
            }
#pragma unroll
            for (int across = 1; across < 32; across *= 2) {
                mean += __shfl_xor_sync(ALL, mean, across);
                top = fmaxf(top, __shfl_xor_sync(ALL, top, across));
            }
            if (lane == 0 && row < ROWS) weights[MEANS + row] = mean, weights[MEANS + ROWS + row] = top;
        }
    }
}

// Fragments of q for one warp's head, times 2^k so that the largest lies in [512, 1024).
__device__ inline void prepare(State& s, const float* all, int head) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const float* weights = all + (head * QUERIES + (g < QUERIES ? g : 0)) * QUERY_ROW;
    const float* means = all + MEANS + head * QUERIES;
    const u32* places = (const u32*)(all + PLACES);
    constexpr float ratio = SPLIT && K_BITS == 5 ? 4.2f : 1.f;
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < QUERIES; i++) largest = fmaxf(largest, means[HEADS * QUERIES + i]);
    largest *= ratio;
    // Exponent of the largest weight; its float16 form may be scaled by up to 16 and down by up to 512.
    int exponent = (int)(__float_as_uint(largest) >> 23) - 127;
    exponent = exponent < -100 ? -100 : exponent > 100 ? 100 : exponent;
    const float up = g < QUERIES ? bits((u32)(127 + 9 - exponent) << 23) : 0.f;
    s.unit = bits((u32)(127 + 24 - 9 + exponent) << 23);
    float sums[GROUPS];
#pragma unroll
    for (int group = 0; group < GROUPS; group++) sums[group] = 0.f;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 a[2], b[2];  // pairs (0, 2) and (1, 3) of the word's four
            const int four = part * 8 + 2 * t + j;
            const u32 slow = places[four], fast = places[DIM / 8 + four];  // channels
#pragma unroll
            for (int k = 0; k < 2; k++) {
                a[k] = halves(weights[slow >> 8 * k & 255] * up, weights[slow >> 8 * (k + 2) & 255] * up);
                b[k] = halves(weights[fast >> 8 * k & 255] * ratio * up, weights[fast >> 8 * (k + 2) & 255] * ratio * up);
                sums[part / (GROUP / 64)] += low_half(a[k]) + high_half(a[k]) + (low_half(b[k]) + high_half(b[k])) * (1.f / ratio);
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
        sum *= bits((u32)(127 - 9 + exponent) << 23);
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
