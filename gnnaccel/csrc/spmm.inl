// Sum of (weighted) neighbour rows: the product of a sparse and a dense matrix.

template <class T, class I>
struct SumView {
  const I *ptr, *col, *perm;
  int64_t last;  // index of the last entry, the furthest that may be prefetched
  const T* x;
  int64_t x_stride;
  const T* w;  // first head's weights
  int64_t w_stride;
  const acc_t<T>* src_scale;
};

// What scales an entry's row, known to the compiler where it is common.
enum class Factor { none, weight_in_order, source, any };

// Adds entries [e0, e1) to the register tile acc.
template <Factor FACTOR, int K, int N, class T, class I>
static inline void sum_entries(const SumView<T, I>& v, int64_t e0, int64_t e1, Block b,
                               Vec<acc_t<T>, N> (&acc)[K]) {
  using A = acc_t<T>;
  for (int64_t e = e0; e < e1; ++e) {
    const int64_t ahead = e + kAhead < v.last ? e + kAhead : v.last;
    prefetch(v.x + at(v.col, ahead) * v.x_stride + b.first, b.count * int64_t(sizeof(T)));
    const int64_t j = at(v.col, e);
    const T* row = v.x + j * v.x_stride + b.first;
    if constexpr (FACTOR == Factor::none) {
      for (int k = 0; k < K; ++k) acc[k] += load<N>(row + lane_offset<K, N>(k, b.count));
      continue;
    }
    A c = 1;
    if constexpr (FACTOR == Factor::weight_in_order) {
      c = widen(v.w[e]);
    } else if constexpr (FACTOR == Factor::source) {
      c = v.src_scale[j];
    } else {
      if (v.w != nullptr) {
        if (v.perm != nullptr) __builtin_prefetch(v.w + v.perm[ahead] * v.w_stride, 0, 3);
        c = widen(v.w[at(v.perm, e) * v.w_stride]);
      }
      if (v.src_scale != nullptr) c *= v.src_scale[j];
    }
    for (int k = 0; k < K; ++k) acc[k] += c * load<N>(row + lane_offset<K, N>(k, b.count));
  }
}

template <class T, class I, Factor FACTOR>
struct Sum {
  using A = acc_t<T>;
  const SumArgs& a;
  const int64_t columns = a.heads * a.features;
  const bool past = a.base != a.out && a.g.rows * columns * int64_t(sizeof(T)) > kCached;

  SumView<T, I> view(int64_t head) const {
    const T* w = static_cast<const T*>(a.w);
    return {static_cast<const I*>(a.g.ptr),
            static_cast<const I*>(a.g.col),
            static_cast<const I*>(a.g.perm),
            a.g.entries - 1,
            static_cast<const T*>(a.x),
            a.x_stride,
            w == nullptr || a.w_stride == 1 ? w : w + head,
            a.w_stride,
            static_cast<const A*>(a.src_scale)};
  }

  // Scales one tile of a finished row, and adds the row's own terms.
  template <int K, int N>
  void scale(int64_t i, Block b, Vec<A, N> (&acc)[K]) const {
    if (a.dst_scale != nullptr) {
      const A s = static_cast<const A*>(a.dst_scale)[i];
      for (int k = 0; k < K; ++k) acc[k] *= s;
    }
    if (a.self != nullptr) {
      const A s = static_cast<const A*>(a.self)[i * a.self_stride];
      const T* row = static_cast<const T*>(a.x) + i * a.x_stride + b.first;
      for (int k = 0; k < K; ++k) acc[k] += s * load<N>(row + lane_offset<K, N>(k, b.count));
    }
    if (a.base != nullptr) {
      const A s = A(a.base_scale);
      const T* row = static_cast<const T*>(a.base) + i * columns + b.first;
      for (int k = 0; k < K; ++k) acc[k] += s * load<N>(row + lane_offset<K, N>(k, b.count));
    }
  }

  // Scales and stores one tile of a finished row.
  template <int K, int N>
  void finish(int64_t i, Block b, Vec<A, N> (&acc)[K]) const {
    scale<K, N>(i, b, acc);
    T* out = static_cast<T*>(a.out) + i * columns + b.first;
    for (int k = 0; k < K; ++k) {
      T* to = out + lane_offset<K, N>(k, b.count);
      if (past) store_past<N>(to, acc[k]);
      else store<N>(to, acc[k]);
    }
  }

  static constexpr int64_t kScratchRows = 1;

  void rows(const Ranges<I>& ranges, int64_t r0, int64_t r1, A* partial) const {
    // Heads that share their weights are one wide row; else each is a column range.
    const bool apart = a.w != nullptr && a.heads > 1 && a.w_stride != 1;
    const int64_t heads = apart ? a.heads : 1, width = apart ? a.features : columns;
    for (int64_t h = 0; h < heads; ++h) {
      const SumView<T, I> v = view(h);
      for_blocks<T, I>(h * width, width, [&]<int K, int N>(Block b) {
        for (int64_t r = r0; r < r1; ++r) {
          if (ranges.skip(r)) continue;
          if (partial == nullptr) {
            if (!past) prefetch_row(static_cast<const T*>(a.out), r, r1, columns, b);
            if (a.self != nullptr) prefetch_row(static_cast<const T*>(a.x), r, r1, a.x_stride, b);
            if (a.base != a.out) prefetch_row(static_cast<const T*>(a.base), r, r1, columns, b);
          }
          Vec<A, N> acc[K] = {};
          sum_entries<FACTOR, K, N>(v, ranges.begin[r], ranges.end[r], b, acc);
          if (partial == nullptr) {
            finish<K, N>(r, b, acc);
          } else {
            A* out = partial + r * columns + b.first;
            for (int k = 0; k < K; ++k) store<N>(out + lane_offset<K, N>(k, b.count), acc[k]);
          }
        }
      });
    }
    if (past) store_fence();
  }

  void merge(int64_t i, const A* partial, int64_t slices) const {
    for (int64_t f = 0; f < columns; ++f) {
      A acc[1] = {};
      for (int64_t s = 0; s < slices; ++s) acc[0] += partial[s * columns + f];
      finish<1, 1>(i, Block{f, 1}, acc);
    }
  }

  void run() const {
    prefer_huge_pages(a.out, a.g.rows * columns * int64_t(sizeof(T)));
    reduce_rows<T, I>(a.g, columns, *this);
  }
};

template <class T, class I>
static void sum_indexed(const SumArgs& a) {
  if (a.w == nullptr && a.src_scale == nullptr) return Sum<T, I, Factor::none>{a}.run();
  // Only the common case is worth a copy of the code: see for_blocks.
  if constexpr (std::is_same_v<T, float> && sizeof(I) == 4) {
    if (a.w == nullptr) return Sum<T, I, Factor::source>{a}.run();
    if (a.src_scale == nullptr && a.g.perm == nullptr && a.w_stride == 1) {
      return Sum<T, I, Factor::weight_in_order>{a}.run();
    }
  }
  Sum<T, I, Factor::any>{a}.run();
}

template <class T>
static void sum_typed(const SumArgs& a) {
  if (a.g.wide) sum_indexed<T, int64_t>(a);
  else sum_indexed<T, int32_t>(a);
}

static void spmm_sum(const SumArgs& a, Dtype t) {
  switch (t) {
    case Dtype::f32: return sum_typed<float>(a);
    case Dtype::f64: return sum_typed<double>(a);
    case Dtype::bf16: return sum_typed<bf16>(a);
    case Dtype::f16: return sum_typed<f16>(a);
  }
}
