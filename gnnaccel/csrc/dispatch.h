// One table of kernels per instruction set; the best one this CPU runs is used.
#pragma once
#include <cstdint>

#include "args.h"

namespace gnnaccel {

struct Kernels {
  const char* isa;
  void (*spmm_sum)(const SumArgs&, Dtype);
  void (*spmm_linear)(const LinearArgs&);
  void (*spmm_extreme)(const ExtremeArgs&, Dtype);
  void (*spmm_select)(const SelectArgs&, Dtype);
  void (*sddmm)(const DotArgs&, Dtype);
  void (*softmax)(const SoftmaxArgs&, Dtype);
  void (*attention)(const AttentionArgs&, Dtype);
  void (*attention_backward)(const AttentionArgs&, Dtype);
  void (*head_dots)(const HeadDotArgs&, Dtype);
  void (*message_sum)(const MessageArgs&, Dtype);
  void (*message_rows)(const MessageRowsArgs&, Dtype);
  void (*gate_sum)(const GateArgs&, Dtype);
  double (*read_rows)(const Grouping&, const float* x, int64_t features);
};

// Best table for this CPU, or the one chosen by use_isa.
const Kernels& kernels();

// Chooses a table by name ("avx512", "avx2", "baseline"); false if this CPU or this
// build lacks it.
bool use_isa(const char* name);

namespace baseline {
extern const Kernels table;
}
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}

}  // namespace gnnaccel
