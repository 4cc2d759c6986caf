#include "pool.h"

#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>

#include "parallel.h"

#if defined(__linux__)
#include <pthread.h>
#include <sys/mman.h>
#endif

namespace gnnaccel {
namespace {

constexpr int64_t kHuge = int64_t{1} << 21;

void* system_take(int64_t bytes) {
#if defined(__linux__)
  // One huge page more than needed, its unaligned ends cut off again.
  void* raw = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto start = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t begin = (start + kHuge - 1) & ~uintptr_t(kHuge - 1);
  if (begin > start) munmap(raw, begin - start);
  const uintptr_t end = start + bytes + kHuge;
  if (end > begin + bytes) munmap(reinterpret_cast<void*>(begin + bytes), end - begin - bytes);
  prefer_huge_pages(reinterpret_cast<void*>(begin), bytes);
  return reinterpret_cast<void*>(begin);
#else
  return std::aligned_alloc(64, bytes);
#endif
}

void system_give(void* block, int64_t bytes) {
#if defined(__linux__)
  munmap(block, bytes);
#else
  (void)bytes;
  std::free(block);
#endif
}

class Pool {
 public:
  void* take(int64_t bytes) {
    const int64_t size = (bytes + kHuge - 1) / kHuge * kHuge;
    std::lock_guard<std::mutex> lock(mutex_);
    // The smallest that fits, unless a quarter of it or more would lie idle.
    auto fit = free_.lower_bound(size);
    if (fit != free_.end() && fit->first <= size + size / 4) {
      // Of equal ones the last that was given back: it may still be in the cache.
      fit = std::prev(free_.upper_bound(fit->first));
      const auto [found, block] = *fit;
      free_.erase(fit);
      stats_.cached -= found;
      stats_.in_use += found;
      ++stats_.reused;
      used_.emplace(block, found);
      return block;
    }
    void* block = system_take(size);
    if (block == nullptr && !free_.empty()) {
      trim_locked();
      block = system_take(size);
    }
    if (block == nullptr) return nullptr;
    used_.emplace(block, size);
    stats_.in_use += size;
    ++stats_.fresh;
    if (stats_.in_use + stats_.cached > stats_.peak) stats_.peak = stats_.in_use + stats_.cached;
    return block;
  }

  void give(void* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = used_.find(block);
    if (entry == used_.end()) return;
    const int64_t size = entry->second;
    used_.erase(entry);
    stats_.in_use -= size;
    if (stats_.cached + size > limit_) {
      system_give(block, size);
    } else {
      free_.emplace(size, block);
      stats_.cached += size;
    }
  }

  void limit(int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = bytes;
    if (stats_.cached > limit_) trim_locked();
  }

  void trim() {
    std::lock_guard<std::mutex> lock(mutex_);
    trim_locked();
  }

  PoolStats stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  std::mutex& mutex() { return mutex_; }

 private:
  void trim_locked() {
    for (const auto& [size, block] : free_) system_give(block, size);
    free_.clear();
    stats_.cached = 0;
  }

  std::mutex mutex_;
  std::multimap<int64_t, void*> free_;
  std::unordered_map<void*, int64_t> used_;
  PoolStats stats_;
  int64_t limit_ = int64_t{1} << 30;
};

Pool& pool() {
  // Never destroyed: tensors may outlive every other static.
  static Pool* const instance = [] {
    auto* p = new Pool;
#if defined(__linux__)
    // A child forked while another thread held the lock could never take it.
    pthread_atfork([] { pool().mutex().lock(); }, [] { pool().mutex().unlock(); },
                   [] { pool().mutex().unlock(); });
#endif
    return p;
  }();
  return *instance;
}

}  // namespace

void* pool_take(int64_t bytes) { return pool().take(bytes); }
void pool_give(void* block) { pool().give(block); }
void pool_limit(int64_t bytes) { pool().limit(bytes); }
void pool_trim() { pool().trim(); }
PoolStats pool_stats() { return pool().stats(); }

}  // namespace gnnaccel
