// Attention: logits, softmax and weighted sum of each row, its neighbours' rows still in
// the cache when they are summed.

enum class Score { sum = 0, mlp = 1, dot = 2 };

// The tensors of one attention, typed.
template <class T, class I>
struct AttentionView {
  const I *col, *perm;
  int64_t last;  // the last entry, the furthest that may be prefetched
  const T *query, *key, *value, *att, *edge, *bias, *keep;
  T slope, scale;

  explicit AttentionView(const AttentionArgs& a)
      : col(static_cast<const I*>(a.g.col)),
        perm(static_cast<const I*>(a.g.perm)),
        last(a.g.entries - 1),
        query(static_cast<const T*>(a.query)),
        key(static_cast<const T*>(a.key)),
        value(static_cast<const T*>(a.value)),
        att(static_cast<const T*>(a.att)),
        edge(static_cast<const T*>(a.edge)),
        bias(static_cast<const T*>(a.bias)),
        keep(static_cast<const T*>(a.keep)),
        slope(T(a.slope)),
        scale(T(a.scale)) {}

  // Fetches what the entry a few ahead of e reads at its far end.
  template <Score S>
  void prefetch_far(int64_t e, int64_t heads, int64_t columns) const {
    const int64_t j = at(col, e + kAhead < last ? e + kAhead : last);
    const int64_t bytes = columns * int64_t(sizeof(T));
    prefetch(value + j * columns, bytes);
    if constexpr (S == Score::sum) __builtin_prefetch(key + j * heads, 0, 3);
    else if (key != value) prefetch(key + j * columns, bytes);
  }
};

template <class T, class I, int N, Score S>
struct Attention {
  const AttentionArgs& a;
  const AttentionView<T, I> v{a};
  const Heads<T, N> hs{a.heads, a.features};
  const int64_t heads = a.heads, columns = hs.columns();
  // A slice leaves the largest logit and the sum of exponentials of every head, then
  // its weighted sum.
  const int64_t width = columns + 2 * heads;
  const int64_t longest = a.g.max_degree < kSlice ? a.g.max_degree : kSlice;
  mutable bool failed = false;

  static constexpr int64_t kScratchRows = 1;
  // Entries whose rows are still in the nearest cache after the logits.
  static constexpr int64_t kFew = 64;
  static constexpr int64_t rounded_up(int64_t n) {
    return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
  }

  // z[h * m + k] = logit of entry e0 + k in head h, before the leaky ReLU of `sum`, where
  // m is n in whole registers: short rows stay close together in the cache.
  void logits(int64_t i, int64_t e0, int64_t n, T* z, T* sums) const {
    const int64_t m = rounded_up(n);
    const T* q = v.query + i * (S == Score::sum ? heads : columns);
    for (int64_t k = 0; k < n; ++k) {
      const int64_t e = e0 + k, j = at(v.col, e);
      v.template prefetch_far<S>(e, heads, columns);
      if constexpr (S == Score::sum) {
        const T* key = v.key + j * heads;
        // One loop per term: in a common one the compiler masks the loads of what is
        // not there, and a masked load from a null pointer takes a fault's time.
        for (int64_t h = 0; h < heads; ++h) z[h * m + k] = key[h];
        if (v.query != nullptr) {
          for (int64_t h = 0; h < heads; ++h) z[h * m + k] += q[h];
        }
        if (v.bias != nullptr) {
          const T* bias = v.bias + at(v.perm, e) * heads;
          for (int64_t h = 0; h < heads; ++h) z[h * m + k] += bias[h];
        }
      } else {
        const T* key = v.key + j * columns;
        const T* edge = v.edge == nullptr ? nullptr : v.edge + at(v.perm, e) * columns;
        hs.sum(sums, [&](int64_t o) -> Vec<T, N> {
          Vec<T, N> u = load<N>(key + o);
          if constexpr (S == Score::mlp) {
            u += load<N>(q + o);
            if (edge != nullptr) u += load<N>(edge + o);
            return load<N>(v.att + o) * leaky<N, T>(u, v.slope);
          } else {
            if (edge != nullptr) u += load<N>(edge + o);
            return load<N>(q + o) * u;
          }
        });
        for (int64_t h = 0; h < heads; ++h) {
          z[h * m + k] = S == Score::dot ? sums[h] * v.scale : sums[h];
        }
      }
    }
  }

  // The range [e0, e0 + n) of row i. Whole rows are normalised; slices leave `partial`.
  void range(int64_t i, int64_t e0, int64_t n, T* z, T* p, T* partial) const {
    T* out = partial == nullptr ? static_cast<T*>(a.out) + i * columns : partial + 2 * heads;
    if (n == 0) {
      for (int64_t c = 0; c < columns; ++c) out[c] = 0;
      return;
    }
    logits(i, e0, n, z, p);  // p is not in use yet
    const int64_t m = rounded_up(n);
    for (int64_t h = 0; h < heads; ++h) {
      T *u = z + h * m, *y = p + h * m;
      // By registers throughout: branches on the sign of a logit are not predictable.
      constexpr int L = kLanes<T>;
      for (int64_t k = 0; k < m; k += L) {
        const Vec<T, L> x = load<L>(u + k);
        if constexpr (S == Score::sum) store<L>(y + k, leaky<L, T>(x, v.slope));
        else store<L>(y + k, x);
      }
      for (int64_t k = n; k < m; ++k) y[k] = -T(__builtin_inf());
      T top;
      const T total = exponentials_padded<T>(y, n, &top);
      T share = 1;
      if (partial != nullptr) {
        partial[h] = top;
        partial[heads + h] = total;
      } else {
        share = T(1) / (total + T(a.epsilon));
      }
      const Vec<T, L> zero{};
      for (int64_t k = 0; k < m; k += L) {
        const Vec<T, L> x = load<L>(y + k) * share;
        store<L>(y + k, x);
        // Its sign tells the backward pass on which side the leaky ReLU was.
        if constexpr (S == Score::sum) store<L>(u + k, (load<L>(u + k) > zero) ? x : -x);
      }
    }
    if (T* shares = static_cast<T*>(a.shares); shares != nullptr) {
      const T* plane = S == Score::sum ? z : p;
      for (int64_t k = 0; k < n; ++k) {
        for (int64_t h = 0; h < heads; ++h) shares[(e0 + k) * heads + h] = plane[h * m + k];
      }
    }
    if (v.keep != nullptr) {
      for (int64_t k = 0; k < n; ++k) {
        const T* keep = v.keep + at(v.perm, e0 + k) * heads;
        for (int64_t h = 0; h < heads; ++h) p[h * m + k] *= keep[h];
      }
    }
    hs.groups([&]<int K>(int64_t s) {
      const Group<K, T, N> g(hs, s);
      Vec<T, N> acc[K] = {};
      for (int64_t k = 0; k < n; ++k) {
        const T* row = v.value + at(v.col, e0 + k) * columns;
        if (s == 0 && n > kFew) {
          // Back from the cache further away to the nearest.
          const int64_t ahead = k + kAhead < n ? k + kAhead : n - 1;
          prefetch(v.value + at(v.col, e0 + ahead) * columns, columns * int64_t(sizeof(T)));
        }
        const T* edge = S != Score::dot || v.edge == nullptr
                            ? nullptr
                            : v.edge + at(v.perm, e0 + k) * columns;
        for (int r = 0; r < K; ++r) {
          Vec<T, N> x = load<N>(row + g.offset[r]);
          if (edge != nullptr) x += load<N>(edge + g.offset[r]);
          acc[r] += p[g.head[r] * m + k] * x;
        }
      }
      for (int r = 0; r < K; ++r) store<N>(out + g.offset[r], acc[r]);
    });
  }

  void rows(const Ranges<I>& ranges, int64_t r0, int64_t r1, T* partial) const {
    const int64_t plane = heads * rounded_up(longest);
    const Scratch scratch(2 * plane * int64_t(sizeof(T)) + 1, &failed);
    if (scratch.data == nullptr) return;
    T* const z = static_cast<T*>(scratch.data);
    for (int64_t r = r0; r < r1; ++r) {
      if (ranges.skip(r)) continue;
      range(ranges.row(r), ranges.begin[r], int64_t(ranges.end[r]) - int64_t(ranges.begin[r]),
            z, z + plane, partial == nullptr ? nullptr : partial + r * width);
    }
  }

  // A hub: its slices brought to one scale.
  void merge(int64_t i, const T* partial, int64_t slices) const {
    const I* ptr = static_cast<const I*>(a.g.ptr);
    const int64_t e0 = ptr[i], e1 = ptr[i + 1];
    T *out = static_cast<T*>(a.out) + i * columns, *shares = static_cast<T*>(a.shares);
    for (int64_t h = 0; h < heads; ++h) {
      T top = partial[h], total = 0;
      for (int64_t s = 1; s < slices; ++s) {
        const T t = partial[s * width + h];
        top = t > top ? t : top;
      }
      for (int64_t s = 0; s < slices; ++s) {
        total += partial[s * width + heads + h] * exp_scalar(partial[s * width + h] - top);
      }
      T* y = out + h * a.features;
      for (int64_t c = 0; c < a.features; ++c) y[c] = 0;
      for (int64_t s = 0; s < slices; ++s) {
        const T* row = partial + s * width;
        const T share = exp_scalar(row[h] - top) / (total + T(a.epsilon));
        for (int64_t c = 0; c < a.features; ++c) {
          y[c] += share * row[2 * heads + h * a.features + c];
        }
        if (shares == nullptr) continue;
        const int64_t from = e0 + s * kSlice, to = from + kSlice < e1 ? from + kSlice : e1;
        for (int64_t e = from; e < to; ++e) shares[e * heads + h] *= share;
      }
    }
  }

  void run() const {
    prefer_huge_pages(a.out, a.g.rows * columns * int64_t(sizeof(T)));
    if (a.shares != nullptr) {
      prefer_huge_pages(a.shares, a.g.entries * heads * int64_t(sizeof(T)));
    }
    reduce_rows<T, I>(a.g, width, *this);
    if (failed) throw std::bad_alloc();
  }
};

template <class T, class I>
static void attention_indexed(const AttentionArgs& a) {
  for_width<T, I>(a.features, [&]<int N>() {
    switch (Score(a.score)) {
      case Score::sum: return Attention<T, I, N, Score::sum>{a}.run();
      case Score::mlp: return Attention<T, I, N, Score::mlp>{a}.run();
      case Score::dot: return Attention<T, I, N, Score::dot>{a}.run();
    }
  });
}

// Half types are widened by the caller.
static void attention(const AttentionArgs& a, Dtype t) {
  if (t == Dtype::f64) {
    if (a.g.wide) attention_indexed<double, int64_t>(a);
    else attention_indexed<double, int32_t>(a);
  } else {
    if (a.g.wide) attention_indexed<float, int64_t>(a);
    else attention_indexed<float, int32_t>(a);
  }
}
