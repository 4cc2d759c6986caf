// How a row of features is cut into register tiles, and rows into work for threads.

// A column block: K registers of N lanes from column `first`, covering `count`
// columns. The last register overlaps its neighbour instead of running past the end.
struct Block {
  int64_t first, count;
};

template <int K, int N>
static inline int64_t lane_offset(int k, int64_t count) {
  return k + 1 < K ? int64_t(k) * N : count - N;
}

// Calls f.template operator()<K, N>(Block) for blocks that cover [first, first + count).
// The common case, float features and int32 indices, gets every tile; the others make
// do with few, which keeps the build short.
template <class T, class I, class F>
static inline void for_blocks(int64_t first, int64_t count, F&& f) {
  constexpr int L = kLanes<T>;
  constexpr bool kAll = std::is_same_v<T, float> && sizeof(I) == 4;
  const int64_t end = first + count;
  while (first < end) {
    const int64_t left = end - first;
    int64_t taken = 0;
#define GNNACCEL_TILE(K, N)                                                \
  if (taken == 0 && left > int64_t(K - 1) * (N) && left >= (N)) {          \
    taken = left < int64_t(K) * (N) ? left : int64_t(K) * (N);             \
    f.template operator()<K, N>(Block{first, taken});                      \
  }
    if constexpr (kAll) {
      GNNACCEL_TILE(8, L)
      GNNACCEL_TILE(6, L)
      GNNACCEL_TILE(4, L)
      GNNACCEL_TILE(3, L)
      GNNACCEL_TILE(2, L)
      GNNACCEL_TILE(1, L)
      if constexpr (L > 8) {
        GNNACCEL_TILE(2, 8)
        GNNACCEL_TILE(1, 8)
      }
      if constexpr (L > 4) {
        GNNACCEL_TILE(2, 4)
        GNNACCEL_TILE(1, 4)
      }
      GNNACCEL_TILE(2, 2)
      GNNACCEL_TILE(1, 2)
    } else {
      GNNACCEL_TILE(4, L)
      GNNACCEL_TILE(1, L)
      if constexpr (L > 4) GNNACCEL_TILE(1, 4)
    }
    GNNACCEL_TILE(1, 1)
#undef GNNACCEL_TILE
    first += taken;
  }
}

// Rows with more entries than this are cut into slices of this many, whose partial
// results are merged in order: one hub does not serialise the loop, and results do
// not depend on the number of threads.
constexpr int64_t kSlice = 4096;
// Below this many multiply-adds, waking the pool costs more than it saves.
constexpr int64_t kSerialWork = 1 << 15;

// First row of part p when rows are dealt out so that rows + entries balance.
template <class I>
static inline int64_t split_row(const I* ptr, int64_t rows, int64_t p, int64_t parts) {
  if (p >= parts) return rows;
  const int64_t total = rows + int64_t(ptr[rows]);
  const int64_t goal = int64_t(double(total) * double(p) / double(parts));
  int64_t lo = 0, hi = rows;
  while (lo < hi) {
    const int64_t mid = (lo + hi) / 2;
    if (mid + int64_t(ptr[mid]) < goal) lo = mid + 1;
    else hi = mid;
  }
  return lo;
}

// Runs f(row_begin, row_end) over all rows on the pool, balanced by entries.
template <class I, class F>
static inline void for_rows(const Grouping& g, int64_t columns, F&& f) {
  const I* ptr = static_cast<const I*>(g.ptr);
  const int64_t work = (g.entries + g.rows) * (columns + 4);
  const int64_t parts = work < kSerialWork ? 1 : threads();
  struct Context {
    F* f;
    const I* ptr;
    int64_t rows, parts;
  } context{&f, ptr, g.rows, parts};
  parallel(
      parts,
      [](int64_t begin, int64_t end, void* c) {
        auto& x = *static_cast<Context*>(c);
        const int64_t r0 = split_row(x.ptr, x.rows, begin, x.parts);
        const int64_t r1 = split_row(x.ptr, x.rows, end, x.parts);
        if (r0 < r1) (*x.f)(r0, r1);
      },
      &context);
}

// Runs f(index) for index in [0, n) on the pool.
template <class F>
static inline void for_each(int64_t n, F&& f) {
  parallel(
      n,
      [](int64_t begin, int64_t end, void* c) {
        for (int64_t k = begin; k < end; ++k) (*static_cast<std::remove_reference_t<F>*>(c))(k);
      },
      &f);
}

// How many edges ahead rows are prefetched: far enough to hide a memory access,
// near enough that 12 rows of 128 floats stay in a 32 KiB cache.
constexpr int64_t kAhead = 12;

// Bytes of a result up to which caches may hold it for whoever reads it next. What the
// system says of its caches counts those of other cores, too.
constexpr int64_t kCached = 32 << 20;

// GCC takes a function that only prefetches to have no effect, and drops calls of it
// that it did not inline.
#define GNNACCEL_PREFETCHES __attribute__((always_inline)) inline

static GNNACCEL_PREFETCHES void prefetch(const void* p, int64_t bytes) {
  const char* c = static_cast<const char*>(p);
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(c + b, 0, 3);
}

// Rows that a loop over rows writes, or reads once each, a few ahead: they are in no
// cache either, and the hardware sees no stream between the gathered rows.
template <class P>
static GNNACCEL_PREFETCHES void prefetch_row(const P* rows, int64_t r, int64_t end, int64_t stride, Block b) {
  constexpr int64_t kRows = 4;
  if (rows != nullptr && r + kRows < end) {
    prefetch(rows + (r + kRows) * stride + b.first, b.count * int64_t(sizeof(P)));
  }
}

template <class I>
static inline int64_t at(const I* index, int64_t e) {
  return index == nullptr ? e : int64_t(index[e]);
}

// The rows of a grouping as [begin[r], end[r]) ranges of entries: either its own rows,
// hubs left out, or slices of its hubs.
template <class I>
struct Ranges {
  const I *begin, *end;
  const I* hub;  // the row each slice belongs to; nullptr: these are rows
  int64_t row(int64_t r) const { return hub == nullptr ? r : int64_t(hub[r]); }
  // A hub, to be done by slices later.
  bool skip(int64_t r) const { return hub == nullptr && int64_t(end[r]) - int64_t(begin[r]) > kSlice; }
};

// Runs op over all rows. op.rows(ranges, r0, r1, partial) reduces ranges [r0, r1), into
// rows of `partial` ([range, op.kScratchRows, columns]) when they are slices; then
// op.merge(row, partial, count) combines the slices of a hub in order. Where there is an
// op.merged(partial), it is called for every hub after that, one hub after the other.
template <class T, class I, class Op>
static inline void reduce_rows(const Grouping& g, int64_t columns, const Op& op) {
  using A = acc_t<T>;
  const I* ptr = static_cast<const I*>(g.ptr);
  for_rows<I>(g, columns, [&](int64_t r0, int64_t r1) {
    op.rows(Ranges<I>{ptr, ptr + 1, nullptr}, r0, r1, static_cast<A*>(nullptr));
  });
  if (g.max_degree <= kSlice) return;

  int64_t n = 0;
  for (int64_t i = 0; i < g.rows; ++i) {
    const int64_t degree = int64_t(ptr[i + 1]) - int64_t(ptr[i]);
    if (degree > kSlice) n += (degree + kSlice - 1) / kSlice;
  }
  // begin, end, the hub each slice belongs to, and how many slices that hub has (only
  // on its first slice).
  I* const begin = static_cast<I*>(std::malloc(n * 4 * sizeof(I)));
  A* const partial = static_cast<A*>(std::malloc(n * columns * Op::kScratchRows * sizeof(A)));
  if (begin == nullptr || partial == nullptr) {
    std::free(begin);
    std::free(partial);
    throw std::bad_alloc();
  }
  I *const end = begin + n, *const hub = end + n, *const slices = hub + n;
  int64_t s = 0;
  for (int64_t i = 0; i < g.rows; ++i) {
    const int64_t e0 = ptr[i], e1 = ptr[i + 1];
    if (e1 - e0 <= kSlice) continue;
    for (int64_t e = e0; e < e1; e += kSlice, ++s) {
      begin[s] = I(e);
      end[s] = I(e + kSlice < e1 ? e + kSlice : e1);
      hub[s] = I(i);
      slices[s] = I(e == e0 ? (e1 - e0 + kSlice - 1) / kSlice : 0);
    }
  }
  const Ranges<I> ranges{begin, end, hub};
  for_each(n, [&](int64_t k) { op.rows(ranges, k, k + 1, partial); });
  for_each(n, [&](int64_t k) {
    if (slices[k] == 0) return;
    op.merge(int64_t(hub[k]), partial + k * Op::kScratchRows * columns, int64_t(slices[k]));
  });
  if constexpr (requires { op.merged(partial); }) {
    for (int64_t k = 0; k < n; ++k) {
      if (slices[k] != 0) op.merged(partial + k * Op::kScratchRows * columns);
    }
  }
  std::free(begin);
  std::free(partial);
}

// Scratch of one call, zeroed, freed at its end; null if there is no memory, which is
// noted.
struct Scratch {
  void* data;
  Scratch(int64_t bytes, bool* failed) : data(std::calloc(size_t(bytes), 1)) {
    if (data == nullptr) __atomic_store_n(failed, true, __ATOMIC_RELAXED);
  }
  ~Scratch() { std::free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};
