// Rows by index: what a message passing layer lifts to its edges.
#pragma once
#include <cstdint>

#include "group.h"

namespace gnnaccel {

struct GatherArgs {
  Indices index;       // `entries` of them, each in [0, rows)
  int64_t entries, rows;
  const char* x;       // rows of `bytes` each, `stride` bytes apart
  int64_t stride, bytes;
  char* out;           // contiguous [entries, bytes]
};

// out[e] = x[index[e]]. Stops at an index out of range and returns its position;
// -1 if there is none.
int64_t gather_rows(const GatherArgs& args);

}  // namespace gnnaccel
