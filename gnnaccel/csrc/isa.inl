// Every kernel for one instruction set: included by isa_*.cpp with GNNACCEL_ISA (the
// namespace) and GNNACCEL_BYTES (register width) defined.
//
// Only headers without out-of-line inline functions may be used in here: the linker
// keeps one copy of such a function for the whole module, and it must not be one
// compiled for a newer CPU.
#include <cstdint>
#include <cstdlib>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "args.h"
#include "dispatch.h"
#include "parallel.h"

namespace gnnaccel {
namespace GNNACCEL_ISA {

// In isa_attention.inl.
void attention(const AttentionArgs& a, Dtype t);
void attention_backward(const AttentionArgs& a, Dtype t);
void head_dots(const HeadDotArgs& a, Dtype t);

namespace {

#include "simd.inl"
//
#include "tiles.inl"
//
#include "dot.inl"
#include "extreme.inl"
#include "gate.inl"
#include "message.inl"
#include "softmax.inl"
#include "spmm.inl"
//
#include "linear.inl"

}  // namespace

#define GNNACCEL_STRING_(x) #x
#define GNNACCEL_STRING(x) GNNACCEL_STRING_(x)
extern const Kernels table = {GNNACCEL_STRING(GNNACCEL_ISA),
                              spmm_sum,
                              spmm_linear,
                              spmm_extreme,
                              spmm_select,
                              sddmm,
                              softmax,
                              attention,
                              attention_backward,
                              head_dots,
                              message_sum,
                              message_rows,
                              gate_sum,
                              read_rows};

}  // namespace GNNACCEL_ISA
}  // namespace gnnaccel
