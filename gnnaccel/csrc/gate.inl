// Sums of gated messages, and their gradients: see kernels/gate.py for what is computed.
// Whatever a gradient needs of an edge is computed anew from the rows at its ends. Only
// f32, f64 and int32 indices. NaN passes as it does in torch.

enum class Gate { sigmoid = 0, crystal = 1, film = 2, softmax = 3 };

template <class V>
struct Halves {
  V on, off;  // sigmoid(x) and 1 - sigmoid(x), neither of them rounded to 0 early
};

// sigmoid(x), given z = exp(-|x|).
template <class V>
static inline Halves<V> sigmoid_of(const V& x, const V& z) {
  const V zero{}, r = V(zero + 1) / (z + 1), s = z * r;
  return {(x < zero) ? s : r, (x < zero) ? r : s};
}

// log(1 + z) for z in [0, 1], by the series of artanh(z / (z + 2)).
template <class A, class V>
static inline V log1p_unit(const V& z) {
  constexpr int kTerms = sizeof(A) == 4 ? 8 : 17;
  const V t = z / (z + 2), q = t * t;
  V sum = V{} + A(1) / A(2 * kTerms - 1);
  for (int k = kTerms - 2; k >= 0; --k) sum = sum * q + A(1) / A(2 * k + 1);
  return 2 * t * sum;
}

// What one edge gives in one register of columns.
template <class A, int N, Gate G>
struct GateMath {
  using V = Vec<A, N>;
  static constexpr int kSrc = G == Gate::sigmoid || G == Gate::crystal ? 2 : 1;
  static constexpr int kDst = G == Gate::sigmoid ? 1 : G == Gate::softmax ? 0 : 2;
  static constexpr int kEdge = G == Gate::film ? 0 : kSrc;
  static constexpr int kSums = G == Gate::sigmoid ? 2 : G == Gate::softmax ? 4 : 3;
  // What the gradients read of a destination, beside the gradient of its sum.
  static constexpr int kBack = G == Gate::softmax ? 3 : kDst;

  static V decay(const V& x) {
    const V zero{};
    return exponential<N, A>((x < zero) ? x : -x);
  }

  // As torch has it, which takes softplus(x) to be x above 20.
  static V softplus(const V& x, const V& z) {
    const V zero{}, sum = ((x > zero) ? x : zero) + log1p_unit<A>(z);
    return (x > zero + 20) ? x : sum;
  }
  static V softplus_slope(const V& x, const V& z) {
    const V one = V{} + 1;
    return (x > one * 20) ? one : sigmoid_of(x, z).on;
  }

  // acc += the message, and the sums that gradients of the destination need.
  static void add(const V (&u)[2], const V (&dst)[2], const V& t, A epsilon,
                  V (&acc)[kSums]) {
    const V zero{}, one = zero + 1;
    if constexpr (G == Gate::sigmoid) {
      const V x = u[0] + dst[0];
      const Halves<V> h = sigmoid_of(x, decay(x));
      const V y = h.on * u[1];
      acc[0] += y;
      acc[1] += y * h.off;
    } else if constexpr (G == Gate::crystal) {
      const V x = u[0] + dst[0], y = u[1] + dst[1], z = decay(y);
      const Halves<V> h = sigmoid_of(x, decay(x));
      const V m = h.on * softplus(y, z);
      acc[0] += m;
      acc[1] += m * h.off;
      acc[2] += h.on * softplus_slope(y, z);
    } else if constexpr (G == Gate::film) {
      const V y = dst[1] * u[0] + dst[0];
      acc[0] += (y <= zero) ? zero : y;
      acc[1] += (y <= zero) ? zero : one;
      acc[2] += (y <= zero) ? zero : u[0];
    } else {
      // One exponential: either what came before shrinks or the newcomer is small.
      const V m = ((u[0] <= zero) ? zero : u[0]) + epsilon, z = m * t, d = z - acc[1];
      const V w = exponential<N, A>((d > zero) ? -d : d);
      const V old = (d > zero) ? w : one, now = (d > zero) ? one : w;
      acc[1] = (d > zero) ? z : acc[1];
      acc[0] = acc[0] * old + now * m;
      acc[2] = acc[2] * old + now;
      acc[3] = acc[3] * old + now * m * m;
    }
  }

  // The gradients of what stands at the source, which are those of the edge's features.
  static void slopes(const V (&u)[2], const V (&dst)[3], const V& grad, const V& t, A epsilon,
                     V (&out)[2]) {
    const V zero{};
    if constexpr (G == Gate::sigmoid) {
      const V x = u[0] + dst[0];
      const Halves<V> h = sigmoid_of(x, decay(x));
      out[1] = grad * h.on;
      out[0] = out[1] * h.off * u[1];
    } else if constexpr (G == Gate::crystal) {
      const V x = u[0] + dst[0], y = u[1] + dst[1], z = decay(y);
      const Halves<V> h = sigmoid_of(x, decay(x));
      const V g = grad * h.on;
      out[0] = g * h.off * softplus(y, z);
      out[1] = g * softplus_slope(y, z);
    } else if constexpr (G == Gate::film) {
      const V y = dst[1] * u[0] + dst[0];
      out[0] = (y <= zero) ? zero : V(grad * dst[1]);
    } else {
      const V m = ((u[0] <= zero) ? zero : u[0]) + epsilon;
      const V g = exponential<N, A>(m * t - dst[0]) * (dst[1] + dst[2] * m);
      out[0] = (u[0] <= zero) ? zero : g;
    }
  }
};

// The tensors of one call, typed.
template <class T>
struct GateView {
  const int32_t *col, *perm;
  int64_t last, depth, map_rows, features;
  const T *src[2], *dst[3], *edge, *map, *grad, *t;
  int64_t src_stride[2], dst_stride[3];
  T epsilon;

  explicit GateView(const GateArgs& a)
      : col(static_cast<const int32_t*>(a.g.col)),
        perm(static_cast<const int32_t*>(a.g.perm)),
        last(a.g.entries - 1),
        depth(a.depth),
        map_rows(a.map_rows),
        features(a.features),
        edge(static_cast<const T*>(a.edge)),
        map(static_cast<const T*>(a.map)),
        grad(static_cast<const T*>(a.grad)),
        t(static_cast<const T*>(a.t)),
        epsilon(T(a.epsilon)) {
    for (int c = 0; c < 2; ++c) {
      src[c] = static_cast<const T*>(a.src[c]);
      src_stride[c] = a.src_stride[c];
    }
    for (int c = 0; c < 3; ++c) {
      dst[c] = static_cast<const T*>(a.dst[c]);
      dst_stride[c] = a.dst_stride[c];
    }
  }

  const T* source(int c, int64_t j) const { return src[c] + j * src_stride[c]; }
  const T* target(int c, int64_t i) const { return dst[c] + i * dst_stride[c]; }

  GNNACCEL_PREFETCHES void prefetch_edge(int64_t e, int64_t terms, Block b) const {
    if (edge == nullptr) return;
    const int64_t p = at(perm, e);
    if (map != nullptr) return prefetch(edge + p * depth, depth * int64_t(sizeof(T)));
    for (int64_t c = 0; c < terms; ++c) {
      prefetch(edge + (p * terms + c) * features + b.first, b.count * int64_t(sizeof(T)));
    }
  }

  // u[c] += what edge p brings to the N columns from `first`.
  template <int TERMS, int N>
  void add_edge(int64_t p, int64_t first, Vec<T, N> (&u)[2]) const {
    if (edge == nullptr) return;
    if (map == nullptr) {
      const T* row = edge + p * TERMS * features + first;
      for (int c = 0; c < TERMS; ++c) u[c] += load<N>(row + c * features);
      return;
    }
    const T* row = map + first;
    for (int64_t d = 0; d < map_rows; ++d, row += TERMS * features) {
      const T y = edge_column(p, d);
      for (int c = 0; c < TERMS; ++c) u[c] += y * load<N>(row + c * features);
    }
  }

  // What row d of the map is multiplied by.
  T edge_column(int64_t p, int64_t d) const { return d < depth ? edge[p * depth + d] : T(1); }
};

template <class T, Gate G>
struct GateSum {
  template <int N>
  using Math = GateMath<T, N, G>;
  static constexpr int kSrc = Math<1>::kSrc, kDst = Math<1>::kDst, kEdge = Math<1>::kEdge;
  static constexpr int kSums = Math<1>::kSums;
  static constexpr int64_t kScratchRows = kSums;
  const GateArgs& a;
  const GateView<T> v{a};

  template <int K, int N>
  void entries(int64_t i, int64_t e0, int64_t e1, Block b, Vec<T, N> (&acc)[K][kSums]) const {
    Vec<T, N> dst[K][2] = {}, t[K] = {};
    for (int k = 0; k < K; ++k) {
      const int64_t first = b.first + lane_offset<K, N>(k, b.count);
      for (int c = 0; c < kDst; ++c) dst[k][c] = load<N>(v.target(c, i) + first);
      if constexpr (G == Gate::softmax) {
        t[k] = load<N>(v.t + first);
        acc[k][1] -= T(__builtin_inf());
      }
    }
    for (int64_t e = e0; e < e1; ++e) {
      const int64_t ahead = e + kAhead < v.last ? e + kAhead : v.last;
      for (int c = 0; c < kSrc; ++c) {
        prefetch(v.source(c, v.col[ahead]) + b.first, b.count * int64_t(sizeof(T)));
      }
      v.prefetch_edge(ahead, kEdge, b);
      const int64_t p = at(v.perm, e);
      for (int k = 0; k < K; ++k) {
        const int64_t first = b.first + lane_offset<K, N>(k, b.count);
        Vec<T, N> u[2] = {};
        for (int c = 0; c < kSrc; ++c) u[c] = load<N>(v.source(c, v.col[e]) + first);
        if constexpr (kEdge > 0) v.template add_edge<kEdge, N>(p, first, u);
        Math<N>::add(u, dst[k], t[k], v.epsilon, acc[k]);
      }
    }
  }

  template <int N>
  void finish(int64_t i, int64_t first, Vec<T, N> (&acc)[kSums]) const {
    if constexpr (G == Gate::softmax) {
      const Vec<T, N> zero{}, one = zero + 1;
      const auto none = acc[2] == zero;
      // An infinite logit makes its row NaN, as infinity less itself does in torch.
      const Vec<T, N> out = acc[0] / acc[2] + (acc[1] - acc[1]);
      acc[0] = none ? zero : out;
      acc[2] = none ? one : acc[2];
    }
    for (int c = 0; c < kSums; ++c) {
      if (a.out[c] == nullptr) continue;
      store<N>(static_cast<T*>(a.out[c]) + i * v.features + first, acc[c]);
    }
  }

  void rows(const Ranges<int32_t>& ranges, int64_t r0, int64_t r1, T* partial) const {
    for_blocks<T, int64_t>(0, v.features, [&]<int K, int N>(Block b) {
      for (int64_t r = r0; r < r1; ++r) {
        if (ranges.skip(r)) continue;
        if (partial == nullptr) {
          for (int c = 0; c < kSums; ++c) {
            prefetch_row(static_cast<const T*>(a.out[c]), r, r1, v.features, b);
          }
          for (int c = 0; c < kDst; ++c) prefetch_row(v.dst[c], r, r1, v.dst_stride[c], b);
        }
        Vec<T, N> acc[K][kSums] = {};
        entries<K, N>(ranges.row(r), ranges.begin[r], ranges.end[r], b, acc);
        for (int k = 0; k < K; ++k) {
          const int64_t first = b.first + lane_offset<K, N>(k, b.count);
          if (partial == nullptr) {
            finish<N>(r, first, acc[k]);
            continue;
          }
          T* out = partial + r * kSums * v.features + first;
          for (int c = 0; c < kSums; ++c) store<N>(out + c * v.features, acc[k][c]);
        }
      }
    });
  }

  void merge(int64_t i, const T* partial, int64_t slices) const {
    for (int64_t f = 0; f < v.features; ++f) {
      T acc[kSums];
      for (int c = 0; c < kSums; ++c) acc[c] = partial[c * v.features + f];
      for (int64_t s = 1; s < slices; ++s) {
        const T* next = partial + s * kSums * v.features + f;
        if constexpr (G == Gate::softmax) {
          const T top = next[v.features], d = top - acc[1];
          const T old = d > 0 ? exp_scalar(-d) : T(1), now = d > 0 ? T(1) : exp_scalar(d);
          acc[1] = d > 0 ? top : acc[1];
          for (int c = 0; c < kSums; ++c) {
            if (c != 1) acc[c] = acc[c] * old + next[c * v.features] * now;
          }
        } else {
          for (int c = 0; c < kSums; ++c) acc[c] += next[c * v.features];
        }
      }
      finish<1>(i, f, acc);
    }
  }

  void run() const {
    for (int c = 0; c < kSums; ++c) {
      if (a.out[c] == nullptr) continue;
      prefer_huge_pages(a.out[c], a.g.rows * v.features * int64_t(sizeof(T)));
    }
    reduce_rows<T, int32_t>(a.g, v.features, *this);
  }
};

// Along the edges grouped by source; the gradient of the map as in message.inl.
template <class T, Gate G>
struct GateGradients {
  template <int N>
  using Math = GateMath<T, N, G>;
  static constexpr int kSrc = Math<1>::kSrc, kBack = Math<1>::kBack, kEdge = Math<1>::kEdge;
  static constexpr int64_t kScratchRows = 1;
  static constexpr int64_t kFew = 256;
  const GateArgs& a;
  double* slots;  // [parts, map_rows, kEdge, features]
  const GateView<T> v{a};
  const int64_t mapped = v.map_rows * kEdge * v.features;
  const int64_t width = kSrc * v.features + mapped;
  mutable bool failed = false;

  template <int K, int N>
  void entries(int64_t j, int64_t e0, int64_t e1, Block b, Vec<T, N> (&acc)[K][kSrc],
               T* tile) const {
    Vec<T, N> own[K][kSrc], t[K] = {};
    for (int k = 0; k < K; ++k) {
      const int64_t first = b.first + lane_offset<K, N>(k, b.count);
      for (int c = 0; c < kSrc; ++c) own[k][c] = load<N>(v.source(c, j) + first);
      if constexpr (G == Gate::softmax) t[k] = load<N>(v.t + first);
    }
    for (int64_t e = e0; e < e1; ++e) {
      const int64_t ahead = e + kAhead < v.last ? e + kAhead : v.last;
      const int64_t bytes = b.count * int64_t(sizeof(T)), next = v.col[ahead];
      for (int c = 0; c < kBack; ++c) prefetch(v.target(c, next) + b.first, bytes);
      if constexpr (G != Gate::softmax) prefetch(v.grad + next * v.features + b.first, bytes);
      v.prefetch_edge(ahead, kEdge, b);
      const int64_t p = at(v.perm, e), i = v.col[e];
      for (int k = 0; k < K; ++k) {
        const int64_t first = b.first + lane_offset<K, N>(k, b.count);
        Vec<T, N> u[2] = {}, dst[3] = {}, grad{}, out[2] = {};
        for (int c = 0; c < kSrc; ++c) u[c] = own[k][c];
        for (int c = 0; c < kBack; ++c) dst[c] = load<N>(v.target(c, i) + first);
        if constexpr (G != Gate::softmax) grad = load<N>(v.grad + i * v.features + first);
        if constexpr (kEdge > 0) v.template add_edge<kEdge, N>(p, first, u);
        Math<N>::slopes(u, dst, grad, t[k], v.epsilon, out);
        for (int c = 0; c < kSrc; ++c) acc[k][c] += out[c];
        if constexpr (kEdge > 0) {
          if (a.g_edge != nullptr) {
            T* row = static_cast<T*>(a.g_edge) + p * kEdge * v.features + first;
            for (int c = 0; c < kEdge; ++c) store<N>(row + c * v.features, out[c]);
          }
          T* sums = tile + k * kEdge * N;
          for (int64_t d = 0; d < v.map_rows; ++d, sums += K * kEdge * N) {
            const T y = v.edge_column(p, d);
            for (int c = 0; c < kEdge; ++c) {
              store<N>(sums + c * N, load<N>(sums + c * N) + y * out[c]);
            }
          }
        }
      }
    }
  }

  // Adds a tile, [map_rows, K, kEdge, N], to the gradient of the map and clears it.
  template <int K, int N, class S>
  void flush(T* tile, Block b, S* sums) const {
    for (int64_t d = 0; d < v.map_rows; ++d) {
      for (int k = 0; k < K; ++k) {
        const int64_t o = lane_offset<K, N>(k, b.count);
        for (int c = 0; c < kEdge; ++c, tile += N) {
          S* row = sums + (d * kEdge + c) * v.features + b.first + o;
          // Columns that the last register shares with the one before it count once.
          for (int64_t n = int64_t(k) * N - o; n < N; ++n) row[n] += S(tile[n]);
          for (int n = 0; n < N; ++n) tile[n] = 0;
        }
      }
    }
  }

  // The part of the rows that begins at r0.
  double* slot_of(int64_t r0) const {
    const int32_t* ptr = static_cast<const int32_t*>(a.g.ptr);
    const int64_t parts = threads();
    int64_t p = 0;
    while (p + 1 < parts && split_row(ptr, a.g.rows, p, parts) != r0) ++p;
    return slots + p * mapped;
  }

  void rows(const Ranges<int32_t>& ranges, int64_t r0, int64_t r1, T* partial) const {
    constexpr int64_t kWidest = 4 * kLanes<T> * (kEdge > 0 ? kEdge : 1);
    const int64_t room = (v.map_rows > 0 ? v.map_rows : 1) * kWidest;
    const Scratch scratch(room * int64_t(sizeof(T)), &failed);
    if (scratch.data == nullptr) return;
    T* const tile = static_cast<T*>(scratch.data);
    for (int64_t n = 0; n < room; ++n) tile[n] = 0;
    double* const slot = v.map_rows > 0 && partial == nullptr ? slot_of(r0) : nullptr;
    for_blocks<T, int64_t>(0, v.features, [&]<int K, int N>(Block b) {
      int64_t pending = 0;
      for (int64_t r = r0; r < r1; ++r) {
        if (ranges.skip(r)) continue;
        if (partial == nullptr) {
          for (int c = 0; c < kSrc; ++c) {
            prefetch_row(static_cast<const T*>(a.out[c]), r, r1, v.features, b);
            prefetch_row(v.src[c], r, r1, v.src_stride[c], b);
          }
        }
        const int64_t j = ranges.row(r), e0 = ranges.begin[r], e1 = ranges.end[r];
        Vec<T, N> acc[K][kSrc] = {};
        entries<K, N>(j, e0, e1, b, acc, tile);
        for (int k = 0; k < K; ++k) {
          const int64_t first = b.first + lane_offset<K, N>(k, b.count);
          for (int c = 0; c < kSrc; ++c) {
            T* out = partial == nullptr ? static_cast<T*>(a.out[c]) + r * v.features
                                        : partial + r * width + c * v.features;
            store<N>(out + first, acc[k][c]);
          }
        }
        if constexpr (kEdge > 0) {
          if (v.map_rows == 0) continue;
          pending += e1 - e0;
          if (partial == nullptr) {
            if (pending < kFew) continue;
            flush<K, N>(tile, b, slot);
            pending = 0;
            continue;
          }
          T* sums = partial + r * width + kSrc * v.features;
          for (int64_t d = 0; d < v.map_rows * kEdge; ++d) {
            for (int64_t n = 0; n < b.count; ++n) sums[d * v.features + b.first + n] = 0;
          }
          flush<K, N>(tile, b, sums);
        }
      }
      if constexpr (kEdge > 0) {
        if (slot != nullptr) flush<K, N>(tile, b, slot);
      }
    });
  }

  void merge(int64_t j, T* partial, int64_t slices) const {
    for (int64_t s = 1; s < slices; ++s) {
      for (int64_t n = 0; n < width; ++n) partial[n] += partial[s * width + n];
    }
    for (int c = 0; c < kSrc; ++c) {
      T* out = static_cast<T*>(a.out[c]) + j * v.features;
      for (int64_t f = 0; f < v.features; ++f) out[f] = partial[c * v.features + f];
    }
  }

  // After all hubs, one after the other: the order does not depend on threads.
  void merged(const T* partial) const {
    for (int64_t n = 0; n < mapped; ++n) slots[n] += double(partial[kSrc * v.features + n]);
  }

  void run() const {
    const int64_t bytes = v.features * int64_t(sizeof(T));
    for (int c = 0; c < kSrc; ++c) prefer_huge_pages(a.out[c], a.g.rows * bytes);
    if (a.g_edge != nullptr) prefer_huge_pages(a.g_edge, a.g.entries * kEdge * bytes);
    reduce_rows<T, int32_t>(a.g, width, *this);
    if (failed) throw std::bad_alloc();
  }
};

template <class T, Gate G>
static void gate_typed(const GateArgs& a) {
  if (!a.backward) return GateSum<T, G>{a}.run();
  const int64_t parts = threads(), mapped = a.map_rows * GateMath<T, 1, G>::kEdge * a.features;
  bool failed = false;
  const Scratch scratch(parts * mapped * int64_t(sizeof(double)) + 1, &failed);
  if (failed) throw std::bad_alloc();
  double* const slots = static_cast<double*>(scratch.data);
  for (int64_t n = 0; n < parts * mapped; ++n) slots[n] = 0;
  GateGradients<T, G>{.a = a, .slots = slots}.run();
  for (int64_t n = 0; n < mapped; ++n) {
    double total = 0;
    for (int64_t p = 0; p < parts; ++p) total += slots[p * mapped + n];
    static_cast<T*>(a.g_map)[n] = T(total);
  }
}

template <class T>
static void gate_kind(const GateArgs& a) {
  switch (Gate(a.kind)) {
    case Gate::sigmoid: return gate_typed<T, Gate::sigmoid>(a);
    case Gate::crystal: return gate_typed<T, Gate::crystal>(a);
    case Gate::film: return gate_typed<T, Gate::film>(a);
    case Gate::softmax: return gate_typed<T, Gate::softmax>(a);
  }
}

static void gate_sum(const GateArgs& a, Dtype t) {
  if (t == Dtype::f32) gate_kind<float>(a);
  else gate_kind<double>(a);
}
