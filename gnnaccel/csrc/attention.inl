// Attention: logits, softmax and weighted sum of each row in one go. A step's logits are
// taken against the largest so far, and what was summed before is brought to that: each
// neighbour's row is read once, however many there are.

template <class T, class I, int N, bool EXACT, Score S>
struct Attention {
  static constexpr int L = kLanes<T>;
  using V = Vec<T, L>;

  const AttentionArgs& a;
  const AttentionView<T, I> v{a};
  const Heads<T, N, EXACT> hs{a.heads, a.features};
  const Lanes<T> lanes{a.heads};
  const int64_t heads = a.heads, columns = hs.columns();
  // Under `sum` the gradients want, apart, the weighted sum of those values and the sum of
  // those shares whose leaky ReLU was on its positive side.
  const bool apart = S == Score::sum && a.positive != nullptr;
  // A slice leaves the largest logit and the sum of exponentials of every head, then its
  // weighted sum; and what is wanted apart.
  const int64_t width = 2 * heads + columns + (apart ? columns + heads : 0);
  const int64_t longest = a.g.max_degree < kSlice ? a.g.max_degree : kSlice;
  mutable bool failed = false;

  static constexpr int64_t kScratchRows = 1;

  // Scratch of one thread. By entry and head: logits, which become shares, and, for
  // `sum`, what the leaky ReLU takes. One period each: the query of `sum`; of all steps so
  // far the largest logit, the sum of exponentials and that of those on the positive side;
  // a factor; the largest logit that each step used.
  struct Room {
    T *shares, *inner, *query, *top, *total, *positive, *factor, *tops, *made;
  };

  int64_t room_size() const {
    const int64_t steps = (longest + kStep - 1) / kStep;
    return 2 * lanes.size(kStep) + (5 + steps) * lanes.period + v.made_size();
  }

  Room room(T* data) const {
    Room m;
    m.shares = data;
    m.inner = m.shares + lanes.size(kStep);
    m.query = m.inner + lanes.size(kStep);
    m.top = m.query + lanes.period;
    m.total = m.top + lanes.period;
    m.positive = m.total + lanes.period;
    m.factor = m.positive + lanes.period;
    m.made = m.factor + lanes.period;
    m.tops = m.made + v.made_size();
    return m;
  }

  void logits(int64_t i, int64_t e0, int64_t n, const Room& m) const {
    if constexpr (S == Score::sum) {
      for (int64_t k = 0; k < n; ++k) {
        v.template prefetch_far<S>(e0 + k, 0, columns * int64_t(sizeof(T)));
        lanes.copy(m.inner + k * lanes.stride, v.key + v.col[e0 + k] * heads);
      }
      // One loop per term: in a common one the compiler masks the loads of what is not
      // there, and a masked load from a null pointer takes a fault's time.
      if (v.bias != nullptr) {
        for (int64_t k = 0; k < n; ++k) {
          lanes.add(m.inner + k * lanes.stride, v.bias + at(v.perm, e0 + k) * heads);
        }
      }
      const int64_t size = lanes.size(n);
      for (int64_t r = 0; r < lanes.period; r += L) {
        const V query = load<L>(m.query + r);
        for (int64_t o = r; o < size; o += lanes.period) {
          const V u = load<L>(m.inner + o) + query;
          store<L>(m.inner + o, u);
          store<L>(m.shares + o, leaky<L, T>(u, v.slope));
        }
      }
    } else {
      struct Near {
        Vec<T, N> query, att;
      };
      struct Far {
        const T *key, *edge;
      };
      const T* query = v.query + i * columns;
      v.make_rows(v.perm, e0, n, m.made);
      hs.sums(
          n, m.shares, lanes.stride,
          [&](int64_t o) {
            Near near{load<N>(query + o), {}};
            if constexpr (S == Score::mlp) near.att = load<N>(v.att + o);
            else near.query *= v.scale;
            return near;
          },
          [&](int64_t k, int64_t o, int64_t bytes) {
            const int64_t e = e0 + k;
            v.template prefetch_far<S>(e, o, bytes);
            const T* edge = v.edge_row(v.perm, e, k, m.made);
            return Far{v.key + v.col[e] * columns + o, edge == nullptr ? nullptr : edge + o};
          },
          [&](const Far& far, int64_t o, const Near& near) -> Vec<T, N> {
            Vec<T, N> u = load<N>(far.key + o);
            if constexpr (S == Score::mlp) u += near.query;
            if (far.edge != nullptr) u += load<N>(far.edge + o);
            if constexpr (S == Score::mlp) return near.att * leaky<N, T>(u, v.slope);
            else return near.query * u;
          });
    }
  }

  // Makes exponentials of the logits, against the largest so far.
  void exponentials(int64_t n, bool first, const Room& m, T* tops) const {
    const int64_t size = lanes.size(n);
    const V none = V{} - T(__builtin_inf());
    for (int64_t o = n * lanes.stride; o < size; ++o) m.shares[o] = none[0];
    for (int64_t r = 0; r < lanes.period; r += L) {
      // Not less than the lowest number: a step of logits of -inf only counts for nothing
      // if others follow.
      V top = first ? V{} + kLowest<T> : load<L>(m.top + r);
      const V before = top;
      for (int64_t o = r; o < size; o += lanes.period) {
        const V x = load<L>(m.shares + o);
        top = (x > top) ? x : top;
      }
      top = lanes.combined(top, [](const V& x, const V& y) -> V { return (x > y) ? x : y; });
      V total{};
      for (int64_t o = r; o < size; o += lanes.period) {
        const V y = exponential<L, T>(load<L>(m.shares + o) - top);
        store<L>(m.shares + o, y);
        total += y;
      }
      total = lanes.combined(total, [](const V& x, const V& y) -> V { return x + y; });
      if (!first) {
        const V factor = exponential<L, T>(before - top);
        store<L>(m.factor + r, factor);
        total += factor * load<L>(m.total + r);
      }
      store<L>(m.top + r, top);
      store<L>(m.total + r, total);
      store<L>(tops + r, top);
    }
  }

  // Leaves in m.inner the shares on the positive side, and adds them up.
  void set_apart(int64_t n, bool first, const Room& m) const {
    const V zero{};
    for (int64_t r = 0; r < lanes.period; r += L) {
      V total{};
      for (int64_t o = r; o < lanes.size(n); o += lanes.period) {
        const V x = (load<L>(m.inner + o) > zero) ? load<L>(m.shares + o) : zero;
        store<L>(m.inner + o, x);
        total += x;
      }
      total = lanes.combined(total, [](const V& x, const V& y) -> V { return x + y; });
      if (!first) total += load<L>(m.factor + r) * load<L>(m.positive + r);
      store<L>(m.positive + r, total);
    }
  }

  // Entries [e0, e0 + n) of row i: adds them to `out`, which is not normalised, and to
  // `positive`.
  void step(int64_t i, int64_t e0, int64_t n, bool first, const Room& m, T* tops, T* out,
            T* positive) const {
    logits(i, e0, n, m);
    exponentials(n, first, m, tops);
    if (!first) hs.scale(out, m.factor);
    if (apart) {
      set_apart(n, first, m);
      if (!first) hs.scale(positive, m.factor);
    }
    if (T* shares = static_cast<T*>(a.shares); S != Score::sum && shares != nullptr) {
      lanes.store_entries(shares + e0 * heads, m.shares, n);
    }
    if (v.keep != nullptr) {
      for (int64_t k = 0; k < n; ++k) {
        const T* keep = v.keep + at(v.perm, e0 + k) * heads;
        lanes.multiply(m.shares + k * lanes.stride, keep);
        if (apart) lanes.multiply(m.inner + k * lanes.stride, keep);
      }
    }
    hs.groups([&]<int K>(int64_t s) {
      const Group<K, T, N, EXACT> g(hs, s);
      const auto leave = [&](T* row, const Vec<T, N>(&acc)[K]) {
        for (int r = 0; r < K; ++r) {
          if (first) store<N>(row + g.first + g.offset_of(r), acc[r]);
          else hs.add(row, s + r, acc[r]);
        }
      };
      Vec<T, N> acc[K] = {}, more[K] = {};
      if (apart) {
        for (int64_t k = 0; k < n; ++k) {
          const T* row = v.value + v.col[e0 + k] * columns + g.first;
          const T *share = m.shares + k * lanes.stride + g.head, *some = share + (m.inner - m.shares);
          for (int r = 0; r < K; ++r) {
            const Vec<T, N> x = load<N>(row + g.offset_of(r));
            acc[r] += share[g.head_of(r)] * x;
            more[r] += some[g.head_of(r)] * x;
          }
        }
        leave(positive, more);
        return leave(out, acc);
      }
      for (int64_t k = 0; k < n; ++k) {
        const T* row = v.value + v.col[e0 + k] * columns + g.first;
        const T* share = m.shares + k * lanes.stride + g.head;
        const T* edge = S == Score::dot ? v.edge_row(v.perm, e0 + k, k, m.made) : nullptr;
        for (int r = 0; r < K; ++r) {
          Vec<T, N> x = load<N>(row + g.offset_of(r));
          if (edge != nullptr) x += load<N>(edge + g.first + g.offset_of(r));
          acc[r] += share[g.head_of(r)] * x;
        }
      }
      leave(out, acc);
    });
  }

  // Where row i keeps what its gradients want: `sum` only.
  T* positive_of(int64_t i) const { return static_cast<T*>(a.positive) + i * columns; }
  T* stats_of(int64_t i) const { return static_cast<T*>(a.stats) + i * 3 * heads; }

  // The range [e0, e0 + n) of row i. Whole rows are normalised; slices leave `partial`.
  void range(int64_t i, int64_t e0, int64_t n, const Room& m, T* partial) const {
    const bool whole = partial == nullptr;
    T* const out = whole ? static_cast<T*>(a.out) + i * columns : partial + 2 * heads;
    T* const positive = !apart ? nullptr : whole ? positive_of(i) : out + columns;
    if (n == 0) {
      clear(out, columns);
      if (apart) {
        clear(positive, columns);
        clear(stats_of(i), 3 * heads);
      }
      return;
    }
    if (S == Score::sum && v.query != nullptr) lanes.repeat(m.query, v.query + i * heads);
    for (int64_t k = 0; k < n; k += kStep) {
      const int64_t count = n - k < kStep ? n - k : kStep;
      step(i, e0 + k, count, k == 0, m, m.tops + k / kStep * lanes.period, out, positive);
    }
    if (!whole) {
      lanes.copy(partial, m.top);
      lanes.copy(partial + heads, m.total);
      if (apart) lanes.copy(positive + columns, m.positive);
    }
    for (int64_t r = 0; r < lanes.period; r += L) {
      const V top = load<L>(m.top + r);
      const V share = whole ? share_of<L>(load<L>(m.total + r)) : V{} + T(1);
      store<L>(m.factor + r, share);
      store<L>(m.positive + r, load<L>(m.positive + r) * share);
      for (int64_t k = 0; k < n; k += kStep) {
        T* factor = m.tops + k / kStep * lanes.period + r;
        store<L>(factor, n <= kStep ? share : exponential<L, T>(load<L>(factor) - top) * share);
      }
    }
    if (whole) {
      hs.scale(out, m.factor);
      if (apart) {
        hs.scale(positive, m.factor);
        T* stats = stats_of(i);
        lanes.copy(stats, m.top);
        lanes.copy(stats + heads, m.factor);
        lanes.copy(stats + 2 * heads, m.positive);
      }
    }
    if (S == Score::sum || a.shares == nullptr) return;
    T* shares = static_cast<T*>(a.shares) + e0 * heads;
    for (int64_t k = 0; k < n; k += kStep) {
      const int64_t count = n - k < kStep ? n - k : kStep;
      lanes.scale_entries(shares + k * heads, m.tops + k / kStep * lanes.period, count);
    }
  }

  // 1 over a sum of exponentials, which is 0 only where all logits are -inf.
  template <int W>
  Vec<T, W> share_of(const Vec<T, W>& total) const {
    const Vec<T, W> zero{}, share = T(1) / (total + T(a.epsilon));
    return (total == zero) ? zero / zero : share;
  }

  void rows(const Ranges<I>& ranges, int64_t r0, int64_t r1, T* partial) const {
    const Scratch scratch(room_size() * int64_t(sizeof(T)), &failed);
    if (scratch.data == nullptr) return;
    const Room m = room(static_cast<T*>(scratch.data));
    for (int64_t r = r0; r < r1; ++r) {
      if (ranges.skip(r)) continue;
      range(ranges.row(r), ranges.begin[r], int64_t(ranges.end[r]) - int64_t(ranges.begin[r]), m,
            partial == nullptr ? nullptr : partial + r * width);
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
      T *y = out + h * a.features, *stats = apart ? stats_of(i) : nullptr;
      T* positive = apart ? positive_of(i) + h * a.features : nullptr;
      for (int64_t c = 0; c < a.features; ++c) y[c] = 0;
      if (apart) {
        for (int64_t c = 0; c < a.features; ++c) positive[c] = 0;
        stats[h] = top;
        stats[heads + h] = share_of<1>(total);
        stats[2 * heads + h] = 0;
      }
      for (int64_t s = 0; s < slices; ++s) {
        const T* row = partial + s * width;
        const T share = exp_scalar(row[h] - top) * share_of<1>(total);
        if (apart) {
          const T* from = row + 2 * heads + columns;
          for (int64_t c = 0; c < a.features; ++c) positive[c] += share * from[h * a.features + c];
          stats[2 * heads + h] += share * from[columns + h];
        }
        for (int64_t c = 0; c < a.features; ++c) {
          y[c] += share * row[2 * heads + h * a.features + c];
        }
        if (S == Score::sum || shares == nullptr) continue;
        const int64_t from = e0 + s * kSlice, to = from + kSlice < e1 ? from + kSlice : e1;
        for (int64_t e = from; e < to; ++e) shares[e * heads + h] *= share;
      }
    }
  }

  void run() const {
    prefer_huge_pages(a.out, a.g.rows * columns * int64_t(sizeof(T)));
    if (apart) prefer_huge_pages(a.positive, a.g.rows * columns * int64_t(sizeof(T)));
    if (a.shares != nullptr) {
      prefer_huge_pages(a.shares, a.g.entries * heads * int64_t(sizeof(T)));
    }
    reduce_rows<T, I>(a.g, width, *this);
    if (failed) throw std::bad_alloc();
  }
};

template <class T, class I>
static void attention_typed(const AttentionArgs& a) {
  for_width<T, I>(a.features, [&]<int N, bool EXACT>() {
    switch (Score(a.score)) {
      case Score::sum: return Attention<T, I, N, EXACT, Score::sum>{a}.run();
      case Score::mlp: return Attention<T, I, N, EXACT, Score::mlp>{a}.run();
      case Score::dot: return Attention<T, I, N, EXACT, Score::dot>{a}.run();
    }
  });
}
