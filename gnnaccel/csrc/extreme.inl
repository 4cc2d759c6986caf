// Largest or smallest neighbour per column, and the gradient's selection.
//
// The smallest is the largest of the negated values: `sign` is 1 or -1 throughout.

// The entry attains the extreme; also true where the extreme is NaN, so that NaN
// spreads to the gradients as it does in torch.
template <int N, class A>
static inline auto attains(const Vec<A, N>& candidate, const Vec<A, N>& best) {
  if constexpr (N == 1) return !(candidate < best);
  else return ~(candidate < best);
}

template <class T, class I, bool TIES>
struct Extreme {
  using A = acc_t<T>;
  const ExtremeArgs& a;
  const A sign = a.is_max ? A(1) : A(-1);

  // A scratch row: the best values, then (with TIES) their counts.
  static constexpr int64_t kScratchRows = TIES ? 2 : 1;

  // Merges a candidate into (best, count). NaN wins and stays.
  template <int N>
  static void take(const Vec<A, N>& c, const Vec<A, N>& c_count, Vec<A, N>& best,
                   Vec<A, N>& count) {
    const auto wins = (c > best) | (c != c);
    if constexpr (TIES) {
      const Vec<A, N> more = count + c_count;
      count = wins ? c_count : ((c == best) ? more : count);
    }
    best = wins ? c : best;
  }

  // Extremes of entries [e0, e1); zeros for none.
  template <int K, int N>
  void entries(int64_t e0, int64_t e1, Block b, Vec<A, N> (&best)[K],
               Vec<A, N> (&count)[K]) const {
    const I *col = static_cast<const I*>(a.g.col), *perm = static_cast<const I*>(a.g.perm);
    const T *x = static_cast<const T*>(a.x), *w = static_cast<const T*>(a.w);
    const int64_t last = a.g.entries - 1;
    const Vec<A, N> one = Vec<A, N>{} + A(1);
    if (e0 == e1) return;
    for (int k = 0; k < K; ++k) {
      best[k] = Vec<A, N>{} - A(__builtin_inf());
      // Entries of -inf tie with this start, which itself counts for nothing.
      if constexpr (TIES) count[k] = Vec<A, N>{};
    }
    for (int64_t e = e0; e < e1; ++e) {
      const int64_t ahead = e + kAhead < last ? e + kAhead : last;
      prefetch(x + at(col, ahead) * a.x_stride + b.first, b.count * int64_t(sizeof(T)));
      const T* row = x + at(col, e) * a.x_stride + b.first;
      if (w == nullptr) {
        for (int k = 0; k < K; ++k) {
          take<N>(sign * load<N>(row + lane_offset<K, N>(k, b.count)), one, best[k], count[k]);
        }
      } else {
        const A c = widen(w[at(perm, e)]);
        for (int k = 0; k < K; ++k) {
          const Vec<A, N> v = c * load<N>(row + lane_offset<K, N>(k, b.count));
          take<N>(sign * rounded<T, N>(v), one, best[k], count[k]);
        }
      }
    }
  }

  template <int K, int N>
  void finish(int64_t i, Block b, const Vec<A, N> (&best)[K], Vec<A, N> (&count)[K]) const {
    const int64_t base = i * a.features + b.first;
    const Vec<A, N> one = Vec<A, N>{} + A(1), zero{};
    for (int k = 0; k < K; ++k) {
      const int64_t o = base + lane_offset<K, N>(k, b.count);
      store<N>(static_cast<T*>(a.out) + o, sign * best[k]);
      if constexpr (TIES) {
        // torch counts the zero it starts from as one more tie, and a NaN extreme
        // equals nothing, so that its gradient is 0 / 0.
        count[k] += (best[k] == zero) ? one : zero;
        count[k] = (best[k] != best[k]) ? best[k] : count[k];
        store<N>(static_cast<A*>(a.ties) + o, count[k]);
      }
    }
  }

  void rows(const Ranges<I>& ranges, int64_t r0, int64_t r1, A* partial) const {
    for_blocks<T, I>(0, a.features, [&]<int K, int N>(Block b) {
      for (int64_t r = r0; r < r1; ++r) {
        if (ranges.skip(r)) continue;
        if (partial == nullptr) {
          prefetch_row(static_cast<const T*>(a.out), r, r1, a.features, b);
          if constexpr (TIES) prefetch_row(static_cast<const A*>(a.ties), r, r1, a.features, b);
        }
        Vec<A, N> best[K] = {}, count[K] = {};
        entries<K, N>(ranges.begin[r], ranges.end[r], b, best, count);
        if (partial == nullptr) {
          finish<K, N>(r, b, best, count);
          continue;
        }
        for (int k = 0; k < K; ++k) {
          A* p = partial + r * kScratchRows * a.features + b.first +
                 lane_offset<K, N>(k, b.count);
          store<N>(p, best[k]);
          if constexpr (TIES) store<N>(p + a.features, count[k]);
        }
      }
    });
  }

  void merge(int64_t i, const A* partial, int64_t slices) const {
    const int64_t stride = kScratchRows * a.features;
    for (int64_t f = 0; f < a.features; ++f) {
      A best[1] = {partial[f]}, count[1] = {TIES ? partial[a.features + f] : A(0)};
      for (int64_t s = 1; s < slices; ++s) {
        const A* p = partial + s * stride + f;
        take<1>(p[0], TIES ? p[a.features] : A(0), best[0], count[0]);
      }
      finish<1, 1>(i, Block{f, 1}, best, count);
    }
  }

  void run() const {
    prefer_huge_pages(a.out, a.g.rows * a.features * int64_t(sizeof(T)));
    if (TIES) prefer_huge_pages(a.ties, a.g.rows * a.features * int64_t(sizeof(A)));
    reduce_rows<T, I>(a.g, a.features, *this);
  }
};

template <class T, class I>
static void extreme_indexed(const ExtremeArgs& a) {
  if (a.ties != nullptr) Extreme<T, I, true>{a}.run();
  else Extreme<T, I, false>{a}.run();
}

template <class T>
static void extreme_typed(const ExtremeArgs& a) {
  if (a.g.wide) extreme_indexed<T, int64_t>(a);
  else extreme_indexed<T, int32_t>(a);
}

static void spmm_extreme(const ExtremeArgs& a, Dtype t) {
  switch (t) {
    case Dtype::f32: return extreme_typed<float>(a);
    case Dtype::f64: return extreme_typed<double>(a);
    case Dtype::bf16: return extreme_typed<bf16>(a);
    case Dtype::f16: return extreme_typed<f16>(a);
  }
}

// Compares messages with the stored extremes: both are rounded to T, so equality is
// exact. v holds accumulators (float for half types).
template <class T, class I, bool TRANSPOSED>
struct Select {
  using A = acc_t<T>;
  const SelectArgs& a;
  const A sign = a.is_max ? A(1) : A(-1);
  static constexpr int64_t kScratchRows = 1;

  // `home` is the row of x (transposed) or of the extremes that belongs to the range.
  template <int K, int N>
  void entries(const T* home, int64_t e0, int64_t e1, Block b, Vec<A, N> (&acc)[K]) const {
    const I *col = static_cast<const I*>(a.g.col), *perm = static_cast<const I*>(a.g.perm);
    const T *x = static_cast<const T*>(a.x), *w = static_cast<const T*>(a.w);
    const T* far = TRANSPOSED ? static_cast<const T*>(a.best) : x;
    const int64_t far_stride = TRANSPOSED ? a.features : a.x_stride;
    const A* v = static_cast<const A*>(a.v);
    const int64_t last = a.g.entries - 1;
    const Vec<A, N> zero{};
    Vec<A, N> own[K];
    for (int k = 0; k < K; ++k) {
      own[k] = sign * load<N>(home + b.first + lane_offset<K, N>(k, b.count));
    }
    for (int64_t e = e0; e < e1; ++e) {
      const int64_t next = at(col, e + kAhead < last ? e + kAhead : last), j = at(col, e);
      prefetch(v + next * a.features + b.first, b.count * int64_t(sizeof(A)));
      prefetch(far + next * far_stride + b.first, b.count * int64_t(sizeof(T)));
      const T* other = far + j * far_stride + b.first;
      const A* value = v + j * a.features + b.first;
      const A c = w == nullptr ? A(1) : widen(w[at(perm, e)]);
      for (int k = 0; k < K; ++k) {
        const int64_t o = lane_offset<K, N>(k, b.count);
        const Vec<A, N> theirs = sign * load<N>(other + o);
        Vec<A, N> add = load<N>(value + o), message = TRANSPOSED ? own[k] : theirs;
        if (w != nullptr) {
          message = rounded<T, N>(c * message);
          add = c * add;
        }
        const auto hit = attains<N, A>(message, TRANSPOSED ? theirs : own[k]);
        acc[k] += hit ? add : zero;
      }
    }
  }

  void rows(const Ranges<I>& ranges, int64_t r0, int64_t r1, A* partial) const {
    const T* home = TRANSPOSED ? static_cast<const T*>(a.x) : static_cast<const T*>(a.best);
    const int64_t stride = TRANSPOSED ? a.x_stride : a.features;
    for_blocks<T, I>(0, a.features, [&]<int K, int N>(Block b) {
      for (int64_t r = r0; r < r1; ++r) {
        if (ranges.skip(r)) continue;
        const int64_t i = ranges.row(r);
        if (partial == nullptr) {
          prefetch_row(static_cast<const T*>(a.out), r, r1, a.features, b);
          prefetch_row(home, r, r1, stride, b);
        }
        Vec<A, N> acc[K] = {};
        entries<K, N>(home + i * stride, ranges.begin[r], ranges.end[r], b, acc);
        for (int k = 0; k < K; ++k) {
          const int64_t o = r * a.features + b.first + lane_offset<K, N>(k, b.count);
          if (partial == nullptr) store<N>(static_cast<T*>(a.out) + o, acc[k]);
          else store<N>(partial + o, acc[k]);
        }
      }
    });
  }

  void merge(int64_t i, const A* partial, int64_t slices) const {
    for (int64_t f = 0; f < a.features; ++f) {
      A sum = 0;
      for (int64_t s = 0; s < slices; ++s) sum += partial[s * a.features + f];
      narrow(sum, static_cast<T*>(a.out) + i * a.features + f);
    }
  }

  void run() const {
    prefer_huge_pages(a.out, a.g.rows * a.features * int64_t(sizeof(T)));
    reduce_rows<T, I>(a.g, a.features, *this);
  }
};

template <class T, class I>
static void select_indexed(const SelectArgs& a) {
  if (a.transposed) Select<T, I, true>{a}.run();
  else Select<T, I, false>{a}.run();
}

template <class T>
static void select_typed(const SelectArgs& a) {
  if (a.g.wide) select_indexed<T, int64_t>(a);
  else select_indexed<T, int32_t>(a);
}

static void spmm_select(const SelectArgs& a, Dtype t) {
  switch (t) {
    case Dtype::f32: return select_typed<float>(a);
    case Dtype::f64: return select_typed<double>(a);
    case Dtype::bf16: return select_typed<bf16>(a);
    case Dtype::f16: return select_typed<f16>(a);
  }
}
