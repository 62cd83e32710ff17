// The sketch scan of a decode step: worth(row) = sum over query heads of sqrt(attention on the row / all attention of the
// head). This leaves the roots of the rows' attention in global memory; select.cu adds them up, for which all rows have to
// be known. step.cu does both in one kernel, where the roots fit into shared memory.
// Macros: those of tile.cuh.

#include "ptx.cuh"
#include "sketch.cuh"
#include "tile.cuh"

// Persistent grid, WARPS warps, WARPS * WARP_BYTES bytes of shared memory. The tiles of all sequences and head blocks
// are shared out evenly; warps of a program take turns. Writes
//   value u32 [BLOCKS, B, max_rows, 4, SETS]: two bfloat16, columns 2 t and 2 t + 1: the root of a row's attention;
//   part float32 [grid + B * BLOCKS, PC]: at program + sequence * BLOCKS + block, the sum of the program's attention.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
scan_rows(const u32* frag, const u8* codes, const u8* scales, const int* table, const int* count, u32* value, float* part,
          int batch, int max_rows, int code_stride, int scale_stride) {
  extern __shared__ __align__(16) u8 memory[];
  __shared__ Base s_base;
  __shared__ float s_total[WARPS][PC];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  start_next();
  const Lengths lengths = read_lengths(count, batch, max_rows, lane);
  const int all = lengths.all * BLOCKS, programs = min((int)gridDim.x, all);
  if ((int)blockIdx.x >= programs) {
    wait_for_previous();  // or this kernel could end before the one ahead, and what follows would not wait for that one
    return;
  }
  int at = share_start(blockIdx.x, programs, all);
  const int stop = share_start(blockIdx.x + 1, programs, all);
  Ring ring;
  ring.set_up(memory, warp);

  while (at < stop) {
    const Place place = find_place(lengths, count, batch, max_rows, at / BLOCKS, lane);
    const int b = place.b, n_rows = place.rows, each = (n_rows + 7) / 8, block = (at - place.before * BLOCKS) / each;
    const int base = place.before * BLOCKS + block * each, end = min(stop - base, each);
    const Sketches from = {codes + block * BODY, scales + block * MARKS, (u32)code_stride, (u32)scale_stride};
    u32* to = value + ((i64)block * batch + b) * max_rows * (4 * SETS) + (lane & 3) * SETS;
    Weights weights;
    float total[SETS][2] = {};
    score_tiles(
        ring, from, table + (i64)b * max_rows, n_rows, at - base + warp, end, warp, WARPS, weights, total, lane,
        [&](const Sample& sample) {
          wait_for_previous();  // sketches, tables and counts are older; the weights are not
          weights.read(frag, (i64)b * HEADS + block * HB, sample, s_base, 1, s_total, warp, lane);
        },
        [&](int, int row, const u32(&result)[SETS]) {
          if (row < n_rows) write_words(to + (i64)row * (4 * SETS), result);
        });
    add_rows(total, s_total[warp], lane);
    __syncthreads();
    if (tid < PC) {
      float x = 0.f;
      for (int w = 0; w < WARPS; ++w) x += s_total[w][tid];
      part[((i64)blockIdx.x + b * BLOCKS + block) * PC + tid] = x;
    }
    __syncthreads();
    at = base + end;
  }
}
