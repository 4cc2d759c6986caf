#include "pack.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "parallel.h"

namespace gnnaccel {
namespace {

constexpr int64_t kAlign = 64;

// Graphs lie anywhere in the pack. The first bytes of one are fetched while others are
// copied; from there on the hardware sees that it is read in order.
constexpr int64_t kAhead = 2, kFetched = 2048;

// Bytes from which a second thread pays.
constexpr int64_t kParallelBytes = int64_t{1} << 21;

// Graphs of a piece, at least, and pieces of a batch, at most: small enough that two
// threads end together, large enough that what is fetched ahead is of use.
constexpr int64_t kPiece = 64, kPieces = 16;

const int64_t* plan_row(const Plan& plan, int64_t row) {
  return plan.values + row * (plan.graphs + 1);
}

int64_t bytes_of(const Part& p, const Plan& plan) {
  const int64_t rows = plan_row(plan, p.plan)[plan.graphs];
  switch (p.kind) {
    case Part::kRows: return p.outer * rows * p.row_bytes;
    case Part::kBatch: return rows * 8;
    default: return (plan.graphs + 1) * 8;
  }
}

template <class T>
void copy_plus(void* to, const void* from, int64_t bytes, int64_t by) {
  auto* out = static_cast<T*>(to);
  const auto* in = static_cast<const T*>(from);
  // Sums wrap around, as torch's do.
  using U = std::make_unsigned_t<T>;
  for (int64_t k = 0; k < bytes / int64_t(sizeof(T)); ++k) out[k] = T(U(in[k]) + U(by));
}

void copy_rows(const Part& p, const Plan& plan, char* to, int64_t begin, int64_t end) {
  const auto* data = reinterpret_cast<const char*>(p.data);
  const auto* starts = reinterpret_cast<const int64_t*>(p.starts);
  const int64_t* at = plan_row(plan, p.plan);
  const int64_t rows = at[plan.graphs];
  for (int64_t o = 0; o < p.outer; ++o) {
    const char* from = data + o * p.total * p.row_bytes;
    char* out = to + o * rows * p.row_bytes;
    const int64_t* by = p.inc < 0 ? nullptr : plan_row(plan, p.inc + o * p.inc_step);
    // PyG adds plain increments only if the last one is not zero.
    if (by != nullptr && p.inc_step == 0 && by[plan.graphs - 1] == 0) by = nullptr;
    for (int64_t g = begin; g < end; ++g) {
      if (g + kAhead < end) {
        const char* far = from + starts[plan.index[g + kAhead]] * p.row_bytes;
        const int64_t bytes = (at[g + kAhead + 1] - at[g + kAhead]) * p.row_bytes;
        for (int64_t b = 0; b < std::min(bytes, kFetched); b += 64) __builtin_prefetch(far + b);
      }
      const int64_t bytes = (at[g + 1] - at[g]) * p.row_bytes;
      const char* first = from + starts[plan.index[g]] * p.row_bytes;
      char* target = out + at[g] * p.row_bytes;
      if (by == nullptr || by[g] == 0) {
        std::memcpy(target, first, bytes);
      } else if (p.width == 8) {
        copy_plus<int64_t>(target, first, bytes, by[g]);
      } else {
        copy_plus<int32_t>(target, first, bytes, by[g]);
      }
    }
  }
}

void number_rows(const Part& p, const Plan& plan, char* to, int64_t begin, int64_t end) {
  auto* out = reinterpret_cast<int64_t*>(to);
  const int64_t* at = plan_row(plan, p.plan);
  for (int64_t g = begin; g < end; ++g) std::fill(out + at[g], out + at[g + 1], g);
}

}  // namespace

int64_t look_up(const Lookup& a) {
  for (int64_t g = 0; g < a.graphs; ++g) {
    int64_t i = a.index[g];
    if (i < 0) i += a.n;
    if (i < 0 || i >= a.n) return g;
    a.found[g] = a.subset == nullptr ? i : a.subset[i];
  }
  for (int64_t r = 0; r < a.rows; ++r) {
    const auto* prefix = reinterpret_cast<const int64_t*>(a.prefixes[r]);
    int64_t* out = a.values + r * (a.graphs + 1);
    int64_t sum = 0;
    out[0] = 0;
    for (int64_t g = 0; g < a.graphs; ++g) {
      if (prefix != nullptr) sum += prefix[a.found[g] + 1] - prefix[a.found[g]];
      out[g + 1] = sum;
    }
  }
  return -1;
}

void place(const Part* parts, int64_t count, const Plan& plan, int64_t* offsets,
           int64_t sizes[2]) {
  sizes[0] = sizes[1] = 0;
  for (int64_t i = 0; i < count; ++i) {
    int64_t& size = sizes[parts[i].slab];
    offsets[i] = size;
    size += (bytes_of(parts[i], plan) + kAlign - 1) / kAlign * kAlign;
  }
}

Filling::Filling(const Fill& args)
    : args_(args),
      piece_(std::max(kPiece, (args.plan.graphs + kPieces - 1) / kPieces)),
      offsets_(args.count) {
  place(args_.parts, args_.count, args_.plan, offsets_.data(), sizes_);
}

int64_t Filling::threads_worth() const {
  return std::min(threads(), (sizes_[0] + sizes_[1]) / kParallelBytes + 1);
}

void Filling::run() {
  // A batch without graphs has its parts, of no rows, too.
  const int64_t end = std::max<int64_t>(args_.plan.graphs, 1);
  for (int64_t g; (g = next_.fetch_add(piece_, std::memory_order_relaxed)) < end;)
    fill_graphs(g, std::min(g + piece_, args_.plan.graphs));
}

// The graphs [begin, end) of every part.
void Filling::fill_graphs(int64_t begin, int64_t end) const {
  for (int64_t i = 0; i < args_.count; ++i) {
    const Part& p = args_.parts[i];
    char* to = static_cast<char*>(args_.slabs[p.slab]) + offsets_[i];
    switch (p.kind) {
      case Part::kRows: copy_rows(p, args_.plan, to, begin, end); break;
      case Part::kBatch: number_rows(p, args_.plan, to, begin, end); break;
      default:
        if (begin == 0) std::memcpy(to, plan_row(args_.plan, p.plan), (args_.plan.graphs + 1) * 8);
    }
  }
}

void fill_batch(const Fill& args, bool alone) {
  Filling filling(args);
  const int64_t threads = alone ? 1 : filling.threads_worth();
  if (threads <= 1) return filling.run();
  parallel(
      threads,
      [](int64_t, int64_t, void* context) { static_cast<Filling*>(context)->run(); }, &filling);
}

}  // namespace gnnaccel
