// Runs loops on torch's own thread pool, through the C shim torch exports.
#pragma once
#include <cstdint>

namespace gnnaccel {

using Body = void (*)(int64_t begin, int64_t end, void* context);

// Hands over torch's `torch_parallel_for` and `torch_get_num_threads`.
void set_pool(void* parallel_for, void* num_threads);

// Threads that `parallel` may use now; 1 while no pool is set.
int64_t threads();

// Calls body on disjoint sub-ranges that cover [0, n), possibly at the same time.
void parallel(int64_t n, Body body, void* context);

// Asks for huge pages behind a large, still untouched output: the first write to
// fresh memory otherwise costs a page fault every 4 KiB.
void prefer_huge_pages(void* data, int64_t bytes);

}  // namespace gnnaccel
