// Fixed-width vectors by the compiler's vector extensions. Included inside the
// namespace of one instruction set, after GNNACCEL_BYTES (its register width) is set.

template <class A, int N>
struct VecOf {
  typedef A type __attribute__((vector_size(N * sizeof(A))));
};
template <class A>
struct VecOf<A, 1> {
  typedef A type;
};
template <class A, int N>
using Vec = typename VecOf<A, N>::type;

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class T>
struct Acc {
  typedef float type;
};
template <>
struct Acc<double> {
  typedef double type;
};
template <class T>
using acc_t = typename Acc<T>::type;

// Lanes of a full register of accumulators.
template <class T>
constexpr int kLanes = GNNACCEL_BYTES / int(sizeof(acc_t<T>));

template <class A>
constexpr A kLowest = A(sizeof(A) == 4 ? -__FLT_MAX__ : -__DBL_MAX__);

static inline float from_bits(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
static inline uint32_t to_bits(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  return u;
}

static inline float widen(float v) { return v; }
static inline double widen(double v) { return v; }
static inline float widen(bf16 v) { return from_bits(uint32_t(v.bits) << 16); }
static inline float widen(f16 v) {
  // IEEE half to float by rebuilding the exponent; subnormals by a float subtraction.
  const uint32_t sign = uint32_t(v.bits & 0x8000u) << 16;
  const uint32_t rest = v.bits & 0x7fffu;
  uint32_t u;
  if (rest >= 0x7c00u) {
    u = 0x7f800000u | ((rest & 0x3ffu) << 13);
  } else if (rest >= 0x400u) {
    u = (rest << 13) + 0x38000000u;
  } else {
    u = to_bits(float(rest) * from_bits(0x33800000u));  // rest * 2^-24
  }
  return from_bits(u | sign);
}

static inline void narrow(float v, float* p) { *p = v; }
static inline void narrow(double v, double* p) { *p = v; }
static inline void narrow(float v, bf16* p) {
  const uint32_t u = to_bits(v);
  // Round to nearest even; a NaN keeps its sign and becomes quiet.
  p->bits = v != v ? uint16_t((u >> 16) | 0x40u)
                   : uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
static inline void narrow(float v, f16* p) {
  const uint32_t u = to_bits(v);
  const uint16_t sign = uint16_t((u >> 16) & 0x8000u);
  const uint32_t a = u & 0x7fffffffu;
  uint16_t h;
  if (a > 0x7f800000u) {
    h = 0x7e00u;
  } else if (a >= 0x477ff000u) {  // rounds to 65536 or more
    h = 0x7c00u;
  } else if (a >= 0x38800000u) {  // normal half
    const uint32_t r = a + 0xfffu + ((a >> 13) & 1u);
    h = uint16_t((r - 0x38000000u) >> 13);
  } else {  // subnormal half: let a float addition round to multiples of 2^-24
    h = uint16_t(to_bits(from_bits(a) + 0.5f) - to_bits(0.5f));
  }
  p->bits = uint16_t(h | sign);
}

template <int N, class T>
static inline Vec<acc_t<T>, N> load(const T* p) {
  if constexpr (N == 1) {
    return widen(*p);
  } else if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
    Vec<T, N> v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  } else if constexpr (std::is_same_v<T, bf16>) {
    Vec<uint16_t, N> h;
    __builtin_memcpy(&h, p, sizeof h);
    const Vec<uint32_t, N> u = __builtin_convertvector(h, Vec<uint32_t, N>) << 16;
    Vec<float, N> v;
    __builtin_memcpy(&v, &u, sizeof v);
    return v;
  } else {
#if defined(__AVX512F__)
    if constexpr (N == 16) {
      // The masked form: GCC 12 warns about its own header for the plain one.
      const __m512 m =
          _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p));
      Vec<float, N> v;
      __builtin_memcpy(&v, &m, sizeof v);
      return v;
    }
#endif
#if defined(__F16C__)
    if constexpr (N == 8) {
      const __m256 m = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
      Vec<float, N> v;
      __builtin_memcpy(&v, &m, sizeof v);
      return v;
    }
#endif
    Vec<float, N> v;
    for (int n = 0; n < N; ++n) v[n] = widen(p[n]);
    return v;
  }
}

template <int N, class T>
static inline void store(T* p, const Vec<acc_t<T>, N>& v) {
  if constexpr (N == 1) {
    narrow(v, p);
  } else if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
    __builtin_memcpy(p, &v, sizeof v);
  } else {
    for (int n = 0; n < N; ++n) narrow(v[n], p + n);
  }
}

// As store, past the caches where the processor can: a result that is larger than they
// are leaves them before anyone reads it, and would first be fetched only to be
// overwritten. To be followed by store_fence before another thread reads.
template <int N, class T>
static inline void store_past(T* p, const Vec<acc_t<T>, N>& v) {
#if defined(__AVX2__)
  if constexpr (sizeof v == GNNACCEL_BYTES && std::is_same_v<T, acc_t<T>>) {
    if (reinterpret_cast<uintptr_t>(p) % GNNACCEL_BYTES == 0) {
#if defined(__AVX512F__)
      __m512i bits;
      __builtin_memcpy(&bits, &v, sizeof v);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(p), bits);
#else
      __m256i bits;
      __builtin_memcpy(&bits, &v, sizeof v);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bits);
#endif
      return;
    }
  }
#endif
  store<N>(p, v);
}

static inline void store_fence() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// Sums the lanes by halves.
template <int N, class A>
static inline A horizontal_sum(const Vec<A, N>& v) {
  if constexpr (N == 1) {
    return v;
  } else {
    Vec<A, N / 2> half[2];
    __builtin_memcpy(half, &v, sizeof v);
    return horizontal_sum<N / 2, A>(half[0] + half[1]);
  }
}

// Lanes of two vectors, numbered through.
#if defined(__clang__) || __GNUC__ >= 12
#define GNNACCEL_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define GNNACCEL_PICK(a, b, ...)                                                              \
  __builtin_shuffle(a, b,                                                                     \
                    Vec<std::conditional_t<sizeof(a[0]) == 4, int32_t, int64_t>,              \
                        int(sizeof(a) / sizeof(a[0]))>{__VA_ARGS__})
#endif

// v with blocks of STEP lanes swapped in pairs.
template <int STEP, int N, class A, int... LANE>
static inline Vec<A, N> swapped_lanes(const Vec<A, N>& v, std::integer_sequence<int, LANE...>) {
  return GNNACCEL_PICK(v, v, (LANE ^ STEP)...);
}
template <int STEP, int N, class A>
static inline Vec<A, N> swapped(const Vec<A, N>& v) {
  return swapped_lanes<STEP, N, A>(v, std::make_integer_sequence<int, N>{});
}

// The sums of the lanes of four vectors at once: a third of the work of one by one.
template <int N, class A>
static inline Vec<A, 4> horizontal_sums(const Vec<A, N>& a, const Vec<A, N>& b,
                                        const Vec<A, N>& c, const Vec<A, N>& d) {
  if constexpr (N == 4) {
    const Vec<A, 4> ab = GNNACCEL_PICK(a, b, 0, 1, 4, 5) + GNNACCEL_PICK(a, b, 2, 3, 6, 7);
    const Vec<A, 4> cd = GNNACCEL_PICK(c, d, 0, 1, 4, 5) + GNNACCEL_PICK(c, d, 2, 3, 6, 7);
    return GNNACCEL_PICK(ab, cd, 0, 2, 4, 6) + GNNACCEL_PICK(ab, cd, 1, 3, 5, 7);
  } else if constexpr (N == 16) {
    // Halves side by side, then quarters, then within quarters.
    using W = Vec<A, N>;
    const W ab = W(GNNACCEL_PICK(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)) +
                 W(GNNACCEL_PICK(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
    const W cd = W(GNNACCEL_PICK(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)) +
                 W(GNNACCEL_PICK(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
    W all = W(GNNACCEL_PICK(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)) +
            W(GNNACCEL_PICK(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
    all += swapped<2, N, A>(all);
    all += swapped<1, N, A>(all);
    const W sums = W(GNNACCEL_PICK(all, all, 0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
    Vec<A, 4> first;
    __builtin_memcpy(&first, &sums, sizeof first);
    return first;
  } else {
    Vec<A, N / 2> half[4][2];
    __builtin_memcpy(half[0], &a, sizeof a);
    __builtin_memcpy(half[1], &b, sizeof a);
    __builtin_memcpy(half[2], &c, sizeof a);
    __builtin_memcpy(half[3], &d, sizeof a);
    return horizontal_sums<N / 2, A>(half[0][0] + half[0][1], half[1][0] + half[1][1],
                                     half[2][0] + half[2][1], half[3][0] + half[3][1]);
  }
}

// v as it reads back after being stored as T.
template <class T, int N>
static inline Vec<acc_t<T>, N> rounded(const Vec<acc_t<T>, N>& v) {
  if constexpr (sizeof(T) != 2) {
    return v;
  } else {
    T stored[N];
    store<N>(stored, v);
    return load<N>(stored);
  }
}

// exp(x) for x <= 0, after Cephes' expf: x = n ln 2 + r, a polynomial for e^r and the
// exponent bits for 2^n. Below the smallest normal float the result is 0. About 1 ulp.
template <int N>
static inline Vec<float, N> exp_nonpositive(const Vec<float, N>& x) {
  const Vec<float, N> zero{}, magic = zero + 12582912.0f;  // 1.5 * 2^23 rounds to integers
  const Vec<float, N> n = (x * 1.44269504088896341f + magic) - magic;
  const Vec<float, N> r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec<float, N> p = zero + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Vec<int32_t, N> bits = (__builtin_convertvector(n, Vec<int32_t, N>) + 127) << 23;
  Vec<float, N> scale;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return (x < -87.0f) ? zero : p * scale;
}

// The same in double: e^r by its series, of which the first term left out is 4e-18.
template <int N>
static inline Vec<double, N> exp_nonpositive(const Vec<double, N>& x) {
  const Vec<double, N> zero{}, magic = zero + 6755399441055744.0;  // 1.5 * 2^52
  const Vec<double, N> shifted = x * 1.44269504088896341 + magic, n = shifted - magic;
  const Vec<double, N> r = (x - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
  Vec<double, N> p = zero + 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r * r + r + 1.0;
  // The last bits of `shifted` are those of n.
  Vec<int64_t, N> bits;
  __builtin_memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52;
  Vec<double, N> scale;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return (x < -708.0) ? zero : p * scale;
}

static inline float exp_scalar(float x) { return __builtin_expf(x); }
static inline double exp_scalar(double x) { return __builtin_exp(x); }

// exp(v) for v <= 0.
template <int N, class A>
static inline Vec<A, N> exponential(const Vec<A, N>& v) {
  if constexpr (N > 1) return exp_nonpositive<N>(v);
  else return exp_scalar(v);
}

// The dot product of n numbers.
template <class T>
static inline acc_t<T> dot(const T* p, const T* q, int64_t n) {
  using A = acc_t<T>;
  constexpr int L = kLanes<T>;
  Vec<A, L> even{}, odd{};
  int64_t k = 0;
  for (; k + 2 * L <= n; k += 2 * L) {
    even += load<L>(p + k) * load<L>(q + k);
    odd += load<L>(p + k + L) * load<L>(q + k + L);
  }
  if (k + L <= n) {
    even += load<L>(p + k) * load<L>(q + k);
    k += L;
  }
  A s = horizontal_sum<L, A>(even + odd);
  for (; k < n; ++k) s += widen(p[k]) * widen(q[k]);
  return s;
}
