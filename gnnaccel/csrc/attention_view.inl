// What attention and its gradients share: the tensors, and the rows of edges.

enum class Score { sum = 0, mlp = 1, dot = 2 };

// Entries that are worked on at once: their rows stay in the nearest cache meanwhile.
constexpr int64_t kStep = 64;

// The tensors of one attention, typed.
template <class T, class I>
struct AttentionView {
  const I *col, *perm;
  int64_t last;  // the last entry, the furthest that may be prefetched
  const T *query, *key, *value, *att, *edge, *map, *bias, *keep;
  int64_t depth, heads, columns;
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
        map(static_cast<const T*>(a.map)),
        bias(static_cast<const T*>(a.bias)),
        keep(static_cast<const T*>(a.keep)),
        depth(a.depth),
        heads(a.heads),
        columns(a.heads * a.features),
        slope(T(a.slope)),
        scale(T(a.scale)) {}

  // Fetches, from column o on, what the entry a few ahead of e reads at its far end.
  template <Score S>
  void prefetch_far(int64_t e, int64_t o, int64_t bytes) const {
    const int64_t j = col[e + kAhead < last ? e + kAhead : last];
    prefetch(value + j * columns + o, bytes);
    if constexpr (S == Score::sum) __builtin_prefetch(key + j * heads, 0, 3);
    else if (key != value) prefetch(key + j * columns + o, bytes);
  }

  // Room for the rows of a step's edges, where a map makes them.
  int64_t made_size() const { return map == nullptr ? 0 : kStep * columns; }

  // The row of the edge of entry e, number k of its step; null: there are none.
  const T* edge_row(const I* order, int64_t e, int64_t k, const T* made) const {
    if (edge == nullptr) return nullptr;
    return map == nullptr ? edge + at(order, e) * columns : made + k * columns;
  }

  // made[k] = edge[order[e0 + k]] map
  void make_rows(const I* order, int64_t e0, int64_t n, T* made) const {
    if (map == nullptr) return;
    for (int64_t k = 0; k < n; ++k) {
      const int64_t ahead = e0 + k + kAhead < last ? e0 + k + kAhead : last;
      prefetch(edge + at(order, ahead) * depth, depth * int64_t(sizeof(T)));
      weighted_rows(depth, edge + at(order, e0 + k) * depth, 1, map, columns, made + k * columns);
    }
  }

  // y = sum over d of w[d * w_stride] * rows[d], rows of c columns.
  static void weighted_rows(int64_t n, const T* w, int64_t w_stride, const T* rows, int64_t c,
                            T* y) {
    constexpr int L = kLanes<T>;
    int64_t o = 0;
    for (; o + 2 * L <= c; o += 2 * L) {
      Vec<T, L> even{}, odd{};
      for (int64_t d = 0; d < n; ++d) {
        const T f = w[d * w_stride];
        even += f * load<L>(rows + d * c + o);
        odd += f * load<L>(rows + d * c + o + L);
      }
      store<L>(y + o, even);
      store<L>(y + o + L, odd);
    }
    for (; o < c; ++o) {
      T s = 0;
      for (int64_t d = 0; d < n; ++d) s += w[d * w_stride] * rows[d * c + o];
      y[o] = s;
    }
  }

  // Given the gradients of the rows that make_rows made: those of the edges' features,
  // and, in g_map, that of the map from this step.
  void unmake_rows(const I* order, int64_t e0, int64_t n, const T* grads, T* features, T* g_edge,
                   T* g_map) const {
    for (int64_t k = 0; k < n; ++k) {
      const int64_t p = at(order, e0 + k) * depth;
      for (int64_t d = 0; d < depth; ++d) {
        features[k * depth + d] = edge[p + d];
        if (g_edge != nullptr) g_edge[p + d] = dot(grads + k * columns, map + d * columns, columns);
      }
    }
    for (int64_t d = 0; d < depth; ++d) {
      weighted_rows(n, features + d, depth, grads, columns, g_map + d * columns);
    }
  }
};

// Calls f.template operator()<T, I>() for a dtype and an index type.
template <class F>
static void for_index(bool wide, Dtype t, F&& f) {
  if (t == Dtype::f64) {
    if (wide) f.template operator()<double, int64_t>();
    else f.template operator()<double, int32_t>();
  } else {
    if (wide) f.template operator()<float, int64_t>();
    else f.template operator()<float, int32_t>();
  }
}
