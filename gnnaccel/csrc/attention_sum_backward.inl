// Gradients of attention by `sum`: logits are made of numbers per node, so that one pass
// over sources can make them again. It reads each neighbour's gradient once, and nothing
// that stands per edge but a bias and what is kept.
//
// With g the gradient of out = sum p' v, that of a logit is p (keep <g, v> - <g, out>).
// These add up to 0 over a destination; so the gradient of its query, which has them times
// the slope of the leaky ReLU, is 1 - slope times the sum of those on the positive side:
// <g, positive> - <g, out> times the sum of their shares.

template <class T, class I, int N, bool EXACT>
struct AttentionOfSums {
  static constexpr int L = kLanes<T>;
  using V = Vec<T, L>;

  const AttentionArgs& a;
  const AttentionView<T, I> v{a};
  const Heads<T, N, EXACT> hs{a.heads, a.features};
  const Lanes<T> lanes{a.heads};
  const int64_t heads = a.heads, columns = hs.columns();
  const int64_t width = columns + heads;  // of the value, of the key
  const I *col = static_cast<const I*>(a.transposed.col),
          *perm = static_cast<const I*>(a.transposed.perm);
  const T* const grad = static_cast<const T*>(a.grad);
  // Of each destination: query, largest logit, 1 / sum of exponentials, <g, out>.
  T* const table = static_cast<T*>(a.pair);
  mutable bool failed = false;

  static constexpr int64_t kScratchRows = 1;

  // Scratch of one thread. By entry and head: bias and keep, where there are any; what the
  // table has of its destination, the first being what the leaky ReLU takes and the third
  // shares in the end; gradients of logits. One period each: the key, its gradient. The
  // sums of a row.
  struct Room {
    T *bias, *keep, *inner, *top, *shares, *mean, *grads, *key, *of_key, *sums;
  };

  int64_t room_size() const { return 7 * lanes.size(kStep) + 2 * lanes.period + width; }

  Room room(T* data) const {
    const int64_t size = lanes.size(kStep);
    T* const key = data + 7 * size;
    return {data,     data + size,     data + 2 * size, data + 3 * size,    data + 4 * size,
            data + 5 * size, data + 6 * size, key, key + lanes.period, key + 2 * lanes.period};
  }

  // The table, and the gradient of the query.
  void prepare(int64_t i, T* mean, T* positive) const {
    const T *g = grad + i * columns, *out = static_cast<const T*>(a.out) + i * columns,
            *some = static_cast<const T*>(a.positive) + i * columns,
            *stats = static_cast<const T*>(a.stats) + i * 3 * heads;
    hs.sum(mean, [&](int64_t o) -> Vec<T, N> { return load<N>(g + o) * load<N>(out + o); });
    T* const row = table + i * 4 * heads;
    for (int64_t h = 0; h < heads; ++h) {
      row[h] = v.query == nullptr ? T(0) : v.query[i * heads + h];
      row[heads + h] = stats[h];
      row[2 * heads + h] = stats[heads + h];
      row[3 * heads + h] = mean[h];
    }
    T* const g_query = static_cast<T*>(a.g_query);
    if (g_query == nullptr) return;
    hs.sum(positive, [&](int64_t o) -> Vec<T, N> { return load<N>(g + o) * load<N>(some + o); });
    for (int64_t h = 0; h < heads; ++h) {
      g_query[i * heads + h] = (1 - v.slope) * (positive[h] - mean[h] * stats[2 * heads + h]);
    }
  }

  // The shares of n entries again, kept ones, and the gradients of their logits.
  void logits(int64_t j, int64_t e0, int64_t n, const Room& m) const {
    for (int64_t k = 0; k < n; ++k) {
      const int64_t e = e0 + k, ahead = e + kAhead < v.last ? e + kAhead : v.last;
      prefetch(table + col[ahead] * 4 * heads, 4 * heads * int64_t(sizeof(T)));
      const T* row = table + col[e] * 4 * heads;
      const int64_t o = k * lanes.stride;
      lanes.copy(m.inner + o, row);
      lanes.copy(m.top + o, row + heads);
      lanes.copy(m.shares + o, row + 2 * heads);
      lanes.copy(m.mean + o, row + 3 * heads);
    }
    // One loop per term: see the forward pass.
    if (v.bias != nullptr) {
      for (int64_t k = 0; k < n; ++k) {
        lanes.copy(m.bias + k * lanes.stride, v.bias + at(perm, e0 + k) * heads);
      }
    }
    if (v.keep != nullptr) {
      for (int64_t k = 0; k < n; ++k) {
        lanes.copy(m.keep + k * lanes.stride, v.keep + at(perm, e0 + k) * heads);
      }
    }
    const int64_t size = lanes.size(n);
    for (int64_t r = 0; r < lanes.period; r += L) {
      for (int64_t o = r; o < size; o += lanes.period) {
        // Summed in the order of the forward pass: the sign must not change.
        V u = load<L>(m.key + r);
        if (v.bias != nullptr) u += load<L>(m.bias + o);
        u += load<L>(m.inner + o);
        store<L>(m.inner + o, u);
        const V y = exponential<L, T>(leaky<L, T>(u, v.slope) - load<L>(m.top + o));
        store<L>(m.shares + o, y * load<L>(m.shares + o));
      }
    }
    for (int64_t o = n * lanes.stride; o < size; ++o) m.shares[o] = m.grads[o] = m.mean[o] = 0;
    const T* const value = v.value + j * columns;
    hs.sums(
        n, m.grads, lanes.stride, [&](int64_t o) { return load<N>(value + o); },
        [&](int64_t k, int64_t o, int64_t bytes) {
          const int64_t e = e0 + k;
          prefetch(grad + col[e + kAhead < v.last ? e + kAhead : v.last] * columns + o, bytes);
          return grad + col[e] * columns + o;
        },
        [&](const T* g, int64_t o, const Vec<T, N>& x) -> Vec<T, N> { return load<N>(g + o) * x; });
    const V zero{};
    for (int64_t r = 0; r < lanes.period; r += L) {
      V of_key = load<L>(m.of_key + r);
      for (int64_t o = r; o < size; o += lanes.period) {
        V d = load<L>(m.grads + o);
        const V share = load<L>(m.shares + o);
        if (v.keep != nullptr) {
          const V keep = load<L>(m.keep + o);
          d *= keep;
          store<L>(m.shares + o, share * keep);
        }
        d = share * (d - load<L>(m.mean + o));
        d = (load<L>(m.inner + o) > zero) ? d : d * v.slope;
        of_key += d;
        store<L>(m.grads + o, d);
      }
      store<L>(m.of_key + r, of_key);
    }
    if (T* g_bias = static_cast<T*>(a.g_bias); g_bias != nullptr) {
      for (int64_t k = 0; k < n; ++k) {
        lanes.copy(g_bias + at(perm, e0 + k) * heads, m.grads + k * lanes.stride);
      }
    }
  }

  // Leaves the gradients of value and key of row j from its entries [e0, e1).
  void range(int64_t j, int64_t e0, int64_t e1, const Room& m, T* sums) const {
    clear(sums, width);
    if (e0 == e1) return;
    lanes.repeat(m.key, v.key + j * heads);
    clear(m.of_key, lanes.period);
    for (int64_t e = e0; e < e1; e += kStep) {
      const int64_t n = e1 - e < kStep ? e1 - e : kStep;
      logits(j, e, n, m);
      hs.groups([&]<int K>(int64_t s) {
        const Group<K, T, N, EXACT> g(hs, s);
        Vec<T, N> acc[K] = {};
        for (int64_t k = 0; k < n; ++k) {
          const T *row = grad + col[e + k] * columns + g.first,
                  *share = m.shares + k * lanes.stride + g.head;
          for (int r = 0; r < K; ++r) acc[r] += share[g.head_of(r)] * load<N>(row + g.offset_of(r));
        }
        for (int r = 0; r < K; ++r) hs.add(sums, s + r, acc[r]);
      });
    }
    for (int64_t r = 0; r < lanes.period; r += L) {
      store<L>(m.of_key + r,
               lanes.combined(load<L>(m.of_key + r),
                              [](const V& x, const V& y) -> V { return x + y; }));
    }
    lanes.copy(sums + columns, m.of_key);
  }

  void finish(int64_t j, const T* sums) const {
    Lanes<T>::copy(static_cast<T*>(a.g_value) + j * columns, sums, columns);
    lanes.copy(static_cast<T*>(a.g_key) + j * heads, sums + columns);
  }

  void rows(const Ranges<I>& ranges, int64_t r0, int64_t r1, T* partial) const {
    const Scratch scratch(room_size() * int64_t(sizeof(T)), &failed);
    if (scratch.data == nullptr) return;
    const Room m = room(static_cast<T*>(scratch.data));
    for (int64_t r = r0; r < r1; ++r) {
      if (ranges.skip(r)) continue;
      T* sums = partial == nullptr ? m.sums : partial + r * width;
      range(ranges.row(r), ranges.begin[r], ranges.end[r], m, sums);
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
    for_rows<I>(a.g, columns, [&](int64_t r0, int64_t r1) {
      const Scratch scratch(2 * heads * int64_t(sizeof(T)), &failed);
      T* const mean = static_cast<T*>(scratch.data);
      if (mean == nullptr) return;
      for (int64_t i = r0; i < r1; ++i) prepare(i, mean, mean + heads);
    });
    reduce_rows<T, I>(a.transposed, width, *this);
    if (failed) throw std::bad_alloc();
  }
};
