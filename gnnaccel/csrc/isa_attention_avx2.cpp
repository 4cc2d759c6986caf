#define GNNACCEL_ISA avx2
#define GNNACCEL_BYTES 32
#include "isa_attention.inl"
