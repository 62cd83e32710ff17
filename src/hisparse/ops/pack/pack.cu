// Packing K and V: normalise, find each block's range, quantise, and write the planes of a page.
//
// A warp packs one head of K or of V, page after page, and holds the statistics of its channels in registers. Lane
// t * LANES + l has the pairs 4 l .. 4 l + 3 of every quarter of token t's channel pairs, slow and fast half: 32 values,
// whose codes fill whole words of the nibble plane and of the extra plane, so that nothing but a block's range crosses
// lanes.
//
// The arithmetic is the reference's, step by step and rounded alike: no fused multiply-adds, divisions to nearest. A
// code is what the mantissa holds when 2^23 is added towards zero: no conversion.
//
// Macros: HEADS, DIM, TOKENS (a page), GROUPS (of a head), FLOAT16 (0: bfloat16), PAGE_BYTES (from page to page of the
// output), INDEXED (1: lists say which token of the input is which of a page, and where a page goes), and for K and V:
// BITS, SPLIT (six bits for the slow half and four for the fast), NIBBLES, EXTRA, SCALES (byte offsets in a page).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

constexpr int EIGHTH = DIM / 8;             // pairs of a quarter, bytes of one bit of a token
constexpr int LANES = EIGHTH / 4;           // of a token
constexpr int SPAN = TOKENS * LANES;        // of a page
constexpr int EACH = 32 / SPAN;             // pages a warp packs at once
constexpr int PER_GROUP = 4 / GROUPS;       // quarters of a group
constexpr float TINY = 1.17549435e-38f;     // the smallest step
constexpr float RATIO = 4.2f;               // step of the fast half over that of the slow half, where they differ

__device__ __forceinline__ float lower(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float upper(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float low_half(u32 word) {
#if FLOAT16
  float y;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(y) : "r"(word));
  return y;
#else
  return __uint_as_float(word << 16);
#endif
}

__device__ __forceinline__ float high_half(u32 word) {
#if FLOAT16
  float y;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(y) : "r"(word));
  return y;
#else
  return __uint_as_float(word & 0xffff0000u);
#endif
}

__device__ __forceinline__ uint2 load_once(const u16* p) {
  uint2 y;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(y.x), "=r"(y.y) : "l"(p));
  return y;
}

// Where token `token` of page `page` lies in the input, in values.
__device__ __forceinline__ i64 source(const i64* p_token, int page, int token, i64 page_stride, i64 token_stride) {
#if INDEXED
  return p_token[(i64)page * TOKENS + token] * token_stride;
#else
  return page * page_stride + token * token_stride;
#endif
}

// The codes of four values in the four bytes of a word.
__device__ __forceinline__ u32 codes(const float* x, float zero, float rate) {
  u32 c[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    c[i] = __float_as_uint(__fadd_rz(__fadd_rn(__fmul_rn(__fsub_rn(x[i], zero), rate), 0.5f), 8388608.0f));
  return __byte_perm(__byte_perm(c[0], c[1], 0x0040), __byte_perm(c[2], c[3], 0x0040), 0x5410);
}

template <int BITS, int SPLIT, int NIBBLES, int EXTRA, int SCALES>
__device__ __forceinline__ void pack_head(
    const u16* p_x, const float* p_mean, const float* p_rate, const i64* p_order, const i64* p_token,
    const i64* p_place, u8* p_pages, int* p_bad, int n_pages, i64 page_stride, i64 token_stride, int head, int warp,
    int warps) {
  const int lane = threadIdx.x & 31;
  const int page_of_lane = lane / SPAN, token = lane / LANES % TOKENS, l = lane % LANES;
  int channel[8];
  float mean[8][4], rate[8][4];
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const int place = (c >> 2) * (DIM / 2) + (c & 3) * EIGHTH + 4 * l;
    channel[c] = p_order ? (int)p_order[place] : place;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mean[c][i] = p_mean[head * DIM + channel[c] + i];
      rate[c][i] = p_rate[head * DIM + channel[c] + i];
    }
  }
  const int own = lane % GROUPS;  // the group whose step this lane works out for all lanes
  uint2 next[8];
  int page = warp * EACH + page_of_lane;
  {
    const u16* p = p_x + source(p_token, min(page, n_pages - 1), token, page_stride, token_stride);
#pragma unroll
    for (int c = 0; c < 8; ++c) next[c] = load_once(p + channel[c]);
  }
  const int stride = warps * EACH;
  i64 at = source(p_token, min(page + stride, n_pages - 1), token, page_stride, token_stride);
  for (; page - page_of_lane < n_pages; page += stride) {
    float x[8][4];
    float low[GROUPS], high[GROUPS];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const int g = (c & 3) / PER_GROUP;
      const float raw[4] = {low_half(next[c].x), high_half(next[c].x), low_half(next[c].y), high_half(next[c].y)};
#pragma unroll
      for (int i = 0; i < 4; ++i) x[c][i] = __fmul_rn(__fsub_rn(raw[i], mean[c][i]), rate[c][i]);
      const float a = lower(lower(x[c][0], x[c][1]), lower(x[c][2], x[c][3]));
      const float b = upper(upper(x[c][0], x[c][1]), upper(x[c][2], x[c][3]));
      const bool first = c < 4 && c % PER_GROUP == 0;
      low[g] = first ? a : lower(low[g], a);
      high[g] = first ? b : upper(high[g], b);
    }
    {  // a step ahead: the warp computes while these are on their way
      const u16* p = p_x + at;
#pragma unroll
      for (int c = 0; c < 8; ++c) next[c] = load_once(p + channel[c]);
      at = source(p_token, min(page + 2 * stride, n_pages - 1), token, page_stride, token_stride);
    }
#pragma unroll
    for (int step = 1; step < SPAN; step *= 2)
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        low[g] = lower(low[g], __shfl_xor_sync(~0u, low[g], step));
        high[g] = upper(high[g], __shfl_xor_sync(~0u, high[g], step));
      }
    float lo = low[0], hi = high[0];
#pragma unroll
    for (int g = 1; g < GROUPS; ++g) {
      lo = own == g ? low[g] : lo;
      hi = own == g ? high[g] : hi;
    }
    // Zero and step are the upper halves of float32, the zero rounded down and the step up.
    int zero_bits = __float_as_int(lo);
    zero_bits = (int)((u32)(zero_bits + ((zero_bits >> 31) & 0xffff)) & 0xffff0000u);
    const float levels = SPLIT ? 63.0f : (float)((1 << BITS) - 1);
    int step_bits = __float_as_int(fmaxf(__fdiv_rn(__fsub_rn(hi, __int_as_float(zero_bits)), levels), TINY));
    step_bits = (int)((u32)(step_bits + 0xffff - (lo == hi ? 0x7fff : 0)) & 0xffff0000u);
    const bool fine = (zero_bits & 0x7f800000) != 0x7f800000 && (step_bits & 0x7f800000) != 0x7f800000 &&
                      __fsub_rn(hi, lo) < __int_as_float(0x7f800000);
    const float width = __int_as_float(step_bits);
    const float slow_rate = __frcp_rn(width);
    const float fast_rate = SPLIT ? __frcp_rn(__fmul_rn(width, RATIO)) : slow_rate;
    const bool there = page < n_pages;
    const u32 faults = __ballot_sync(~0u, there && !fine);
    const u32 mine = SPAN == 32 ? ~0u : ((1u << (SPAN % 32)) - 1) << (page_of_lane * SPAN);
    if ((faults & mine) && lane % SPAN == 0) atomicAdd(p_bad, 1);
#if INDEXED
    u8* p_page = p_pages + p_place[min(page, n_pages - 1)] * PAGE_BYTES;
#else
    u8* p_page = p_pages + (i64)min(page, n_pages - 1) * PAGE_BYTES;
#endif
    if (there && lane % SPAN < GROUPS)
      *(u32*)(p_page + SCALES + (head * GROUPS + own) * 4) =
          (u32)zero_bits | ((u32)step_bits >> 16) | (SPLIT ? 0x8000u : 0u);
    const int row = head * TOKENS + token;
    u32* p_nibbles = (u32*)(p_page + NIBBLES + row * (DIM / 2)) + l;
    u32 extra = 0, extra_fast = 0;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const int from = (lane & ~(GROUPS - 1)) | s / PER_GROUP;
      const float zero = __shfl_sync(~0u, __int_as_float(zero_bits), from);
      const u32 a = codes(x[s], zero, __shfl_sync(~0u, slow_rate, from));
      const u32 b = codes(x[4 + s], zero, __shfl_sync(~0u, SPLIT ? fast_rate : slow_rate, from));
      if (there) p_nibbles[s * LANES] = (a & 0x0f0f0f0fu) | (b << 4 & 0xf0f0f0f0u);
      if (BITS == 5 && SPLIT) extra |= (a >> 4 & 0x03030303u) << 2 * s;
      if (BITS == 5 && !SPLIT) extra |= ((a >> 4 & 0x01010101u) | (b >> 3 & 0x02020202u)) << 2 * s;
      if (BITS == 6) {
        extra |= (a >> 4 & 0x03030303u) << 2 * s;
        extra_fast |= (b >> 4 & 0x03030303u) << 2 * s;
      }
    }
    if (BITS > 4 && there) {
      u32* p_extra = (u32*)(p_page + EXTRA + row * ((BITS - 4) * EIGHTH)) + l;
      p_extra[0] = extra;
      if (BITS == 6) p_extra[LANES] = extra_fast;
    }
  }
}

extern "C" __global__ void pack(
    const u16* p_k, const u16* p_v, const float* p_k_mean, const float* p_k_rate, const float* p_v_mean,
    const float* p_v_rate, const i64* p_order, const i64* p_token, const i64* p_place, u8* p_pages, int* p_bad,
    int n_pages, int k_page, int k_token, int k_head, int v_page, int v_token, int v_head) {
  const int head = blockIdx.y >> 1;
  const int warp = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), warps = gridDim.x * (blockDim.x >> 5);
  if (blockIdx.y & 1)
    pack_head<V_BITS, 0, V_NIBBLES, V_EXTRA, V_SCALES>(
        p_v + (i64)head * v_head, p_v_mean, p_v_rate, nullptr, p_token, p_place, p_pages, p_bad, n_pages,
        v_page, v_token, head, warp, warps);
  else
    pack_head<K_BITS, K_SPLIT, K_NIBBLES, K_EXTRA, K_SCALES>(
        p_k + (i64)head * k_head, p_k_mean, p_k_rate, p_order, p_token, p_place, p_pages, p_bad, n_pages,
        k_page, k_token, head, warp, warps);
}
