// Gradients of attention: one pass over destinations, which leaves for every entry its
// kept share and the gradient of its logit, and one over sources, which reads them.
//
// With shares p, kept shares p' = p keep and logits z, the gradient of out = sum p' v is
// dz = p (keep <g, v> - <g, out>).

template <class T, class I, int N, Score S>
struct AttentionToRows {
  const AttentionArgs& a;
  const AttentionView<T, I> v{a};
  const Heads<T, N> hs{a.heads, a.features};
  const int64_t heads = a.heads, columns = hs.columns();
  // `sum`: the query's gradient; `mlp`: that, and that of att; `dot`: the query's.
  const int64_t width = S == Score::sum ? heads : S == Score::mlp ? 2 * columns : columns;
  double* slots;  // [parts, columns]: gradient of att, by part of the rows
  mutable bool failed = false;

  static constexpr int64_t kScratchRows = 1;

  // The gradients of the logits of [e0, e1), through the leaky ReLU of `sum` and the
  // scale of `dot`; for `sum` added to gq.
  void logits(int64_t i, int64_t e0, int64_t e1, const T* mean, T* gq) const {
    const T *grad = static_cast<const T*>(a.grad) + i * columns,
            *shares = static_cast<const T*>(a.shares);
    T *pair = static_cast<T*>(a.pair), *g_bias = static_cast<T*>(a.g_bias);
    const T sides[2] = {T(1), v.slope};
    for (int64_t e = e0; e < e1; ++e) {
      v.template prefetch_far<S>(e, heads, columns);
      const T* row = v.value + at(v.col, e) * columns;
      const T* edge = S != Score::dot || v.edge == nullptr
                          ? nullptr
                          : v.edge + at(v.perm, e) * columns;
      T *kept = pair + e * 2 * heads, *d = kept + heads;
      hs.sum(d, [&](int64_t o) -> Vec<T, N> {
        Vec<T, N> x = load<N>(row + o);
        if (edge != nullptr) x += load<N>(edge + o);
        return load<N>(grad + o) * x;
      });
      // No loop reads or writes what may not be there: see the logits.
      const T *stored = shares + e * heads, *keep = nullptr;
      if (v.keep != nullptr) {
        keep = v.keep + at(v.perm, e) * heads;
        for (int64_t h = 0; h < heads; ++h) d[h] *= keep[h];
      }
      for (int64_t h = 0; h < heads; ++h) {
        const T share = S == Score::sum ? __builtin_fabs(stored[h]) : stored[h];
        kept[h] = share;
        d[h] = share * (d[h] - mean[h]);
        if constexpr (S == Score::dot) d[h] *= v.scale;
        if constexpr (S == Score::sum) {
          // No branch: the sign is not predictable.
          d[h] *= sides[__builtin_signbit(stored[h]) != 0];
          gq[h] += d[h];
        }
      }
      if (keep != nullptr) {
        for (int64_t h = 0; h < heads; ++h) kept[h] *= keep[h];
      }
      if (S == Score::sum && g_bias != nullptr) {
        T* of_bias = g_bias + at(v.perm, e) * heads;
        for (int64_t h = 0; h < heads; ++h) of_bias[h] = d[h];
      }
    }
  }

  // The gradient of the query (for `mlp` without att, and that of att), of [e0, e1).
  void queries(int64_t i, int64_t e0, int64_t e1, T* gq, T* ga) const {
    const T *q = v.query + i * columns, *pair = static_cast<const T*>(a.pair),
            *grad = static_cast<const T*>(a.grad) + i * columns;
    hs.groups([&]<int K>(int64_t s) {
      const Group<K, T, N> g(hs, s);
      Vec<T, N> acc[K] = {}, of_att[K] = {};
      for (int64_t e = e0; e < e1; ++e) {
        const T* row = v.key + at(v.col, e) * columns;
        const int64_t place = (v.edge == nullptr ? 0 : at(v.perm, e)) * columns;
        T* g_edge = a.g_edge == nullptr ? nullptr : static_cast<T*>(a.g_edge) + place;
        const T* both = pair + e * 2 * heads;
        for (int m = 0; m < K; ++m) {
          const int64_t o = g.offset[m], h = g.head[m];
          const T d = both[heads + h];
          Vec<T, N> u = load<N>(row + o);
          if constexpr (S == Score::mlp) {
            u += load<N>(q + o);
            if (v.edge != nullptr) u += load<N>(v.edge + place + o);
            const Vec<T, N> flat = leaky_slope<N, T>(u, Vec<T, N>{} + d, v.slope);
            acc[m] += flat;
            of_att[m] += flat * u;
            if (g_edge != nullptr) store<N>(g_edge + o, flat * load<N>(v.att + o));
          } else {
            if (v.edge != nullptr) u += load<N>(v.edge + place + o);
            acc[m] += d * u;
            if (g_edge != nullptr) {
              store<N>(g_edge + o, d * load<N>(q + o) + both[h] * load<N>(grad + o));
            }
          }
        }
      }
      for (int m = 0; m < K; ++m) {
        store<N>(gq + g.offset[m], acc[m]);
        if constexpr (S == Score::mlp) store<N>(ga + g.offset[m], of_att[m]);
      }
    });
  }

  // Leaves the sums of a range, `width` of them; `mean` has room for as many beyond the
  // heads. Long ranges go in steps whose rows stay
  // in the nearest cache from the logits to the query.
  void range(int64_t i, int64_t e0, int64_t e1, T* mean, T* sums) const {
    constexpr int64_t kStep = 32;
    const T *grad = static_cast<const T*>(a.grad) + i * columns,
            *out = static_cast<const T*>(a.out) + i * columns;
    hs.sum(mean, [&](int64_t o) -> Vec<T, N> { return load<N>(grad + o) * load<N>(out + o); });
    for (int64_t c = 0; c < width; ++c) sums[c] = 0;
    for (int64_t e = e0; e < e1; e += kStep) {
      const int64_t end = e + kStep < e1 ? e + kStep : e1;
      logits(i, e, end, mean, sums);
      if constexpr (S != Score::sum) {
        T* const step = e == e0 ? sums : mean + heads;
        queries(i, e, end, step, step + columns);
        if (step == sums) continue;
        for (int64_t c = 0; c < width; ++c) sums[c] += step[c];
      }
    }
  }

  // The finished row i: `sums` holds what `range` leaves.
  void finish(int64_t i, const T* sums, double* slot) const {
    if constexpr (S == Score::sum) {
      if (T* g = static_cast<T*>(a.g_query); g != nullptr) {
        for (int64_t h = 0; h < heads; ++h) g[i * heads + h] = sums[h];
      }
    } else {
      T* g = static_cast<T*>(a.g_query) + i * columns;
      for (int64_t c = 0; c < columns; ++c) g[c] = S == Score::mlp ? sums[c] * v.att[c] : sums[c];
      if constexpr (S == Score::mlp) {
        if (slot == nullptr) return;
        for (int64_t c = 0; c < columns; ++c) slot[c] += double(sums[columns + c]);
      }
    }
  }

  // The part of the rows that begins at r0.
  double* slot_of(int64_t r0) const {
    const I* ptr = static_cast<const I*>(a.g.ptr);
    const int64_t parts = threads();
    int64_t p = 0;
    while (p + 1 < parts && split_row(ptr, a.g.rows, p, parts) != r0) ++p;
    return slots + p * columns;
  }

  void rows(const Ranges<I>& ranges, int64_t r0, int64_t r1, T* partial) const {
    const Scratch scratch((heads + 2 * width) * int64_t(sizeof(T)), &failed);
    if (scratch.data == nullptr) return;
    T *const mean = static_cast<T*>(scratch.data), *const own = mean + heads + width;
    double* slot = S == Score::mlp && partial == nullptr ? slot_of(r0) : nullptr;
    for (int64_t r = r0; r < r1; ++r) {
      if (ranges.skip(r)) continue;
      T* sums = partial == nullptr ? own : partial + r * width;
      range(ranges.row(r), ranges.begin[r], ranges.end[r], mean, sums);
      if (partial == nullptr) finish(ranges.row(r), sums, slot);
    }
  }

  void merge(int64_t i, T* partial, int64_t slices) const {
    for (int64_t s = 1; s < slices; ++s) {
      for (int64_t c = 0; c < width; ++c) partial[c] += partial[s * width + c];
    }
    finish(i, partial, nullptr);
  }

  // After all hubs, one after the other: the order does not depend on threads.
  void merged(const T* partial) const {
    if constexpr (S == Score::mlp) {
      for (int64_t c = 0; c < columns; ++c) slots[c] += double(partial[columns + c]);
    }
  }

  void run() const {
    prefer_huge_pages(a.pair, a.g.entries * 2 * heads * int64_t(sizeof(T)));
    reduce_rows<T, I>(a.g, width, *this);
    if (failed) throw std::bad_alloc();
  }
};

template <class T, class I, int N, Score S>
struct AttentionToCols {
  const AttentionArgs& a;
  const Grouping& t = a.transposed;
  const AttentionView<T, I> v{a};
  const Heads<T, N> hs{a.heads, a.features};
  const int64_t heads = a.heads, columns = hs.columns();
  const int64_t width = columns + (S == Score::sum ? heads : columns);
  const I *col = static_cast<const I*>(t.col), *perm = static_cast<const I*>(t.perm),
          *positions = static_cast<const I*>(a.positions);
  mutable bool failed = false;

  static constexpr int64_t kScratchRows = 1;

  // The gradients of value and key of row j over its entries [e0, e1).
  void range(int64_t j, int64_t e0, int64_t e1, T* gv, T* gk) const {
    const T *grad = static_cast<const T*>(a.grad), *pair = static_cast<const T*>(a.pair);
    const T* key = v.key + j * columns;
    const int64_t row_bytes = columns * int64_t(sizeof(T));
    if constexpr (S == Score::sum) {
      for (int64_t h = 0; h < heads; ++h) gk[h] = 0;
    }
    hs.groups([&]<int K>(int64_t s) {
      const Group<K, T, N> g(hs, s);
      Vec<T, N> acc[K] = {}, of_key[K] = {};
      for (int64_t e = e0; e < e1; ++e) {
        const int64_t i = at(col, e);
        const T* both = pair + at(positions, e) * 2 * heads;
        if (s == 0) {
          const int64_t ahead = e + kAhead < v.last ? e + kAhead : v.last;
          // Further ahead: pairs are the larger table, seldom in a near cache.
          const int64_t far = e + 2 * kAhead < v.last ? e + 2 * kAhead : v.last;
          prefetch(pair + at(positions, far) * 2 * heads, 2 * heads * int64_t(sizeof(T)));
          prefetch(grad + at(col, ahead) * columns, row_bytes);
          if constexpr (S == Score::sum) {
            for (int64_t h = 0; h < heads; ++h) gk[h] += both[heads + h];
          } else {
            prefetch(v.query + at(col, ahead) * columns, row_bytes);
          }
        }
        const T* edge = S != Score::mlp || v.edge == nullptr
                            ? nullptr
                            : v.edge + at(perm, e) * columns;
        for (int m = 0; m < K; ++m) {
          const int64_t o = g.offset[m], h = g.head[m];
          acc[m] += both[h] * load<N>(grad + i * columns + o);
          if constexpr (S == Score::dot) {
            of_key[m] += both[heads + h] * load<N>(v.query + i * columns + o);
          } else if constexpr (S == Score::mlp) {
            // Summed in the order of the forward pass: the sign must not change.
            Vec<T, N> u = load<N>(key + o) + load<N>(v.query + i * columns + o);
            if (edge != nullptr) u += load<N>(edge + o);
            of_key[m] += leaky_slope<N, T>(u, Vec<T, N>{} + both[heads + h], v.slope);
          }
        }
      }
      for (int m = 0; m < K; ++m) {
        store<N>(gv + g.offset[m], acc[m]);
        if constexpr (S != Score::sum) store<N>(gk + g.offset[m], of_key[m]);
      }
    });
  }

  void finish(int64_t j, const T* sums) const {
    T *gv = static_cast<T*>(a.g_value), *gk = static_cast<T*>(a.g_key);
    const T* of_key = sums + columns;
    if constexpr (S == Score::sum) {
      for (int64_t h = 0; h < heads; ++h) gk[j * heads + h] = of_key[h];
    } else {
      for (int64_t c = 0; c < columns; ++c) {
        const T d = S == Score::mlp ? of_key[c] * v.att[c] : of_key[c];
        // Without values of their own keys are the values.
        gk[j * columns + c] = gv == nullptr ? d + sums[c] : d;
      }
    }
    if (gv == nullptr) return;
    for (int64_t c = 0; c < columns; ++c) gv[j * columns + c] = sums[c];
  }

  void rows(const Ranges<I>& ranges, int64_t r0, int64_t r1, T* partial) const {
    const Scratch scratch(width * int64_t(sizeof(T)), &failed);
    if (scratch.data == nullptr) return;
    for (int64_t r = r0; r < r1; ++r) {
      if (ranges.skip(r)) continue;
      T* sums = partial == nullptr ? static_cast<T*>(scratch.data) : partial + r * width;
      range(ranges.row(r), ranges.begin[r], ranges.end[r], sums, sums + columns);
      if (partial == nullptr) finish(ranges.row(r), sums);
    }
  }

  void merge(int64_t j, T* partial, int64_t slices) const {
    for (int64_t s = 1; s < slices; ++s) {
      for (int64_t c = 0; c < width; ++c) partial[c] += partial[s * width + c];
    }
    finish(j, partial);
  }

  void run() const {
    reduce_rows<T, I>(t, width, *this);
    if (failed) throw std::bad_alloc();
  }
};

template <class T, class I, int N, Score S>
static void attention_gradients(const AttentionArgs& a) {
  const int64_t parts = threads(), columns = a.heads * a.features;
  bool failed = false;
  const Scratch slots(S == Score::mlp ? parts * columns * int64_t(sizeof(double)) : 1, &failed);
  if (failed) throw std::bad_alloc();
  double* const sums = static_cast<double*>(slots.data);
  if constexpr (S == Score::mlp) {
    for (int64_t c = 0; c < parts * columns; ++c) sums[c] = 0;
  }
  AttentionToRows<T, I, N, S>{.a = a, .slots = sums}.run();
  if constexpr (S == Score::mlp) {
    for (int64_t c = 0; c < columns; ++c) {
      double total = 0;
      for (int64_t p = 0; p < parts; ++p) total += sums[p * columns + c];
      static_cast<T*>(a.g_att)[c] = T(total);
    }
  }
  if (a.g_key != nullptr) AttentionToCols<T, I, N, S>{a}.run();
}

template <class T, class I>
static void attention_backward_indexed(const AttentionArgs& a) {
  for_width<T, I>(a.features, [&]<int N>() {
    switch (Score(a.score)) {
      case Score::sum: return attention_gradients<T, I, N, Score::sum>(a);
      case Score::mlp: return attention_gradients<T, I, N, Score::mlp>(a);
      case Score::dot: return attention_gradients<T, I, N, Score::dot>(a);
    }
  });
}

static void attention_backward(const AttentionArgs& a, Dtype t) {
  if (t == Dtype::f64) {
    if (a.g.wide) attention_backward_indexed<double, int64_t>(a);
    else attention_backward_indexed<double, int32_t>(a);
  } else {
    if (a.g.wide) attention_backward_indexed<float, int64_t>(a);
    else attention_backward_indexed<float, int32_t>(a);
  }
}
