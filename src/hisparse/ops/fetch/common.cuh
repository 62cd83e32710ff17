// What the kernels of this folder share. Macro: THREADS (of a program; a multiple of 32, 1024 at most).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int WARPS = THREADS / 32;
constexpr u32 ALL = 0xffffffffu;

// For launches that overlap: waits until the kernel ahead has ended and its writes can be seen; lets the next one start.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// A load that stays where it is among waits and barriers; and one of what others wrote not long ago.
__device__ __forceinline__ int read(const int* p) {
  int x;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ int read_fresh(const int* p) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// Sum of `x` over the warps before this one, and over all; `x` is the same in all lanes. warps: shared, WARPS words, used by
// this call alone.
__device__ __forceinline__ u32 sum_before(u32 x, u32* warps, u32& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) warps[warp] = x;
  __syncthreads();
  const u32 own = lane < WARPS ? warps[lane] : 0;
  total = __reduce_add_sync(ALL, own);
  return __reduce_add_sync(ALL, lane < warp ? own : 0u);
}
