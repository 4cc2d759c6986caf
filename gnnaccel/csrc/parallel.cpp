#include "parallel.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace gnnaccel {
namespace {

using ParallelFor = int32_t (*)(int64_t, int64_t, int64_t, Body, void*);
using NumThreads = int32_t (*)(uint32_t*);

ParallelFor pool_for = nullptr;
NumThreads pool_threads = nullptr;

}  // namespace

void set_pool(void* parallel_for, void* num_threads) {
  pool_for = reinterpret_cast<ParallelFor>(parallel_for);
  pool_threads = reinterpret_cast<NumThreads>(num_threads);
}

int64_t threads() {
  uint32_t n = 1;
  if (pool_for == nullptr || pool_threads == nullptr || pool_threads(&n) != 0) {
    return 1;
  }
  return n > 0 ? n : 1;
}

void parallel(int64_t n, Body body, void* context) {
  if (n <= 0) return;
  if (n == 1 || pool_for == nullptr || pool_for(0, n, 1, body, context) != 0) {
    body(0, n, context);
  }
}

void prefer_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t kHuge = int64_t{1} << 21;
  if (bytes < 4 * kHuge) return;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) & ~(kHuge - 1);
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kHuge - 1);
  // Advice only: a refusal leaves ordinary pages, so its result is of no interest.
  if (end > begin) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace gnnaccel
