// What CUDA C++ has no words for: barriers, bulk copies, matrix instructions, pairs of float16. Includes nothing.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 ALL = 0xFFFFFFFFu;  // lanes

__device__ inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ inline void barrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ inline void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
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
__device__ inline void copy4(u32 to, const void* from) {  // in the background, until wait_copies
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(4) : "memory");
}
__device__ inline void wait_copies() {
    asm volatile("cp.async.commit_group;\n cp.async.wait_group 0;" ::: "memory");
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
// x >> 8. `eighth` is 2^24, which the compiler does not know: with MULTIPLY the multipliers shift, and leave the units that
// mask their time.
__device__ inline u32 down8(u32 x, u32 eighth) {
#if MULTIPLY
    return __umulhi(x, eighth);
#else
    return x >> 8;
#endif
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
// What the kernel ahead wrote, read past the cache that may hold what was there before.
__device__ inline int read_fresh(const int* p) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
// For launches that overlap: waits until the kernels ahead have ended and their writes can be seen; lets the next one start.
__device__ inline void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// The same value, but the compiler does not know how it came about: it stays in its register instead of being computed
// again in every round.
__device__ inline u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
__device__ inline float bits(u32 x) { return __uint_as_float(x); }
__device__ inline float number(u16 x) {
#if BF16
    return bits((u32)x << 16);
#else
    return low_half(x);
#endif
}
