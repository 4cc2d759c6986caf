// Sums of messages that a neighbour's row and the features of the edge make together, and
// their gradients. A NaN passes through the ReLU both ways, as it does in torch.

enum class Message { sum_relu = 0, product = 1, active = 2 };

// The tensors of one call, typed.
template <class T, class I>
struct MessageView {
  const I *col, *perm;
  int64_t last;  // the last entry, the furthest that may be prefetched
  const T *x, *edge, *map, *w, *x_dst, *grad;
  int64_t x_stride, depth, map_rows, features;

  explicit MessageView(const MessageArgs& a)
      : col(static_cast<const I*>(a.g.col)),
        perm(static_cast<const I*>(a.g.perm)),
        last(a.g.entries - 1),
        x(static_cast<const T*>(a.x)),
        edge(static_cast<const T*>(a.edge)),
        map(static_cast<const T*>(a.map)),
        w(static_cast<const T*>(a.w)),
        x_dst(static_cast<const T*>(a.x_dst)),
        grad(static_cast<const T*>(a.grad)),
        x_stride(a.x_stride),
        depth(a.depth),
        map_rows(a.map_rows),
        features(a.features) {}

  acc_t<T> weight(int64_t p) const { return w == nullptr ? acc_t<T>(1) : widen(w[p]); }

  // y = the block of the destination's row, or 0.
  template <int K, int N>
  void load_dst(int64_t i, Block b, Vec<acc_t<T>, N> (&y)[K]) const {
    if (x_dst == nullptr) return;
    const T* row = x_dst + i * features + b.first;
    for (int k = 0; k < K; ++k) y[k] = load<N>(row + lane_offset<K, N>(k, b.count));
  }

  // Fetches what the entry `ahead` reads of the edges' features.
  template <bool MAPPED>
  GNNACCEL_PREFETCHES void prefetch_edge(int64_t ahead, Block b) const {
    const int64_t p = at(perm, ahead);
    if constexpr (MAPPED) prefetch(edge + p * depth, depth * int64_t(sizeof(T)));
    else if (edge != nullptr) prefetch(edge + p * features + b.first, b.count * int64_t(sizeof(T)));
  }

  // y += what edge p brings to the block.
  template <bool MAPPED, int K, int N>
  void add_edge(int64_t p, Block b, Vec<acc_t<T>, N> (&y)[K]) const {
    if constexpr (MAPPED) {
      const T* row = map + b.first;
      for (int64_t d = 0; d < depth; ++d, row += features) {
        const acc_t<T> c = widen(edge[p * depth + d]);
        for (int k = 0; k < K; ++k) y[k] += c * load<N>(row + lane_offset<K, N>(k, b.count));
      }
      if (map_rows == depth) return;
      for (int k = 0; k < K; ++k) y[k] += load<N>(row + lane_offset<K, N>(k, b.count));
    } else if (edge != nullptr) {
      const T* row = edge + p * features + b.first;
      for (int k = 0; k < K; ++k) y[k] += load<N>(row + lane_offset<K, N>(k, b.count));
    }
  }
};

template <class T, class I, Message M, bool MAPPED>
struct MessageSum {
  using A = acc_t<T>;
  const MessageArgs& a;
  const MessageView<T, I> v{a};

  static constexpr int64_t kScratchRows = 1;

  // The entries [e0, e1) of destination i.
  template <int K, int N>
  void entries(int64_t i, int64_t e0, int64_t e1, Block b, Vec<A, N> (&acc)[K]) const {
    const Vec<A, N> zero{}, one = zero + A(1);
    const bool counts = Message(a.kind) == Message::active;
    Vec<A, N> dst[K] = {};
    if constexpr (M == Message::sum_relu) v.template load_dst<K, N>(i, b, dst);
    for (int64_t e = e0; e < e1; ++e) {
      const int64_t ahead = e + kAhead < v.last ? e + kAhead : v.last;
      prefetch(v.x + at(v.col, ahead) * v.x_stride + b.first, b.count * int64_t(sizeof(T)));
      v.template prefetch_edge<MAPPED>(ahead, b);
      const int64_t p = at(v.perm, e);
      const T* row = v.x + at(v.col, e) * v.x_stride + b.first;
      const A c = v.weight(p);
      Vec<A, N> u[K] = {};
      if constexpr (M == Message::sum_relu) {
        for (int k = 0; k < K; ++k) u[k] = dst[k] + load<N>(row + lane_offset<K, N>(k, b.count));
      }
      v.template add_edge<MAPPED, K, N>(p, b, u);
      for (int k = 0; k < K; ++k) {
        if constexpr (M == Message::sum_relu) {
          acc[k] += c * ((u[k] <= zero) ? zero : counts ? one : u[k]);
        } else {
          acc[k] += c * u[k] * load<N>(row + lane_offset<K, N>(k, b.count));
        }
      }
    }
  }

  template <int K, int N>
  void finish(int64_t i, Block b, Vec<A, N> (&acc)[K]) const {
    if (a.own != 0) {
      const T* row = v.x + i * v.x_stride + b.first;
      for (int k = 0; k < K; ++k) {
        acc[k] += A(a.own) * load<N>(row + lane_offset<K, N>(k, b.count));
      }
    }
    T* out = static_cast<T*>(a.out) + i * v.features + b.first;
    for (int k = 0; k < K; ++k) store<N>(out + lane_offset<K, N>(k, b.count), acc[k]);
  }

  void rows(const Ranges<I>& ranges, int64_t r0, int64_t r1, A* partial) const {
    for_blocks<T, I>(0, v.features, [&]<int K, int N>(Block b) {
      for (int64_t r = r0; r < r1; ++r) {
        if (ranges.skip(r)) continue;
        if (partial == nullptr) {
          prefetch_row(static_cast<const T*>(a.out), r, r1, v.features, b);
          if (a.own != 0) prefetch_row(v.x, r, r1, v.x_stride, b);
        }
        Vec<A, N> acc[K] = {};
        entries<K, N>(ranges.row(r), ranges.begin[r], ranges.end[r], b, acc);
        if (partial == nullptr) {
          finish<K, N>(r, b, acc);
          continue;
        }
        A* out = partial + r * v.features + b.first;
        for (int k = 0; k < K; ++k) store<N>(out + lane_offset<K, N>(k, b.count), acc[k]);
      }
    });
  }

  void merge(int64_t i, const A* partial, int64_t slices) const {
    for (int64_t f = 0; f < v.features; ++f) {
      A acc[1] = {};
      for (int64_t s = 0; s < slices; ++s) acc[0] += partial[s * v.features + f];
      finish<1, 1>(i, Block{f, 1}, acc);
    }
  }

  void run() const {
    prefer_huge_pages(a.out, a.g.rows * v.features * int64_t(sizeof(T)));
    reduce_rows<T, I>(a.g, v.features, *this);
  }
};

// Along the edges grouped by source: the gradient of x is summed row by row, that of the
// edges' features written edge by edge, and with a map its gradient summed over all.
template <class T, class I, Message M, bool MAPPED>
struct MessageGradients {
  using A = acc_t<T>;
  const MessageArgs& a;
  double* slots;  // [parts, map_rows, features]: gradient of the map, by part of the rows
  const MessageView<T, I> v{a};
  const int64_t mapped = MAPPED ? v.map_rows * v.features : 0, width = v.features + mapped;
  mutable bool failed = false;

  static constexpr int64_t kScratchRows = 1;
  // Entries of which the gradient of the map is summed in the features' own precision.
  static constexpr int64_t kFew = 256;

  // The entries [e0, e1) of the source whose row of x is `home`. `tile`, [map_rows, K, N],
  // takes the gradient of the map.
  template <int K, int N>
  void entries(const T* home, int64_t e0, int64_t e1, Block b, Vec<A, N> (&acc)[K],
               A* tile) const {
    const Vec<A, N> zero{};
    Vec<A, N> own[K];
    for (int k = 0; k < K; ++k) own[k] = load<N>(home + b.first + lane_offset<K, N>(k, b.count));
    for (int64_t e = e0; e < e1; ++e) {
      const int64_t ahead = e + kAhead < v.last ? e + kAhead : v.last;
      prefetch(v.grad + at(v.col, ahead) * v.features + b.first, b.count * int64_t(sizeof(T)));
      v.template prefetch_edge<MAPPED>(ahead, b);
      if (v.x_dst != nullptr) {
        prefetch(v.x_dst + at(v.col, ahead) * v.features + b.first, b.count * int64_t(sizeof(T)));
      }
      const int64_t p = at(v.perm, e);
      const T* grad = v.grad + at(v.col, e) * v.features + b.first;
      const A c = v.weight(p);
      Vec<A, N> u[K] = {}, g[K];
      if constexpr (M == Message::sum_relu) {
        v.template load_dst<K, N>(at(v.col, e), b, u);
        for (int k = 0; k < K; ++k) u[k] += own[k];
      }
      v.template add_edge<MAPPED, K, N>(p, b, u);
      for (int k = 0; k < K; ++k) {
        g[k] = c * load<N>(grad + lane_offset<K, N>(k, b.count));
        if constexpr (M == Message::sum_relu) {
          g[k] = (u[k] <= zero) ? zero : g[k];
          acc[k] += g[k];
        } else {
          acc[k] += g[k] * u[k];
          g[k] *= own[k];
        }
      }
      if constexpr (MAPPED) {
        A* sums = tile;
        for (int64_t d = 0; d < v.depth; ++d, sums += K * N) {
          const A y = widen(v.edge[p * v.depth + d]);
          for (int k = 0; k < K; ++k) store<N>(sums + k * N, load<N>(sums + k * N) + y * g[k]);
        }
        if (v.map_rows != v.depth) {
          for (int k = 0; k < K; ++k) store<N>(sums + k * N, load<N>(sums + k * N) + g[k]);
        }
      } else if (a.g_edge != nullptr) {
        T* out = static_cast<T*>(a.g_edge) + p * v.features + b.first;
        for (int k = 0; k < K; ++k) store<N>(out + lane_offset<K, N>(k, b.count), g[k]);
      }
    }
  }

  // Adds a tile to the gradient of the map and clears it. Columns that the last register
  // shares with the one before it count once.
  template <int K, int N, class S>
  void flush(A* tile, Block b, S* sums) const {
    for (int64_t d = 0; d < v.map_rows; ++d) {
      for (int k = 0; k < K; ++k) {
        const int64_t o = lane_offset<K, N>(k, b.count);
        for (int64_t n = int64_t(k) * N - o; n < N; ++n) {
          A& value = tile[(d * K + k) * N + n];
          sums[d * v.features + b.first + o + n] += S(value);
        }
      }
    }
    clear(tile, v.map_rows * K * N);
  }

  static void clear(A* sums, int64_t n) {
    for (int64_t c = 0; c < n; ++c) sums[c] = 0;
  }

  // The part of the rows that begins at r0.
  double* slot_of(int64_t r0) const {
    const I* ptr = static_cast<const I*>(a.g.ptr);
    const int64_t parts = threads();
    int64_t p = 0;
    while (p + 1 < parts && split_row(ptr, a.g.rows, p, parts) != r0) ++p;
    return slots + p * mapped;
  }

  void rows(const Ranges<I>& ranges, int64_t r0, int64_t r1, A* partial) const {
    constexpr int64_t kWidest = 8 * kLanes<T>;
    const Scratch scratch(MAPPED ? v.map_rows * kWidest * int64_t(sizeof(A)) : 1, &failed);
    if (scratch.data == nullptr) return;
    A* const tile = static_cast<A*>(scratch.data);
    double* const slot = MAPPED && partial == nullptr ? slot_of(r0) : nullptr;
    for_blocks<T, I>(0, v.features, [&]<int K, int N>(Block b) {
      if constexpr (MAPPED) clear(tile, v.map_rows * K * N);
      int64_t pending = 0;
      for (int64_t r = r0; r < r1; ++r) {
        if (ranges.skip(r)) continue;
        if (partial == nullptr) {
          prefetch_row(static_cast<const T*>(a.out), r, r1, v.features, b);
          prefetch_row(v.x, r, r1, v.x_stride, b);
        }
        const int64_t j = ranges.row(r), e0 = ranges.begin[r], e1 = ranges.end[r];
        Vec<A, N> acc[K] = {};
        entries<K, N>(v.x + j * v.x_stride, e0, e1, b, acc, tile);
        if (partial == nullptr) {
          finish<K, N>(j, b, acc);
          pending += e1 - e0;
          if (MAPPED && pending >= kFew) {
            flush<K, N>(tile, b, slot);
            pending = 0;
          }
          continue;
        }
        A* out = partial + r * width + b.first;
        for (int k = 0; k < K; ++k) store<N>(out + lane_offset<K, N>(k, b.count), acc[k]);
        if constexpr (MAPPED) {
          A* sums = partial + r * width + v.features;
          for (int64_t d = 0; d < v.map_rows; ++d) {
            clear(sums + d * v.features + b.first, b.count);
          }
          flush<K, N>(tile, b, sums);
        }
      }
      if (MAPPED && pending > 0) flush<K, N>(tile, b, slot);
    });
  }

  template <int K, int N>
  void finish(int64_t j, Block b, Vec<A, N> (&acc)[K]) const {
    if (a.own != 0) {
      const T* row = v.grad + j * v.features + b.first;
      for (int k = 0; k < K; ++k) {
        acc[k] += A(a.own) * load<N>(row + lane_offset<K, N>(k, b.count));
      }
    }
    T* out = static_cast<T*>(a.out) + j * v.features + b.first;
    for (int k = 0; k < K; ++k) store<N>(out + lane_offset<K, N>(k, b.count), acc[k]);
  }

  void merge(int64_t j, A* partial, int64_t slices) const {
    for (int64_t s = 1; s < slices; ++s) {
      for (int64_t c = 0; c < width; ++c) partial[c] += partial[s * width + c];
    }
    for (int64_t f = 0; f < v.features; ++f) {
      A acc[1] = {partial[f]};
      finish<1, 1>(j, Block{f, 1}, acc);
    }
  }

  // After all hubs, one after the other: the order does not depend on threads.
  void merged(const A* partial) const {
    for (int64_t c = 0; c < mapped; ++c) slots[c] += double(partial[v.features + c]);
  }

  void run() const {
    prefer_huge_pages(a.out, a.g.rows * v.features * int64_t(sizeof(T)));
    if (a.g_edge != nullptr) {
      prefer_huge_pages(a.g_edge, a.g.entries * v.features * int64_t(sizeof(T)));
    }
    reduce_rows<T, I>(a.g, width, *this);
    if (failed) throw std::bad_alloc();
  }
};

template <class T, class I, Message M, bool MAPPED>
static void message_any(const MessageArgs& a) {
  if (a.grad == nullptr) return MessageSum<T, I, M, MAPPED>{a}.run();
  if constexpr (!MAPPED) {
    MessageGradients<T, I, M, MAPPED>{.a = a, .slots = nullptr}.run();
  } else {
    const int64_t parts = threads(), mapped = a.map_rows * a.features;
    bool failed = false;
    const Scratch scratch(parts * mapped * int64_t(sizeof(double)) + 1, &failed);
    if (failed) throw std::bad_alloc();
    double* const slots = static_cast<double*>(scratch.data);
    for (int64_t c = 0; c < parts * mapped; ++c) slots[c] = 0;
    MessageGradients<T, I, M, MAPPED>{.a = a, .slots = slots}.run();
    for (int64_t c = 0; c < mapped; ++c) {
      double total = 0;
      for (int64_t p = 0; p < parts; ++p) total += slots[p * mapped + c];
      narrow(acc_t<T>(total), static_cast<T*>(a.g_map) + c);
    }
  }
}

template <class T, class I>
static void message_indexed(const MessageArgs& a) {
  if (Message(a.kind) == Message::product) return message_any<T, I, Message::product, false>(a);
  // Half types come without a map: the caller applies it.
  if constexpr (sizeof(T) > 2) {
    if (a.map != nullptr) return message_any<T, I, Message::sum_relu, true>(a);
  }
  message_any<T, I, Message::sum_relu, false>(a);
}

template <class T>
static void message_typed(const MessageArgs& a) {
  if (a.g.wide) message_indexed<T, int64_t>(a);
  else message_indexed<T, int32_t>(a);
}

static void message_sum(const MessageArgs& a, Dtype t) {
  switch (t) {
    case Dtype::f32: return message_typed<float>(a);
    case Dtype::f64: return message_typed<double>(a);
    case Dtype::bf16: return message_typed<bf16>(a);
    case Dtype::f16: return message_typed<f16>(a);
  }
}

// The messages themselves, entry by entry: a hub is no more work than its entries.
template <class T, class I, bool MAPPED>
struct MessageRows {
  using A = acc_t<T>;
  const MessageRowsArgs& a;
  const MessageView<T, I> v{a.message};
  const I* const ptr = static_cast<const I*>(a.message.g.ptr);
  const int64_t bytes = a.message.g.entries * v.features * int64_t(sizeof(T));
  const bool past = bytes > kCached;

  // The row of entry e.
  int64_t row_of(int64_t e) const {
    int64_t lo = 0, hi = a.message.g.rows;
    while (hi - lo > 1) {
      const int64_t mid = (lo + hi) / 2;
      if (int64_t(ptr[mid]) <= e) lo = mid;
      else hi = mid;
    }
    return lo;
  }

  void entries(int64_t e0, int64_t e1) const {
    const int64_t first = row_of(e0);
    for_blocks<T, I>(0, v.features, [&]<int K, int N>(Block b) {
      const Vec<A, N> zero{};
      int64_t i = first;
      for (int64_t e = e0; e < e1; ++e) {
        while (int64_t(ptr[i + 1]) <= e) ++i;
        const int64_t ahead = e + kAhead < v.last ? e + kAhead : v.last;
        prefetch(v.x + at(v.col, ahead) * v.x_stride + b.first, b.count * int64_t(sizeof(T)));
        v.template prefetch_edge<MAPPED>(ahead, b);
        const int64_t p = at(v.perm, e);
        const T* row = v.x + at(v.col, e) * v.x_stride + b.first;
        Vec<A, N> u[K] = {};
        v.template load_dst<K, N>(i, b, u);
        for (int k = 0; k < K; ++k) u[k] += load<N>(row + lane_offset<K, N>(k, b.count));
        v.template add_edge<MAPPED, K, N>(p, b, u);
        if (a.relu) {
          for (int k = 0; k < K; ++k) u[k] = (u[k] <= zero) ? zero : u[k];
        }
        T* const out = static_cast<T*>(a.message.out) + p * v.features + b.first;
        for (int k = 0; k < K; ++k) {
          T* to = out + lane_offset<K, N>(k, b.count);
          if (past) store_past<N>(to, u[k]);
          else store<N>(to, u[k]);
        }
      }
    });
    if (past) store_fence();
  }

  void run() const {
    prefer_huge_pages(a.message.out, bytes);
    const int64_t count = a.message.g.entries;
    const int64_t parts = count * (v.features + 4) < kSerialWork ? 1 : threads();
    for_each(parts, [&](int64_t p) {
      const int64_t e0 = count * p / parts, e1 = count * (p + 1) / parts;
      if (e0 < e1) entries(e0, e1);
    });
  }
};

template <class T, class I>
static void message_rows_indexed(const MessageRowsArgs& a) {
  if (a.message.map != nullptr) MessageRows<T, I, true>{a}.run();
  else MessageRows<T, I, false>{a}.run();
}

static void message_rows(const MessageRowsArgs& a, Dtype t) {
  const bool wide = a.message.g.wide;
  if (t == Dtype::f32) {
    if (wide) message_rows_indexed<float, int64_t>(a);
    else message_rows_indexed<float, int32_t>(a);
  } else if (t == Dtype::f64) {
    if (wide) message_rows_indexed<double, int64_t>(a);
    else message_rows_indexed<double, int32_t>(a);
  }
}
