// Softmax over the entries of each row, and its gradient.

// Replaces v[0, n) by exp(v - max(v)) and returns their sum.
template <class A>
static inline A exponentials(A* v, int64_t n) {
  A top = v[0];
  for (int64_t k = 1; k < n; ++k) top = v[k] > top ? v[k] : top;
  A sum = 0;
  int64_t k = 0;
  if constexpr (std::is_same_v<A, float>) {
    constexpr int L = kLanes<float>;
    Vec<float, L> sums{};
    for (; k + L <= n; k += L) {
      const Vec<float, L> y = exp_nonpositive<L>(load<L>(v + k) - top);
      store<L>(v + k, y);
      sums += y;
    }
    sum = horizontal_sum<L, float>(sums);
  }
  for (; k < n; ++k) sum += v[k] = exp_scalar(v[k] - top);
  return sum;
}

// Heads from which a row's entries are read as they lie, a register of heads at a time.
constexpr int64_t kWideHeads = 4;

// One row's softmax for the heads of a block: entries e0 to e1.
template <int K, int N, class T, class I>
static inline void softmax_block(const SoftmaxArgs& a, const I* perm, int64_t e0, int64_t e1,
                                 Block b) {
  using V = Vec<T, N>;
  const T* z = static_cast<const T*>(a.z) + b.first;
  T* out = static_cast<T*>(a.out) + b.first;
  V top[K], sum[K];
  for (int k = 0; k < K; ++k) {
    top[k] = load<N>(z + at(perm, e0) * a.heads + lane_offset<K, N>(k, b.count));
    sum[k] = V{};
  }
  for (int64_t e = e0 + 1; e < e1; ++e) {
    const T* row = z + at(perm, e) * a.heads;
    for (int k = 0; k < K; ++k) {
      const V v = load<N>(row + lane_offset<K, N>(k, b.count));
      top[k] = v > top[k] ? v : top[k];
    }
  }
  for (int64_t e = e0; e < e1; ++e) {
    const int64_t o = at(perm, e) * a.heads;
    for (int k = 0; k < K; ++k) {
      const int64_t c = o + lane_offset<K, N>(k, b.count);
      const V y = exponential<N, T>(load<N>(z + c) - top[k]);
      store<N>(out + c, y);
      sum[k] += y;
    }
  }
  // Registers may overlap, so each column is divided once, by what is the last to hold it.
  for (int k = 0; k < K; ++k) sum[k] += T(a.epsilon);
  for (int64_t e = e0; e < e1; ++e) {
    T* row = out + at(perm, e) * a.heads;
    V y[K];
    for (int k = 0; k < K; ++k) y[k] = load<N>(row + lane_offset<K, N>(k, b.count));
    for (int k = 0; k < K; ++k) store<N>(row + lane_offset<K, N>(k, b.count), y[k] / sum[k]);
  }
}

template <int K, int N, class T, class I>
static inline void softmax_backward_block(const SoftmaxArgs& a, const I* perm, int64_t e0,
                                          int64_t e1, Block b) {
  using V = Vec<T, N>;
  const T *s = static_cast<const T*>(a.z) + b.first,
          *grad = static_cast<const T*>(a.grad) + b.first;
  T* out = static_cast<T*>(a.out) + b.first;
  V sum[K];
  for (int k = 0; k < K; ++k) sum[k] = V{};
  for (int64_t e = e0; e < e1; ++e) {
    const int64_t o = at(perm, e) * a.heads;
    for (int k = 0; k < K; ++k) {
      const int64_t c = o + lane_offset<K, N>(k, b.count);
      sum[k] += load<N>(s + c) * load<N>(grad + c);
    }
  }
  for (int64_t e = e0; e < e1; ++e) {
    const int64_t o = at(perm, e) * a.heads;
    for (int k = 0; k < K; ++k) {
      const int64_t c = o + lane_offset<K, N>(k, b.count);
      store<N>(out + c, load<N>(s + c) * (load<N>(grad + c) - sum[k]));
    }
  }
}

template <class T, class I>
static void softmax_wide(const SoftmaxArgs& a) {
  const I *ptr = static_cast<const I*>(a.g.ptr), *perm = static_cast<const I*>(a.g.perm);
  for_rows<I>(a.g, 16 * a.heads, [&](int64_t r0, int64_t r1) {
    for (int64_t i = r0; i < r1; ++i) {
      const int64_t e0 = ptr[i], e1 = ptr[i + 1];
      if (e0 == e1) continue;
      for_blocks<T, I>(0, a.heads, [&]<int K, int N>(Block b) {
        if (a.grad == nullptr) softmax_block<K, N, T>(a, perm, e0, e1, b);
        else softmax_backward_block<K, N, T>(a, perm, e0, e1, b);
      });
    }
  });
}

template <class T, class I>
static void softmax_rows(const SoftmaxArgs& a) {
  // Half types are not kept between the passes over a row: that would round twice.
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    if (a.heads >= kWideHeads) return softmax_wide<T, I>(a);
  }
  using A = acc_t<T>;
  const I *ptr = static_cast<const I*>(a.g.ptr), *perm = static_cast<const I*>(a.g.perm);
  const T *z = static_cast<const T*>(a.z), *grad = static_cast<const T*>(a.grad);
  T* out = static_cast<T*>(a.out);
  bool failed = false;
  for_rows<I>(a.g, 16 * a.heads, [&](int64_t r0, int64_t r1) {
    A* const row = static_cast<A*>(std::malloc((a.g.max_degree + 1) * sizeof(A)));
    if (row == nullptr) {
      __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t i = r0; i < r1; ++i) {
      const int64_t e0 = ptr[i], n = int64_t(ptr[i + 1]) - e0;
      if (n == 0) continue;
      for (int64_t h = 0; h < a.heads; ++h) {
        if (grad == nullptr) {
          for (int64_t k = 0; k < n; ++k) row[k] = widen(z[at(perm, e0 + k) * a.heads + h]);
          const A sum = exponentials(row, n) + A(a.epsilon);
          for (int64_t k = 0; k < n; ++k) {
            narrow(row[k] / sum, out + at(perm, e0 + k) * a.heads + h);
          }
        } else {
          A sum = 0;
          for (int64_t k = 0; k < n; ++k) {
            const int64_t o = at(perm, e0 + k) * a.heads + h;
            sum += widen(z[o]) * widen(grad[o]);
          }
          for (int64_t k = 0; k < n; ++k) {
            const int64_t o = at(perm, e0 + k) * a.heads + h;
            narrow(widen(z[o]) * (widen(grad[o]) - sum), out + o);
          }
        }
      }
    }
    std::free(row);
  });
  if (failed) throw std::bad_alloc();
}

template <class T>
static void softmax_typed(const SoftmaxArgs& a) {
  if (a.g.wide) softmax_rows<T, int64_t>(a);
  else softmax_rows<T, int32_t>(a);
}

static void softmax(const SoftmaxArgs& a, Dtype t) {
  switch (t) {
    case Dtype::f32: return softmax_typed<float>(a);
    case Dtype::f64: return softmax_typed<double>(a);
    case Dtype::bf16: return softmax_typed<bf16>(a);
    case Dtype::f16: return softmax_typed<f16>(a);
  }
}
