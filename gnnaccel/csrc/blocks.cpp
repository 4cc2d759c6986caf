#include "blocks.h"

#include <cstring>

namespace gnnaccel {

void copy_blocks(const Block* blocks, int64_t count, void* target) {
  auto* to = static_cast<char*>(target);
  for (int64_t i = 0; i < count; ++i) {
    const Block& block = blocks[i];
    std::memcpy(to + block.offset, reinterpret_cast<const void*>(block.from), block.bytes);
  }
}

}  // namespace gnnaccel
