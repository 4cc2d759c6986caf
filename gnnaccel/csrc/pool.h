// Large blocks of memory that are handed out again instead of going back to the
// system: fresh memory costs a page fault every 4 KiB, often more than the kernel
// that writes it.
#pragma once
#include <cstdint>

namespace gnnaccel {

struct PoolStats {
  int64_t in_use = 0;      // bytes handed out
  int64_t cached = 0;      // bytes kept for later
  int64_t peak = 0;        // most bytes ever held, in use and cached
  int64_t fresh = 0;       // blocks taken from the system
  int64_t reused = 0;      // blocks handed out again
};

// A block of at least `bytes`, aligned to 64 bytes or better; nullptr if there is none.
void* pool_take(int64_t bytes);

// Returns a block that pool_take gave out.
void pool_give(void* block);

// Blocks are only kept while `cached` stays below this many bytes.
void pool_limit(int64_t bytes);

// Gives all cached blocks back to the system.
void pool_trim();

PoolStats pool_stats();

}  // namespace gnnaccel
