// The thread pool: workers spin for the next job, then yield the core to whoever wants it, then park.
//
// A decode step has some 150 parallel regions, so handing over must cost well under a microsecond while work keeps
// coming, and nothing when it does not. Spinning lasts from one kernel to the next of a replayed step; yielding from one
// step to the next: it answers nearly as fast, but gives way to an event loop or a tokenizer on the same core. Waking a
// parked worker takes tens of microseconds, hence `ls_pool_wake`: an engine calls it when a step begins, and by the
// first job the workers are there. Left to itself Linux likes to wake a worker on its waker's core, where it waits for
// milliseconds behind the waker, so the waker bars it from that core until it runs. The caller works too and waits only for pieces that a worker has claimed, so a
// worker the kernel has descheduled never holds a job up. Pieces are claimed with one compare-and-swap on a word that
// holds the job's generation, its number of pieces and the next one, so a late worker cannot touch a newer job: an old
// word either is exhausted or belongs to a job whose caller is still waiting.
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "lockstep_native.h"

namespace ls {
namespace {

constexpr int kSpins = 4000;  // some 0.1 ms on Zen 4: longer than Python takes between two kernels
constexpr auto kYielding = std::chrono::milliseconds(2);  // longer than an engine takes between two steps
constexpr int64_t kMaxPieces = (1 << 20) - 1;

// generation (24 bits) | pieces (20) | next piece (20)
uint64_t ticket_of(uint64_t generation, uint64_t pieces) { return generation << 40 | pieces << 20; }
uint32_t generation_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 40); }
int64_t pieces_of(uint64_t ticket) { return ticket >> 20 & kMaxPieces; }
int64_t next_of(uint64_t ticket) { return ticket & kMaxPieces; }

// Where a parked thread may run once it is woken.
struct Bed {
#if defined(__linux__)
  pid_t thread = static_cast<pid_t>(syscall(SYS_gettid));
  cpu_set_t allowed;
  bool is_barred = false;

  // By the waker: anywhere but here, if there is elsewhere.
  void bar_this_core() {
    if (is_barred || sched_getaffinity(thread, sizeof allowed, &allowed) != 0) return;
    const int here = sched_getcpu();
    cpu_set_t others = allowed;
    if (here < 0 || here >= CPU_SETSIZE || !CPU_ISSET(here, &others) || CPU_COUNT(&others) < 2) return;
    CPU_CLR(here, &others);
    is_barred = sched_setaffinity(thread, sizeof others, &others) == 0;
  }
  // By the woken thread.
  void unbar() {
    if (is_barred) sched_setaffinity(thread, sizeof allowed, &allowed);
  }
#else
  void bar_this_core() {}
  void unbar() {}
#endif
};

struct Pool {
  std::mutex caller;  // one job at a time; a second caller runs its own job alone
  std::vector<std::thread> workers;
  std::atomic<bool> stopping{false};

  std::atomic<uint64_t> ticket{0};
  std::atomic<int64_t> pieces_left{0};
  int64_t count = 0, grain = 1;
  void (*fn)(void*, int64_t, int64_t) = nullptr;
  void* context = nullptr;

  std::mutex parking;
  std::condition_variable wake;
  std::atomic<int> parked{0};
  // Guarded by `parking`:
  std::vector<Bed*> beds;  // of parked workers
  uint64_t roused = 0;     // how often they were told to expect a job

  // Run pieces of generation `generation` until none is left.
  void work(uint32_t generation) {
    uint64_t seen = ticket.load(std::memory_order_acquire);
    while (generation_of(seen) == generation) {
      const int64_t piece = next_of(seen);
      if (piece >= pieces_of(seen)) return;
      if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
      const int64_t begin = piece * grain;
      const int64_t end = begin + grain < count ? begin + grain : count;
      fn(context, begin, end);
      pieces_left.fetch_sub(1, std::memory_order_release);
      seen = ticket.load(std::memory_order_acquire);
    }
  }

  void worker_main() {
    uint32_t done = 0;
    while (true) {
      while (!comes_soon(done)) park(done);
      if (stopping.load()) return;
      const uint32_t generation = generation_of(ticket.load(std::memory_order_acquire));
      work(generation);
      done = generation;
    }
  }

  // Whether a job after generation `done`, or the end, comes while spinning and yielding.
  bool comes_soon(uint32_t done) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (has_news(done)) return true;
      pause();
    }
    const auto end = std::chrono::steady_clock::now() + kYielding;
    while (std::chrono::steady_clock::now() < end) {
      if (has_news(done)) return true;
      std::this_thread::yield();
    }
    return false;
  }

  void park(uint32_t done) {
    Bed bed;
    std::unique_lock<std::mutex> lock(parking);
    beds.push_back(&bed);
    parked.fetch_add(1);  // before has_news is asked: the caller stores the ticket, then asks for `parked`
    const uint64_t before = roused;
    wake.wait(lock, [&] { return has_news(done) || roused != before; });
    parked.fetch_sub(1);
    beds.erase(std::find(beds.begin(), beds.end(), &bed));
    lock.unlock();
    bed.unbar();
  }

  bool has_news(uint32_t done) const {
    return generation_of(ticket.load(std::memory_order_seq_cst)) != done || stopping.load(std::memory_order_relaxed);
  }

  // Have parked workers spin again: a job is about to come.
  void rouse() {
    if (parked.load(std::memory_order_relaxed) == 0) return;
    std::lock_guard<std::mutex> lock(parking);
    ++roused;
    wake_all();
  }

  // With `parking` held.
  void wake_all() {
    for (Bed* bed : beds) bed->bar_this_core();
    wake.notify_all();
  }

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
  }

  void run(int64_t total, int64_t piece_size, void (*function)(void*, int64_t, int64_t), void* argument) {
    if (total / piece_size >= kMaxPieces) piece_size = total / kMaxPieces + 1;
    const int64_t wanted = (total + piece_size - 1) / piece_size;
    if (wanted <= 1 || workers.empty() || !caller.try_lock()) {
      function(argument, 0, total);
      return;
    }
    const uint32_t generation = (generation_of(ticket.load(std::memory_order_relaxed)) + 1) & 0xFFFFFF;
    count = total;
    grain = piece_size;
    fn = function;
    context = argument;
    pieces_left.store(wanted, std::memory_order_relaxed);
    ticket.store(ticket_of(generation, wanted), std::memory_order_seq_cst);
    if (parked.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(parking);
      wake_all();
    }
    work(generation);
    while (pieces_left.load(std::memory_order_acquire) > 0) pause();
    caller.unlock();
  }

  void resize(int threads) {
    std::lock_guard<std::mutex> lock(caller);
    {
      std::lock_guard<std::mutex> parking_lock(parking);
      stopping.store(true);
    }
    wake.notify_all();
    for (auto& worker : workers) worker.join();
    workers.clear();
    stopping.store(false);
    for (int i = 1; i < threads; ++i) workers.emplace_back([this] { worker_main(); });
  }
};

// Never destroyed: workers may outlive static destructors at process exit.
Pool& pool() {
  static Pool* instance = [] {
    auto* made = new Pool;
    const unsigned cores = std::thread::hardware_concurrency();
    made->resize(cores ? static_cast<int>(cores) : 1);
    return made;
  }();
  return *instance;
}

}  // namespace

void parallel_for(int64_t count, int64_t grain, void (*fn)(void*, int64_t, int64_t), void* context) {
  if (count > 0) pool().run(count, grain < 1 ? 1 : grain, fn, context);
}

int num_threads() { return static_cast<int>(pool().workers.size()) + 1; }

}  // namespace ls

LS_EXPORT void ls_set_threads(int threads) { ls::pool().resize(threads < 1 ? 1 : threads); }
LS_EXPORT void ls_pool_wake() { ls::pool().rouse(); }
LS_EXPORT int ls_threads() { return ls::num_threads(); }
