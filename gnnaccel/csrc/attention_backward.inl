// Gradients of attention by `mlp` and `dot`: one pass over destinations, which leaves for
// every entry its kept share and the gradient of its logit, and one over sources, which
// reads them.
//
// With shares p, kept shares p' = p keep and logits z, the gradient of out = sum p' v is
// dz = p (keep <g, v> - <g, out>).

template <class T, class I, int N, bool EXACT, Score S>
struct AttentionToRows {
  static constexpr int L = kLanes<T>;
  using V = Vec<T, L>;

  const AttentionArgs& a;
  const AttentionView<T, I> v{a};
  const Heads<T, N, EXACT> hs{a.heads, a.features};
  const Lanes<T> lanes{a.heads};
  const int64_t heads = a.heads, columns = hs.columns();
  // `mlp`: the query's gradient, and that of att; `dot`: the query's.
  const int64_t own = S == Score::mlp ? 2 * columns : columns;
  // Then that of the map.
  const int64_t width = own + map_size(a);
  double* slots;  // [parts, slot_size]: gradients of att and of the map, by part of the rows
  mutable bool failed = false;

  static constexpr int64_t kScratchRows = 1;

  static int64_t map_size(const AttentionArgs& a) {
    return a.g_map == nullptr ? 0 : a.depth * a.heads * a.features;
  }
  static int64_t slot_size(const AttentionArgs& a) {
    return (S == Score::mlp ? a.heads * a.features : 0) + map_size(a);
  }

  // Scratch of one thread. By entry and head: shares, kept ones after `logits`; gradients
  // of logits; keep. One period: <g, out>. Rows of a step's edges and their gradients, and
  // the features those are made of; a step's gradient of the map. The sums of a row.
  struct Room {
    T *shares, *grads, *keep, *mean, *made, *of_made, *features, *of_map, *sums;
  };

  int64_t room_size() const {
    return 3 * lanes.size(kStep) + lanes.period + width + map_size(a) +
           (v.map == nullptr ? 0 : 2 * v.made_size() + kStep * v.depth);
  }

  Room room(T* data) const {
    Room m;
    m.shares = data;
    m.grads = m.shares + lanes.size(kStep);
    m.keep = m.grads + lanes.size(kStep);
    m.mean = m.keep + lanes.size(kStep);
    m.sums = m.mean + lanes.period;
    m.of_map = m.sums + width;
    m.made = m.of_map + map_size(a);
    m.of_made = m.made + v.made_size();
    m.features = m.of_made + v.made_size();
    return m;
  }

  // The gradients of the logits of n entries, through the scale of `dot`.
  void logits(int64_t i, int64_t e0, int64_t n, const Room& m) const {
    struct Far {
      const T *value, *edge;
    };
    const T* grad = static_cast<const T*>(a.grad) + i * columns;
    hs.sums(
        n, m.grads, lanes.stride, [&](int64_t o) { return load<N>(grad + o); },
        [&](int64_t k, int64_t o, int64_t bytes) {
          const int64_t e = e0 + k;
          v.template prefetch_far<S>(e, o, bytes);
          const T* edge = S == Score::dot ? v.edge_row(v.perm, e, k, m.made) : nullptr;
          return Far{v.value + v.col[e] * columns + o, edge == nullptr ? nullptr : edge + o};
        },
        [&](const Far& far, int64_t o, const Vec<T, N>& g) -> Vec<T, N> {
          Vec<T, N> x = load<N>(far.value + o);
          if (S == Score::dot && far.edge != nullptr) x += load<N>(far.edge + o);
          return g * x;
        });
    const int64_t size = lanes.size(n);
    for (int64_t o = n * lanes.stride; o < size; ++o) m.shares[o] = m.grads[o] = 0;
    lanes.load_entries(m.shares, static_cast<const T*>(a.shares) + e0 * heads, n);
    if (v.keep != nullptr) {
      for (int64_t k = 0; k < n; ++k) {
        lanes.copy(m.keep + k * lanes.stride, v.keep + at(v.perm, e0 + k) * heads);
      }
      for (int64_t o = 0; o < size; o += L) {
        store<L>(m.grads + o, load<L>(m.grads + o) * load<L>(m.keep + o));
      }
    }
    for (int64_t r = 0; r < lanes.period; r += L) {
      const V mean = load<L>(m.mean + r);
      for (int64_t o = r; o < size; o += lanes.period) {
        V d = load<L>(m.shares + o) * (load<L>(m.grads + o) - mean);
        if constexpr (S == Score::dot) d *= v.scale;
        store<L>(m.grads + o, d);
      }
    }
    if (v.keep != nullptr) {
      for (int64_t o = 0; o < size; o += L) {
        store<L>(m.shares + o, load<L>(m.shares + o) * load<L>(m.keep + o));
      }
    }
    T* pair = static_cast<T*>(a.pair) + e0 * 2 * heads;
    for (int64_t k = 0; k < n; ++k) {
      lanes.copy(pair + k * 2 * heads, m.shares + k * lanes.stride);
      lanes.copy(pair + k * 2 * heads + heads, m.grads + k * lanes.stride);
    }
  }

  // Adds the gradient of the query (for `mlp` without att, and that of att) of n entries
  // to m.sums.
  void queries(int64_t i, int64_t e0, int64_t n, const Room& m, T* sums) const {
    const T *q = v.query + i * columns, *grad = static_cast<const T*>(a.grad) + i * columns;
    const bool of_edges = a.g_edge != nullptr || a.g_map != nullptr;
    T* const g_edge = v.map == nullptr ? static_cast<T*>(a.g_edge) : m.of_made;
    hs.groups([&]<int K>(int64_t s) {
      const Group<K, T, N, EXACT> g(hs, s);
      Vec<T, N> acc[K] = {}, of_att[K] = {}, query[K];
      for (int r = 0; r < K; ++r) query[r] = load<N>(q + g.first + g.offset_of(r));
      for (int64_t k = 0; k < n; ++k) {
        const int64_t e = e0 + k;
        const T *row = v.key + v.col[e] * columns + g.first,
                *edge = v.edge_row(v.perm, e, k, m.made),
                *d = m.grads + k * lanes.stride + g.head;
        for (int r = 0; r < K; ++r) {
          const int64_t o = g.first + g.offset_of(r);
          Vec<T, N> u = load<N>(row + g.offset_of(r)), of_edge;
          const T of_logit = d[g.head_of(r)];
          if constexpr (S == Score::mlp) {
            // Summed in the order of the forward pass: the sign must not change.
            u += query[r];
            if (edge != nullptr) u += load<N>(edge + o);
            const Vec<T, N> zero{}, flat = (u > zero) ? zero + of_logit : zero + of_logit * v.slope;
            acc[r] += flat;
            of_att[r] += flat * u;
            if (of_edges) of_edge = flat * load<N>(v.att + o);
          } else {
            if (edge != nullptr) u += load<N>(edge + o);
            acc[r] += of_logit * u;
            if (of_edges) {
              const T share = m.shares[k * lanes.stride + g.head + g.head_of(r)];
              of_edge = of_logit * query[r] + share * load<N>(grad + o);
            }
          }
          if (of_edges) {
            const int64_t place = v.map == nullptr ? at(v.perm, e) : k;
            store<N>(g_edge + place * columns + o, of_edge);
          }
        }
      }
      for (int r = 0; r < K; ++r) {
        hs.add(sums, s + r, acc[r]);
        if constexpr (S == Score::mlp) hs.add(sums + columns, s + r, of_att[r]);
      }
    });
  }

  // Leaves the sums of a range, `width` of them; those of the map go to the slot instead
  // where there is one.
  void range(int64_t i, int64_t e0, int64_t e1, const Room& m, T* sums, double* slot) const {
    const T *grad = static_cast<const T*>(a.grad) + i * columns,
            *out = static_cast<const T*>(a.out) + i * columns;
    clear(sums, width);
    if (e0 == e1) return;
    hs.sum(m.mean, [&](int64_t o) -> Vec<T, N> { return load<N>(grad + o) * load<N>(out + o); });
    lanes.repeat(m.mean, m.mean);
    for (int64_t e = e0; e < e1; e += kStep) {
      const int64_t n = e1 - e < kStep ? e1 - e : kStep;
      v.make_rows(v.perm, e, n, m.made);
      logits(i, e, n, m);
      queries(i, e, n, m, sums);
      if (a.g_map == nullptr) continue;
      v.unmake_rows(v.perm, e, n, m.of_made, m.features, static_cast<T*>(a.g_edge), m.of_map);
      for (int64_t c = 0; c < map_size(a); ++c) {
        if (slot == nullptr) sums[own + c] += m.of_map[c];
        else slot[slot_size(a) - map_size(a) + c] += double(m.of_map[c]);
      }
    }
  }

  // The finished row i: `sums` holds what `range` leaves.
  void finish(int64_t i, const T* sums, double* slot) const {
    T* g = static_cast<T*>(a.g_query) + i * columns;
    by_registers<T>(columns, [&]<int W>(int64_t c) {
      Vec<T, W> x = load<W>(sums + c);
      if constexpr (S == Score::mlp) x *= load<W>(v.att + c);
      store<W>(g + c, x);
    });
    if constexpr (S == Score::mlp) {
      if (slot == nullptr) return;
      for (int64_t c = 0; c < columns; ++c) slot[c] += double(sums[columns + c]);
    }
  }

  // The part of the rows that begins at r0.
  double* slot_of(int64_t r0) const {
    const I* ptr = static_cast<const I*>(a.g.ptr);
    const int64_t parts = threads();
    int64_t p = 0;
    while (p + 1 < parts && split_row(ptr, a.g.rows, p, parts) != r0) ++p;
    return slots + p * slot_size(a);
  }

  void rows(const Ranges<I>& ranges, int64_t r0, int64_t r1, T* partial) const {
    const Scratch scratch(room_size() * int64_t(sizeof(T)), &failed);
    if (scratch.data == nullptr) return;
    const Room m = room(static_cast<T*>(scratch.data));
    double* slot = slot_size(a) > 0 && partial == nullptr ? slot_of(r0) : nullptr;
    for (int64_t r = r0; r < r1; ++r) {
      if (ranges.skip(r)) continue;
      T* sums = partial == nullptr ? m.sums : partial + r * width;
      range(ranges.row(r), ranges.begin[r], ranges.end[r], m, sums, slot);
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
    const T* from = partial + width - slot_size(a);
    for (int64_t c = 0; c < slot_size(a); ++c) slots[c] += double(from[c]);
  }

  void run() const {
    prefer_huge_pages(a.pair, a.g.entries * 2 * heads * int64_t(sizeof(T)));
    reduce_rows<T, I>(a.g, width, *this);
    if (failed) throw std::bad_alloc();
  }
};

template <class T, class I, int N, bool EXACT, Score S>
struct AttentionToCols {
  const AttentionArgs& a;
  const Grouping& t = a.transposed;
  const AttentionView<T, I> v{a};
  const Heads<T, N, EXACT> hs{a.heads, a.features};
  const int64_t heads = a.heads, columns = hs.columns();
  const int64_t width = 2 * columns;
  const I *col = static_cast<const I*>(t.col), *perm = static_cast<const I*>(t.perm),
          *positions = static_cast<const I*>(a.positions);
  mutable bool failed = false;

  static constexpr int64_t kScratchRows = 1;

  // Adds the gradients of value and key of n entries of row j.
  void step(int64_t j, int64_t e0, int64_t n, const T* made, T* gv, T* gk) const {
    const T *grad = static_cast<const T*>(a.grad), *pair = static_cast<const T*>(a.pair);
    [[maybe_unused]] const T* key = v.key + j * columns;
    hs.groups([&]<int K>(int64_t s) {
      const Group<K, T, N, EXACT> g(hs, s);
      Vec<T, N> acc[K] = {}, of_key[K] = {}, own[K];
      if constexpr (S == Score::mlp) {
        for (int m = 0; m < K; ++m) own[m] = load<N>(key + g.first + g.offset_of(m));
      }
      const T *grads = grad + g.first, *pairs = pair + g.head;
      const T* queries = v.query + g.first;
      for (int64_t e = e0; e < e0 + n; ++e) {
        const int64_t i = col[e] * columns;
        const T *both = pairs + at(positions, e) * 2 * heads, *d = both + heads;
        const int64_t ahead = col[e + kAhead < v.last ? e + kAhead : v.last] * columns;
        prefetch(grads + ahead, g.kBytes);
        prefetch(queries + ahead, g.kBytes);
        if (s == 0) {
          // Further ahead: pairs are the larger table, seldom in a near cache.
          const int64_t far = e + 4 * kAhead < v.last ? e + 4 * kAhead : v.last;
          prefetch(pair + at(positions, far) * 2 * heads, 2 * heads * int64_t(sizeof(T)));
        }
        const T* edge = S == Score::mlp ? v.edge_row(perm, e, e - e0, made) : nullptr;
        for (int m = 0; m < K; ++m) {
          const int64_t o = g.offset_of(m), h = g.head_of(m);
          acc[m] += both[h] * load<N>(grads + i + o);
          if constexpr (S == Score::dot) {
            of_key[m] += d[h] * load<N>(queries + i + o);
          } else if constexpr (S == Score::mlp) {
            // Summed in the order of the forward pass: the sign must not change.
            Vec<T, N> u = own[m] + load<N>(queries + i + o);
            if (edge != nullptr) u += load<N>(edge + g.first + o);
            const Vec<T, N> zero{};
            of_key[m] += (u > zero) ? zero + d[h] : zero + d[h] * v.slope;
          }
        }
      }
      for (int m = 0; m < K; ++m) {
        hs.add(gv, s + m, acc[m]);
        hs.add(gk, s + m, of_key[m]);
      }
    });
  }

  void finish(int64_t j, const T* sums) const {
    T *gv = static_cast<T*>(a.g_value), *gk = static_cast<T*>(a.g_key);
    const T* of_key = sums + columns;
    by_registers<T>(columns, [&]<int W>(int64_t c) {
      Vec<T, W> d = load<W>(of_key + c);
      if constexpr (S == Score::mlp) d *= load<W>(v.att + c);
      // Without values of their own keys are the values.
      if (gv == nullptr) d += load<W>(sums + c);
      else store<W>(gv + j * columns + c, load<W>(sums + c));
      store<W>(gk + j * columns + c, d);
    });
  }

  void rows(const Ranges<I>& ranges, int64_t r0, int64_t r1, T* partial) const {
    const int64_t made_size = S == Score::mlp ? v.made_size() : 0;
    const Scratch scratch((width + made_size) * int64_t(sizeof(T)), &failed);
    if (scratch.data == nullptr) return;
    T *const own = static_cast<T*>(scratch.data), *const made = own + width;
    for (int64_t r = r0; r < r1; ++r) {
      if (ranges.skip(r)) continue;
      T* sums = partial == nullptr ? own : partial + r * width;
      clear(sums, width);
      const int64_t j = ranges.row(r), e1 = ranges.end[r];
      // Only rows that a map makes are kept for a while.
      const int64_t most = made_size == 0 ? kSlice : kStep;
      for (int64_t e = ranges.begin[r]; e < e1; e += most) {
        const int64_t n = e1 - e < most ? e1 - e : most;
        if constexpr (S == Score::mlp) v.make_rows(perm, e, n, made);
        step(j, e, n, made, sums, sums + columns);
      }
      if (partial == nullptr) finish(j, sums);
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

template <class T, class I, int N, bool EXACT, Score S>
static void attention_gradients(const AttentionArgs& a) {
  using ToRows = AttentionToRows<T, I, N, EXACT, S>;
  const int64_t parts = threads(), size = ToRows::slot_size(a);
  bool failed = false;
  const Scratch slots(parts * size * int64_t(sizeof(double)) + 1, &failed);
  if (failed) throw std::bad_alloc();
  double* const sums = static_cast<double*>(slots.data);
  ToRows{.a = a, .slots = sums}.run();
  for (int64_t c = 0; c < size; ++c) {
    double total = 0;
    for (int64_t p = 0; p < parts; ++p) total += sums[p * size + c];
    const int64_t of_map = c - size + ToRows::map_size(a);
    if (of_map < 0) static_cast<T*>(a.g_att)[c] = T(total);
    else static_cast<T*>(a.g_map)[of_map] = T(total);
  }
  if (a.g_key != nullptr) AttentionToCols<T, I, N, EXACT, S>{a}.run();
}

template <class T, class I>
static void attention_backward_typed(const AttentionArgs& a) {
  for_width<T, I>(a.features, [&]<int N, bool EXACT>() {
    switch (Score(a.score)) {
      case Score::sum: return AttentionOfSums<T, I, N, EXACT>{a}.run();
      case Score::mlp: return attention_gradients<T, I, N, EXACT, Score::mlp>(a);
      case Score::dot: return attention_gradients<T, I, N, EXACT, Score::dot>(a);
    }
  });
}
