// What CUDA C++ has no words for: matrix products, copies in the background, clusters. Includes nothing.
//
// Macros: ONCE (1: what copy16 brings leaves the L2 cache first).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_bfloat(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u16 to_half(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float from_half(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

__device__ __forceinline__ float sqrt_fast(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 pack_bfloat(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// For what is read once: the roots that the scan writes should stay in the L2 cache, not the sketches.
__device__ __forceinline__ u64 read_once() {
  u64 policy = 0;
#if ONCE
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// 16 or 4 bytes from global to shared memory.
__device__ __forceinline__ void copy16(u32 to, const void* from, u64 policy) {
#if ONCE
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#endif
}

__device__ __forceinline__ void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

template <int N>
__device__ __forceinline__ void read_shared(u32 (&w)[N], u32 at) {
  if constexpr (N == 4) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at));
  } else if constexpr (N == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(at));
  } else {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[0]) : "r"(at));
  }
}

template <int N>
__device__ __forceinline__ void read_shared(float (&x)[N], u32 at) {
  u32 w[N];
  read_shared(w, at);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = __uint_as_float(w[i]);
}

__device__ __forceinline__ void write_shared(u32 at, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// For programs of a cluster: a barrier, which also shows each the others' writes; and reading and writing another's
// shared memory, at the place that `p` has in one's own.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ u32 address_in(const void* p, int rank) {
  u32 y;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(y) : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank));
  return y;
}

__device__ __forceinline__ int read_in(const int* p, int rank) {
  int y;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(y) : "r"(address_in(p, rank)) : "memory");
  return y;
}

__device__ __forceinline__ void write_in(u64* p, int rank, u64 x) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address_in(p, rank)), "l"(x) : "memory");
}

// What programs of a grid tell each other through global memory. Relaxed: the word itself is all that is told.
__device__ __forceinline__ void tell(u32* p, u32 x) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ void tell(u64* p, u64 x) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}

__device__ __forceinline__ uint4 hear(const uint4* p) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p)
               : "memory");
  return x;
}
__device__ __forceinline__ u64 hear(const u64* p) {
  u64 x;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ int hear_all(const int* p) {  // and what the teller had written before
  int x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// A barrier among the threads of `n` programs; `arrived` was zero at first. Shows each the others' writes.
__device__ __forceinline__ void arrive(int* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1);
  }
}
__device__ __forceinline__ void wait_for_programs(const int* arrived, int n) {
  if (threadIdx.x == 0)
    while (hear_all(arrived) < n) {}
  __syncthreads();
}

// For launches that overlap: waits until the kernel ahead has ended and its writes can be seen; lets the next one start.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Rows of sequence b.
__device__ __forceinline__ int clamp_count(const int* count, int b, int max_rows) {
  const int c = count[b];
  return c < 0 ? 0 : c < max_rows ? c : max_rows;
}
