// Rows of H heads with C columns each, cut into registers that lie within one head, and
// the numbers that an entry has for each head.

// Calls f.template operator()<N>(c) for registers, then single numbers, of n.
template <class T, class F>
static inline void by_registers(int64_t n, F&& f) {
  constexpr int L = kLanes<T>;
  int64_t c = 0;
  for (; c + L <= n; c += L) f.template operator()<L>(c);
  for (; c < n; ++c) f.template operator()<1>(c);
}

template <class T>
static inline void clear(T* to, int64_t n) {
  by_registers<T>(n, [&]<int W>(int64_t c) { store<W>(to + c, Vec<T, W>{}); });
}

// A head takes `each` registers of N lanes; the last overlaps its neighbour instead of
// running into the next head, so that N <= C is all that is asked. EXACT: N == C, one
// register per head, which the compiler may count on.
template <class T, int N, bool EXACT>
struct Heads {
  int64_t heads, features, each;
  Vec<T, N> fresh;  // 1 in the lanes of a head's last register that no other has, else 0

  Heads(int64_t h, int64_t c) : heads(h), features(c), each((c + N - 1) / N), fresh{} {
    if constexpr (N == 1) {
      fresh = 1;
    } else {
      for (int n = 0; n < N; ++n) fresh[n] = n >= each * N - c ? T(1) : T(0);
    }
  }

  int64_t columns() const { return EXACT ? heads * N : heads * features; }
  int64_t registers() const { return EXACT ? heads : heads * each; }
  int64_t head(int64_t s) const { return EXACT ? s : s / each; }
  int64_t offset(int64_t s) const { return EXACT ? s * N : offset(s / each, s % each); }
  int64_t offset(int64_t h, int64_t r) const {
    return h * features + (r + 1 < each ? r * N : features - N);
  }

  // The columns of head h, term(offset) being registers, added up to one register.
  template <class F>
  Vec<T, N> fold(int64_t h, F&& term) const {
    Vec<T, N> total{};
    const int64_t whole = features / N, end = h * features + whole * N;
    for (int64_t o = h * features; o < end; o += N) total += term(o);
    if (whole < each) {
      const Vec<T, N> last = term(offset(h, whole)), zero{};
      total += (fresh > zero) ? last : zero;
    }
    return total;
  }

  // sums[h] = the sum of term(offset) over the columns of head h, for all heads.
  template <class F>
  void sum(T* sums, F&& term) const {
    int64_t h = 0;
    if constexpr (N >= 4) {
      for (; h + 4 <= heads; h += 4) {
        store<4>(sums + h, horizontal_sums<N, T>(fold(h, term), fold(h + 1, term),
                                                 fold(h + 2, term), fold(h + 3, term)));
      }
    }
    for (; h < heads; ++h) sums[h] = horizontal_sum<N, T>(fold(h, term));
  }

  // The same for entries [0, n): sums[k * stride + h] out of term(row(k, o, bytes), offset
  // from o, fixed(offset)). What is `fixed` stays in registers where it can. `row` may fetch
  // `bytes` from column o on for entries ahead.
  template <class Fixed, class Row, class F>
  void sums(int64_t n, T* sums, int64_t stride, Fixed&& fixed, Row&& row, F&& term) const {
    if constexpr (EXACT) {
      int64_t h = 0;
      for (; h + 4 <= heads; h += 4) exact_sums<4>(h, n, sums, stride, fixed, row, term);
      for (; h < heads; ++h) exact_sums<1>(h, n, sums, stride, fixed, row, term);
    } else {
      for (int64_t k = 0; k < n; ++k) {
        const auto r = row(k, int64_t{0}, columns() * int64_t(sizeof(T)));
        sum(sums + k * stride, [&](int64_t o) { return term(r, o, fixed(o)); });
      }
    }
  }

  template <int K, class Fixed, class Row, class F>
  void exact_sums(int64_t h, int64_t n, T* sums, int64_t stride, Fixed&& fixed, Row&& row,
                  F&& term) const {
    decltype(fixed(int64_t{})) f[K];
    for (int m = 0; m < K; ++m) f[m] = fixed((h + m) * N);
    for (int64_t k = 0; k < n; ++k) {
      const auto r = row(k, h * N, K * N * int64_t(sizeof(T)));
      Vec<T, N> t[K];
      for (int m = 0; m < K; ++m) t[m] = term(r, int64_t(m * N), f[m]);
      if constexpr (K == 4) {
        store<4>(sums + k * stride + h, horizontal_sums<N, T>(t[0], t[1], t[2], t[3]));
      } else {
        for (int m = 0; m < K; ++m) sums[k * stride + h + m] = horizontal_sum<N, T>(t[m]);
      }
    }
  }

  // Calls f.template operator()<K>(s) for groups of registers s .. s + K that cover a row.
  template <class F>
  void groups(F&& f) const {
    int64_t s = 0;
    // Fewer forms where they are seldom met: see for_blocks.
    if constexpr (std::is_same_v<T, float>) {
      for (; s + 4 <= registers(); s += 4) f.template operator()<4>(s);
    }
    if constexpr (!EXACT) {
      for (; s + 2 <= registers(); s += 2) f.template operator()<2>(s);
    }
    for (; s < registers(); ++s) f.template operator()<1>(s);
  }

  // Adds register s to a row, once where it overlaps its neighbour.
  void add(T* y, int64_t s, const Vec<T, N>& v) const {
    const int64_t o = offset(s);
    const Vec<T, N> zero{};
    const bool last = !EXACT && s % each + 1 == each;
    store<N>(y + o, load<N>(y + o) + (last ? ((fresh > zero) ? v : zero) : v));
  }

  // y[c] *= factors[head of c]
  void scale(T* y, const T* factors) const {
    if constexpr (EXACT) {
      for (int64_t h = 0; h < heads; ++h) store<N>(y + h * N, load<N>(y + h * N) * factors[h]);
      return;
    }
    for (int64_t h = 0; h < heads; ++h, y += features) {
      const T f = factors[h];
      by_registers<T>(features, [&]<int W>(int64_t c) { store<W>(y + c, load<W>(y + c) * f); });
    }
  }
};

// K registers from register s on: where they begin in a row, after `first`, and which
// heads they belong to, after `head`.
template <int K, class T, int N, bool EXACT>
struct Group {
  static constexpr int64_t kBytes = K * N * int64_t(sizeof(T));
  int64_t first, head, offsets[K], heads[K];
  Group(const Heads<T, N, EXACT>& hs, int64_t s) : first(hs.offset(s)), head(hs.head(s)) {
    for (int k = 0; k < K; ++k) {
      offsets[k] = hs.offset(s + k) - first;
      heads[k] = hs.head(s + k) - head;
    }
  }
  // Constants where registers are heads: fewer addresses to keep.
  int64_t offset_of(int k) const { return EXACT ? k * N : offsets[k]; }
  int64_t head_of(int k) const { return EXACT ? k : heads[k]; }
};

// One number per entry and head, entry after entry: `stride` of them per entry, so many
// that whole registers hold whole entries, or whole entries whole registers. Of `period`
// numbers, each lane belongs to one head.
template <class T>
struct Lanes {
  static constexpr int L = kLanes<T>, W = L < 4 ? L : 4;
  int64_t heads, stride, period;

  explicit Lanes(int64_t h) : heads(h), stride(1) {
    while (stride < h && stride < L) stride *= 2;
    if (stride < h) stride = (h + L - 1) / L * L;
    period = stride < L ? L : stride;
  }

  // Numbers of n entries, in whole periods.
  int64_t size(int64_t n) const { return (n * stride + period - 1) / period * period; }

  static void copy(T* to, const T* from, int64_t n) {
    int64_t k = 0;
    for (; k + L <= n; k += L) store<L>(to + k, load<L>(from + k));
    for (; k < n; ++k) to[k] = from[k];
  }

  // to[h] = from[h]
  void copy(T* to, const T* from) const {
    int64_t h = 0;
    for (; h + W <= heads; h += W) store<W>(to + h, load<W>(from + h));
    for (; h < heads; ++h) to[h] = from[h];
  }
  void add(T* to, const T* from) const {
    int64_t h = 0;
    for (; h + W <= heads; h += W) store<W>(to + h, load<W>(to + h) + load<W>(from + h));
    for (; h < heads; ++h) to[h] += from[h];
  }
  void multiply(T* to, const T* from) const {
    int64_t h = 0;
    for (; h + W <= heads; h += W) store<W>(to + h, load<W>(to + h) * load<W>(from + h));
    for (; h < heads; ++h) to[h] *= from[h];
  }

  // One period of from[h], again and again.
  void repeat(T* to, const T* from) const {
    copy(to, from);
    for (int64_t h = heads; h < stride; ++h) to[h] = 0;
    for (int64_t k = stride; k < period; ++k) to[k] = to[k - stride];
  }

  // Entries as they lie in a tensor [entries, heads], from and to.
  void load_entries(T* to, const T* from, int64_t n) const {
    if (stride == heads) return copy(to, from, n * heads);
    for (int64_t k = 0; k < n; ++k) copy(to + k * stride, from + k * heads);
  }
  void store_entries(T* to, const T* from, int64_t n) const {
    if (stride == heads) return copy(to, from, n * heads);
    for (int64_t k = 0; k < n; ++k) copy(to + k * heads, from + k * stride);
  }
  // to[k, h] *= from[h], which is repeated over one period.
  void scale_entries(T* to, const T* from, int64_t n) const {
    int64_t k = 0;
    if (stride == heads) {
      for (; k + period <= n * heads; k += period) {
        for (int64_t r = 0; r < period; r += L) {
          store<L>(to + k + r, load<L>(to + k + r) * load<L>(from + r));
        }
      }
      for (int64_t r = 0; k < n * heads; ++k, ++r) to[k] *= from[r];
    } else {
      for (; k < n; ++k) multiply(to + k * heads, from);
    }
  }

  // The lanes of v that belong to one head combined, in each of them.
  template <class F, int STEP = L / 2>
  Vec<T, L> combined(Vec<T, L> v, F&& f) const {
    if constexpr (STEP == 0) {
      return v;
    } else {
      if (STEP >= stride) v = f(v, swapped<STEP, L, T>(v));
      return combined<F, STEP / 2>(v, static_cast<F&&>(f));
    }
  }
};

template <int N, class A>
static inline Vec<A, N> leaky(const Vec<A, N>& u, A slope) {
  const Vec<A, N> zero{}, low = u * slope;
  return (u > zero) ? u : low;
}

// Calls f.template operator()<N, EXACT>() with the register width for heads of c columns.
template <class T, class I, class F>
static inline void for_width(int64_t c, F&& f) {
  constexpr int L = kLanes<T>;
  constexpr bool kAll = std::is_same_v<T, float> && sizeof(I) == 4;
  if constexpr (kAll) {
    if (c == L) return f.template operator()<L, true>();
  }
  if (c >= L) return f.template operator()<L, false>();
  if constexpr (kAll) {
    if constexpr (L > 8) {
      if (c == 8) return f.template operator()<8, true>();
    }
    if constexpr (L > 4) {
      if (c >= 4) return f.template operator()<4, false>();
    }
  }
  f.template operator()<1, false>();
}
