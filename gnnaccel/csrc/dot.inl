// Dot products of the two ends of every edge (sampled dense-dense product), and the
// row reader that serves as the bandwidth yardstick.

template <class T, class I>
static void dot_rows(const DotArgs& a) {
  const I *ptr = static_cast<const I*>(a.g.ptr), *col = static_cast<const I*>(a.g.col),
          *perm = static_cast<const I*>(a.g.perm);
  const int64_t last = a.g.entries - 1, columns = a.heads * a.features;
  prefer_huge_pages(a.out, a.g.entries * a.heads * int64_t(sizeof(T)));
  for_rows<I>(a.g, columns, [&](int64_t r0, int64_t r1) {
    for (int64_t i = r0; i < r1; ++i) {
      const T* p = static_cast<const T*>(a.a) + i * a.a_stride;
      for (int64_t e = ptr[i]; e < int64_t(ptr[i + 1]); ++e) {
        const T* b = static_cast<const T*>(a.b);
        const int64_t ahead = e + kAhead < last ? e + kAhead : last;
        prefetch(b + at(col, ahead) * a.b_stride, columns * int64_t(sizeof(T)));
        const T* q = b + at(col, e) * a.b_stride;
        T* out = static_cast<T*>(a.out) + at(perm, e) * a.heads;
        for (int64_t h = 0; h < a.heads; ++h) {
          narrow(dot(p + h * a.features, q + h * a.features, a.features), out + h);
        }
      }
    }
  });
}

template <class T>
static void dot_typed(const DotArgs& a) {
  if (a.g.wide) dot_rows<T, int64_t>(a);
  else dot_rows<T, int32_t>(a);
}

static void sddmm(const DotArgs& a, Dtype t) {
  switch (t) {
    case Dtype::f32: return dot_typed<float>(a);
    case Dtype::f64: return dot_typed<double>(a);
    case Dtype::bf16: return dot_typed<bf16>(a);
    case Dtype::f16: return dot_typed<f16>(a);
  }
}

// Reads every row that a sum would read and writes nothing: what memory allows.
static double read_rows(const Grouping& g, const float* x, int64_t features) {
  constexpr int L = kLanes<float>;
  const int32_t* col = static_cast<const int32_t*>(g.col);
  const int64_t last = g.entries - 1;
  double total = 0;
  for_rows<int32_t>(g, features, [&](int64_t r0, int64_t r1) {
    const int32_t* ptr = static_cast<const int32_t*>(g.ptr);
    Vec<float, L> acc[2] = {};
    for (int64_t e = ptr[r0]; e < ptr[r1]; ++e) {
      prefetch(x + at(col, e + kAhead < last ? e + kAhead : last) * features, features * 4);
      const float* row = x + at(col, e) * features;
      int64_t k = 0;
      for (; k + 2 * L <= features; k += 2 * L) {
        acc[0] += load<L>(row + k);
        acc[1] += load<L>(row + k + L);
      }
      for (; k + L <= features; k += L) acc[0] += load<L>(row + k);
    }
    const double s = horizontal_sum<L, float>(acc[0] + acc[1]);
    // Of one thread only: it is there so that the reads are not optimised away.
    __atomic_store(&total, &s, __ATOMIC_RELAXED);
  });
  return total;
}
