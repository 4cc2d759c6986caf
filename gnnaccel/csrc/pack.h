// Batches out of packed graphs: one copy of each attribute into one block of memory.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

namespace gnnaccel {

// One tensor of a batch, as data/parts.py writes it: int64 fields only.
//
// A "row" is one slice at the dimension along which graphs are joined. Where each graph
// begins, in the pack and in the batch, stands in prefix sums.
struct Part {
  enum Kind : int64_t {
    kRows,    // the graphs' rows out of `data`
    kBatch,   // int64: the number of its graph at each row
    kStarts,  // int64 [graphs + 1]: the plan row itself
  };
  int64_t kind;
  int64_t slab;      // 0 or 1: which of the two slabs it goes to
  int64_t data;      // address of the packed tensor, [outer, total, row_bytes]
  int64_t starts;    // address of int64 [n + 1]: where graph i begins along `total`
  int64_t plan;      // row of the plan: where each graph begins in the batch
  int64_t row_bytes;
  int64_t outer;
  int64_t total;
  int64_t inc;       // first row of the plan that holds increments, or -1
  int64_t inc_step;  // 0: one increment for all; 1: one for each of `outer`
  int64_t width;     // 4 or 8: bytes of the integers that are incremented
};

struct Plan {
  const int64_t* index;   // [graphs]: positions in the pack
  const int64_t* values;  // [rows, graphs + 1]: prefix sums over the graphs of the batch
  int64_t graphs;
};

// Looks each graph up in `rows` prefix sums of the pack (int64 [n + 1] each; null: all
// zero) and writes the prefix sums over the batch, [rows, graphs + 1].
//
// Indices may count from the end; `subset` (null: everything) maps them to the pack.
// Returns -1, or where in `index` the first stands that is out of range.
struct Lookup {
  const int64_t* index;   // [graphs]
  int64_t graphs;
  const int64_t* subset;  // [n], or nullptr
  int64_t n;
  const int64_t* prefixes;  // [rows] addresses
  int64_t rows;
  int64_t* found;   // [graphs]: positions in the pack
  int64_t* values;  // [rows, graphs + 1]
};
int64_t look_up(const Lookup& args);

// Where each part begins in its slab (64-byte steps), and how large both slabs are.
void place(const Part* parts, int64_t count, const Plan& plan, int64_t* offsets,
           int64_t sizes[2]);

struct Fill {
  const Part* parts;
  int64_t count;
  Plan plan;
  void* slabs[2];
};

// The copy of one batch, which several threads may share. Needs no Python.
class Filling {
 public:
  explicit Filling(const Fill& args);

  // Writes a piece of the batch after another, until none is left to begin. What other
  // threads have begun may still be under way then.
  void run();

  // The threads that are worth their wake-up, of torch's.
  int64_t threads_worth() const;

 private:
  void fill_graphs(int64_t begin, int64_t end) const;

  const Fill args_;
  const int64_t piece_;
  std::vector<int64_t> offsets_;
  int64_t sizes_[2];
  std::atomic<int64_t> next_{0};
};

// Writes every part of a batch; `alone` stays in the calling thread.
void fill_batch(const Fill& args, bool alone);

}  // namespace gnnaccel
