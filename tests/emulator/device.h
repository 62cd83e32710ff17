// A model of one device for kernels in CUDA C++, to run them on a CPU: see emulator.py.
//
// Every thread is a fiber. The lanes of a warp meet in the warp's instructions; between these they run in random order,
// and so do warps: at any time the warp with the highest priority runs that can, and priorities change at random, so that
// one warp runs far ahead of another until a barrier stops it (Burckhardt et al. 2010, a randomised scheduler for finding
// concurrency bugs). Copies in the background arrive as late as the program allows, in random order. Shared memory is
// full of nonsense at first. What goes wrong ends the launch with a message.

#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct int2 { int x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;

namespace emu {

// ---- fibers ------------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
extern "C" void emu_switch(void** from, void* to) __attribute__((visibility("hidden")));
asm(".text\n.hidden emu_switch\n.globl emu_switch\n.type emu_switch,@function\nemu_switch:\n"
    " pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    " movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
    " popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
struct Context {
  void* sp = nullptr;
  void start(char* stack, size_t size, void (*entry)()) {
    void** top = (void**)(((uintptr_t)stack + size) & ~(uintptr_t)15);
    top[-2] = (void*)entry;  // the address that `ret` takes; the stack is then as after a call
    sp = top - 8;
  }
};
static void switch_to(Context& from, Context& to) { emu_switch(&from.sp, to.sp); }
#else
struct Context {
  ucontext_t c;
  void start(char* stack, size_t size, void (*entry)()) {
    getcontext(&c);
    c.uc_stack.ss_sp = stack, c.uc_stack.ss_size = size, c.uc_link = nullptr;
    makecontext(&c, entry, 0);
  }
};
static void switch_to(Context& from, Context& to) { swapcontext(&from.c, &to.c); }
#endif

struct Copy {
  char* to;
  const char* from;
  unsigned size, valid;  // bytes; those beyond `valid` become zeros
  unsigned barrier;      // of a bulk copy: shared address
};

struct Warp;
struct Block;

struct Fiber {
  Context context;
  int tid = 0, lane = 0;
  bool done = false;
  Warp* warp = nullptr;
  Block* block = nullptr;
  std::vector<Copy> open;               // copies of the group not committed yet
  std::deque<std::vector<Copy>> groups;  // committed, oldest first
  unsigned cluster_phase = 0;           // of the cluster's barrier, at which it arrived last
  const void* heard = nullptr;          // global memory that it read last while others may write it, and what was there
  char words[16];
  unsigned size = 0;
};

struct Slot {
  unsigned in[10];
  unsigned out[4];
  unsigned long long wide;
};

struct Warp {
  Block* block = nullptr;
  int alive = 0;
  unsigned long long priority = 0;
  std::vector<Fiber*> ready, waiting;
  Fiber* lanes[32] = {};
  Slot slots[32];
  const char* doing = nullptr;
  void (*act)(Warp&) = nullptr;
};

struct Barrier {  // of threads
  std::vector<Fiber*> waiting;
};

struct Mbarrier {
  int count = 0, pending = 0;
  long long bytes = 0;
  unsigned phase = 0;
  std::vector<std::pair<Fiber*, unsigned>> waiting;
};

struct Block {
  unsigned x = 0, y = 0, z = 0, rank = 0;
  int alive = 0;
  char* memory = nullptr;
  size_t used = 0;
  std::map<int, size_t> sites;
  std::vector<std::pair<size_t, size_t>> places;  // what may be touched: begin, end
  Barrier all;
  std::map<int, Barrier> named;
  std::map<unsigned, Mbarrier> mbarriers;
  std::vector<Warp> warps;
};

constexpr size_t ARENA = 228 << 10, STACK = 96 << 10;
constexpr unsigned WINDOW = 1 << 20;  // from block to block of a cluster in the shared address space

// Memory that the kernel ahead changes: while it may still run, programs see what was there before.
struct Hidden {
  char* at;
  std::vector<char> other;  // what is not visible now
};

struct Device {
  Context main;
  Fiber* now = nullptr;
  std::vector<Block> blocks;  // of the cluster that runs
  std::vector<Fiber> fibers;
  std::vector<Copy> bulk;
  std::vector<std::pair<const char*, const char*>> known;  // global memory that copies may read
  Barrier cluster, ahead;      // `ahead`: threads that wait for the kernel ahead
  unsigned cluster_phase = 0;  // how often all threads have arrived at the cluster's barrier
  int arrived = 0;             // at it
  std::vector<Fiber*> listening;  // to what others write into global memory
  std::vector<Hidden> hidden;  // of it
  bool before = false;         // it has not ended yet
  int alive = 0;
  unsigned grid[3] = {}, threads = 0;
  unsigned long long random = 1;
  bool failed = false;
  char message[512] = {};
};
static Device device;

static unsigned long long draw() {
  unsigned long long& x = device.random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return x * 0x2545F4914F6CDD1Dull >> 16;
}

struct Failed {};

[[noreturn]] static void fail(const char* format, ...) {
  Fiber* f = device.now;
  int n = 0;
  if (f) n = snprintf(device.message, sizeof device.message, "block (%u, %u), thread %d: ", f->block->x, f->block->y, f->tid);
  va_list rest;
  va_start(rest, format);
  vsnprintf(device.message + n, sizeof device.message - n, format, rest);
  va_end(rest);
  device.failed = true;
  if (!f) throw Failed();  // not in a fiber, but in the launch itself
  Context lost;
  switch_to(lost, device.main);
  __builtin_unreachable();
}

static void block_here() {
  Fiber* f = device.now;
  switch_to(f->context, device.main);
}

static void wake(Fiber* f) { f->warp->ready.push_back(f); }
static void wake(std::vector<Fiber*>& fibers) {
  for (Fiber* f : fibers) wake(f);
  fibers.clear();
}

// Lets threads go on whose word in global memory is no longer what they read.
static bool wake_listeners() {
  bool any = false;
  for (size_t i = device.listening.size(); i-- > 0;) {
    Fiber* f = device.listening[i];
    if (!memcmp(f->heard, f->words, f->size)) continue;
    device.listening.erase(device.listening.begin() + i);
    wake(f), any = true;
  }
  return any;
}

// A read of memory that other programs write. Who reads the same again waits for something else to be there: loops until a
// word changes take no time, and one that never ends shows.
static void listen(const void* p, void* to, unsigned size) {
  Fiber* f = device.now;
  if (f->heard == p && !memcmp(p, f->words, size)) {
    device.listening.push_back(f);
    block_here();
  }
  f->heard = p, f->size = size;
  memcpy(f->words, p, size), memcpy(to, p, size);
}

static void meet(Barrier& barrier, int all) {
  barrier.waiting.push_back(device.now);
  if ((int)barrier.waiting.size() >= all) wake(barrier.waiting);
  block_here();
}

// ---- shared memory and copies ------------------------------------------------------------------------------------

static void fill_with_nonsense(char* p, size_t size) {
  for (size_t i = 0; i < size; i += 4) {
    const unsigned nonsense = 0xFFF00000u | (unsigned)(draw() & 0xFFFFF);  // NaN, or a number far below zero
    memcpy(p + i, &nonsense, std::min<size_t>(4, size - i));
  }
}

static char* place_shared(size_t size, size_t align) {
  Block& b = *device.now->block;
  const size_t at = (b.used + 64 + align - 1) / align * align;  // with a gap, so that one overrun does not hit the next
  if (at + size > ARENA) fail("%zu bytes of shared memory do not fit", at + size);
  b.used = at + size;
  b.places.push_back({at, at + size});
  fill_with_nonsense(b.memory + at, size);
  return b.memory + at;
}

template <class T>
static T& shared_variable(int site) {
  Block& b = *device.now->block;
  const auto found = b.sites.find(site);
  if (found != b.sites.end()) return *(T*)(b.memory + found->second);
  char* p = place_shared(sizeof(T), std::max<size_t>(alignof(T), 16));
  b.sites[site] = p - b.memory;
  return *(T*)p;
}

static void* dynamic_shared() { return device.now->block->memory + device.now->block->sites[-1]; }

static char* shared_pointer(unsigned address, unsigned size, const char* what) {
  const unsigned rank = address / WINDOW, at = address % WINDOW;
  if (rank >= device.blocks.size()) fail("%s at shared address %#x of no block", what, address);
  if (at % std::min(size, 16u)) fail("%s of %u bytes at shared address %#x, which is not aligned", what, size, address);
  for (const auto& place : device.blocks[rank].places)
    if (at >= place.first && at + size <= place.second) return device.blocks[rank].memory + at;
  fail("%s of %u bytes at shared address %#x, beyond what is there", what, size, address);
}

static void check_source(const void* p, unsigned size) {
  for (const auto& range : device.known)
    if ((const char*)p >= range.first && (const char*)p + size <= range.second) return;
  fail("a copy of %u bytes from outside all tensors", size);
}

static void carry_out(const Copy& copy) {
  memcpy(copy.to, copy.from, copy.valid);
  memset(copy.to + copy.valid, 0, copy.size - copy.valid);
}

static Mbarrier& mbarrier_at(unsigned address) {
  Block& b = device.blocks[address / WINDOW];
  const auto found = b.mbarriers.find(address % WINDOW);
  if (found == b.mbarriers.end()) fail("a barrier at shared address %#x that was not set up", address);
  return found->second;
}

static void settle(Mbarrier& m) {
  if (m.pending > 0 || m.bytes != 0) return;
  if (m.pending < 0) fail("more arrivals at a barrier than it was set up for");
  m.phase++, m.pending = m.count;
  auto waiting = std::move(m.waiting);
  m.waiting.clear();
  for (auto& w : waiting)
    if ((m.phase & 1) != w.second) wake(w.first);
    else m.waiting.push_back(w);
}

static void finish_bulk_copy() {
  const size_t i = draw() % device.bulk.size();
  const Copy copy = device.bulk[i];
  device.bulk.erase(device.bulk.begin() + i);
  carry_out(copy);
  Mbarrier& m = mbarrier_at(copy.barrier);
  m.bytes -= copy.size;
  settle(m);
}

static void finish_group(std::vector<Copy>& group) {
  while (!group.empty()) {
    const size_t i = draw() % group.size();
    carry_out(group[i]);
    group.erase(group.begin() + i);
  }
}

static void settle_cluster() {
  if (device.arrived < device.alive || !device.alive) return;
  device.arrived = 0, device.cluster_phase++;
  wake(device.cluster.waiting);
}

// The kernel ahead starts or ends, as the programs of the cluster that runs see it.
static void show_other() {
  for (Hidden& h : device.hidden) std::swap_ranges(h.other.begin(), h.other.end(), h.at);
  device.before = !device.before;
}

// ---- warps -------------------------------------------------------------------------------------------------------

// All lanes that are left meet; the last one does what `act` says with their slots.
static void meet_in_warp(const char* doing, void (*act)(Warp&)) {
  Warp& w = *device.now->warp;
  if (w.doing && strcmp(w.doing, doing)) fail("lanes of a warp meet in %s and in %s", w.doing, doing);
  w.doing = doing, w.act = act;
  w.waiting.push_back(device.now);
  if ((int)w.waiting.size() == w.alive) {
    if (act) act(w);
    w.doing = nullptr;
    wake(w.waiting);
  }
  block_here();
}

static Slot& slot() { return device.now->warp->slots[device.now->lane]; }

static void leave() {
  Fiber& f = *device.now;
  for (auto& group : f.groups) finish_group(group);
  finish_group(f.open);
  f.done = true;
  f.warp->alive--, f.block->alive--, device.alive--;
  Warp& w = *f.warp;
  if (w.alive && (int)w.waiting.size() == w.alive) {
    if (w.act) w.act(w);
    w.doing = nullptr;
    wake(w.waiting);
  }
  if (!f.block->all.waiting.empty() && (int)f.block->all.waiting.size() >= f.block->alive) wake(f.block->all.waiting);
  if (device.arrived) settle_cluster();
  block_here();
}

// ---- the launch --------------------------------------------------------------------------------------------------

template <class F>
struct Entry {
  static F* kernel;
  static void run() {
    (*kernel)();
    leave();
  }
};
template <class F>
F* Entry<F>::kernel;

static void run_cluster() {
  Warp* warp = nullptr;
  while (device.alive) {
    device.now = nullptr;
    if (!device.bulk.empty() && draw() % 64 == 0) finish_bulk_copy();
    if (!device.listening.empty() && draw() % 64 == 0) wake_listeners();
    if (!warp || warp->ready.empty() || draw() % 256 == 0) {
      warp = nullptr;
      for (Block& b : device.blocks)
        for (Warp& w : b.warps) {
          if (draw() % 512 == 0) w.priority = draw();
          if (!w.ready.empty() && (!warp || w.priority > warp->priority)) warp = &w;
        }
      if (!warp) {
        if (wake_listeners()) {
        } else if (!device.bulk.empty()) {
          finish_bulk_copy();
        } else if (!device.ahead.waiting.empty()) {  // as late as the program allows
          if (device.before) show_other();
          wake(device.ahead.waiting);
        } else {
          fail("all threads wait, and nothing is on its way");
        }
        continue;
      }
    }
    const size_t i = draw() % warp->ready.size();
    Fiber* next = warp->ready[i];
    warp->ready[i] = warp->ready.back(), warp->ready.pop_back();
    device.now = next;
    switch_to(device.main, next->context);
    if (device.failed) return;
  }
  device.now = nullptr;
  if (!device.bulk.empty()) fail("%zu copies are still on their way at the end", device.bulk.size());
}

template <class F>
static const char* launch(unsigned gx, unsigned gy, unsigned gz, unsigned threads, unsigned shared, unsigned cluster,
                          unsigned seed, F kernel) {
  Entry<F>::kernel = &kernel;
  device.random = seed * 0x9E3779B97F4A7C15ull + 0x1234567;
  for (int i = 0; i < 9; i++) draw();
  device.failed = false, device.message[0] = 0;
  device.grid[0] = gx, device.grid[1] = gy, device.grid[2] = gz, device.threads = threads;
  const size_t count = (size_t)threads * cluster;
  char* stacks = (char*)mmap(nullptr, count * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  std::vector<char> arenas(ARENA * cluster);
  std::vector<unsigned> order(gx / cluster * gy * gz);  // programs start in any order
  for (unsigned i = 0; i < order.size(); i++) order[i] = i;
  for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[draw() % i]);
  for (unsigned n : order) {
    device.fibers = std::vector<Fiber>(count);
    device.blocks = std::vector<Block>(cluster);
    device.bulk.clear(), device.listening.clear(), device.cluster = device.ahead = Barrier(), device.alive = (int)count;
    device.cluster_phase = 0, device.arrived = 0;
    const unsigned groups = gx / cluster;
    for (unsigned r = 0; r < cluster; r++) {
      Block& b = device.blocks[r];
      b.x = n % groups * cluster + r, b.y = n / groups % gy, b.z = n / groups / gy, b.rank = r;
      b.alive = (int)threads, b.memory = &arenas[ARENA * r];
      b.warps = std::vector<Warp>((threads + 31) / 32);
      b.sites[-1] = 1024, b.used = 1024 + shared;
      b.places.push_back({1024, 1024 + shared});
      for (unsigned t = 0; t < threads; t++) {
        Fiber& f = device.fibers[r * threads + t];
        Warp& w = b.warps[t / 32];
        f.tid = (int)t, f.lane = (int)t % 32, f.warp = &w, f.block = &b;
        f.context.start(stacks + (r * threads + t) * STACK, STACK, Entry<F>::run);
        w.block = &b, w.lanes[f.lane] = &f, w.alive++, w.priority = draw();
        w.ready.push_back(&f);
      }
    }
    show_other();
    try {
      if (1024 + shared > ARENA) fail("%u bytes of shared memory do not fit", shared);
      for (Block& b : device.blocks) fill_with_nonsense(b.memory + 1024, shared);
      run_cluster();
    } catch (Failed) {
    }
    device.now = nullptr;
    if (device.before) show_other();
    if (device.failed) break;
  }
  munmap(stacks, count * STACK);
  return device.message;
}

struct Index {
  struct X { operator unsigned() const { return device.now->block->x; } } x;
  struct Y { operator unsigned() const { return device.now->block->y; } } y;
  struct Z { operator unsigned() const { return device.now->block->z; } } z;
};
struct Thread {
  struct X { operator unsigned() const { return (unsigned)device.now->tid; } } x;
};
struct Grid {
  template <int I> struct Of { operator unsigned() const { return device.grid[I]; } };
  Of<0> x;
  Of<1> y;
  Of<2> z;
};
struct Size {
  struct X { operator unsigned() const { return device.threads; } } x;
};

}  // namespace emu

static const emu::Index blockIdx{};
static const emu::Thread threadIdx{};
static const emu::Grid gridDim{};
static const emu::Size blockDim{};
