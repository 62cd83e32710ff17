// Attention over up to DENSE dense slots of one KV head, by a whole block.

constexpr int DENSE = 64;  // slots of a piece
constexpr int DENSE_WORDS = DENSE * 8 + 8 * 2;

// k, v: of the piece's first slot; `room` slots can be read, of which those of the sequence's first *length are used, the
// piece's first one being slot `first`. scores: shared, float [DENSE, 8], then [8] sums and [8] references. Writes QUERIES
// rows of part, each n_part rows after the one before, and their log2-sum-exps.
__device__ __noinline__ void attend_dense(float* scores, const u16* q, int q_stride, const u16* k, const u16* v,
                                          int token_stride, int room, const int* length, int first, float scaling,
                                          float* part, float* part_lse, int n_part) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    constexpr int PER = DIM / 32, BATCH = 4, OCTETS = DIM / 8;
    float* total = scores + DENSE * 8;
    // Everything is requested before anything is used, the length too. Of V a lane has two channels of every eighth slot.
    const int channel = lane & 3, eighth = lane >> 2;
    u32 values[DENSE / 8];
    auto load_values = [&](int octet) {
#pragma unroll
        for (int j = 0; j < DENSE / 8; j++) {
            const int slot = eighth + 8 * j;
            values[j] = slot < room && octet < OCTETS ? *(const u32*)(v + (i64)slot * token_stride + octet * 8 + 2 * channel) : 0;
        }
    };
    u32 keys[BATCH][PER / 2];
    auto load_keys = [&](int start) {
#pragma unroll
        for (int n = 0; n < BATCH; n++)
#pragma unroll
            for (int c = 0; c < PER / 2; c++) {
                const int slot = start + n * WARPS;
                keys[n][c] = slot < room ? *(const u32*)(k + (i64)slot * token_stride + lane * PER + 2 * c) : 0;
            }
    };
    load_keys(warp);
    float x[8][PER];
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int c = 0; c < PER; c += 2) {
            const u32 both = i < QUERIES ? *(const u32*)(q + (i64)i * q_stride + lane * PER + c) : 0;
            x[i][c] = number((u16)both) * scaling;
            x[i][c + 1] = number((u16)(both >> 16)) * scaling;
        }
    load_values(warp);
    const int slots = min(max(*length - first, 0), DENSE);
    for (int start = warp; start < slots; start += BATCH * WARPS) {
        if (start > warp) load_keys(start);
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            const int slot = start + n * WARPS;
            if (slot >= slots) break;
            float dot[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                dot[i] = 0.f;
#pragma unroll
                for (int c = 0; c < PER; c++)
                    dot[i] = fmaf(x[i][c], number((u16)(keys[n][c / 2] >> 16 * (c & 1))), dot[i]);
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
    }
    __syncthreads();
    for (int query = warp; query < 8; query += WARPS) {
        float top = FAR, sum = 0.f, score[DENSE / 32];
#pragma unroll
        for (int n = 0; n < DENSE / 32; n++) {
            const int slot = lane + 32 * n;
            score[n] = slot < slots ? scores[slot * 8 + query] : FAR;
            top = fmaxf(top, score[n]);
        }
#pragma unroll
        for (int across = 1; across < 32; across *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, across));
#pragma unroll
        for (int n = 0; n < DENSE / 32; n++) {
            const float p = lane + 32 * n < slots ? exp2_(score[n] - top) : 0.f;
            scores[(lane + 32 * n) * 8 + query] = p;
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
    for (int octet = warp; octet < OCTETS; octet += WARPS) {
        if (octet > warp) load_values(octet);
        float acc[8][2];
#pragma unroll
        for (int i = 0; i < 8; i++) acc[i][0] = acc[i][1] = 0.f;
#pragma unroll
        for (int j = 0; j < DENSE / 8; j++) {
            const u32 both = eighth + 8 * j < slots ? values[j] : 0;  // what lies beyond may be NaN
            const float low = number((u16)both), high = number((u16)(both >> 16));
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float p = scores[(eighth + 8 * j) * 8 + i];
                acc[i][0] = fmaf(p, low, acc[i][0]);
                acc[i][1] = fmaf(p, high, acc[i][1]);
            }
        }
#pragma unroll
        for (int width = 4, across = 16; width; width /= 2, across /= 2)
#pragma unroll
            for (int i = 0; i < width; i++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const bool upper = lane & across;
                    const float give = upper ? acc[i][c] : acc[i + width][c], keep = upper ? acc[i + width][c] : acc[i][c];
                    acc[i][c] = keep + __shfl_xor_sync(ALL, give, across);
                }
        const int query = (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
        if (query < QUERIES && slots > 0) {
            const float factor = __fdividef(1.f, total[query]);
            float* to = part + (i64)query * n_part * DIM + octet * 8 + 2 * channel;
            to[0] = acc[0][0] * factor, to[1] = acc[0][1] * factor;
        }
    }
    if (threadIdx.x < QUERIES)
        part_lse[(i64)threadIdx.x * n_part] =
            slots > 0 ? total[8 + threadIdx.x] + log2_(total[threadIdx.x]) : __int_as_float(0xFF800000);
    __syncthreads();  // the next piece writes to the same places
}
