#include "rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "parallel.h"

namespace gnnaccel {
namespace {

// Rows ahead of the copy that are fetched, as in the products.
constexpr int64_t kAhead = 12;

struct Task {
  const GatherArgs& a;
  int64_t parts;
  std::atomic<int64_t> bad{-1};

  template <class I>
  void copy(int64_t begin, int64_t end) {
    const I* index = static_cast<const I*>(a.index.data);
    const int64_t step = a.index.stride;
    for (int64_t e = begin; e < end; ++e) {
      const int64_t row = index[e * step];
      if (row < 0 || row >= a.rows) {
        bad.store(e, std::memory_order_relaxed);
        return;
      }
      const int64_t next = index[std::min(e + kAhead, end - 1) * step];
      // Any address may be prefetched, but only those of rows may be computed.
      if (next >= 0 && next < a.rows) {
        const char* far = a.x + next * a.stride;
        for (int64_t b = 0; b < a.bytes; b += 64) __builtin_prefetch(far + b, 0, 3);
      }
      std::memcpy(a.out + e * a.bytes, a.x + row * a.stride, size_t(a.bytes));
    }
  }
};

}  // namespace

int64_t gather_rows(const GatherArgs& a) {
  prefer_huge_pages(a.out, a.entries * a.bytes);
  Task task{a, a.entries * a.bytes < (1 << 16) ? 1 : threads()};
  parallel(
      task.parts,
      [](int64_t begin, int64_t end, void* context) {
        Task& t = *static_cast<Task*>(context);
        const int64_t e0 = t.a.entries * begin / t.parts, e1 = t.a.entries * end / t.parts;
        if (t.a.index.wide) t.copy<int64_t>(e0, e1);
        else t.copy<int32_t>(e0, e1);
      },
      &task);
  return task.bad.load();
}

}  // namespace gnnaccel
