#define GNNACCEL_ISA avx512
#define GNNACCEL_BYTES 64
#include "isa_attention.inl"
