// Grouping of edges by one of their ends: a stable parallel counting sort.
#pragma once
#include <cstdint>

namespace gnnaccel {

// A column of indices as the caller holds it: int32 or int64, with a stride.
struct Indices {
  const void* data;
  int64_t stride;
  bool wide;
};

struct GroupArgs {
  Indices key;    // what to group by, in [0, rows)
  Indices other;  // the other end, in [0, others); data may be nullptr
  int64_t entries, rows, others;
  // Instead of `other`: entries come grouped already, [origin_ptr[i], origin_ptr[i + 1])
  // having i as their other end and origin_perm as positions (nullptr: the identity).
  // Both are as wide as the results. Regroups a CSR structure by column.
  const void *origin_ptr, *origin_perm;
  void* ptr;   // [rows + 1]
  void* perm;  // [entries]
  void* col;   // [entries], or nullptr without another end
  bool wide;   // of ptr, perm and col
};

struct GroupResult {
  int64_t bad_end = 0;  // 1: a key is out of range, 2: an other is
  int64_t bad_value = 0;
  bool sorted = true;  // keys never fall: perm is the identity and was not written,
                       // unless entries came grouped
  int64_t loops = 0;   // entries whose ends are equal
  int64_t max_degree = 0;
};

GroupResult group(const GroupArgs& args);

}  // namespace gnnaccel
