// Copies scattered blocks of memory into one, as a batch is packed for its crossing.
#pragma once
#include <cstdint>

namespace gnnaccel {

// int64 fields only: rows of a table that Python writes.
struct Block {
  int64_t from;    // address
  int64_t bytes;
  int64_t offset;  // where it goes in the target
};

// Stays in the calling thread, which copies at the speed of memory as it is.
void copy_blocks(const Block* blocks, int64_t count, void* target);

}  // namespace gnnaccel
