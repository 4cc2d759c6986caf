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

template <class T, class I>
static void softmax_rows(const SoftmaxArgs& a) {
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
