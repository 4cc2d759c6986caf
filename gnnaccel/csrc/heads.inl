// Rows of H heads with C columns each, cut into registers that lie within one head.

// A head takes `each` registers of N lanes; the last overlaps its neighbour instead of
// running into the next head, so that N <= C is all that is asked.
template <class T, int N>
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

  int64_t columns() const { return heads * features; }
  int64_t registers() const { return heads * each; }
  int64_t head(int64_t s) const { return s / each; }
  int64_t offset(int64_t s) const { return offset(s / each, s % each); }
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

  // Calls f.template operator()<K>(s) for groups of registers s .. s + K that cover a row.
  template <class F>
  void groups(F&& f) const {
    int64_t s = 0;
    for (; s + 4 <= registers(); s += 4) f.template operator()<4>(s);
    for (; s + 2 <= registers(); s += 2) f.template operator()<2>(s);
    for (; s < registers(); ++s) f.template operator()<1>(s);
  }
};

// Where the K registers from s on begin, and the heads they belong to.
template <int K, class T, int N>
struct Group {
  int64_t offset[K], head[K];
  Group(const Heads<T, N>& hs, int64_t s) {
    for (int k = 0; k < K; ++k) {
      offset[k] = hs.offset(s + k);
      head[k] = hs.head(s + k);
    }
  }
};

template <int N, class A>
static inline Vec<A, N> leaky(const Vec<A, N>& u, A slope) {
  const Vec<A, N> zero{}, low = u * slope;
  return (u > zero) ? u : low;
}

// v times the derivative of leaky at u.
template <int N, class A>
static inline Vec<A, N> leaky_slope(const Vec<A, N>& u, const Vec<A, N>& v, A slope) {
  const Vec<A, N> zero{}, low = v * slope;
  return (u > zero) ? v : low;
}

// Scratch of one call, freed at its end; null if there is no memory, which is noted.
struct Scratch {
  void* data;
  Scratch(int64_t bytes, bool* failed) : data(std::malloc(size_t(bytes))) {
    if (data == nullptr) __atomic_store_n(failed, true, __ATOMIC_RELAXED);
  }
  ~Scratch() { std::free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

// Calls f.template operator()<N>() with the register width for heads of c columns.
template <class T, class I, class F>
static inline void for_width(int64_t c, F&& f) {
  constexpr int L = kLanes<T>;
  if (c >= L) return f.template operator()<L>();
  if constexpr (std::is_same_v<T, float> && sizeof(I) == 4) {
    if constexpr (L > 8) {
      if (c >= 8) return f.template operator()<8>();
    }
    if constexpr (L > 4) {
      if (c >= 4) return f.template operator()<4>();
    }
  }
  f.template operator()<1>();
}
