// Products of each head of a node's row with a vector, which GATConv's logits are made of.

template <class T, int N, bool EXACT>
struct HeadDots {
  // Rows whose sums are taken in T before they are added up in double.
  static constexpr int64_t kRows = 512;

  const HeadDotArgs& a;
  const Heads<T, N, EXACT> hs{a.heads, a.features};
  const int64_t heads = a.heads, columns = hs.columns();
  const T* const x = static_cast<const T*>(a.x);
  const int count = a.att[1] == nullptr ? 1 : 2;

  void forward(int64_t r0, int64_t r1) const {
    for (int m = 0; m < count; ++m) {
      const T* att = static_cast<const T*>(a.att[m]);
      hs.sums(
          r1 - r0, static_cast<T*>(a.out[m]) + r0 * heads, heads,
          [&](int64_t o) { return load<N>(att + o); },
          [&](int64_t k, int64_t o, int64_t) { return x + (r0 + k) * columns + o; },
          [](const T* row, int64_t o, const Vec<T, N>& y) -> Vec<T, N> { return load<N>(row + o) * y; });
    }
  }

  // Adds to g_x, and leaves in `sums` ([count, columns]) what the rows add to g_att.
  void backward(int64_t r0, int64_t r1, T* sums) const {
    T* const g_x = static_cast<T*>(a.g_x);
    hs.groups([&]<int K>(int64_t s) {
      const Group<K, T, N, EXACT> g(hs, s);
      Vec<T, N> att[2][K], acc[2][K] = {};
      for (int m = 0; m < count; ++m) {
        for (int k = 0; k < K; ++k) {
          att[m][k] = load<N>(static_cast<const T*>(a.att[m]) + g.first + g.offset_of(k));
        }
      }
      for (int64_t r = r0; r < r1; ++r) {
        for (int k = 0; k < K; ++k) {
          const Vec<T, N> row = load<N>(x + r * columns + g.first + g.offset_of(k));
          const int64_t o = r * heads + g.head + g.head_of(k);
          const T d = static_cast<const T*>(a.grad[0])[o];
          Vec<T, N> more = d * att[0][k];
          acc[0][k] += d * row;
          if (count > 1) {
            const T other = static_cast<const T*>(a.grad[1])[o];
            more += other * att[1][k];
            acc[1][k] += other * row;
          }
          hs.add(g_x + r * columns, s + k, more);
        }
      }
      for (int m = 0; m < count; ++m) {
        for (int k = 0; k < K; ++k) hs.add(sums + m * columns, s + k, acc[m][k]);
      }
    });
  }

  void run() const {
    // No rows have no address, but a gradient.
    const bool forward_only = a.g_att[0] == nullptr;
    const int64_t parts = a.rows * columns < kSerialWork ? 1 : threads(), size = count * columns;
    bool failed = false;
    const Scratch scratch(parts * size * int64_t(sizeof(double) + sizeof(T)), &failed);
    if (failed) throw std::bad_alloc();
    double* const totals = static_cast<double*>(scratch.data);
    for_each(parts, [&](int64_t p) {
      const int64_t end = a.rows * (p + 1) / parts;
      int64_t r = a.rows * p / parts;
      if (forward_only) return forward(r, end);
      T* const sums = reinterpret_cast<T*>(totals + parts * size) + p * size;
      for (; r < end; r += kRows) {
        clear(sums, size);
        backward(r, r + kRows < end ? r + kRows : end, sums);
        for (int64_t c = 0; c < size; ++c) totals[p * size + c] += double(sums[c]);
      }
    });
    if (forward_only) return;
    for (int64_t c = 0; c < size; ++c) {
      double total = 0;
      for (int64_t p = 0; p < parts; ++p) total += totals[p * size + c];
      static_cast<T*>(a.g_att[c / columns])[c % columns] = T(total);
    }
  }
};

template <class T>
static void head_dots_typed(const HeadDotArgs& a) {
  if (a.heads * a.features == 0) return;
  for_width<T, int32_t>(a.features, [&]<int N, bool EXACT>() {
    HeadDots<T, N, EXACT>{a}.run();
  });
}
