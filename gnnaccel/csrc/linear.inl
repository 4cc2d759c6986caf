// Sums of neighbour rows times a matrix, a tile of rows at a time: the sums are multiplied
// while they are in the cache, and written only if they are wanted, too.

// Floats of a tile of sums; rows of one, a multiple of what one step multiplies.
constexpr int64_t kTileFloats = 3072, kStepRows = 4, kMostRows = 48;
// Widths are whole multiples of this, which is whole registers on every CPU.
constexpr int64_t kLinearWidth = 16;

// Registers of one row of a step: 16 accumulators where there are 32 registers.
constexpr int kStepColumns = kLanes<float> >= 16 ? 4 : 2;

using Lanes = Vec<float, kLanes<float>>;

// c[m, :] += a[m, :depth] b, for M rows of `a` and R registers of columns of b.
template <int M, int R>
static inline void add_product(const float* a, int64_t a_stride, const float* b,
                               int64_t b_stride, int64_t depth, Lanes (&c)[M][R]) {
  constexpr int L = kLanes<float>;
  for (int64_t d = 0; d < depth; ++d, b += b_stride) {
    Lanes row[R];
    for (int r = 0; r < R; ++r) row[r] = load<L>(b + r * L);
    for (int m = 0; m < M; ++m) {
      const float s = a[m * a_stride + d];
      for (int r = 0; r < R; ++r) c[m][r] += s * row[r];
    }
  }
}

// Calls f.template operator()<R>(first) for blocks of R registers that cover the columns.
template <class F>
static inline void for_registers(int64_t columns, F&& f) {
  constexpr int L = kLanes<float>, R = kStepColumns;
  int64_t n = 0;
  for (; n + R * L <= columns; n += R * L) f.template operator()<R>(n);
  for (; n < columns; n += L) f.template operator()<1>(n);
}

// g[d, :] += sum over `rows` of a[row, d] y[row, :].
static inline void add_outer(const float* a, int64_t a_stride, const float* y,
                             int64_t y_stride, int64_t rows, int64_t depth, int64_t columns,
                             float* g) {
  constexpr int L = kLanes<float>, M = kStepRows;
  for_registers(columns, [&]<int R>(int64_t n) {
    for (int64_t d = 0; d < depth; d += M) {
      float* const to = g + d * columns + n;
      Lanes c[M][R];
      for (int m = 0; m < M; ++m) {
        for (int r = 0; r < R; ++r) c[m][r] = load<L>(to + m * columns + r * L);
      }
      const float *s = a + d, *row = y + n;
      for (int64_t i = 0; i < rows; ++i, s += a_stride, row += y_stride) {
        Lanes v[R];
        for (int r = 0; r < R; ++r) v[r] = load<L>(row + r * L);
        for (int m = 0; m < M; ++m) {
          for (int r = 0; r < R; ++r) c[m][r] += s[m] * v[r];
        }
      }
      for (int m = 0; m < M; ++m) {
        for (int r = 0; r < R; ++r) store<L>(to + m * columns + r * L, c[m][r]);
      }
    }
  });
}

template <Factor FACTOR>
struct SumLinear {
  const LinearArgs& a;
  const Sum<float, int32_t, FACTOR> sum{a.sum};
  const SumView<float, int32_t> view = sum.view(0);
  const int64_t depth = a.sum.features, columns = a.columns;
  const int64_t gradient = depth * columns;  // floats of one matrix's gradient

  const float* own_row(int64_t i) const { return view.x + i * view.x_stride; }

  // The sums of rows [r0, r1), below one another.
  void sums(int64_t r0, int64_t r1, float* out) const {
    constexpr int L = kLanes<float>;
    int64_t first = 0;
    const auto block = [&]<int K>() {
      for (; first + K * L <= depth; first += K * L) {
        const Block b{first, K * L};
        for (int64_t r = r0; r < r1; ++r) {
          Lanes acc[K] = {};
          sum_entries<FACTOR, K, L>(view, view.ptr[r], view.ptr[r + 1], b, acc);
          sum.template scale<K, L>(r, b, acc);
          float* const to = out + (r - r0) * depth + first;
          for (int k = 0; k < K; ++k) store<L>(to + k * L, acc[k]);
          if (a.sum.out == nullptr) continue;
          float* const kept = static_cast<float*>(a.sum.out) + r * depth + first;
          for (int k = 0; k < K; ++k) store<L>(kept + k * L, acc[k]);
        }
      }
    };
    block.template operator()<8>();
    block.template operator()<4>();
    block.template operator()<1>();
  }

  // M rows of the result from their sums.
  template <int M>
  void multiply(int64_t i, const float* from) const {
    constexpr int L = kLanes<float>;
    for_registers(columns, [&]<int R>(int64_t n) {
      float* const to = a.out + i * columns + n;
      Lanes c[M][R];
      for (int m = 0; m < M; ++m) {
        for (int r = 0; r < R; ++r) {
          c[m][r] = a.adds              ? load<L>(to + m * columns + r * L)
                    : a.bias == nullptr ? Lanes{}
                                        : load<L>(a.bias + n + r * L);
        }
      }
      add_product<M, R>(from, depth, a.map + n, columns, depth, c);
      if (a.root != nullptr) {
        add_product<M, R>(own_row(i), view.x_stride, a.root + n, columns, depth, c);
      }
      for (int m = 0; m < M; ++m) {
        for (int r = 0; r < R; ++r) store<L>(to + m * columns + r * L, c[m][r]);
      }
    });
  }

  // Rows [r0, r1); what they add to the gradients goes to g_map and g_root.
  void rows(int64_t r0, int64_t r1, float* g_map, float* g_root) const {
    alignas(64) float tile[kTileFloats];
    int64_t step = kTileFloats / depth / kStepRows * kStepRows;
    if (step > kMostRows) step = kMostRows;
    for (int64_t i = r0; i < r1; i += step) {
      const int64_t end = i + step < r1 ? i + step : r1;
      sums(i, end, tile);
      for (int64_t r = i; r < end; ++r) {
        if (a.y != nullptr) prefetch(a.y + r * a.y_stride, columns * int64_t(sizeof(float)));
        if (a.root != nullptr) prefetch(own_row(r), depth * int64_t(sizeof(float)));
        if (a.adds) prefetch(a.out + r * columns, columns * int64_t(sizeof(float)));
      }
      if (a.out != nullptr) {
        int64_t r = i;
        for (; r + kStepRows <= end; r += kStepRows) {
          multiply<kStepRows>(r, tile + (r - i) * depth);
        }
        for (; r < end; ++r) multiply<1>(r, tile + (r - i) * depth);
      }
      const float* const y = a.y + i * a.y_stride;
      if (g_map != nullptr) {
        add_outer(tile, depth, y, a.y_stride, end - i, depth, columns, g_map);
      }
      if (g_root != nullptr) {
        add_outer(own_row(i), view.x_stride, y, a.y_stride, end - i, depth, columns, g_root);
      }
    }
  }

  void run() const {
    if (a.out != nullptr) {
      prefer_huge_pages(a.out, a.sum.g.rows * columns * int64_t(sizeof(float)));
    }
    if (a.sum.out != nullptr) {
      prefer_huge_pages(a.sum.out, a.sum.g.rows * depth * int64_t(sizeof(float)));
    }
    const int64_t work = (a.sum.g.entries + a.sum.g.rows * columns) * depth;
    const int64_t parts = work < kSerialWork ? 1 : threads();
    // Each part adds up gradients of its own, which are then added in order.
    const int64_t matrices = (a.g_map != nullptr) + (a.g_root != nullptr);
    float* const partial = static_cast<float*>(
        std::calloc(size_t(parts * matrices * gradient + 1), sizeof(float)));
    if (partial == nullptr) throw std::bad_alloc();
    struct Context {
      const SumLinear& op;
      float* partial;
      int64_t parts, matrices;
    } context{*this, partial, parts, matrices};
    parallel(
        parts,
        [](int64_t begin, int64_t end, void* c) {
          const Context& x = *static_cast<Context*>(c);
          const LinearArgs& a = x.op.a;
          const int32_t* ptr = x.op.view.ptr;
          float* own = x.partial + begin * x.matrices * x.op.gradient;
          float* const g_map = a.g_map == nullptr ? nullptr : own;
          if (g_map != nullptr) own += x.op.gradient;
          x.op.rows(split_row(ptr, a.sum.g.rows, begin, x.parts),
                    split_row(ptr, a.sum.g.rows, end, x.parts), g_map,
                    a.g_root == nullptr ? nullptr : own);
        },
        &context);
    const float* from = partial;
    float* const wanted[] = {a.g_map, a.g_root};
    for (float* to : wanted) {
      if (to == nullptr) continue;
      for (int64_t k = 0; k < gradient; ++k) {
        to[k] = 0;
        for (int64_t p = 0; p < parts; ++p) to[k] += from[p * matrices * gradient + k];
      }
      from += gradient;
    }
    std::free(partial);
  }
};

static void spmm_linear(const LinearArgs& a) {
  const SumArgs& s = a.sum;
  if (s.w == nullptr && s.src_scale == nullptr) return SumLinear<Factor::none>{a}.run();
  if (s.w == nullptr) return SumLinear<Factor::source>{a}.run();
  if (s.src_scale == nullptr && s.g.perm == nullptr) {
    return SumLinear<Factor::weight_in_order>{a}.run();
  }
  SumLinear<Factor::any>{a}.run();
}
