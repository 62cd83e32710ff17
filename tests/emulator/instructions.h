// What kernels call beside C++: functions that nvcc knows, and, in namespace ptx, the PTX instructions that emulator.py
// finds in their inline assembly, with the operands in the order in which PTX has them.

using emu::device;
using emu::Slot;
using emu::Warp;

template <class To, class From>
static inline To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

// ---- numbers -----------------------------------------------------------------------------------------------------

static inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
static inline float __int_as_float(int x) { return same_bits<float>(x); }
static inline int __float_as_int(float x) { return same_bits<int>(x); }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __frcp_rn(float x) { return 1.f / x; }
static inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
static inline float __fadd_rz(float x, float y) {
  const int mode = fegetround();
  fesetround(FE_TOWARDZERO);
  volatile float a = x, b = y;
  volatile float sum = a + b;
  fesetround(mode);
  return sum;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
static inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((unsigned long long)x * y >> 32); }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long both = (unsigned long long)y << 32 | x;
  unsigned z = 0;
  for (int i = 0; i < 4; i++) z |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return z;
}
static inline float half_value(unsigned x) { return (float)same_bits<_Float16>((unsigned short)x); }
static inline unsigned half_bits(float x) { return same_bits<unsigned short>((_Float16)x); }
static inline unsigned bfloat_bits(float x) {
  const unsigned u = same_bits<unsigned>(x);
  return x != x ? 0x7FFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}

// ---- threads and warps -------------------------------------------------------------------------------------------

static void __syncthreads() { emu::meet(device.now->block->all, device.now->block->alive); }
static void __syncwarp() { emu::meet_in_warp("__syncwarp", nullptr); }
static void __threadfence() {}

static void whole_warp(unsigned mask) {
  if (mask != ~0u) emu::fail("a warp instruction for some lanes only, %#x", mask);
}

template <class T>
static T exchange(const char* what, T x, int lane) {
  static_assert(sizeof(T) == 4);
  emu::slot().in[0] = same_bits<unsigned>(x), emu::slot().in[1] = (unsigned)lane;
  emu::meet_in_warp(what, [](Warp& w) {
    for (Slot& s : w.slots) s.out[0] = w.slots[s.in[1] & 31].in[0];
  });
  return same_bits<T>(emu::slot().out[0]);
}
template <class T>
static T __shfl_sync(unsigned mask, T x, int lane) {
  whole_warp(mask);
  return exchange("shfl.idx", x, lane & 31);
}
template <class T>
static T __shfl_xor_sync(unsigned mask, T x, int across) {
  whole_warp(mask);
  return exchange("shfl.bfly", x, device.now->lane ^ across);
}
template <class T>
static T __shfl_up_sync(unsigned mask, T x, int by) {
  whole_warp(mask);
  return exchange("shfl.up", x, device.now->lane >= by ? device.now->lane - by : device.now->lane);
}
static unsigned __ballot_sync(unsigned mask, bool x) {
  whole_warp(mask);
  emu::slot().in[0] = x;
  emu::meet_in_warp("vote", [](Warp& w) {
    unsigned votes = 0;
    for (int i = 0; i < 32; i++) votes |= w.slots[i].in[0] << i;
    for (Slot& s : w.slots) s.out[0] = votes;
  });
  return emu::slot().out[0];
}
static bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
static bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == mask; }
template <class T>
static T __reduce_add_sync(unsigned mask, T x) {
  whole_warp(mask);
  emu::slot().in[0] = (unsigned)x;
  emu::meet_in_warp("redux.add", [](Warp& w) {
    unsigned sum = 0;
    for (Slot& s : w.slots) sum += s.in[0];
    for (Slot& s : w.slots) s.out[0] = sum;
  });
  return (T)emu::slot().out[0];
}
template <class T>
static T atomicAdd(T* p, T x) {
  const T old = *p;
  *p += x;
  return old;
}
template <class T>
static T atomicOr(T* p, T x) {
  const T old = *p;
  *p |= x;
  return old;
}
static int atomicMin(int* p, int x) {
  const int old = *p;
  *p = std::min(old, x);
  return old;
}
template <class T>
static T atomicExch(T* p, T x) {
  const T old = *p;
  *p = x;
  return old;
}
static size_t __cvta_generic_to_shared(const void* p) {
  const emu::Block& b = *device.now->block;
  const char* at = (const char*)p;
  if (at < b.memory || at >= b.memory + emu::ARENA) emu::fail("an address that is not in shared memory is taken for one that is");
  return b.rank * emu::WINDOW + (size_t)(at - b.memory);
}

// ---- PTX ---------------------------------------------------------------------------------------------------------

namespace ptx {

using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;

template <class... T>
static void nothing(T&&...) {}

static void ex2(float& y, float x) { y = exp2f(x); }
static void lg2(float& y, float x) { y = log2f(x); }
static void sqrt_(float& y, float x) { y = sqrtf(x); }
static void min_nan(float& z, float x, float y) { z = x != x || y != y ? NAN : x < y ? x : y; }
static void max_nan(float& z, float x, float y) { z = x != x || y != y ? NAN : x > y ? x : y; }
static void cvt_f16x2(u32& y, float high, float low) { y = half_bits(high) << 16 | half_bits(low); }
static void cvt_bf16x2(u32& y, float high, float low) { y = bfloat_bits(high) << 16 | bfloat_bits(low); }
static void cvt_to_f16(u16& y, float x) { y = (u16)half_bits(x); }
static void cvt_from_f16(float& y, u16 x) { y = half_value(x); }
static void mul_f16x2(u32& z, u32 x, u32 y) {
  z = half_bits(half_value(x) * half_value(y)) | half_bits(half_value(x >> 16) * half_value(y >> 16)) << 16;
}

template <bool BFLOAT>
static void mma(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1,
                float c2, float c3) {
  Slot& s = emu::slot();
  const u32 in[10] = {a0, a1, a2, a3, b0, b1, same_bits<u32>(c0), same_bits<u32>(c1), same_bits<u32>(c2), same_bits<u32>(c3)};
  memcpy(s.in, in, sizeof in);
  emu::meet_in_warp("mma", [](Warp& w) {
    // Lane 4 g + t has rows g and g + 8 of A, column g of B, and of both the places 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
    float a[16][16], b[8][16];
    for (int lane = 0; lane < 32; lane++)
      for (int r = 0; r < 4; r++)
        for (int i = 0; i < 2; i++) {
          const int g = lane / 4, place = lane % 4 * 2 + i + (r >> 1) * 8;
          const auto value = [](u32 x) { return BFLOAT ? same_bits<float>(x << 16) : half_value(x); };
          a[g + (r & 1) * 8][place] = value(w.slots[lane].in[r] >> 16 * i);
          if (r < 2) b[g][lane % 4 * 2 + i + r * 8] = value(w.slots[lane].in[4 + r] >> 16 * i);
        }
    for (int lane = 0; lane < 32; lane++)
      for (int r = 0; r < 4; r++) {
        const float *x = a[lane / 4 + (r >> 1) * 8], *y = b[lane % 4 * 2 + (r & 1)];
        double sum = same_bits<float>(w.slots[lane].in[6 + r]);
        for (int k = 0; k < 16; k++) sum += (double)x[k] * y[k];
        w.slots[lane].out[r] = same_bits<u32>((float)sum);
      }
  });
  d0 = same_bits<float>(s.out[0]), d1 = same_bits<float>(s.out[1]), d2 = same_bits<float>(s.out[2]), d3 = same_bits<float>(s.out[3]);
}

template <int N>
static void load_matrices(u32* (&to)[N], u32 address) {
  emu::slot().in[0] = address;
  const char* what = N == 4 ? "ldmatrix.x4.trans" : "ldmatrix.x2.trans";
  emu::meet_in_warp(what, [](Warp& w) {
    // Lanes 8 m .. 8 m + 7 name the rows of matrix m; transposed, lane 4 g + t gets column g of rows 2 t, 2 t + 1.
    for (int m = 0; m < N; m++) {
      u16 x[8][8];
      for (int row = 0; row < 8; row++) memcpy(x[row], emu::shared_pointer(w.slots[8 * m + row].in[0], 16, "ldmatrix"), 16);
      for (int lane = 0; lane < 32; lane++)
        w.slots[lane].out[m] = x[lane % 4 * 2][lane / 4] | (u32)x[lane % 4 * 2 + 1][lane / 4] << 16;
    }
  });
  for (int m = 0; m < N; m++) *to[m] = emu::slot().out[m];
}
static void ldmatrix_trans(u32& a, u32& b, u32& c, u32& d, u32 address) {
  u32* to[4] = {&a, &b, &c, &d};
  load_matrices(to, address);
}
static void ldmatrix_trans(u32& a, u32& b, u32 address) {
  u32* to[2] = {&a, &b};
  load_matrices(to, address);
}
static void movmatrix_trans(u32& y, u32 x) {
  emu::slot().in[0] = x;
  emu::meet_in_warp("movmatrix.trans", [](Warp& w) {
    u16 m[8][8];
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 2; i++) m[lane / 4][lane % 4 * 2 + i] = (u16)(w.slots[lane].in[0] >> 16 * i);
    for (int lane = 0; lane < 32; lane++)
      w.slots[lane].out[0] = m[lane % 4 * 2][lane / 4] | (u32)m[lane % 4 * 2 + 1][lane / 4] << 16;
  });
  y = emu::slot().out[0];
}

template <class T>
static T read_at(u32 address, const char* what) {
  T x;
  memcpy(&x, emu::shared_pointer(address, sizeof x, what), sizeof x);
  return x;
}
template <class T>
static void write_at(u32 address, T x, const char* what) {
  memcpy(emu::shared_pointer(address, sizeof x, what), &x, sizeof x);
}
static void ld_shared(u32& x, u32 at) { x = read_at<u32>(at, "ld.shared"); }
static void ld_shared_u16(u16& x, u32 at) { x = read_at<u16>(at, "ld.shared"); }
static void ld_shared(u32& x, u32& y, u32 at) {
  const uint2 v = read_at<uint2>(at, "ld.shared.v2");
  x = v.x, y = v.y;
}
static void ld_shared(u32& x, u32& y, u32& z, u32& v, u32 at) {
  const uint4 all = read_at<uint4>(at, "ld.shared.v4");
  x = all.x, y = all.y, z = all.z, v = all.w;
}
static void st_shared(u32 at, u32 x) { write_at(at, x, "st.shared"); }
static void st_shared(u32 at, float x, float y, float z, float w) { write_at(at, float4{x, y, z, w}, "st.shared.v4"); }
static void atom_add_shared(u32& old, u32 at, u32 x) {
  old = read_at<u32>(at, "atom.shared");
  write_at(at, old + x, "atom.shared");
}
template <class T>
static void mapa(u32& y, u32 x, T rank) { y = x % emu::WINDOW + (u32)rank * emu::WINDOW; }
template <class T>
static void ld_cluster(T& x, u32 at) { x = read_at<T>(at, "ld.shared::cluster"); }
static void st_cluster_u32(u32 at, u32 x) { write_at(at, x, "st.shared::cluster"); }
static void st_cluster_u64(u32 at, u64 x) { write_at(at, x, "st.shared::cluster"); }

template <class T, class P>
static void ld_global(T& x, P p) { memcpy(&x, (const void*)p, 4); }
template <class P>
static void ld_global(u32& x, u32& y, P p) { memcpy(&x, (const char*)p, 4), memcpy(&y, (const char*)p + 4, 4); }
template <class P>
static void ld_global(u32& x, u32& y, u32& z, u32& w, P p) {
  if ((uintptr_t)p % 16) emu::fail("a load of 16 bytes that is not aligned");
  ld_global(x, y, p), ld_global(z, w, (const char*)p + 8);
}

template <class T, class P>
static void hear(T& x, P p) { emu::listen((const void*)p, &x, sizeof x); }
template <class P>
static void hear(u32& x, u32& y, u32& z, u32& w, P p) {
  if ((uintptr_t)p % 16) emu::fail("a load of 16 bytes that is not aligned");
  u32 all[4];
  emu::listen((const void*)p, all, sizeof all);
  x = all[0], y = all[1], z = all[2], w = all[3];
}
template <class T>
static void tell(T* p, T x) { *p = x; }

// Behind the size may be how many bytes are brought, the rest being zeros, and a 64-bit policy.
static u32 brought(int size) { return (u32)size; }
static u32 brought(int size, u64) { return (u32)size; }
template <class... Policy>
static u32 brought(int, int valid, Policy...) { return (u32)valid; }

template <class... More>
static void cp_async(u32 to, const void* from, int size, More... more) {
  const u32 valid = brought(size, more...);
  if (valid) emu::check_source(from, valid);
  if (valid && (uintptr_t)from % size) emu::fail("an asynchronous copy of %d bytes that is not aligned", size);
  char* p = emu::shared_pointer(to, (unsigned)size, "cp.async");
  const emu::Copy copy{p, (const char*)from, (unsigned)size, valid, 0};
  if (emu::draw() % 8 == 0) emu::carry_out(copy);  // rarely at once, mostly when it is waited for
  else device.now->open.push_back(copy);
}
static void cp_async_commit() {
  device.now->groups.push_back(std::move(device.now->open));
  device.now->open.clear();
}
static void cp_async_wait(int left) {
  while ((int)device.now->groups.size() > left) {
    emu::finish_group(device.now->groups.front());
    device.now->groups.pop_front();
  }
}
template <class... Policy>
static void bulk_copy(u32 to, const void* from, u32 size, u32 barrier, Policy...) {
  if (to % 16 || (uintptr_t)from % 16 || size % 16) emu::fail("a bulk copy that is not aligned to 16 bytes");
  emu::check_source(from, size);
  emu::mbarrier_at(barrier);
  device.bulk.push_back({emu::shared_pointer(to, size, "cp.async.bulk"), (const char*)from, size, size, barrier});
}

static void mbarrier_init(u32 at, u32 count) {
  emu::shared_pointer(at, 8, "mbarrier.init");
  emu::Mbarrier m;
  m.count = m.pending = (int)count;
  device.blocks[at / emu::WINDOW].mbarriers[at % emu::WINDOW] = m;
}
static void mbarrier_arrive(u32 at) {
  emu::Mbarrier& m = emu::mbarrier_at(at);
  m.pending--;
  emu::settle(m);
}
static void mbarrier_expect(u32 at, u32 bytes) {
  emu::mbarrier_at(at).bytes += bytes;
  mbarrier_arrive(at);
}
static void mbarrier_wait(u32 at, u32 parity) {
  emu::Mbarrier& m = emu::mbarrier_at(at);
  if ((m.phase & 1) != parity) return;
  m.waiting.push_back({device.now, parity});
  emu::block_here();
}
static void bar_sync(int name, int threads) { emu::meet(device.now->block->named[name], threads); }
static void wait_for_kernel_ahead() {
  if (!device.before) return;
  device.ahead.waiting.push_back(device.now);
  emu::block_here();
}
static void cluster_arrive() {
  if (device.now->cluster_phase > device.cluster_phase) emu::fail("a thread arrives twice at the cluster's barrier");
  device.now->cluster_phase = device.cluster_phase + 1;
  device.arrived++;
  emu::settle_cluster();
}
static void cluster_wait() {
  if (device.cluster_phase >= device.now->cluster_phase) return;
  device.cluster.waiting.push_back(device.now);
  emu::block_here();
}

}  // namespace ptx
