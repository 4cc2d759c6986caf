// Attention for one instruction set: a source of its own, for it is long and compiled with
// fewer optimisations: see CMakeLists.txt. On headers: see isa.inl.
#include <cstdint>
#include <cstdlib>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "args.h"
#include "parallel.h"

namespace gnnaccel {
namespace GNNACCEL_ISA {
namespace {

#include "simd.inl"
//
#include "tiles.inl"
//
#include "heads.inl"
//
#include "attention_view.inl"
//
#include "attention.inl"
#include "attention_sum_backward.inl"
//
#include "attention_backward.inl"
#include "head_dots.inl"

}  // namespace

// Half types are widened by the caller.
void attention(const AttentionArgs& a, Dtype t) {
  for_index(a.g.wide, t, [&]<class T, class I>() { attention_typed<T, I>(a); });
}

void attention_backward(const AttentionArgs& a, Dtype t) {
  for_index(a.g.wide, t, [&]<class T, class I>() { attention_backward_typed<T, I>(a); });
}

void head_dots(const HeadDotArgs& a, Dtype t) {
  for_index(false, t, [&]<class T, class I>() {
    if constexpr (sizeof(I) == 4) head_dots_typed<T>(a);
  });
}

}  // namespace GNNACCEL_ISA
}  // namespace gnnaccel
