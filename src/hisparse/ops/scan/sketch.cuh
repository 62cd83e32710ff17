// Scoring sketches on the matrix units of Hopper and later: what weigh.cu and scan.cu share.
//
// A 32-bit word of a sketch holds twelve codes: of two 16-bit halves each two of four bits and four of two bits. A mask
// takes the same bits out of both halves, and the result, read as two float16, is those bits * 2^-24: subnormals, which
// mma.sync multiplies exactly. Of the byte with four codes one takes the lowest two, four, six and all eight bits, so that
// the last needs no mask; the weight of the lowest f fields is then what a code of field f is worth less what one of field
// f + 1 is, each by its place. So two masks, a move of bytes and three masks unpack twelve codes; place and step are in the
// query's weights, the midpoints in what the accumulators start from.
//
// A tile is 8 rows. Lane 4 g + t has row g in both halves of the m = 16 rows of an operand: token j as row g, token
// j + 1 as row g + 8. So all tokens of a row meet in one lane and nothing is shuffled. The n = 8 columns are the query
// heads of a KV head, or of several where they are few (HG).
//
// Names: g row of a tile, t lane of a quad (columns 2 t, 2 t + 1), n column, b sequence. Logarithms are to base 2.
//
// Macros: HEADS, QUERIES (a KV head), HEAD_DIM, BITS, ROW (tokens a row, a multiple of 4), and how heads are shared out:
// HB heads a warp, HG heads an accumulator, QP columns a head, NB accumulators a head (more than one where it has more
// than eight query heads).

constexpr int I = HEAD_DIM * BITS / 128;           // words of a token and head in a lane
constexpr int PAIRS = HEAD_DIM * BITS / 16;        // byte pairs of a token and head
constexpr int C = 6 * PAIRS;                       // coordinates that have codes
constexpr int NQ = 8 * NB;                         // columns of a head's accumulators
constexpr int G = HB / HG;
constexpr int SETS = G * NB;                       // accumulators, and words of results a lane and row
constexpr int PC = SETS * 8;                       // columns of a warp's heads
constexpr int BLOCKS = HEADS / HB;                 // warps' shares of the heads
constexpr int FRAG = 6 * I;                        // registers of weights a head and operand
constexpr int TOKEN = 16 * I;                      // bytes of a token and head

// ---- scores ------------------------------------------------------------------------------------------------------

// Adds the products of the words of two tokens (rows g and g + 8 of the operand) with one head's weights.
__device__ __forceinline__ void add_products(float (&acc)[NB][4], u32 a, u32 b, const u32 (&weight)[NB][FRAG], int i) {
  const u32 ua = __byte_perm(a, 0, 0x4341), ub = __byte_perm(b, 0, 0x4341);
  const u32 fa[6] = {a & 0x000F000Fu, a & 0x00F000F0u, ua & 0x00030003u, ua & 0x000F000Fu, ua & 0x003F003Fu, ua};
  const u32 fb[6] = {b & 0x000F000Fu, b & 0x00F000F0u, ub & 0x00030003u, ub & 0x000F000Fu, ub & 0x003F003Fu, ub};
#pragma unroll
  for (int p = 0; p < 6; p += 2)
#pragma unroll
    for (int nb = 0; nb < NB; ++nb)
      multiply(acc[nb], fa[p], fb[p], fa[p + 1], fb[p + 1], weight[nb][i * 6 + p], weight[nb][i * 6 + p + 1]);
}

// 2^24 times the root mean square that byte `j` of `word` stands for: 2^((byte - 128) / 16 + 24).
__device__ __forceinline__ float decode_scale(u32 word, int j) {
  const float x = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440 + j));  // 2^23 + byte
  return exp2_fast(__fmaf_rn(x, 0.0625f, 16.f - 524288.f));
}

// True where every sequence wants all rows that it has: there is nothing to choose, so nothing has to be scored. For whole
// warps. limits: int32 [B] or null; budget below 0: never true.
__device__ __forceinline__ bool wants_all(const int* count, const int* limits, int batch, int max_rows, int budget) {
  bool all = budget >= 0;
#pragma unroll 1
  for (int b = threadIdx.x & 31; b < batch && budget >= 0; b += 32) {
    const int wanted = limits ? min(limits[b], budget) : budget;
    all = all && clamp_count(count, b, max_rows) <= wanted;
  }
  return __all_sync(~0u, all);
}
