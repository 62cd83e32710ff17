// What is in a hot buffer. A warp has EACH_SLOT times 32 adjacent slots. Macros: EACH_SLOT, and common.cuh's.

#include "common.cuh"

// Grid (B). The slots that hold rows, in ascending order: slots int32 [B, width], and their number int32 [B].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
list_held(const int* owner, const int* first, int* slots, int* number, int width) {
  __shared__ u32 s_sums[WARPS];
  const int b = blockIdx.x, lane = threadIdx.x % 32;
  start_next();
  wait_for_previous();
  const int begin = read(first + b), end = read(first + b + 1);
  const int own = begin + (int)threadIdx.x / 32 * 32 * EACH_SLOT + lane;
  u32 holds[EACH_SLOT], held = 0;
#pragma unroll
  for (int j = 0; j < EACH_SLOT; j++) {
    const int s = own + 32 * j;
    holds[j] = __ballot_sync(ALL, s < end && read(owner + s) >= 0);
    held += __popc(holds[j]);
  }
  u32 total, place = sum_before(held, s_sums, total);
#pragma unroll
  for (int j = 0; j < EACH_SLOT; j++) {
    if (holds[j] >> lane & 1) slots[(i64)b * width + place + __popc(holds[j] & ((1u << lane) - 1))] = own + 32 * j;
    place += __popc(holds[j]);
  }
  if (threadIdx.x == 0) number[b] = (int)total;
}
