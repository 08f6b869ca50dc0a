// The row kernels for AVX2 with float16 conversion.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>
#include <limits>

#include "cpu/rows.h"

#define LQ_TARGET __attribute__((target("avx2,fma,f16c")))
#define LQ_KERNELS kAvx2Kernels
#define LQ_PRODUCT 0
#define LQ_F16C 256
#define LQ_INLINE_LAMBDA __attribute__((always_inline))
#include "cpu/rows.inc"
#endif
