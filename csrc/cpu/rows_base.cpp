// The row kernels for the baseline of the machine: SSE2, NEON.
#include <cstring>
#include <limits>

#include "cpu/rows.h"

#define LQ_TARGET
#define LQ_KERNELS kBaseKernels
#define LQ_PRODUCT 0
#define LQ_F16C 0
#define LQ_INLINE_LAMBDA __attribute__((always_inline))
#include "cpu/rows.inc"
