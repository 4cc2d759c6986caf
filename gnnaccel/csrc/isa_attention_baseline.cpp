#define GNNACCEL_ISA baseline
#define GNNACCEL_BYTES 16
#include "isa_attention.inl"
