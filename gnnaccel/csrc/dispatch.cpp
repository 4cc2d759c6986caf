#include "dispatch.h"

#include <cstring>

namespace gnnaccel {
namespace {

bool supported(const Kernels& k) {
#if defined(GNNACCEL_X86)
  if (&k == &avx512::table) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  if (&k == &avx2::table) {
    // F16C has no name in older compilers' list; every CPU with AVX2 has it.
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
#endif
  return &k == &baseline::table;
}

const Kernels* const all[] = {
#if defined(GNNACCEL_X86)
    &avx512::table,
    &avx2::table,
#endif
    &baseline::table,
};

const Kernels* best() {
  for (const Kernels* k : all) {
    if (supported(*k)) return k;
  }
  return &baseline::table;
}

const Kernels* current = best();

}  // namespace

const Kernels& kernels() { return *current; }

bool use_isa(const char* name) {
  for (const Kernels* k : all) {
    if (std::strcmp(k->isa, name) == 0 && supported(*k)) {
      current = k;
      return true;
    }
  }
  return false;
}

}  // namespace gnnaccel
