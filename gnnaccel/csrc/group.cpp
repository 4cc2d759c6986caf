#include "group.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "parallel.h"

namespace gnnaccel {
namespace {

// Entries per part below which more threads do not pay.
constexpr int64_t kPartEntries = 1 << 14;

template <class In>
struct Column {
  const In* data;
  int64_t stride;
  int64_t operator[](int64_t e) const { return int64_t(data[e * stride]); }
};

template <class In, class Out>
class Sorter {
 public:
  explicit Sorter(const GroupArgs& a)
      : a_(a),
        key_{static_cast<const In*>(a.key.data), a.key.stride},
        other_{static_cast<const In*>(a.other.data), a.other.stride},
        ptr_(static_cast<Out*>(a.ptr)),
        perm_(static_cast<Out*>(a.perm)),
        col_(static_cast<Out*>(a.col)),
        origin_ptr_(static_cast<const Out*>(a.origin_ptr)),
        origin_perm_(static_cast<const Out*>(a.origin_perm)) {
    // One histogram per part: memory stays within a few times the edges.
    const int64_t by_memory = std::max<int64_t>(1, 4 * a.entries / std::max<int64_t>(1, a.rows));
    parts_ = std::clamp<int64_t>(a.entries / kPartEntries, 1, std::min(threads(), by_memory));
  }

  GroupResult run() {
    partial_.resize(parts_);
    counts_.reset(new Out[parts_ * a_.rows]());
    each(&Sorter::count);
    GroupResult r;
    for (int64_t p = 0; p < parts_; ++p) {
      const GroupResult& part = partial_[p];
      if (part.bad_end != 0) return part;
      r.loops += part.loops;
      r.sorted = r.sorted && part.sorted && (p == 0 || key_[begin(p) - 1] <= key_[begin(p)]);
    }
    r.max_degree = offsets();
    each(origin_ptr_ != nullptr ? &Sorter::regroup
         : r.sorted             ? &Sorter::copy
                                : &Sorter::scatter);
    return r;
  }

 private:
  int64_t begin(int64_t p) const { return a_.entries * p / parts_; }

  void each(void (Sorter::*step)(int64_t)) {
    struct Context {
      Sorter* self;
      void (Sorter::*step)(int64_t);
    } context{this, step};
    parallel(
        parts_,
        [](int64_t b, int64_t e, void* c) {
          auto& x = *static_cast<Context*>(c);
          for (int64_t p = b; p < e; ++p) (x.self->*x.step)(p);
        },
        &context);
  }

  void count(int64_t p) {
    Out* counts = counts_.get() + p * a_.rows;
    GroupResult r;
    int64_t previous = -1;
    for (int64_t e = begin(p); e < begin(p + 1); ++e) {
      const int64_t k = key_[e];
      if (uint64_t(k) >= uint64_t(a_.rows)) {
        r.bad_end = 1;
        r.bad_value = k;
        break;
      }
      if (other_.data != nullptr) {
        const int64_t o = other_[e];
        if (uint64_t(o) >= uint64_t(a_.others)) {
          r.bad_end = 2;
          r.bad_value = o;
          break;
        }
        r.loops += o == k;
      }
      r.sorted &= k >= previous;
      previous = k;
      ++counts[k];
    }
    partial_[p] = r;
  }

  // Turns counts into each part's first position per row; fills ptr.
  int64_t offsets() {
    int64_t position = 0, max_degree = 0;
    for (int64_t i = 0; i < a_.rows; ++i) {
      const int64_t first = position;
      ptr_[i] = Out(first);
      for (int64_t p = 0; p < parts_; ++p) {
        Out& c = counts_[p * a_.rows + i];
        const int64_t n = c;
        c = Out(position);
        position += n;
      }
      max_degree = std::max(max_degree, position - first);
    }
    ptr_[a_.rows] = Out(position);
    return max_degree;
  }

  void scatter(int64_t p) {
    Out* next = counts_.get() + p * a_.rows;
    for (int64_t e = begin(p); e < begin(p + 1); ++e) {
      const int64_t position = next[key_[e]]++;
      perm_[position] = Out(e);
      if (col_ != nullptr) col_[position] = Out(other_[e]);
    }
  }

  void regroup(int64_t p) {
    Out* next = counts_.get() + p * a_.rows;
    const Out* row_end = std::upper_bound(origin_ptr_, origin_ptr_ + a_.others, Out(begin(p)));
    for (int64_t e = begin(p); e < begin(p + 1); ++e) {
      while (e >= int64_t(*row_end)) ++row_end;
      const int64_t position = next[key_[e]]++;
      perm_[position] = origin_perm_ == nullptr ? Out(e) : origin_perm_[e];
      col_[position] = Out(row_end - origin_ptr_ - 1);
    }
  }

  void copy(int64_t p) {
    if (col_ == nullptr) return;
    for (int64_t e = begin(p); e < begin(p + 1); ++e) col_[e] = Out(other_[e]);
  }

  const GroupArgs& a_;
  Column<In> key_, other_;
  Out *ptr_, *perm_, *col_;
  const Out *origin_ptr_, *origin_perm_;
  int64_t parts_;
  std::vector<GroupResult> partial_;
  std::unique_ptr<Out[]> counts_;
};

template <class In>
GroupResult group_from(const GroupArgs& a) {
  return a.wide ? Sorter<In, int64_t>(a).run() : Sorter<In, int32_t>(a).run();
}

}  // namespace

GroupResult group(const GroupArgs& args) {
  return args.key.wide ? group_from<int64_t>(args) : group_from<int32_t>(args);
}

}  // namespace gnnaccel
